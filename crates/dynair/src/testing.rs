//! Small models and steps for this crate's unit tests.

use std::sync::Arc;

use crate::batch::{BatchMeta, BlockId, BlockTables, SeqSpan};
use crate::builder::{GraphBuilder, TensorIndex};
use crate::dtype::DType;
use crate::error::Result;
use crate::eval::{Array, Caches, Weights};
use crate::graph::{CacheDecl, Graph, ValueId, WeightDecl};
use crate::op::{
    Activation, AttnSpec, ExpertWeights, FusedOp, Op, RopeScaling, RopeSpec, RopeStyle, RouterSpec,
};
use crate::plan::{Limits, Target};
use crate::ty::ValueType;

/// A target that supports every plain op and the fused ops a predicate takes.
pub(crate) struct Only<F>(pub(crate) F);

impl<F: Fn(&FusedOp, &[ValueType]) -> bool> Target for Only<F> {
    fn supports(&self, op: &Op, inputs: &[ValueType]) -> bool {
        match op {
            Op::Fused(f) => (self.0)(f, inputs),
            _ => true,
        }
    }

    fn alignment(&self) -> usize {
        64
    }
}

pub(crate) const LIMITS: Limits = Limits {
    max_tokens: 16,
    max_seqs: 4,
    max_outputs: 8,
};

/// Options by which the small models differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Small {
    pub(crate) bias: bool,
    pub(crate) qk_norm: bool,
    pub(crate) post_norm: bool,
    pub(crate) freqs: bool,
    pub(crate) window: Option<u32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) merged: bool,
    pub(crate) experts: bool,
}

pub(crate) const PLAIN: Small = Small {
    bias: false,
    qk_norm: false,
    post_norm: false,
    freqs: false,
    window: None,
    softcap: None,
    merged: false,
    experts: false,
};

const HIDDEN: usize = 24;
const FFN: usize = 40;
const VOCAB: usize = 50;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const EXPERTS: usize = 5;
const EXPERTS_USED: usize = 2;

impl TensorIndex for Small {
    fn find(&self, name: &str) -> Option<(DType, usize, usize)> {
        let part = name
            .strip_prefix("blk.")
            .and_then(|r| r.split_once('.'))
            .map_or(name, |(_, p)| p);
        let (rows, cols) = match part {
            "token_embd.weight" => (VOCAB, HIDDEN),
            "output_norm.weight" | "attn_norm.weight" | "ffn_norm.weight" => (1, HIDDEN),
            "post_attention_norm.weight" if self.post_norm => (1, HIDDEN),
            "attn_qkv.weight" if self.merged => ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "attn_q.weight" if !self.merged => (HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight" | "attn_v.weight" if !self.merged => (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_q.bias" if self.bias => (1, HEADS * HEAD_DIM),
            "attn_v.bias" if self.bias => (1, KV_HEADS * HEAD_DIM),
            "ffn_gate.bias" if self.bias => (1, FFN),
            "attn_q_norm.weight" | "attn_k_norm.weight" if self.qk_norm => (1, HEAD_DIM),
            "attn_output.weight" => (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate.weight" | "ffn_up.weight" if !self.experts => (FFN, HIDDEN),
            "ffn_down.weight" if !self.experts => (HIDDEN, FFN),
            "ffn_gate_inp.weight" if self.experts => (EXPERTS, HIDDEN),
            "ffn_gate_exps.weight" | "ffn_up_exps.weight" if self.experts => (EXPERTS * FFN, HIDDEN),
            "ffn_down_exps.weight" if self.experts => (EXPERTS * HIDDEN, FFN),
            "rope_freqs.weight" if self.freqs => (1, HEAD_DIM / 2),
            _ => return None,
        };
        Some((DType::F32, rows, cols))
    }

    fn experts(&self, name: &str) -> usize {
        if name.ends_with("_exps.weight") {
            EXPERTS
        } else {
            1
        }
    }
}

impl Small {
    fn heads(&self, b: &mut GraphBuilder<'_>, x: ValueId, name: &str, heads: usize) -> Result<ValueId> {
        let v = b.view(x, &[heads, HEAD_DIM])?;
        if self.qk_norm {
            b.rms_norm(v, name, 1e-5)
        } else {
            Ok(v)
        }
    }

    fn qkv(&self, b: &mut GraphBuilder<'_>, x: ValueId, p: &str) -> Result<[ValueId; 3]> {
        let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
        if self.merged {
            let name = format!("{p}.attn_qkv");
            return Ok([
                b.linear_rows(x, &name, 0..q, "q")?,
                b.linear_rows(x, &name, q..q + kv, "k")?,
                b.linear_rows(x, &name, q + kv..q + 2 * kv, "v")?,
            ]);
        }
        Ok([
            b.linear(x, &format!("{p}.attn_q"))?,
            b.linear(x, &format!("{p}.attn_k"))?,
            b.linear(x, &format!("{p}.attn_v.weight"))?,
        ])
    }

    fn layer(&self, b: &mut GraphBuilder<'_>, i: usize, x: ValueId, last: bool) -> Result<ValueId> {
        let p = format!("blk.{i}");
        let rope = RopeSpec {
            style: if i == 0 {
                RopeStyle::Half
            } else {
                RopeStyle::Interleaved
            },
            dims: HEAD_DIM,
            theta: 10000.0,
            scaling: if i == 0 {
                RopeScaling::None
            } else {
                RopeScaling::Linear { factor: 2.0 }
            },
        };
        let attn = AttnSpec {
            num_heads: HEADS,
            num_kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.3,
            sliding_window: if i == 0 { self.window } else { None },
            softcap: self.softcap,
        };
        let h = b.rms_norm(x, &format!("{p}.attn_norm"), 1e-5)?;
        let [q, k, v] = self.qkv(b, h, &p)?;
        let q = self.heads(b, q, &format!("{p}.attn_q_norm"), HEADS)?;
        let k = self.heads(b, k, &format!("{p}.attn_k_norm"), KV_HEADS)?;
        let v = b.view(v, &[KV_HEADS, HEAD_DIM])?;
        let (q, k) = (b.rope(q, rope)?, b.rope(k, rope)?);
        let a = b.attention(i, q, k, v, attn)?;
        let mut a = b.view(a, &[HEADS * HEAD_DIM])?;
        let mut x = x;
        if last {
            a = b.take_outputs(a)?;
            x = b.take_outputs(x)?;
        }
        let mut o = b.linear(a, &format!("{p}.attn_output"))?;
        if self.post_norm {
            o = b.rms_norm(o, &format!("{p}.post_attention_norm"), 1e-5)?;
        }
        let x = b.add(x, o, &format!("{p}.attn_residual"))?;
        let h = b.rms_norm(x, &format!("{p}.ffn_norm"), 1e-5)?;
        if self.experts {
            let weights = if last {
                ExpertWeights::SoftmaxAll
            } else {
                ExpertWeights::SoftmaxUsed
            };
            let spec = RouterSpec {
                experts: EXPERTS,
                experts_used: EXPERTS_USED,
                weights,
            };
            let d = b.moe(h, &p, spec, Activation::Silu, FFN)?;
            return b.add(x, d, &format!("{p}.ffn_residual"));
        }
        let gate = b.linear(h, &format!("{p}.ffn_gate"))?;
        let up = b.linear(h, &format!("{p}.ffn_up"))?;
        let h = b.glu(gate, up, Activation::Silu, &format!("{p}.ffn_glu"))?;
        let d = b.linear(h, &format!("{p}.ffn_down"))?;
        b.add(x, d, &format!("{p}.ffn_residual"))
    }

    /// Two layers, tied output.
    pub(crate) fn graph(&self) -> Graph {
        let build = || -> Result<Graph> {
            let mut b = GraphBuilder::new(self);
            let x = b.embed("token_embd", VOCAB, HIDDEN)?;
            let mut x = b.scale(x, 2.0)?;
            for i in 0..2 {
                x = self.layer(&mut b, i, x, i == 1)?;
            }
            let x = b.rms_norm(x, "output_norm", 1e-5)?;
            let logits = b.linear(x, "token_embd")?;
            b.finish(logits)
        };
        build().expect("the small model is well formed")
    }
}

/// A small deterministic generator (xorshift64*).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in −1..1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn array(&mut self, dims: &[usize]) -> Array {
        let n = dims.iter().product();
        Array::new(dims, (0..n).map(|_| self.float()).collect())
    }
}

