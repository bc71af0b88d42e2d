//! What every decoder-only transformer has in common: the keys and the graph.

use dynair::infer::MAX_EXPERTS;
use dynair::op::{Activation, AttnSpec, ExpertWeights, RopeScaling, RopeSpec, RopeStyle, RouterSpec};
use dynair::{Graph, GraphBuilder, ValueId};

use super::{FfnSpec, LayerSpec, Metadata, ModelSpec, NormPlacement, QkNorm};
use crate::error::{Error, Result};

/// Most layers a model may claim to have: bounds what a hostile file can make us build.
const MAX_LAYERS: usize = 1024;

/// YaRN's ramp ends where the file gives none (arXiv:2309.00071, section 3.2).
const YARN_BETA: (f32, f32) = (32.0, 1.0);

/// Keys (after the architecture's name) that change what a model computes, with the value that changes nothing. A
/// family that does not name a key as one it handles refuses files where it has another value.
const ALTERING: &[(&str, f32)] = &[
    ("expert_count", 0.0),
    ("expert_used_count", 0.0),
    ("expert_shared_count", 0.0),
    ("expert_shared_feed_forward_length", 0.0),
    ("expert_chunk_feed_forward_length", 0.0),
    ("expert_group_count", 1.0),
    ("expert_group_used_count", 1.0),
    ("expert_group_scale", 1.0),
    ("expert_weights_scale", 1.0),
    ("expert_weights_norm", 1.0),
    // Softmax.
    ("expert_gating_func", 1.0),
    ("expert_latent_length", 0.0),
    ("experts_per_group", 0.0),
    ("moe_every_n_layers", 0.0),
    ("moe_latent_size", 0.0),
    ("interleave_moe_layer_step", 1.0),
    ("deepstack_mapping", 0.0),
    ("leading_dense_block_count", 0.0),
    ("nextn_predict_layers", 0.0),
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
    ("logit_scale", 1.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("use_parallel_residual", 0.0),
    ("no_rope_layer_interval", 0.0),
    ("pooling_type", 0.0),
    ("attention.causal", 1.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.chunk_size", 0.0),
    ("attention.temperature_length", 0.0),
    ("attention.temperature_scale", 0.0),
    ("attention.q_lora_rank", 0.0),
    ("attention.kv_lora_rank", 0.0),
    ("attention.key_length_mla", 0.0),
    ("attention.value_length_mla", 0.0),
    ("attention.shared_kv_layers", 0.0),
    ("attention.rope_pattern", 0.0),
    ("attention.key_length_swa", 0.0),
    ("attention.value_length_swa", 0.0),
    ("attention.sliding_window", 0.0),
    ("attention.sliding_window_pattern", 0.0),
    ("rope.freq_base_swa", 0.0),
    ("rope.dimension_count_swa", 0.0),
    ("rope.dimension_sections", 0.0),
    ("rope.scaling.alpha", 0.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_log_multiplier", 0.0),
];

/// A number of any type; a truth value as 0 or 1; an array as NaN, which equals nothing.
fn number(meta: &dyn Metadata, key: &str) -> Option<f32> {
    let scalar = meta.f32(key).or_else(|| meta.u32(key).map(|n| n as f32));
    scalar
        .or_else(|| meta.bool(key).map(|b| f32::from(u8::from(b))))
        .or_else(|| meta.array_len(key).map(|_| f32::NAN))
}

fn unsupported(key: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> Error {
    Error::Unsupported(format!(
        "metadata key `{key}` is {found}, which is not supported: expected {expected}"
    ))
}

/// The spec that the keys every decoder has describe: norms before each branch, SiLU, one kind of attention. Keys of
/// [`ALTERING`] that `handled` names are left to the caller.
///
/// # Errors
/// If a key is missing, contradicts another, or asks for something no one handles.
pub fn spec(meta: &dyn Metadata, style: RopeStyle, handled: &[&str]) -> Result<ModelSpec> {
    let arch = meta.arch().to_string();
    let key = |suffix: &str| format!("{arch}.{suffix}");
    for (suffix, neutral) in ALTERING.iter().filter(|(s, _)| !handled.contains(s)) {
        match number(meta, &key(suffix)) {
            Some(n) if n != *neutral => return Err(unsupported(&key(suffix), n, neutral)),
            _ => {}
        }
    }
    let layers = meta.need(&key("block_count"))?;
    if !(1..=MAX_LAYERS).contains(&layers) {
        return Err(unsupported(
            &key("block_count"),
            layers,
            format_args!("1 to {MAX_LAYERS}"),
        ));
    }
    let hidden_size = meta.need(&key("embedding_length"))?;
    let norm_key = key("attention.layer_norm_rms_epsilon");
    let norm_eps = meta.f32(&norm_key).ok_or_else(|| {
        Error::Unsupported(format!(
            "metadata key `{norm_key}` is missing or no floating-point number"
        ))
    })?;
    let heads = per_layer(meta, &key("attention.head_count"), layers)?.ok_or_else(|| {
        Error::Unsupported(format!(
            "metadata key `{}` is missing",
            key("attention.head_count")
        ))
    })?;
    let kv_heads = per_layer(meta, &key("attention.head_count_kv"), layers)?.unwrap_or_else(|| heads.clone());
    let ffn = per_layer(meta, &key("feed_forward_length"), layers)?.ok_or_else(|| {
        Error::Unsupported(format!(
            "metadata key `{}` is missing",
            key("feed_forward_length")
        ))
    })?;
    let head_dim = head_dim(meta, &arch, hidden_size, heads[0])?;
    let rope = rope(meta, &arch, style, head_dim)?;
    let scale = match meta.f32(&key("attention.scale")) {
        Some(s) if s.is_finite() && s > 0.0 => s,
        Some(s) => return Err(unsupported(&key("attention.scale"), s, "a positive number")),
        None => 1.0 / (head_dim as f32).sqrt(),
    };
    let layer = |i: usize| -> Result<LayerSpec> {
        let (num_heads, num_kv_heads) = (heads[i], kv_heads[i]);
        if num_heads == 0 || num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            let expected = format!("a divisor of {num_heads} query heads in layer {i}");
            return Err(unsupported(
                &key("attention.head_count_kv"),
                num_kv_heads,
                expected,
            ));
        }
        let attn = AttnSpec {
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            sliding_window: None,
            softcap: None,
        };
        Ok(LayerSpec {
            attn,
            rope: Some(rope),
            qk_norm: QkNorm::None,
            ffn: FfnSpec::Gated {
                act: Activation::Silu,
                intermediate_size: ffn[i],
            },
            norms: NormPlacement::Pre,
        })
    };
    Ok(ModelSpec {
        layers: (0..layers).map(layer).collect::<Result<_>>()?,
        hidden_size,
        vocab_size: vocab_size(meta, &key("vocab_size"))?,
        max_context: meta.need(&key("context_length"))?,
        norm_eps,
        embed_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        logit_softcap: None,
    })
}

/// Keys that [`experts`] reads, which a family with experts names as handled.
pub(super) const EXPERT_KEYS: [&str; 2] = ["expert_count", "expert_used_count"];

/// Makes every layer's feed-forward block a mixture of experts, as the file's keys say. An expert's inner size is
/// `expert_feed_forward_length`, or `feed_forward_length` where the file has that alone.
///
/// # Errors
/// If a key is missing or the numbers do not fit each other.
pub(super) fn experts(meta: &dyn Metadata, spec: &mut ModelSpec, weights: ExpertWeights) -> Result<()> {
    let arch = meta.arch().to_string();
    let [count, used] = EXPERT_KEYS.map(|suffix| format!("{arch}.{suffix}"));
    let experts = meta.need(&count)?;
    if !(1..=MAX_EXPERTS).contains(&experts) {
        return Err(unsupported(&count, experts, format_args!("1 to {MAX_EXPERTS}")));
    }
    let experts_used = meta.need(&used)?;
    if !(1..=experts).contains(&experts_used) {
        return Err(unsupported(
            &used,
            experts_used,
            format_args!("1 to {experts} experts"),
        ));
    }
    let sizes = per_layer(
        meta,
        &format!("{arch}.expert_feed_forward_length"),
        spec.layers.len(),
    )?;
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let (FfnSpec::Gated {
            act,
            intermediate_size,
        }
        | FfnSpec::Moe {
            act,
            intermediate_size,
            ..
        }) = layer.ffn;
        layer.ffn = FfnSpec::Moe {
            router: RouterSpec {
                experts,
                experts_used,
                weights,
            },
            act,
            intermediate_size: sizes.as_ref().map_or(intermediate_size, |s| s[i]),
        };
    }
    Ok(())
}

/// A scale; 1 where the file has none.
///
/// # Errors
/// If it is no positive number.
pub(super) fn positive(meta: &dyn Metadata, key: &str) -> Result<f32> {
    match number(meta, key) {
        None => Ok(1.0),
        Some(x) if x.is_finite() && x > 0.0 => Ok(x),
        Some(x) => Err(unsupported(key, x, "a positive number")),
    }
}

/// A key that holds one number for all layers, or an array with one for each.
fn per_layer(meta: &dyn Metadata, key: &str, layers: usize) -> Result<Option<Vec<usize>>> {
    if let Some(n) = meta.u32(key) {
        return Ok(Some(vec![n as usize; layers]));
    }
    match meta.u32s(key) {
        Some(list) if list.len() == layers => Ok(Some(list.into_iter().map(|n| n as usize).collect())),
        Some(list) => Err(unsupported(
            key,
            format_args!("an array of {}", list.len()),
            format_args!("{layers}"),
        )),
        None if meta.array_len(key).is_some() => {
            Err(unsupported(key, "an array", "an array of whole numbers"))
        }
        None => Ok(None),
    }
}

fn vocab_size(meta: &dyn Metadata, key: &str) -> Result<usize> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    meta.array_len(TOKENS)
        .or_else(|| meta.u32(key).map(|n| n as usize))
        .ok_or_else(|| {
            Error::Unsupported(format!(
                "the size of the vocabulary is not known: neither `{TOKENS}` nor `{key}` is there"
            ))
        })
}

fn head_dim(meta: &dyn Metadata, arch: &str, hidden_size: usize, heads: usize) -> Result<usize> {
    let (key, value) = (
        format!("{arch}.attention.key_length"),
        format!("{arch}.attention.value_length"),
    );
    let head_dim = match meta.u32(&key) {
        Some(n) => n as usize,
        None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            return Err(Error::Unsupported(format!(
                "`{key}` is missing and {hidden_size} columns do not divide into {heads} heads"
            )));
        }
    };
    if let Some(v) = meta.u32(&value).filter(|v| *v as usize != head_dim) {
        return Err(unsupported(&value, v, format_args!("the key length {head_dim}")));
    }
    if head_dim == 0 {
        return Err(unsupported(&key, 0, "at least 1"));
    }
    Ok(head_dim)
}

