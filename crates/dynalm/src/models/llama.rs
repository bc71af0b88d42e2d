//! Llama 1 to 3.x and what shares its structure: Mistral, SmolLM, TinyLlama.
//!
//! GGUF stores q and k with the rows of each head permuted, so that pairs of the rotary embedding lie side by side.
//! Llama 3's frequency factors are the tensor `rope_freqs.weight`. Mistral 7B v0.1 has a window on every layer.

use dynair::op::RopeStyle;

use super::{Family, Metadata, ModelSpec, decoder};
use crate::error::Result;

/// The family.
pub(super) const FAMILY: Family = Family {
    name: "llama",
    arch: &["llama"],
    spec,
    build: decoder::build,
};

fn spec(meta: &dyn Metadata) -> Result<ModelSpec> {
    let mut m = decoder::spec(meta, RopeStyle::Interleaved, &["attention.sliding_window"])?;
    let window = meta.u32("llama.attention.sliding_window").filter(|w| *w > 0);
    for layer in &mut m.layers {
        layer.attn.sliding_window = window;
    }
    Ok(m)
}
