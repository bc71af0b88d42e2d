//! Families against made checkpoints: which tensors they use, what they compute, what they refuse.

use std::sync::Arc;

use dynair::eval::{Array, Caches, eval_graph};
use dynair::op::{Op, RopeScaling, RopeStyle};
use dynair::{BatchMeta, BlockId, BlockTables, DType, SeqSpan, WeightDecl};
use testkit::checkpoint::{Checkpoint, Meta, Mix, tiny};

use super::*;

/// A checkpoint with changed keys.
struct Made(Checkpoint);

impl Made {
    fn new(family: &str, mix: &str) -> Made {
        Made(tiny(family, Mix::named(mix).expect("a mix"), 7))
    }

    fn set(mut self, key: &str, value: Meta) -> Made {
        self.0.metadata.retain(|(k, _)| k != key);
        self.0.metadata.push((key.to_string(), value));
        self
    }

    fn without(mut self, key: &str) -> Made {
        self.0.metadata.retain(|(k, _)| k != key);
        self
    }

    fn spec(&self) -> Result<ModelSpec> {
        (family(self.arch())?.spec)(self)
    }

    fn refused(&self) -> String {
        self.spec().expect_err("refused").to_string()
    }
}

impl Metadata for Made {
    fn arch(&self) -> &str {
        self.str("general.architecture").unwrap_or("")
    }
    fn u32(&self, key: &str) -> Option<u32> {
        match self.0.get(key) {
            Some(Meta::U32(n)) => Some(*n),
            _ => None,
        }
    }
    fn f32(&self, key: &str) -> Option<f32> {
        match self.0.get(key) {
            Some(Meta::F32(n)) => Some(*n),
            _ => None,
        }
    }
    fn bool(&self, key: &str) -> Option<bool> {
        match self.0.get(key) {
            Some(Meta::Bool(b)) => Some(*b),
            _ => None,
        }
    }
    fn str(&self, key: &str) -> Option<&str> {
        match self.0.get(key) {
            Some(Meta::Str(s)) => Some(s),
            _ => None,
        }
    }
    fn u32s(&self, key: &str) -> Option<Vec<u32>> {
        match self.0.get(key) {
            Some(Meta::I32s(list)) => list.iter().map(|n| u32::try_from(*n).ok()).collect(),
            _ => None,
        }
    }
    fn array_len(&self, key: &str) -> Option<usize> {
        match self.0.get(key) {
            Some(Meta::Strings(s)) => Some(s.len()),
            Some(Meta::I32s(s)) => Some(s.len()),
            Some(Meta::F32s(s)) => Some(s.len()),
            _ => None,
        }
    }
}

impl TensorIndex for Made {
    fn find(&self, name: &str) -> Option<(DType, usize, usize)> {
        let t = self.0.tensors.iter().find(|t| t.name == name)?;
        Some((t.dtype, t.dims[1..].iter().product(), t.dims[0]))
    }

    fn experts(&self, name: &str) -> usize {
        let t = self.0.tensors.iter().find(|t| t.name == name);
        t.and_then(|t| t.dims.get(2)).copied().unwrap_or(1)
    }
}

const FAMILY_NAMES: [&str; 8] = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "qwen3moe",
    "granite",
    "granitemoe",
];

#[test]
fn every_family_uses_every_tensor_of_its_checkpoint() {
    for name in FAMILY_NAMES {
        let made = Made::new(name, "Q4_K_M");
        let (spec, graph) = build(&made, &made).expect("builds");
        let mut used: Vec<&str> = graph.weights.iter().map(|w| w.name.as_str()).collect();
        let mut have: Vec<&str> = made.0.tensors.iter().map(|t| t.name.as_str()).collect();
        used.sort_unstable();
        have.sort_unstable();
        assert_eq!(used, have, "{name}");
        assert_eq!(graph.caches.len(), spec.layers.len());
    }
}

#[test]
fn a_missing_or_misshapen_tensor_is_named() {
    let mut made = Made::new("qwen3", "F16");
    made.0.tensors.retain(|t| t.name != "blk.1.attn_k_norm.weight");
    let error = build(&made, &made).expect_err("refused").to_string();
    assert!(error.contains("`blk.1.attn_k_norm.weight` is missing"), "{error}");
    let mut made = Made::new("qwen3", "F16");
    let norm = made
        .0
        .tensors
        .iter_mut()
        .find(|t| t.name == "blk.0.ffn_down.weight")
        .expect("there");
    norm.dims[1] += 1;
    let error = build(&made, &made).expect_err("refused").to_string();
    assert!(
        error.contains("`blk.0.ffn_down.weight` has shape F16["),
        "{error}"
    );
}