fn rope(meta: &dyn Metadata, arch: &str, style: RopeStyle, head_dim: usize) -> Result<RopeSpec> {
    let key = |suffix: &str| format!("{arch}.rope.{suffix}");
    let dims = meta.u32(&key("dimension_count")).map_or(head_dim, |n| n as usize);
    if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
        return Err(unsupported(
            &key("dimension_count"),
            dims,
            format_args!("an even number of 2 to {head_dim}"),
        ));
    }
    let theta = meta.f32(&key("freq_base")).unwrap_or(10_000.0);
    if !(theta.is_finite() && theta > 0.0) {
        return Err(unsupported(&key("freq_base"), theta, "a positive number"));
    }
    Ok(RopeSpec {
        style,
        dims,
        theta,
        scaling: scaling(meta, arch)?,
    })
}

/// Reads `{arch}.rope.scaling.*`; the older `rope.scale_linear` counts as a linear factor.
fn scaling(meta: &dyn Metadata, arch: &str) -> Result<RopeScaling> {
    let key = |suffix: &str| format!("{arch}.rope.{suffix}");
    let factor = number(meta, &key("scaling.factor")).or_else(|| number(meta, &key("scale_linear")));
    // GGUF writers give 0 for "none".
    let factor = factor.filter(|f| *f != 0.0).unwrap_or(1.0);
    if !(factor.is_finite() && factor > 0.0) {
        return Err(unsupported(&key("scaling.factor"), factor, "a positive number"));
    }
    let kind = meta.str(&key("scaling.type"));
    let attention_key = key("scaling.attn_factor");
    let attention = number(meta, &attention_key).unwrap_or(1.0);
    if !(attention.is_finite() && attention > 0.0) || (attention != 1.0 && kind != Some("yarn")) {
        return Err(unsupported(
            &attention_key,
            attention,
            "1, or a positive number with `yarn` scaling",
        ));
    }
    match kind {
        Some("none") => Ok(RopeScaling::None),
        None | Some("linear") if factor == 1.0 => Ok(RopeScaling::None),
        None | Some("linear") => Ok(RopeScaling::Linear { factor }),
        Some("yarn") => {
            let original = key("scaling.original_context_length");
            let original_context = meta
                .u32(&original)
                .or_else(|| meta.u32(&format!("{arch}.context_length")))
                .filter(|n| *n > 0);
            let beta = |suffix, default| number(meta, &key(suffix)).unwrap_or(default);
            let beta_fast = beta("scaling.yarn_beta_fast", YARN_BETA.0);
            let beta_slow = beta("scaling.yarn_beta_slow", YARN_BETA.1);
            if !(beta_fast.is_finite() && beta_slow.is_finite() && beta_slow > 0.0 && beta_fast > beta_slow) {
                let found = format!("{beta_fast} with a slow end of {beta_slow}");
                return Err(unsupported(
                    &key("scaling.yarn_beta_fast"),
                    found,
                    "fast above slow above 0",
                ));
            }
            Ok(RopeScaling::Yarn {
                factor,
                original_context: original_context
                    .ok_or_else(|| Error::Unsupported(format!("metadata key `{original}` is missing")))?,
                beta_fast,
                beta_slow,
                // Attention's temperature of the paper, equation 22, on queries and keys.
                attention_factor: attention * (0.1 * factor.ln() + 1.0),
            })
        }
        Some(other) => Err(unsupported(
            &key("scaling.type"),
            format_args!("`{other}`"),
            "`none`, `linear` or `yarn`",
        )),
    }
}

