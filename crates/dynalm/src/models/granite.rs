//! Granite 3, dense: Llama's structure with scales on embeddings, branches, scores and logits.
//!
//! A file may say that the model has no rotary embedding: its key for that is `rope.scaling.finetuned`.

use dynair::op::RopeStyle;

use super::{Family, Metadata, ModelSpec, decoder};
use crate::error::Result;

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "granite",
    arch: &["granite"],
    spec,
    build: decoder::build,
};

/// Keys that [`scales`] reads. `attention.scale` is read for every family.
pub(super) const SCALE_KEYS: [&str; 3] = ["embedding_scale", "residual_scale", "logit_scale"];

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    let mut m = decoder::spec(meta, RopeStyle::Interleaved, &SCALE_KEYS)?;
    scales(meta, &mut m)?;
    if meta.bool("granite.rope.scaling.finetuned") == Some(false) {
        m.layers.iter_mut().for_each(|layer| layer.rope = None);
    }
    Ok(m)
}

/// The scales of the Granite families.
pub(super) fn scales(meta: &dyn Metadata, m: &mut ModelSpec) -> Result<()> {
    let scale = |name: &str| decoder::positive(meta, &format!("{}.{name}", meta.arch()));
    m.embed_scale = scale("embedding_scale")?;
    m.residual_scale = scale("residual_scale")?;
    // The file gives the number that logits are divided by.
    m.logit_scale = 1.0 / scale("logit_scale")?;
    Ok(())
}
