//! A plan lowered for the CPU: operands resolved to places in the arena, weights to their packed forms, and each op
//! to one or two phases.
//!
//! Owns the check that makes the workers' views of the arena sound: no output of a step overlaps an input or another
//! output of the same step (see [`super::pool::shared`]).

mod experts;
mod whole;

use std::ops::Range;
use std::sync::Arc;

use dynair::{
    Activation, AttnSpec, CacheDecl, DType, Dim, FusedOp, Op, Operand, Plan, RopeSpec, RopeStyle, Step,
    TensorType,
};

pub use whole::whole_products;

use super::ops::experts::ExpertPhase;
use super::ops::linear::Meets;
use super::ops::rope::Frequencies;
use super::storage::{CpuKv, CpuWeight};
use crate::buffer::Tensor;
use crate::error::{Error, Result};

/// A value in the arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Val {
    /// First element.
    pub(crate) at: usize,
    /// Leading dimension.
    pub(crate) rows: Dim,
    /// Elements of one row of the leading dimension.
    pub(crate) width: usize,
    /// Last dimension.
    pub(crate) cols: usize,
}

/// Tokens and output rows of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Size {
    pub(crate) tokens: usize,
    pub(crate) outputs: usize,
}

impl Val {
    /// Rows in a step.
    pub(crate) fn bind(&self, size: Size) -> usize {
        self.rows.bind(size.tokens, size.outputs)
    }

    /// Its elements in a step.
    pub(crate) fn range(&self, size: Size) -> Range<usize> {
        self.row_range(0..self.bind(size))
    }

    /// The elements of some rows.
    pub(crate) fn row_range(&self, rows: Range<usize>) -> Range<usize> {
        self.at + rows.start * self.width..self.at + rows.end * self.width
    }
}

/// Element-wise op of one input.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MapOp {
    Copy,
    Scale(f32),
    Softcap(f32),
    Act(Activation),
}

/// Element-wise op of two inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ZipOp {
    Add,
    Mul,
    Glu(Activation),
}

/// One product of a linear op.
pub(crate) struct Member {
    pub(crate) weight: Arc<CpuWeight>,
    pub(crate) bias: Option<Arc<[f32]>>,
    pub(crate) out: Val,
}

/// What a linear op does with its products.
pub(crate) enum Linear {
    /// One output per member.
    Group(Vec<Member>),
    /// act(gate) · up.
    Glu {
        gate: Arc<CpuWeight>,
        up: Arc<CpuWeight>,
        act: Activation,
        out: Val,
    },
}

/// Layers whose attention splits into the same work items.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttnClass {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) window: Option<u32>,
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
}

/// A phase: what workers do without waiting for each other.
pub(crate) enum Phase {
    /// Cosines and sines of the step's positions, all tables.
    Angles,
    Embed {
        weight: Arc<CpuWeight>,
        out: Val,
    },
    Norm {
        x: Val,
        weight: Arc<[f32]>,
        eps: f32,
        out: Val,
    },
    AddNorm {
        a: Val,
        b: Val,
        weight: Arc<[f32]>,
        eps: f32,
        sum: Val,
        out: Val,
    },
    Rope {
        x: Val,
        style: RopeStyle,
        table: usize,
        out: Val,
    },
    Map {
        op: MapOp,
        x: Val,
        out: Val,
    },
    Zip {
        op: ZipOp,
        a: Val,
        b: Val,
        out: Val,
    },
    TakeOutputs {
        x: Val,
        out: Val,
    },
    KvWrite {
        k: Val,
        v: Val,
        cache: usize,
        rope: Option<(RopeStyle, usize)>,
    },
    Attention {
        q: Val,
        cache: usize,
        class: usize,
        spec: AttnSpec,
        out: Val,
    },
    AttentionMerge {
        class: usize,
        spec: AttnSpec,
        out: Val,
    },
    /// Of the rows that the next phase's products are made from.
    Prepare {
        x: Val,
        meets: Meets,
    },
    Product {
        x: Val,
        meets: Meets,
        linear: Linear,
    },
    /// A part of a mixture of experts.
    Experts(ExpertPhase),
}

