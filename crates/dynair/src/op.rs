//! The ops, their parameters, and how many inputs and outputs each has.
//!
//! Shapes in the variants' docs are row-major; `T` tokens, `R` output rows, `H` hidden size, `N` query heads, `G` key
//! and value heads, `D` head size, `V` vocabulary, `E` experts, `U` experts used per row, `F` an expert's inner size. All activations are f32. What each op computes is defined in
//! [`crate::eval`].

use crate::graph::{CacheId, WeightId};
use crate::ty::Shape;

/// Element-wise non-linearity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// GELU, tanh approximation: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
    GeluTanh,
    /// GELU, exact: 0.5·x·(1 + erf(x/√2)).
    Gelu,
    /// max(x, 0).
    Relu,
}

/// Which elements of a head RoPE turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Pairs (2i, 2i+1): GGUF's llama layout.
    Interleaved,
    /// Pairs (i, i + dims/2): "NeoX".
    Half,
}

/// How positions or frequencies are changed for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// None.
    None,
    /// Position divided by `factor`.
    Linear {
        /// Extension factor.
        factor: f32,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071), as llama.cpp and transformers compute it.
    Yarn {
        /// Extension factor.
        factor: f32,
        /// Context the model was trained with.
        original_context: u32,
        /// Ramp ends, in rotations over the original context.
        beta_fast: f32,
        /// See `beta_fast`.
        beta_slow: f32,
        /// Multiplies sin and cos; 1 where the model does not scale attention.
        attention_factor: f32,
    },
}

/// Rotary position embedding of one layer (Su et al. 2021, arXiv:2104.09864).
///
/// If the op has a third input (`rope_freqs.weight`, `[dims/2]`), each frequency is divided by its entry (llama3
/// factors).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Which elements are turned together.
    pub style: RopeStyle,
    /// How many leading elements of a head are turned; the rest pass through.
    pub dims: usize,
    /// Base of the frequencies: theta^(−2i/dims).
    pub theta: f32,
    /// Long-context scaling.
    pub scaling: RopeScaling,
}

/// Causal attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttnSpec {
    /// Query heads N.
    pub num_heads: usize,
    /// Key and value heads G; N is a multiple of G.
    pub num_kv_heads: usize,
    /// Head size D.
    pub head_dim: usize,
    /// Multiplies q·k.
    pub scale: f32,
    /// A token sees itself and the `window − 1` tokens before it; `None`: all before it.
    pub sliding_window: Option<u32>,
    /// c: scores become c·tanh(score/c) before the softmax.
    pub softcap: Option<f32>,
}

/// How the experts a row uses are weighted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertWeights {
    /// Softmax over the chosen logits: the same as a softmax over all of them, divided by its sum over the chosen.
    SoftmaxUsed,
    /// Softmax over all logits; the shares of the chosen are taken as they are and sum to less than one.
    SoftmaxAll,
}

/// Choice of experts from a router's logits (Shazeer et al. 2017, arXiv:1701.06538).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouterSpec {
    /// Experts E.
    pub experts: usize,
    /// Experts used per row U.
    pub experts_used: usize,
    /// How their outputs are weighted.
    pub weights: ExpertWeights,
}