/// The graph of a spec. In the last layer, everything after attention is computed for the output rows alone.
///
/// # Errors
/// If a tensor is missing or has a wrong shape.
pub fn build(spec: &ModelSpec, mut b: GraphBuilder<'_>) -> Result<Graph> {
    let x = b.embed("token_embd", spec.vocab_size, spec.hidden_size)?;
    let mut x = b.scale(x, spec.embed_scale)?;
    for (i, layer) in spec.layers.iter().enumerate() {
        let (mut branch, mut residual) = (attention(&mut b, spec, i, x)?, x);
        if i + 1 == spec.layers.len() {
            branch = b.take_outputs(branch)?;
            residual = b.take_outputs(x)?;
        }
        let branch = b.linear_to(branch, &format!("blk.{i}.attn_output"), spec.hidden_size)?;
        let post = format!("blk.{i}.post_attention_norm");
        let branch = post_norm(&mut b, spec, layer, branch, &post)?;
        x = b.add(residual, branch, &format!("blk.{i}.attn_residual"))?;
        let branch = ffn(&mut b, spec, i, x)?;
        let branch = post_norm(&mut b, spec, layer, branch, &format!("blk.{i}.post_ffw_norm"))?;
        x = b.add(x, branch, &format!("blk.{i}.ffn_residual"))?;
    }
    let x = b.rms_norm(x, "output_norm", spec.norm_eps)?;
    // Without an output weight the embedding serves as one.
    let head = if b.has("output.weight") {
        "output"
    } else {
        "token_embd"
    };
    let logits = b.linear_to(x, head, spec.vocab_size)?;
    let mut logits = b.scale(logits, spec.logit_scale)?;
    if let Some(cap) = spec.logit_softcap {
        logits = b.softcap(logits, cap)?;
    }
    Ok(b.finish(logits)?)
}

