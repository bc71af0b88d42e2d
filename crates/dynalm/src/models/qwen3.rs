//! Qwen 3, dense: a norm on each head of queries and keys, no biases.

use dynair::op::RopeStyle;

use super::{Family, Metadata, ModelSpec, QkNorm, decoder};
use crate::error::Result;

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    arch: &["qwen3"],
    spec,
    build: decoder::build,
};

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    let mut m = decoder::spec(meta, RopeStyle::Half, &[])?;
    for layer in &mut m.layers {
        layer.qk_norm = QkNorm::PerHead;
    }
    Ok(m)
}