/// An op of the graph. `x: A → B` in a variant's doc gives inputs and outputs in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// → the weight.
    Weight(WeightId),
    /// → token ids, `I32[T]`.
    Tokens,
    /// → positions, `I32[T]`.
    Positions,
    /// → the step's batch description.
    Batch,
    /// → the cache of a layer as the step finds it.
    Cache(CacheId),

    /// weight `[V, H]`, tokens `[T]` → `[T, H]`: rows of the weight, decoded.
    Embed,
    /// x `[n, K]`, weight `[M, K]`, optional bias `[M]` → `[n, M]`: x·Wᵀ (+ bias). `n` may be T, R or fixed.
    Linear,
    /// a, b of one shape → a + b.
    Add,
    /// a, b of one shape → a·b, element-wise.
    Mul,
    /// x → s·x.
    Scale(f32),
    /// x → c·tanh(x/c).
    Softcap(f32),
    /// x → act(x).
    Act(Activation),
    /// gate, up of one shape → act(gate)·up.
    Glu(Activation),
    /// x `[.., C]`, weight `[C]` → x/√(mean(x²)+eps)·weight over the last dimension.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// x `[T, heads, D]`, positions, optional frequency factors `[dims/2]` → the same shape.
    Rope(RopeSpec),
    /// x → the same elements under another shape with the same leading dimension.
    View(Shape),
    /// x `[T, H]`, batch → `[R, H]`: the rows `output_rows` names.
    TakeOutputs,
    /// cache, k `[T, G, D]`, v `[T, G, D]`, batch → the next version of the cache.
    KvWrite,
    /// q `[T, N, D]`, cache, batch → `[T, N, D]`. Reads a version made by `KvWrite`.
    Attention(AttnSpec),

    /// logits `[n, E]` → ids `I32[n, U]`, weights `[n, U]`: the U largest logits of each row, largest first, and of equal
    /// ones the lower number first. NaN is below everything.
    Route(RouterSpec),
    /// x `[n, H]`, ids `[n, U]`, gate and up weights `[E, F, H]` → `[n, U, F]`: act(x·gateᵀ)·(x·upᵀ) with the matrices
    /// of each expert the row uses. Ids are made by `Route`.
    ExpertGlu(Activation),
    /// h `[n, U, F]`, ids `[n, U]`, weights `[n, U]`, down weight `[E, H, F]` → `[n, H]`: the weighted sum of each used
    /// expert's h·downᵀ.
    ExpertDown,

    /// Made by [`crate::fuse`] alone.
    Fused(FusedOp),
}

/// Ops that stand for several plain ones. Each has an expansion in [`crate::fuse`], against which it is tested.
#[derive(Debug, Clone, PartialEq)]
pub enum FusedOp {
    /// x, then per member weight `[Mi, K]` and, where `bias[i]`, its bias `[Mi]` → one `[n, Mi]` per member.
    /// Several `Linear` of one x: its preparation (quantising, packing) is shared.
    LinearGroup {
        /// Which members have a bias.
        bias: Vec<bool>,
    },
    /// x `[n, K]`, gate weight `[F, K]`, up weight `[F, K]` → act(x·gateᵀ)·(x·upᵀ) `[n, F]`.
    LinearGlu(Activation),
    /// a, b, weight → (a + b, rms_norm(a + b)·weight).
    AddRmsNorm {
        /// See [`Op::RmsNorm`].
        eps: f32,
    },
    /// cache, k `[T, G, D]`, v `[T, G, D]`, batch, positions, optional factors → the next version of the cache:
    /// `KvWrite` of `Rope(k)`.
    RopeKvWrite(RopeSpec),
}

impl Op {
    /// The op's name in the text form and in error messages.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Weight(_) => "weight",
            Op::Tokens => "tokens",
            Op::Positions => "positions",
            Op::Batch => "batch",
            Op::Cache(_) => "cache",
            Op::Embed => "embed",
            Op::Linear => "linear",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Scale(_) => "scale",
            Op::Softcap(_) => "softcap",
            Op::Act(_) => "act",
            Op::Glu(_) => "glu",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Rope(_) => "rope",
            Op::View(_) => "view",
            Op::TakeOutputs => "take_outputs",
            Op::KvWrite => "kv_write",
            Op::Attention(_) => "attention",
            Op::Route(_) => "route",
            Op::ExpertGlu(_) => "expert_glu",
            Op::ExpertDown => "expert_down",
            Op::Fused(FusedOp::LinearGroup { .. }) => "linear_group",
            Op::Fused(FusedOp::LinearGlu(_)) => "linear_glu",
            Op::Fused(FusedOp::AddRmsNorm { .. }) => "add_rms_norm",
            Op::Fused(FusedOp::RopeKvWrite(_)) => "rope_kv_write",
        }
    }

    /// Whether the op only names something that exists before the step: it becomes an operand, never a step.
    pub fn is_source(&self) -> bool {
        matches!(
            self,
            Op::Weight(_) | Op::Tokens | Op::Positions | Op::Batch | Op::Cache(_)
        )
    }
}
