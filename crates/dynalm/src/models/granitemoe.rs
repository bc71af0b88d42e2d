//! Granite 3, mixture of experts: Granite's scales, and in each layer experts weighted by a softmax over the chosen.

use dynair::op::{ExpertWeights, RopeStyle};

use super::{Family, Metadata, ModelSpec, decoder, granite};
use crate::error::Result;

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "granitemoe",
    arch: &["granitemoe"],
    spec,
    build: decoder::build,
};

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    let handled = [&granite::SCALE_KEYS[..], &decoder::EXPERT_KEYS].concat();
    let mut m = decoder::spec(meta, RopeStyle::Interleaved, &handled)?;
    granite::scales(meta, &mut m)?;
    decoder::experts(meta, &mut m, ExpertWeights::SoftmaxUsed)?;
    Ok(m)
}