/// Attention of layer `i` up to the heads' outputs, `[T, num_heads·head_dim]`.
fn attention(b: &mut GraphBuilder<'_>, spec: &ModelSpec, i: usize, x: ValueId) -> Result<ValueId> {
    let layer = &spec.layers[i];
    let AttnSpec {
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = layer.attn;
    let h = b.rms_norm(x, &format!("blk.{i}.attn_norm"), spec.norm_eps)?;
    let mut heads = |name: &str, n: usize| -> Result<ValueId> {
        let v = b.linear_to(h, &format!("blk.{i}.{name}"), n * head_dim)?;
        Ok(b.view(v, &[n, head_dim])?)
    };
    let mut q = heads("attn_q", num_heads)?; // [T, num_heads, head_dim]
    let mut k = heads("attn_k", num_kv_heads)?; // [T, num_kv_heads, head_dim]
    let v = heads("attn_v", num_kv_heads)?;
    if layer.qk_norm == QkNorm::PerHead {
        q = b.rms_norm(q, &format!("blk.{i}.attn_q_norm"), spec.norm_eps)?;
        k = b.rms_norm(k, &format!("blk.{i}.attn_k_norm"), spec.norm_eps)?;
    }
    if let Some(rope) = layer.rope {
        q = b.rope(q, rope)?;
        k = b.rope(k, rope)?;
    }
    let a = b.attention(i, q, k, v, layer.attn)?;
    Ok(b.view(a, &[num_heads * head_dim])?)
}

fn ffn(b: &mut GraphBuilder<'_>, spec: &ModelSpec, i: usize, x: ValueId) -> Result<ValueId> {
    let h = b.rms_norm(x, &format!("blk.{i}.ffn_norm"), spec.norm_eps)?;
    let (act, intermediate_size) = match spec.layers[i].ffn {
        FfnSpec::Gated {
            act,
            intermediate_size,
        } => (act, intermediate_size),
        FfnSpec::Moe {
            router,
            act,
            intermediate_size,
        } => return Ok(b.moe(h, &format!("blk.{i}"), router, act, intermediate_size)?),
    };
    let gate = b.linear_to(h, &format!("blk.{i}.ffn_gate"), intermediate_size)?;
    let up = b.linear_to(h, &format!("blk.{i}.ffn_up"), intermediate_size)?;
    let h = b.glu(gate, up, act, &format!("blk.{i}.ffn_glu"))?;
    Ok(b.linear_to(h, &format!("blk.{i}.ffn_down"), spec.hidden_size)?)
}

/// What is added to the residual stream: the branch, normalised and scaled as the model says.
fn post_norm(
    b: &mut GraphBuilder<'_>,
    spec: &ModelSpec,
    layer: &LayerSpec,
    branch: ValueId,
    name: &str,
) -> Result<ValueId> {
    let branch = match layer.norms {
        NormPlacement::Pre => branch,
        NormPlacement::PreAndPost => b.rms_norm(branch, name, spec.norm_eps)?,
    };
    Ok(b.scale(branch, spec.residual_scale)?)
}
