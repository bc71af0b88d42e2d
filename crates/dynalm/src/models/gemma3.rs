//! Gemma 3, text: scaled embeddings, norms before and after each branch and on each head of queries and keys, five
//! local layers to one global.
//!
//! Local layers have a window and their own rotary base without scaling; a scaling that the file gives is that of the
//! global layers. The weights of its norms are stored with 1 already added. The 27B model scales queries by its hidden
//! size (see [`super::gemma2`]).

use dynair::op::{RopeScaling, RopeStyle};

use super::{Family, Metadata, ModelSpec, QkNorm, decoder, gemma2};
use crate::error::{Error, Result};

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "gemma3",
    arch: &["gemma3"],
    spec,
    build: decoder::build,
};

/// Layers of the 27B model.
const LAYERS_27B: usize = 62;
/// Every sixth layer is global, where the file does not say.
const PATTERN: usize = 6;
/// Rotary base of local layers, where the file does not say.
const LOCAL_THETA: f32 = 10_000.0;

const WINDOW: &str = "gemma3.attention.sliding_window";
const WINDOW_PATTERN: &str = "gemma3.attention.sliding_window_pattern";

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    let handled = [
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "final_logit_softcapping",
    ];
    let mut m = decoder::spec(meta, RopeStyle::Half, &handled)?;
    gemma2::gemma(meta, &mut m, LAYERS_27B);
    m.logit_softcap = gemma2::softcap(meta, "gemma3.final_logit_softcapping", None)?;
    let window = meta.need(WINDOW)? as u32;
    if window == 0 {
        return Err(Error::Unsupported(format!(
            "metadata key `{WINDOW}` is 0, expected at least 1"
        )));
    }
    let theta = meta.f32("gemma3.rope.freq_base_swa").unwrap_or(LOCAL_THETA);
    let local = local_layers(meta, m.layers.len())?;
    for (layer, local) in m.layers.iter_mut().zip(local) {
        layer.qk_norm = QkNorm::PerHead;
        if !local {
            continue;
        }
        layer.attn.sliding_window = Some(window);
        if let Some(rope) = &mut layer.rope {
            rope.theta = theta;
            rope.scaling = RopeScaling::None;
        }
    }
    Ok(m)
}

/// Which layers are local. The key holds the period of global layers, or a flag for each layer.
fn local_layers(meta: &dyn Metadata, layers: usize) -> Result<Vec<bool>> {
    let by_period = |n: usize| (0..layers).map(|i| (i + 1) % n != 0).collect();
    if let Some(n) = meta.u32(WINDOW_PATTERN).filter(|n| *n > 0) {
        return Ok(by_period(n as usize));
    }
    match meta.u32s(WINDOW_PATTERN) {
        Some(flags) if flags.len() == layers => Ok(flags.iter().map(|f| *f != 0).collect()),
        Some(flags) => Err(Error::Unsupported(format!(
            "metadata key `{WINDOW_PATTERN}` has {} entries, expected one for each of {layers} layers",
            flags.len()
        ))),
        None => Ok(by_period(PATTERN)),
    }
}
