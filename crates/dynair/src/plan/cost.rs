//! What a step must at least move and compute, and the plan's text.
//!
//! The estimates are floors: every operand touched once, of experts those that the step's rows can name. They tell which share of a machine's bandwidth or peak a
//! step reaches; they choose nothing.

use std::fmt::Write;

use crate::graph::CacheDecl;
use crate::op::{FusedOp, Op};
use crate::plan::{Operand, Plan, Step};
use crate::ty::{TensorType, ValueType};

/// The step an estimate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens T.
    pub tokens: usize,
    /// Output rows R.
    pub outputs: usize,
    /// Tokens each row attends to, itself included, before a window cuts them.
    pub context_len: usize,
    /// Numbers in a block of the cache's element type, and bytes of such a block: (1, 2) for f16.
    pub kv_block: (usize, usize),
}

impl StepSize {
    /// One sequence decoding its `context_len`-th token with an f16 cache.
    pub fn decode(context_len: usize) -> StepSize {
        StepSize {
            tokens: 1,
            outputs: 1,
            context_len,
            kv_block: (1, 2),
        }
    }
}

/// Estimated work of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Bytes of weights read.
    pub weight_bytes: u64,
    /// Bytes of activations read and written.
    pub activation_bytes: u64,
    /// Bytes of the cache read and written.
    pub cache_bytes: u64,
    /// Additions and multiplications.
    pub flops: u64,
}

impl Cost {
    /// All bytes moved.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + self.activation_bytes + self.cache_bytes
    }
}

impl std::ops::Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            weight_bytes: self.weight_bytes + other.weight_bytes,
            activation_bytes: self.activation_bytes + other.activation_bytes,
            cache_bytes: self.cache_bytes + other.cache_bytes,
            flops: self.flops + other.flops,
        }
    }
}

impl Step {
    /// Bytes this step of `plan` moves at least.
    pub fn bytes(&self, plan: &Plan, size: &StepSize) -> u64 {
        self.cost(plan, size).bytes()
    }

    /// Additions and multiplications of this step of `plan`.
    pub fn flops(&self, plan: &Plan, size: &StepSize) -> u64 {
        self.cost(plan, size).flops
    }

    /// Estimated work of this step of `plan`.
    pub fn cost(&self, plan: &Plan, size: &StepSize) -> Cost {
        let mut cost = Cost::default();
        let bind = |ty: &TensorType| ty.shape.elements(size.tokens, size.outputs) as u64;
        for operand in self.inputs.iter().chain(&self.outputs) {
            match (operand, plan.operand_type(operand)) {
                (Operand::Weight(_), Some(ValueType::Tensor(ty))) => {
                    let whole = ty.bytes(size.tokens, size.outputs).unwrap_or(0) as u64;
                    let rows = bind(&ty) / ty.shape.row_elements().max(1) as u64;
                    cost.weight_bytes += match self.op {
                        Op::Embed => whole / rows.max(1) * rows.min(size.tokens as u64),
                        Op::ExpertGlu(_) | Op::ExpertDown => {
                            let experts = match ty.shape.rank() {
                                3 => ty.shape.rows().bind(0, 0) as u64,
                                _ => 1,
                            };
                            whole / experts.max(1) * experts.min(self.experts_named(plan, size))
                        }
                        _ => whole,
                    };
                }
                (_, Some(ValueType::Tensor(ty))) => {
                    cost.activation_bytes += ty.bytes(size.tokens, size.outputs).unwrap_or(0) as u64;
                }
                _ => {}
            }
        }
        let outputs: u64 = self
            .outputs
            .iter()
            .filter_map(|o| self.tensor(plan, o))
            .map(|t| bind(&t))
            .sum();
        let k = self
            .inputs
            .first()
            .and_then(|o| self.tensor(plan, o))
            .map_or(0, |t| t.shape.cols()) as u64;
        cost.flops = match &self.op {
            Op::Linear | Op::Fused(FusedOp::LinearGroup { .. }) => 2 * k * outputs,
            Op::Fused(FusedOp::LinearGlu(_)) | Op::ExpertGlu(_) => (4 * k + 4) * outputs,
            // Per expert a product and what weighting and adding it takes.
            Op::ExpertDown => (2 * k + 2) * outputs * self.experts_used(plan),
            // A comparison per logit.
            Op::Route(spec) => outputs / (2 * spec.experts_used.max(1) as u64) * spec.experts as u64,
            Op::Embed | Op::View(_) | Op::TakeOutputs | Op::KvWrite => 0,
            Op::RmsNorm { .. } | Op::Rope(_) => 4 * outputs,
            // Two outputs: one addition for the sum, four operations for the norm.
            Op::Fused(FusedOp::AddRmsNorm { .. }) => 5 * (outputs / 2),
            Op::Attention(spec) => {
                let seen = spec
                    .sliding_window
                    .map_or(size.context_len, |w| size.context_len.min(w as usize));
                4 * seen as u64 * outputs
            }
            Op::Fused(FusedOp::RopeKvWrite(_)) => {
                4 * self
                    .inputs
                    .get(1)
                    .and_then(|o| self.tensor(plan, o))
                    .map_or(0, |t| bind(&t))
            }
            _ => outputs,
        };
        cost.cache_bytes = self.cache_bytes(plan, size);
        cost
    }

