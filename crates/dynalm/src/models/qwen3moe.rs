//! Qwen 3, mixture of experts: Qwen 3's attention, and in each layer experts.
//!
//! Their weights are shares of a softmax over all experts, divided by their sum, which is a softmax over the chosen.

use dynair::op::{ExpertWeights, RopeStyle};

use super::{Family, Metadata, ModelSpec, QkNorm, decoder};
use crate::error::Result;

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "qwen3moe",
    arch: &["qwen3moe"],
    spec,
    build: decoder::build,
};

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    let mut m = decoder::spec(meta, RopeStyle::Half, &decoder::EXPERT_KEYS)?;
    for layer in &mut m.layers {
        layer.qk_norm = QkNorm::PerHead;
    }
    decoder::experts(meta, &mut m, ExpertWeights::SoftmaxUsed)?;
    Ok(m)
}