/// Weights that depend on the tensor's name and row alone.
pub(crate) fn random_weights() -> Box<Weights<'static>> {
    Box::new(|decl: &WeightDecl| {
        let mut data = Vec::with_capacity(decl.rows * decl.cols);
        for row in decl.first_row..decl.first_row + decl.rows {
            let seed = decl.name.bytes().fold(row as u64 + 1, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
            });
            let mut rng = Rng(seed | 1);
            rng.next();
            data.extend(
                (0..decl.cols)
                    .map(|_| rng.float().abs().max(0.05) * if rng.next() >> 63 == 0 { 0.4 } else { -0.4 }),
            );
        }
        let dims = decl.dims();
        if decl.name == "rope_freqs.weight" {
            data.iter_mut().for_each(|x| *x = x.abs() + 0.5);
        }
        Ok(Arc::new(Array { dims, data }))
    })
}

pub(crate) const BLOCK_TOKENS: usize = 4;

/// Caches of 16 blocks per group.
pub(crate) fn caches(decls: &[CacheDecl]) -> Caches {
    Caches::new(decls, BLOCK_TOKENS, &[16, 16])
}

/// Two steps of two sequences: a prefill of 7 and 3 tokens, then a decode of the first beside a chunk of the second.
/// Blocks are scattered, and differ between groups.
pub(crate) fn steps(groups: usize) -> Vec<BatchMeta> {
    let step = |spans: &[(usize, usize)], outputs: &[u32]| {
        let mut meta = BatchMeta {
            output_rows: outputs.to_vec(),
            ..BatchMeta::default()
        };
        for (s, (from, to)) in spans.iter().enumerate() {
            meta.seqs.push(SeqSpan {
                first_row: meta.tokens.len() as u32,
                rows: (to - from) as u32,
                context_len: *to as u32,
            });
            for p in *from..*to {
                meta.tokens.push(((p * 7 + s * 13) % VOCAB) as u32);
                meta.positions.push(p as u32);
            }
        }
        for g in 0..groups {
            let mut table = BlockTables {
                first: vec![0],
                ..BlockTables::default()
            };
            for (s, (_, to)) in spans.iter().enumerate() {
                let blocks =
                    (0..to.div_ceil(BLOCK_TOKENS)).map(|i| BlockId(((i * 5 + s * 8 + g * 3) % 16) as u32));
                table.blocks.extend(blocks);
                table.first.push(table.blocks.len() as u32);
                table.start.push(0);
            }
            meta.tables.push(table);
        }
        meta
    };
    vec![step(&[(0, 7), (0, 3)], &[6]), step(&[(7, 8), (3, 9)], &[0, 6])]
}