#[test]
fn every_family_computes_logits_that_depend_on_the_prompt() {
    for name in FAMILY_NAMES {
        let made = Made::new(name, "F16");
        let (spec, graph) = build(&made, &made).expect("builds");
        let weights = |decl: &WeightDecl| {
            let t = made
                .0
                .tensors
                .iter()
                .find(|t| t.name == decl.name)
                .expect("a used tensor is there");
            let bytes = made.0.tensor_bytes(t);
            let mut data = vec![0.0; t.elements()];
            dynair::quant::decode_row(t.dtype, &bytes, &mut data)?;
            let dims: Vec<usize> = t.dims.iter().rev().copied().collect();
            Ok(Arc::new(Array::new(&dims, data)))
        };
        let groups = graph
            .caches
            .iter()
            .map(|c| match c {
                dynair::CacheDecl::Kv { group, .. } => group + 1,
                dynair::CacheDecl::State { .. } => 0,
            })
            .max()
            .expect("a model has layers");
        let table = BlockTables {
            blocks: vec![BlockId(0)],
            first: vec![0, 1],
            start: vec![0],
            copies: vec![],
        };
        let run = |tokens: [u32; 3]| {
            let mut caches = Caches::new(&graph.caches, 16, &vec![1; groups]);
            let batch = BatchMeta {
                tokens: tokens.to_vec(),
                positions: vec![0, 1, 2],
                seqs: vec![SeqSpan {
                    first_row: 0,
                    rows: 3,
                    context_len: 3,
                }],
                tables: vec![table.clone(); groups],
                output_rows: vec![2],
            };
            eval_graph(&graph, &weights, &mut caches, &batch).expect("evaluates")
        };
        let (a, b) = (run([5, 6, 7]), run([6, 5, 7]));
        assert_eq!(a.dims, [1, spec.vocab_size], "{name}");
        assert!(a.data.iter().all(|x| x.is_finite()), "{name}");
        let change = a
            .data
            .iter()
            .zip(&b.data)
            .map(|(x, y)| (x - y).abs())
            .fold(0.0, f32::max);
        assert!(
            change > 1e-3,
            "{name}: the order of the prompt changes nothing ({change})"
        );
    }
}

#[test]
fn an_unknown_architecture_lists_the_known_ones() {
    let Err(error) = family("mamba") else {
        panic!("refused")
    };
    let error = error.to_string();
    assert!(
        error.contains("`mamba`") && error.contains("llama, qwen2, qwen3, gemma2, gemma3"),
        "{error}"
    );
}

#[test]
fn options_no_one_handles_are_refused_by_name() {
    let made = || Made::new("llama", "F16");
    let error = made().set("llama.expert_count", Meta::U32(8)).refused();
    assert!(error.contains("`llama.expert_count` is 8"), "{error}");
    assert!(made().set("llama.expert_count", Meta::U32(0)).spec().is_ok());
    let error = made().set("llama.logit_scale", Meta::F32(0.5)).refused();
    assert!(error.contains("`llama.logit_scale` is 0.5"), "{error}");
    let error = made().set("llama.attention.causal", Meta::Bool(false)).refused();
    assert!(error.contains("`llama.attention.causal`"), "{error}");
    let error = made()
        .set("llama.rope.scaling.type", Meta::Str("longrope".into()))
        .refused();
    assert!(
        error.contains("`llama.rope.scaling.type` is `longrope`"),
        "{error}"
    );
    let error = made()
        .set("llama.rope.dimension_sections", Meta::I32s(vec![8, 8]))
        .refused();
    assert!(error.contains("`llama.rope.dimension_sections`"), "{error}");
    let error = made().set("llama.block_count", Meta::U32(u32::MAX)).refused();
    assert!(error.contains("`llama.block_count`"), "{error}");
    let error = made()
        .set("llama.attention.head_count_kv", Meta::U32(0))
        .refused();
    assert!(error.contains("`llama.attention.head_count_kv`"), "{error}");
    let error = made().without("llama.embedding_length").refused();
    assert!(error.contains("`llama.embedding_length` is missing"), "{error}");
    let error = Made::new("qwen2", "F16")
        .set("qwen2.attention.sliding_window", Meta::U32(64))
        .refused();
    assert!(error.contains("`qwen2.attention.sliding_window`"), "{error}");
}