/// A plan in the form the workers walk.
pub(crate) struct Program {
    /// In order, with the label of the step each came from.
    pub(crate) phases: Vec<(Phase, Arc<str>)>,
    /// Rotation tables the phases name.
    pub(crate) ropes: Vec<Frequencies>,
    /// Attention classes the phases name.
    pub(crate) classes: Vec<AttnClass>,
    /// Window of each cache group.
    pub(crate) windows: Vec<Option<u32>>,
    /// Rows of the smallest embedding table: token ids must lie below.
    pub(crate) vocab_size: usize,
    pub(crate) logits: Val,
    /// Arena size in elements.
    pub(crate) arena: usize,
}

/// What rows that are multiplied with these matrices meet.
fn meets<'a>(whole: bool, weights: impl IntoIterator<Item = &'a Arc<CpuWeight>>) -> Meets {
    Meets::of(
        whole,
        weights
            .into_iter()
            .filter_map(|w| Some(w.matrix.as_ref()?.dtype())),
    )
}

fn invalid(label: &str, detail: impl Into<String>) -> Error {
    Error::Ir(dynair::Error::Invalid {
        what: "plan",
        rule: "cpu-lowering",
        at: format!("step `{label}`"),
        detail: detail.into(),
    })
}

/// Lowers `plan`.
///
/// # Errors
/// If a step has operands its op is not defined for, an output overlaps an operand of its own step, or a weight was
/// loaded for other uses than the plan makes of it.
pub(crate) fn lower(plan: &Plan, weights: &[Tensor], kv: &CpuKv) -> Result<Program> {
    let mut lowering = Lowering {
        plan,
        weights: Vec::new(),
        kv,
        routed: Vec::new(),
        grouped: None,
        whole: false,
        program: Program::empty(plan)?,
    };
    for (decl, tensor) in plan.weights.iter().zip(weights) {
        let weight = Arc::clone(&tensor.buffer.data).downcast::<CpuWeight>();
        let fits = tensor.decl == *decl;
        let weight = weight.ok().filter(|_| fits);
        lowering.weights.push(weight.ok_or_else(|| {
            invalid(
                &decl.name,
                format!(
                    "the tensor given for weight `{}` is not the one declared",
                    decl.name
                ),
            )
        })?);
    }
    if weights.len() != plan.weights.len() {
        return Err(invalid(
            "",
            format!("{} tensors for {} weights", weights.len(), plan.weights.len()),
        ));
    }
    for (step, whole) in plan.steps.iter().zip(whole_products(plan)) {
        lowering.whole = whole;
        lowering.step(step)?;
    }
    if !lowering.program.ropes.is_empty() {
        lowering
            .program
            .phases
            .insert(0, (Phase::Angles, Arc::from("angles")));
    }
    Ok(lowering.program)
}

impl Program {
    fn empty(plan: &Plan) -> Result<Program> {
        let mut windows = Vec::new();
        for cache in &plan.caches {
            if let CacheDecl::Kv { window, group, .. } = cache {
                if windows.len() <= *group {
                    windows.resize(group + 1, None);
                }
                windows[*group] = *window;
            }
        }
        Ok(Program {
            phases: Vec::new(),
            ropes: Vec::new(),
            classes: Vec::new(),
            windows,
            vocab_size: usize::MAX,
            logits: arena_value(plan, &plan.logits, "logits")?,
            arena: plan.arena_bytes.div_ceil(4),
        })
    }
}

fn arena_value(plan: &Plan, operand: &Operand, label: &str) -> Result<Val> {
    typed_value(plan, operand, DType::F32, label)
}

