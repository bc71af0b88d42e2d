//! Qwen 2 and 2.5: biases on q, k and v, which the builder takes from the checkpoint.

use dynair::op::RopeStyle;

use super::{Family, Metadata, ModelSpec, decoder};
use crate::error::Result;

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    arch: &["qwen2"],
    spec,
    build: decoder::build,
};

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    decoder::spec(meta, RopeStyle::Half, &[])
}