#[test]
fn rope_scaling_is_read() {
    let rope = |made: Made| made.spec().expect("supported").layers[0].rope.expect("rope");
    let made = || Made::new("qwen2", "F16");
    assert_eq!(rope(made()).scaling, RopeScaling::None);
    assert_eq!(rope(made()).style, RopeStyle::Half);
    let linear = made()
        .set("qwen2.rope.scaling.type", Meta::Str("linear".into()))
        .set("qwen2.rope.scaling.factor", Meta::F32(4.0));
    assert_eq!(rope(linear).scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(
        rope(made().set("qwen2.rope.scale_linear", Meta::F32(2.0))).scaling,
        RopeScaling::Linear { factor: 2.0 }
    );
    let yarn = made()
        .set("qwen2.rope.scaling.type", Meta::Str("yarn".into()))
        .set("qwen2.rope.scaling.factor", Meta::F32(4.0))
        .set("qwen2.rope.scaling.original_context_length", Meta::U32(32768));
    let RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast,
        beta_slow,
        attention_factor,
    } = rope(yarn).scaling
    else {
        panic!("yarn is read as yarn");
    };
    assert_eq!(
        (factor, original_context, beta_fast, beta_slow),
        (4.0, 32768, 32.0, 1.0)
    );
    assert!((attention_factor - 1.138_629_4).abs() < 1e-6);
}

#[test]
fn llama_takes_its_frequency_factors_and_a_window() {
    let made = Made::new("llama", "F16");
    let (_, graph) = build(&made, &made).expect("builds");
    let ropes = graph.nodes.iter().filter(|n| matches!(n.op, Op::Rope(_)));
    assert!(ropes.clone().count() > 0 && ropes.clone().all(|n| n.inputs.len() == 3));
    let mistral = Made::new("llama", "F16").set("llama.attention.sliding_window", Meta::U32(4096));
    let spec = mistral.spec().expect("supported");
    assert!(spec.layers.iter().all(|l| l.attn.sliding_window == Some(4096)));
    assert_eq!(spec.layers[0].rope.expect("rope").style, RopeStyle::Interleaved);
}

#[test]
fn gemma2_alternates_and_caps() {
    let spec = Made::new("gemma2", "F16").spec().expect("supported");
    let windows: Vec<bool> = spec
        .layers
        .iter()
        .map(|l| l.attn.sliding_window.is_some())
        .collect();
    assert_eq!(windows, [true, false, true, false]);
    assert_eq!(
        (spec.layers[0].attn.softcap, spec.logit_softcap),
        (Some(50.0), Some(30.0))
    );
    assert_eq!(spec.embed_scale, 128f32.sqrt());
    assert!(spec.layers.iter().all(|l| l.norms == NormPlacement::PreAndPost));
    // The 27B model scales by hidden_size / num_heads.
    let large = Made::new("gemma2", "F16")
        .set("gemma2.block_count", Meta::U32(46))
        .spec()
        .expect("supported");
    let attn = large.layers[0].attn;
    assert_eq!(attn.scale, 1.0 / (128.0 / attn.num_heads as f32).sqrt());
}

#[test]
fn gemma3_has_five_local_layers_to_one_global() {
    let scaled = Made::new("gemma3", "F16")
        .set("gemma3.rope.scaling.type", Meta::Str("linear".into()))
        .set("gemma3.rope.scaling.factor", Meta::F32(8.0))
        .spec()
        .expect("supported");
    for (i, layer) in scaled.layers.iter().enumerate() {
        let rope = layer.rope.expect("rope");
        if i == 5 {
            assert_eq!(
                (rope.theta, rope.scaling),
                (1e6, RopeScaling::Linear { factor: 8.0 })
            );
            assert_eq!(layer.attn.sliding_window, None);
        } else {
            assert_eq!((rope.theta, rope.scaling), (1e4, RopeScaling::None));
            assert_eq!(layer.attn.sliding_window, Some(16));
        }
        assert_eq!(layer.qk_norm, QkNorm::PerHead);
    }
    let pattern = "gemma3.attention.sliding_window_pattern";
    let flags = Made::new("gemma3", "F16").set(pattern, Meta::I32s(vec![0, 1, 1, 0, 1, 1]));
    let local: Vec<bool> = flags
        .spec()
        .expect("supported")
        .layers
        .iter()
        .map(|l| l.attn.sliding_window.is_some())
        .collect();
    assert_eq!(local, [false, true, true, false, true, true]);
    let short = Made::new("gemma3", "F16")
        .set(pattern, Meta::I32s(vec![0, 1]))
        .refused();
    assert!(short.contains(pattern), "{short}");
}

