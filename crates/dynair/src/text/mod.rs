//! The text form of a graph, `.ir`: printing and parsing.
//!
//! One line per declaration and node; `;` starts a comment. Printing a graph and parsing the text gives the same
//! graph, bit for bit. The parser accepts graphs that break rules of [`crate::verify`], so that these can be tested;
//! it never panics and its memory is bounded by the length of the text.
//!
//! ```text
//! weight w0 "token_embd.weight" Q8_0[49152, 576]
//! weight w1 "blk.0.attn_qkv.weight" F16[64, 576] first_row=576
//! cache c0 kv num_kv_heads=3 head_dim=64 window=512 group=0
//! %0 = tokens : I32[T] "tokens"
//! %1 = weight(w0) : Q8_0[49152, 576] "token_embd.weight"
//! %2 = embed %1, %0 : F32[T, 576] "token_embd"
//! %9, %10 = add_rms_norm(eps=1e-5) %2, %7, %8 : F32[T, 576], F32[T, 576] "blk.0.ffn_norm"
//! logits %42
//! ```
//!
//! A weight with one row is a vector, `F32[576]`; one of stacked experts has three dimensions, `Q4_K[32, 512, 1024]`. A value that no node makes is declared as `value %7 : F32[T, 4]`.

mod parse;

use std::fmt;
use std::fmt::Write;

use crate::graph::{CacheDecl, Graph, Node, ValueId, WeightDecl};
use crate::infer::weight_type;
use crate::op::{Activation, ExpertWeights, FusedOp, Op, RopeScaling, RopeSpec, RopeStyle};

pub use parse::parse;

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, w) in self.weights.iter().enumerate() {
            weight(f, i, w)?;
        }
        for (i, c) in self.caches.iter().enumerate() {
            cache(f, i, c)?;
        }
        let mut made = vec![false; self.values.len()];
        for v in self.nodes.iter().flat_map(|n| &n.outputs) {
            if let Some(m) = made.get_mut(v.0 as usize) {
                *m = true;
            }
        }
        for (i, ty) in self.values.iter().enumerate().filter(|(i, _)| !made[*i]) {
            writeln!(f, "value %{i} : {ty}")?;
        }
        for n in &self.nodes {
            node(f, self, n)?;
        }
        if let Some(v) = self.logits {
            writeln!(f, "logits %{}", v.0)?;
        }
        Ok(())
    }
}

fn weight(f: &mut fmt::Formatter<'_>, i: usize, w: &WeightDecl) -> fmt::Result {
    write!(f, "weight w{i} {} {}", Quoted(&w.name), weight_type(w))?;
    if w.first_row > 0 {
        write!(f, " first_row={}", w.first_row)?;
    }
    writeln!(f)
}

fn cache(f: &mut fmt::Formatter<'_>, i: usize, c: &CacheDecl) -> fmt::Result {
    match c {
        CacheDecl::Kv {
            num_kv_heads,
            head_dim,
            window,
            group,
        } => {
            write!(f, "cache c{i} kv num_kv_heads={num_kv_heads} head_dim={head_dim}")?;
            if let Some(w) = window {
                write!(f, " window={w}")?;
            }
            writeln!(f, " group={group}")
        }
        CacheDecl::State { bytes } => writeln!(f, "cache c{i} state bytes={bytes}"),
    }
}

fn node(f: &mut fmt::Formatter<'_>, graph: &Graph, node: &Node) -> fmt::Result {
    let values = |ids: &[ValueId]| {
        ids.iter()
            .map(|v| format!("%{}", v.0))
            .collect::<Vec<_>>()
            .join(", ")
    };
    write!(f, "{} = {}", values(&node.outputs), op_text(&node.op))?;
    if !node.inputs.is_empty() {
        write!(f, " {}", values(&node.inputs))?;
    }
    let types: Vec<String> = node
        .outputs
        .iter()
        .map(|v| {
            graph
                .values
                .get(v.0 as usize)
                .map_or("batch".to_string(), |t| t.to_string())
        })
        .collect();
    writeln!(f, " : {} {}", types.join(", "), Quoted(&node.label))
}

/// A string in double quotes with `\`, `"` and control characters escaped as `\u{hex}`.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            if c == '"' || c == '\\' || c.is_control() {
                write!(f, "\\u{{{:x}}}", c as u32)?;
            } else {
                f.write_char(c)?;
            }
        }
        f.write_char('"')
    }
}

/// An op with its parameters, as in the text form.
pub(crate) fn op_text(op: &Op) -> String {
    let name = op.name();
    match op {
        Op::Weight(id) => format!("{name}(w{})", id.0),
        Op::Cache(id) => format!("{name}(c{})", id.0),
        Op::Scale(s) | Op::Softcap(s) => format!("{name}({s:?})"),
        Op::Act(a) | Op::Glu(a) | Op::ExpertGlu(a) | Op::Fused(FusedOp::LinearGlu(a)) => {
            format!("{name}({})", act_name(*a))
        }
        Op::RmsNorm { eps } | Op::Fused(FusedOp::AddRmsNorm { eps }) => format!("{name}(eps={eps:?})"),
        Op::Rope(spec) | Op::Fused(FusedOp::RopeKvWrite(spec)) => format!("{name}({})", rope_text(spec)),
        Op::View(shape) => format!("{name}({shape})"),
        Op::Attention(a) => {
            let mut out = format!(
                "{name}(num_heads={}, num_kv_heads={}, head_dim={}, scale={:?}",
                a.num_heads, a.num_kv_heads, a.head_dim, a.scale
            );
            if let Some(w) = a.sliding_window {
                out.push_str(&format!(", sliding_window={w}"));
            }
            if let Some(c) = a.softcap {
                out.push_str(&format!(", softcap={c:?}"));
            }
            out + ")"
        }
        Op::Route(r) => {
            let weights = match r.weights {
                ExpertWeights::SoftmaxUsed => "softmax_used",
                ExpertWeights::SoftmaxAll => "softmax_all",
            };
            format!(
                "{name}(experts={}, experts_used={}, weights={weights})",
                r.experts, r.experts_used
            )
        }
        Op::Fused(FusedOp::LinearGroup { bias }) => {
            let flags: Vec<&str> = bias.iter().map(|b| if *b { "bias" } else { "plain" }).collect();
            format!("{name}({})", flags.join(", "))
        }
        Op::Tokens
        | Op::Positions
        | Op::Batch
        | Op::Embed
        | Op::Linear
        | Op::Add
        | Op::Mul
        | Op::TakeOutputs
        | Op::KvWrite
        | Op::ExpertDown => name.to_string(),
    }
}

fn rope_text(spec: &RopeSpec) -> String {
    let style = match spec.style {
        RopeStyle::Interleaved => "interleaved",
        RopeStyle::Half => "half",
    };
    let mut out = format!("style={style}, dims={}, theta={:?}", spec.dims, spec.theta);
    match spec.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => out.push_str(&format!(", scaling=linear, factor={factor:?}")),
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
        } => {
            out.push_str(&format!(
                ", scaling=yarn, factor={factor:?}, original_context={original_context}, \
                 beta_fast={beta_fast:?}, beta_slow={beta_slow:?}, attention_factor={attention_factor:?}"
            ));
        }
    }
    out
}

fn act_name(act: Activation) -> &'static str {
    match act {
        Activation::Silu => "silu",
        Activation::GeluTanh => "gelu_tanh",
        Activation::Gelu => "gelu",
        Activation::Relu => "relu",
    }
}