fn typed_value(plan: &Plan, operand: &Operand, dtype: DType, label: &str) -> Result<Val> {
    match operand {
        Operand::Arena { offset, ty } if ty.dtype == dtype => value(plan, *offset, *ty, label),
        _ => Err(invalid(
            label,
            format!("operand {operand:?} is no {dtype} value of the arena"),
        )),
    }
}

fn value(plan: &Plan, offset: usize, ty: TensorType, label: &str) -> Result<Val> {
    let width = ty.shape.row_elements();
    let rows = ty.shape.rows();
    let most = rows.bind(plan.limits.max_tokens, plan.limits.max_outputs);
    let bytes = most
        .checked_mul(width)
        .and_then(|n| n.checked_mul(4))
        .and_then(|n| n.checked_add(offset));
    let words = matches!(ty.dtype, DType::F32 | DType::I32) && offset.is_multiple_of(4);
    if !words || bytes.is_none_or(|n| n > plan.arena_bytes) {
        return Err(invalid(
            label,
            format!("{ty} at {offset} does not lie in the arena as words of four bytes"),
        ));
    }
    let cols = if ty.shape.rank() == 1 {
        most
    } else {
        ty.shape.cols()
    };
    Ok(Val {
        at: offset / 4,
        rows,
        width,
        cols,
    })
}

struct Lowering<'a> {
    plan: &'a Plan,
    weights: Vec<Arc<CpuWeight>>,
    kv: &'a CpuKv,
    /// Ids of experts, and of how many, that routers have made so far.
    routed: Vec<(Val, usize)>,
    /// The ids that rows are grouped by at this point of the program.
    grouped: Option<Val>,
    /// Whether the products of the step at hand must be made from whole records.
    whole: bool,
    program: Program,
}

