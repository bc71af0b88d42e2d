//! Gemma 2: scaled embeddings, norms before and after each branch, softcaps on scores and logits, every other layer
//! local, beginning with the first.
//!
//! The weights of its norms are stored with 1 already added. Queries are scaled by 1/√head_dim, but in the 27B model
//! by 1/√(hidden_size/num_heads); the file does not say so, and the number of layers tells the model.

use dynair::op::{Activation, RopeStyle};

use super::{Family, Metadata, ModelSpec, NormPlacement, decoder};
use crate::error::{Error, Result};

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "gemma2",
    arch: &["gemma2"],
    spec,
    build: decoder::build,
};

/// Layers of the 27B model.
const LAYERS_27B: usize = 46;
/// Values of the published models, where an old file does not give them.
const DEFAULT_WINDOW: u32 = 4096;
const DEFAULT_ATTN_SOFTCAP: f32 = 50.0;
const DEFAULT_LOGIT_SOFTCAP: f32 = 30.0;

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    let handled = [
        "attention.sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ];
    let mut m = decoder::spec(meta, RopeStyle::Half, &handled)?;
    m.logit_softcap = softcap(
        meta,
        "gemma2.final_logit_softcapping",
        Some(DEFAULT_LOGIT_SOFTCAP),
    )?;
    let attn_softcap = softcap(meta, "gemma2.attn_logit_softcapping", Some(DEFAULT_ATTN_SOFTCAP))?;
    let window = meta
        .u32("gemma2.attention.sliding_window")
        .unwrap_or(DEFAULT_WINDOW);
    gemma(meta, &mut m, LAYERS_27B);
    for (i, layer) in m.layers.iter_mut().enumerate() {
        layer.attn.softcap = attn_softcap;
        layer.attn.sliding_window = (i % 2 == 0 && window > 0).then_some(window);
    }
    Ok(m)
}

/// What Gemma 2 and 3 share. `layers_27b` tells the model whose queries are scaled by its hidden size.
pub(super) fn gemma(meta: &dyn Metadata, m: &mut ModelSpec, layers_27b: usize) {
    m.embed_scale = (m.hidden_size as f32).sqrt();
    let is_27b = m.layers.len() == layers_27b;
    let given = meta.f32(&format!("{}.attention.scale", meta.arch())).is_some();
    for layer in &mut m.layers {
        layer.norms = NormPlacement::PreAndPost;
        *layer.ffn.act_mut() = Activation::GeluTanh;
        if is_27b && !given {
            layer.attn.scale = 1.0 / (m.hidden_size as f32 / layer.attn.num_heads as f32).sqrt();
        }
    }
}

/// A softcap key; 0 stands for none.
pub(super) fn softcap(meta: &dyn Metadata, key: &str, default: Option<f32>) -> Result<Option<f32>> {
    match meta.f32(key).or(default) {
        None | Some(0.0) => Ok(None),
        Some(c) if c.is_finite() && c > 0.0 => Ok(Some(c)),
        Some(c) => Err(Error::Unsupported(format!(
            "metadata key `{key}` is {c}, expected a positive number"
        ))),
    }
}