#[test]
fn granite_scales_are_read() {
    for name in ["granite", "granitemoe"] {
        let made = || Made::new(name, "F16");
        let key = |suffix: &str| format!("{name}.{suffix}");
        let scaled = made()
            .set(&key("embedding_scale"), Meta::F32(12.0))
            .set(&key("residual_scale"), Meta::F32(0.22))
            .set(&key("attention.scale"), Meta::F32(0.015_625))
            .set(&key("logit_scale"), Meta::F32(8.0));
        let spec = scaled.spec().expect("supported");
        assert_eq!(
            (spec.embed_scale, spec.residual_scale, spec.logit_scale),
            (12.0, 0.22, 0.125)
        );
        assert!(spec.layers.iter().all(|l| l.attn.scale == 0.015_625));
        assert_eq!(spec.layers[0].rope.expect("rope").style, RopeStyle::Interleaved);
        let plain = made().without(&key("residual_scale")).spec().expect("supported");
        assert_eq!(plain.residual_scale, 1.0);
        for suffix in ["embedding_scale", "residual_scale", "logit_scale"] {
            let error = made().set(&key(suffix), Meta::F32(0.0)).refused();
            assert!(
                error.contains(&key(suffix)) && error.contains("positive"),
                "{error}"
            );
        }
    }
    let without = Made::new("granite", "F16").set("granite.rope.scaling.finetuned", Meta::Bool(false));
    assert!(
        without
            .spec()
            .expect("supported")
            .layers
            .iter()
            .all(|l| l.rope.is_none())
    );
}

#[test]
fn experts_are_read_or_refused_by_name() {
    for (name, experts, used) in [("granitemoe", 6, 2), ("qwen3moe", 8, 3)] {
        let made = || Made::new(name, "F16");
        let key = |suffix: &str| format!("{name}.{suffix}");
        for layer in made().spec().expect("supported").layers {
            let FfnSpec::Moe { router, .. } = layer.ffn else {
                panic!("{name} has experts");
            };
            assert_eq!((router.experts, router.experts_used), (experts, used));
        }
        let sized = made().set(&key("expert_feed_forward_length"), Meta::U32(96));
        assert!(matches!(
            sized.spec().expect("supported").layers[0].ffn,
            FfnSpec::Moe {
                intermediate_size: 96,
                ..
            }
        ));
        let error = build(&sized, &sized).expect_err("refused").to_string();
        assert!(
            error.contains("`blk.0.ffn_gate_exps.weight` has shape F16["),
            "{error}"
        );
        for (suffix, bad) in [
            ("expert_count", 0),
            ("expert_used_count", 0),
            ("expert_used_count", experts as u32 + 1),
            ("expert_shared_count", 1),
            ("expert_gating_func", 2),
            ("expert_group_count", 4),
        ] {
            let error = made().set(&key(suffix), Meta::U32(bad)).refused();
            assert!(error.contains(&key(suffix)), "{error}");
        }
        let error = made().without(&key("expert_used_count")).refused();
        assert!(error.contains(&key("expert_used_count")), "{error}");
        // The same number of rows, stacked otherwise.
        let mut other = made();
        for t in other
            .0
            .tensors
            .iter_mut()
            .filter(|t| t.name.ends_with("ffn_up_exps.weight"))
        {
            t.dims[1] *= 2;
            t.dims[2] /= 2;
        }
        let error = build(&other, &other).expect_err("refused").to_string();
        assert!(
            error.contains("`blk.0.ffn_up_exps.weight` has shape F16["),
            "{error}"
        );
    }
}