impl Lowering<'_> {
    fn val(&self, step: &Step, i: usize) -> Result<Val> {
        let operand = step
            .inputs
            .get(i)
            .ok_or_else(|| invalid(&step.label, format!("input {i} is missing")))?;
        arena_value(self.plan, operand, &step.label)
    }

    fn out(&self, step: &Step, i: usize) -> Result<Val> {
        let operand = step
            .outputs
            .get(i)
            .ok_or_else(|| invalid(&step.label, format!("output {i} is missing")))?;
        arena_value(self.plan, operand, &step.label)
    }

    fn weight(&self, step: &Step, i: usize) -> Result<(&Arc<CpuWeight>, usize)> {
        match step.inputs.get(i) {
            Some(Operand::Weight(id)) if (id.0 as usize) < self.weights.len() => {
                Ok((&self.weights[id.0 as usize], id.0 as usize))
            }
            other => Err(invalid(
                &step.label,
                format!("input {i} is {other:?}, expected a weight"),
            )),
        }
    }

    /// A weight of `cols` columns as the right operand of a product, with its rows.
    fn matrix(&self, step: &Step, i: usize, cols: usize) -> Result<(Arc<CpuWeight>, usize)> {
        let (weight, id) = self.weight(step, i)?;
        let name = &self.plan.weights[id].name;
        let Some(matrix) = &weight.matrix else {
            return Err(invalid(
                &step.label,
                format!("weight `{name}` was not loaded as a matrix"),
            ));
        };
        if matrix.cols() != cols {
            let detail = format!("weight `{name}` has {} columns, expected {cols}", matrix.cols());
            return Err(invalid(&step.label, detail));
        }
        Ok((Arc::clone(weight), matrix.rows()))
    }

    fn vector(&self, step: &Step, i: usize, len: usize) -> Result<Arc<[f32]>> {
        let (weight, id) = self.weight(step, i)?;
        let name = &self.plan.weights[id].name;
        match &weight.vector {
            Some(v) if v.len() == len => Ok(Arc::clone(v)),
            Some(v) => Err(invalid(
                &step.label,
                format!("weight `{name}` has {} elements, expected {len}", v.len()),
            )),
            None => Err(invalid(
                &step.label,
                format!("weight `{name}` was not loaded as a vector"),
            )),
        }
    }

    fn cache(&self, step: &Step, i: usize) -> Result<usize> {
        match step.inputs.get(i) {
            Some(Operand::Cache(id)) if (id.0 as usize) < self.kv.caches.len() => Ok(id.0 as usize),
            other => Err(invalid(
                &step.label,
                format!("input {i} is {other:?}, expected a cache"),
            )),
        }
    }

    /// The table of rotations for `spec`, made once for all steps that share it.
    fn rope(&mut self, step: &Step, spec: &RopeSpec, factors: usize, head_dim: usize) -> Result<usize> {
        let factors = match step.inputs.get(factors) {
            Some(_) => Some(self.vector(step, factors, spec.dims / 2)?),
            None => None,
        };
        if spec.dims > head_dim || !spec.dims.is_multiple_of(2) {
            let detail = format!("rope turns {} elements of a head of {head_dim}", spec.dims);
            return Err(invalid(&step.label, detail));
        }
        let new = Frequencies::new(spec, factors.as_deref());
        let ropes = &mut self.program.ropes;
        Ok(ropes.iter().position(|r| *r == new).unwrap_or_else(|| {
            ropes.push(new);
            ropes.len() - 1
        }))
    }

    fn same(&self, step: &Step, vals: &[Val]) -> Result<()> {
        match vals
            .iter()
            .all(|v| v.rows == vals[0].rows && v.width == vals[0].width)
        {
            true => Ok(()),
            false => Err(invalid(&step.label, format!("operands {vals:?} differ in shape"))),
        }
    }

    fn push(&mut self, step: &Step, phase: Phase) {
        self.program.phases.push((phase, Arc::clone(&step.label)));
    }

    /// No output may overlap an input or another output.
    fn check_overlap(&self, step: &Step) -> Result<()> {
        let most = Size {
            tokens: self.plan.limits.max_tokens,
            outputs: self.plan.limits.max_outputs,
        };
        let range = |o: &Operand| match o {
            Operand::Arena { offset, ty } => {
                value(self.plan, *offset, *ty, &step.label).map(|v| Some(v.range(most)))
            }
            _ => Ok(None),
        };
        for (i, output) in step.outputs.iter().enumerate() {
            let Some(out) = range(output)? else { continue };
            for other in step.inputs.iter().chain(&step.outputs[..i]) {
                let Some(other) = range(other)? else { continue };
                if out.start < other.end && other.start < out.end {
                    let detail = format!("output {out:?} overlaps an operand {other:?} of the same step");
                    return Err(invalid(&step.label, detail));
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        if let Op::View(_) = step.op {
            return self.view(step);
        }
        self.check_overlap(step)?;
        match &step.op {
            Op::Embed => self.embed(step),
            Op::Linear => self.linear(step, &[step.inputs.len() > 2]),
            Op::Add => self.zip(step, ZipOp::Add),
            Op::Mul => self.zip(step, ZipOp::Mul),
            Op::Glu(act) => self.zip(step, ZipOp::Glu(*act)),
            Op::Scale(c) => self.map(step, MapOp::Scale(*c)),
            Op::Softcap(c) => self.map(step, MapOp::Softcap(*c)),
            Op::Act(act) => self.map(step, MapOp::Act(*act)),
            Op::RmsNorm { eps } => {
                let (x, out) = (self.val(step, 0)?, self.out(step, 0)?);
                self.same(step, &[x, out])?;
                let weight = self.vector(step, 1, x.cols)?;
                self.push(
                    step,
                    Phase::Norm {
                        x,
                        weight,
                        eps: *eps,
                        out,
                    },
                );
                Ok(())
            }
            Op::Rope(spec) => {
                let (x, out) = (self.val(step, 0)?, self.out(step, 0)?);
                self.same(step, &[x, out])?;
                let table = self.rope(step, spec, 2, x.cols)?;
                self.push(
                    step,
                    Phase::Rope {
                        x,
                        style: spec.style,
                        table,
                        out,
                    },
                );
                Ok(())
            }
            Op::TakeOutputs => {
                let (x, out) = (self.val(step, 0)?, self.out(step, 0)?);
                if x.width != out.width || out.rows != Dim::Outputs {
                    return Err(invalid(&step.label, "the result is not [R, H] of [T, H]"));
                }
                self.push(step, Phase::TakeOutputs { x, out });
                Ok(())
            }
            Op::KvWrite => self.kv_write(step, None),
            Op::Attention(spec) => self.attention(step, spec),
            Op::Route(spec) => self.route(step, *spec),
            Op::ExpertGlu(act) => self.expert_glu(step, *act),
            Op::ExpertDown => self.expert_down(step),
            Op::Fused(fused) => self.fused(step, fused),
            Op::View(_) | Op::Weight(_) | Op::Tokens | Op::Positions | Op::Batch | Op::Cache(_) => {
                Err(invalid(&step.label, format!("`{}` is no step", step.op.name())))
            }
        }
    }

    fn fused(&mut self, step: &Step, fused: &FusedOp) -> Result<()> {
        match fused {
            FusedOp::LinearGroup { bias } => self.linear(step, bias),
            FusedOp::LinearGlu(act) => {
                let (x, out) = (self.val(step, 0)?, self.out(step, 0)?);
                let (gate, rows) = self.matrix(step, 1, x.cols)?;
                let (up, up_rows) = self.matrix(step, 2, x.cols)?;
                if rows != up_rows || out.width != rows || x.width != x.cols {
                    return Err(invalid(
                        &step.label,
                        format!("gate {rows}, up {up_rows}, out {}", out.width),
                    ));
                }
                let linear = Linear::Glu {
                    gate,
                    up,
                    act: *act,
                    out,
                };
                self.product(step, x, linear);
                Ok(())
            }
            FusedOp::AddRmsNorm { eps } => {
                let (a, b) = (self.val(step, 0)?, self.val(step, 1)?);
                let (sum, out) = (self.out(step, 0)?, self.out(step, 1)?);
                self.same(step, &[a, b, sum, out])?;
                let weight = self.vector(step, 2, a.cols)?;
                self.push(
                    step,
                    Phase::AddNorm {
                        a,
                        b,
                        weight,
                        eps: *eps,
                        sum,
                        out,
                    },
                );
                Ok(())
            }
            FusedOp::RopeKvWrite(spec) => self.kv_write(step, Some(spec)),
        }
    }

    fn view(&mut self, step: &Step) -> Result<()> {
        let (x, out) = (self.val(step, 0)?, self.out(step, 0)?);
        self.same(step, &[x, out])?;
        if x.at != out.at {
            self.check_overlap(step)?;
            self.push(
                step,
                Phase::Map {
                    op: MapOp::Copy,
                    x,
                    out,
                },
            );
        }
        Ok(())
    }

    fn embed(&mut self, step: &Step) -> Result<()> {
        let out = self.out(step, 0)?;
        if step.inputs.get(1) != Some(&Operand::Tokens) {
            return Err(invalid(&step.label, "input 1 is not the step's tokens"));
        }
        let (weight, rows) = self.matrix(step, 0, out.width)?;
        self.program.vocab_size = self.program.vocab_size.min(rows);
        self.push(step, Phase::Embed { weight, out });
        Ok(())
    }

    fn linear(&mut self, step: &Step, bias: &[bool]) -> Result<()> {
        let x = self.val(step, 0)?;
        if x.width != x.cols {
            return Err(invalid(&step.label, "input 0 is no matrix [n, K]"));
        }
        let (mut members, mut at) = (Vec::new(), 1);
        for (i, bias) in bias.iter().enumerate() {
            let (weight, rows) = self.matrix(step, at, x.cols)?;
            let bias = if *bias {
                Some(self.vector(step, at + 1, rows)?)
            } else {
                None
            };
            at += 1 + usize::from(bias.is_some());
            let out = self.out(step, i)?;
            if out.width != rows || out.rows != x.rows {
                let detail = format!("output {i} is {} wide, expected {rows}", out.width);
                return Err(invalid(&step.label, detail));
            }
            members.push(Member { weight, bias, out });
        }
        self.product(step, x, Linear::Group(members));
        Ok(())
    }

    /// Products with prepared rows.
    fn product(&mut self, step: &Step, x: Val, linear: Linear) {
        let meets = match &linear {
            Linear::Group(members) => meets(self.whole, members.iter().map(|m| &m.weight)),
            Linear::Glu { gate, up, .. } => meets(self.whole, [gate, up]),
        };
        self.push(step, Phase::Prepare { x, meets });
        self.push(step, Phase::Product { x, meets, linear });
    }

    fn map(&mut self, step: &Step, op: MapOp) -> Result<()> {
        let (x, out) = (self.val(step, 0)?, self.out(step, 0)?);
        self.same(step, &[x, out])?;
        self.push(step, Phase::Map { op, x, out });
        Ok(())
    }

    fn zip(&mut self, step: &Step, op: ZipOp) -> Result<()> {
        let (a, b, out) = (self.val(step, 0)?, self.val(step, 1)?, self.out(step, 0)?);
        self.same(step, &[a, b, out])?;
        self.push(step, Phase::Zip { op, a, b, out });
        Ok(())
    }

    fn kv_write(&mut self, step: &Step, spec: Option<&RopeSpec>) -> Result<()> {
        let cache = self.cache(step, 0)?;
        let (k, v) = (self.val(step, 1)?, self.val(step, 2)?);
        let (heads, dim) = (self.kv.caches[cache].num_kv_heads, self.kv.caches[cache].head_dim);
        if k.width != heads * dim || v.width != heads * dim || k.cols != dim || k.rows != Dim::Tokens {
            let detail = format!(
                "keys {} and values {} wide, cache of {heads} heads of {dim}",
                k.width, v.width
            );
            return Err(invalid(&step.label, detail));
        }
        let rope = match spec {
            Some(spec) => Some((spec.style, self.rope(step, spec, 5, dim)?)),
            None => None,
        };
        self.push(step, Phase::KvWrite { k, v, cache, rope });
        Ok(())
    }

    fn attention(&mut self, step: &Step, spec: &AttnSpec) -> Result<()> {
        let (q, out) = (self.val(step, 0)?, self.out(step, 0)?);
        let cache = self.cache(step, 1)?;
        let c = &self.kv.caches[cache];
        let fits = (c.num_kv_heads, c.head_dim) == (spec.num_kv_heads, spec.head_dim)
            && spec.num_kv_heads > 0
            && spec.num_heads.is_multiple_of(spec.num_kv_heads)
            && q.width == spec.num_heads * spec.head_dim
            && q.rows == Dim::Tokens;
        if !fits {
            let detail = format!(
                "{spec:?}, cache of {} heads of {}, q {q:?}",
                c.num_kv_heads, c.head_dim
            );
            return Err(invalid(&step.label, detail));
        }
        self.same(step, &[q, out])?;
        let class = AttnClass {
            num_heads: spec.num_heads,
            num_kv_heads: spec.num_kv_heads,
            window: spec.sliding_window,
            group: c.group,
            head_dim: spec.head_dim,
        };
        let classes = &mut self.program.classes;
        let class = classes.iter().position(|c| *c == class).unwrap_or_else(|| {
            classes.push(class);
            classes.len() - 1
        });
        self.push(
            step,
            Phase::Attention {
                q,
                cache,
                class,
                spec: *spec,
                out,
            },
        );
        self.push(
            step,
            Phase::AttentionMerge {
                class,
                spec: *spec,
                out,
            },
        );
        Ok(())
    }
}