    fn tensor(&self, plan: &Plan, operand: &Operand) -> Option<TensorType> {
        match plan.operand_type(operand) {
            Some(ValueType::Tensor(t)) => Some(t),
            _ => None,
        }
    }

    /// Experts a row uses: columns of the ids, which are input 1 of an op of experts.
    fn experts_used(&self, plan: &Plan) -> u64 {
        let ids = self.inputs.get(1).and_then(|o| self.tensor(plan, o));
        ids.map_or(0, |t| t.shape.cols() as u64)
    }

    /// Most experts the step's rows can name. Which they do is not known before the step; for a row alone it is exact.
    fn experts_named(&self, plan: &Plan, size: &StepSize) -> u64 {
        let ids = self.inputs.get(1).and_then(|o| self.tensor(plan, o));
        ids.map_or(0, |t| t.shape.elements(size.tokens, size.outputs) as u64)
    }

    fn cache_bytes(&self, plan: &Plan, size: &StepSize) -> u64 {
        let decl = self.inputs.iter().find_map(|o| match o {
            Operand::Cache(id) => plan.caches.get(id.0 as usize),
            _ => None,
        });
        let Some(CacheDecl::Kv {
            num_kv_heads,
            head_dim,
            window,
            ..
        }) = decl
        else {
            return 0;
        };
        let tokens = match self.op {
            Op::Attention(_) => window.map_or(size.context_len, |w| size.context_len.min(w as usize)),
            _ => size.tokens,
        };
        let (block, bytes) = size.kv_block;
        (2 * num_kv_heads * head_dim.div_ceil(block) * bytes * tokens) as u64
    }
}

/// See [`Plan::to_text_with`].
pub(crate) fn to_text(plan: &Plan, size: &StepSize, note: &dyn Fn(&Step) -> String) -> String {
    let mut out = String::new();
    let l = &plan.limits;
    let mut line = |text: std::fmt::Arguments<'_>| {
        out.write_fmt(text).expect("writing to a string cannot fail");
        out.push('\n');
    };
    line(format_args!(
        "plan: {} steps, arena {} bytes at {} tokens, {} sequences, {} outputs",
        plan.steps.len(),
        plan.arena_bytes,
        l.max_tokens,
        l.max_seqs,
        l.max_outputs
    ));
    line(format_args!(
        "costs at {} tokens, {} outputs, context {}",
        size.tokens, size.outputs, size.context_len
    ));
    let mut total = Cost::default();
    for (i, step) in plan.steps.iter().enumerate() {
        let cost = step.cost(plan, size);
        total = total + cost;
        let inputs: Vec<String> = step.inputs.iter().map(|o| describe(plan, o)).collect();
        let outputs: Vec<String> = step.outputs.iter().map(|o| describe(plan, o)).collect();
        line(format_args!(
            "{i:4} {} {} -> {}  ; {} ({} bytes, {} flops){}",
            crate::text::op_text(&step.op),
            inputs.join(", "),
            outputs.join(", "),
            step.label,
            cost.bytes(),
            cost.flops,
            note(step)
        ));
    }
    line(format_args!("logits {}", plan.logits));
    line(format_args!(
        "total {} bytes ({} weights, {} activations, {} cache), {} flops",
        total.bytes(),
        total.weight_bytes,
        total.activation_bytes,
        total.cache_bytes,
        total.flops
    ));
    out
}

fn describe(plan: &Plan, operand: &Operand) -> String {
    match (operand, plan.operand_type(operand)) {
        (Operand::Weight(id), Some(ty)) => match plan.weights.get(id.0 as usize) {
            Some(w) if w.first_row > 0 => format!("{}+{}:{ty}", w.name, w.first_row),
            Some(w) => format!("{}:{ty}", w.name),
            None => operand.to_string(),
        },
        _ => operand.to_string(),
    }
}
