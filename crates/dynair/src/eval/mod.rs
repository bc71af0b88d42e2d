//! The reference evaluator: what every op means, slowly.
//!
//! Values are f32; expert ids are numbers too, which f32 holds exactly. Inside an op everything is computed in f64 and rounded to f32 once, at the op's outputs, so that
//! the result is the truth up to the roundings between ops, and a kernel's error can be told from its own arithmetic
//! alone. Rotations are computed in f64 from the exact position. The cache holds f32. A fused op rounds where its
//! expansion would hand a value to a reader, and is computed here on its own, not by expansion, so that tests of one
//! against the other say something.
//!
//! [`eval_op`] evaluates a single op on arbitrary data; [`eval_graph`] and [`eval_plan`] a whole step. The latter keeps
//! its values in an arena at the plan's offsets, which tests the plan's memory.

mod cache;
mod experts;
mod math;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::batch::BatchMeta;
use crate::error::{Error, Result};
use crate::graph::{CacheId, Graph, WeightDecl};
use crate::op::{FusedOp, Op, RopeSpec};
use crate::plan::{Operand, Plan};
use crate::ty::Shape;

pub use cache::{Caches, PagedCache};
pub use math::{activate, dot, rope_angles};

/// A dense f32 tensor with all dimensions bound, row-major.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Array {
    /// Dimensions.
    pub dims: Vec<usize>,
    /// Values, row-major.
    pub data: Vec<f32>,
}

impl Array {
    /// An array of the given dimensions.
    ///
    /// # Panics
    /// If the number of values is not the product of the dimensions.
    pub fn new(dims: &[usize], data: Vec<f32>) -> Array {
        assert_eq!(
            dims.iter().product::<usize>(),
            data.len(),
            "an array has as many values as its dimensions say"
        );
        Array {
            dims: dims.to_vec(),
            data,
        }
    }

    /// Length of the last dimension.
    pub fn cols(&self) -> usize {
        self.dims.last().copied().unwrap_or(0)
    }

    /// Rows of the last dimension's length.
    pub fn rows(&self) -> std::slice::ChunksExact<'_, f32> {
        self.data.chunks_exact(self.cols().max(1))
    }
}

/// An input of [`eval_op`].
#[derive(Debug, Clone, Copy)]
pub enum Arg<'a> {
    /// A tensor: activation, weight or bias.
    Array(&'a Array),
    /// The batch's token ids.
    Tokens,
    /// The batch's positions.
    Positions,
    /// The batch.
    Batch,
    /// A cache of the context.
    Cache(CacheId),
}

/// What an op may read and change besides its tensors.
#[derive(Debug)]
pub struct Context<'a> {
    /// The step.
    pub batch: &'a BatchMeta,
    /// The caches; `KvWrite` changes them.
    pub caches: &'a mut Caches,
}

/// A lookup of decoded weights.
pub type Weights<'a> = dyn Fn(&WeightDecl) -> Result<Arc<Array>> + 'a;

/// Evaluates one op. Gives its tensor outputs in order; a cache output changes the context instead.
///
/// # Errors
/// [`Error::BadInput`] if the inputs are not what the op is defined for.
///
/// # Panics
/// If the batch breaks the rules of [`crate::verify::batch`].
pub fn eval_op(op: &Op, inputs: &[Arg<'_>], ctx: &mut Context<'_>) -> Result<Vec<Array>> {
    let args = Args { op, inputs };
    let one = |a: Array| Ok(vec![a]);
    match op {
        Op::Weight(_) | Op::Tokens | Op::Positions | Op::Batch | Op::Cache(_) => {
            Err(args.bad("op", op.name(), "an op that computes"))
        }
        Op::Embed => one(embed(args.array(0)?, ctx.batch, &args)?),
        Op::Linear => one(linear(&args, args.array(0)?, 1, inputs.len() > 2)?),
        Op::Add => one(zip(&args, |a, b| a + b)?),
        Op::Mul => one(zip(&args, |a, b| a * b)?),
        Op::Glu(act) => one(zip(&args, |g, u| activate(*act, g) * u)?),
        Op::Scale(s) => one(map(args.array(0)?, |x| f64::from(*s) * x)),
        Op::Softcap(c) => one(map(args.array(0)?, |x| {
            f64::from(*c) * (x / f64::from(*c)).tanh()
        })),
        Op::Act(act) => one(map(args.array(0)?, |x| activate(*act, x))),
        Op::RmsNorm { eps } => one(rms_norm(&args, args.array(0)?, 1, *eps)?),
        Op::Rope(spec) => one(rope(&args, spec, 0, 2, ctx.batch)?),
        Op::View(shape) => one(view(&args, *shape, ctx.batch)?),
        Op::TakeOutputs => one(take_outputs(&args, ctx.batch)?),
        Op::KvWrite => {
            let (id, k, v) = (args.cache(0)?, args.array(1)?, args.array(2)?);
            ctx.caches
                .write(id, k, v, ctx.batch)
                .map_err(|(f, e)| args.bad("keys and values", f, e))?;
            Ok(Vec::new())
        }
        Op::Attention(spec) => {
            let (q, id) = (args.array(0)?, args.cache(1)?);
            let out = ctx.caches.attend(id, q, spec, ctx.batch);
            one(out.map_err(|(f, e)| args.bad("queries and cache", f, e))?)
        }
        Op::Route(spec) => experts::route(&args, spec),
        Op::ExpertGlu(act) => one(experts::glu(&args, *act)?),
        Op::ExpertDown => one(experts::down(&args)?),
        Op::Fused(fused) => eval_fused(fused, &args, ctx),
    }
}

fn eval_fused(fused: &FusedOp, args: &Args<'_>, ctx: &mut Context<'_>) -> Result<Vec<Array>> {
    match fused {
        FusedOp::LinearGroup { bias } => {
            let x = args.array(0)?;
            let mut at = 1;
            let members = bias.iter().map(|has_bias| {
                let weight = at;
                at += 1 + usize::from(*has_bias);
                linear(args, x, weight, *has_bias)
            });
            members.collect()
        }
        FusedOp::LinearGlu(act) => {
            let x = args.array(0)?;
            let (gate, up) = (linear(args, x, 1, false)?, linear(args, x, 2, false)?);
            if gate.dims != up.dims {
                return Err(args.bad(
                    "up",
                    format_args!("{:?}", up.dims),
                    format_args!("{:?}", gate.dims),
                ));
            }
            let pairs = gate.data.iter().zip(&up.data);
            let data = pairs
                .map(|(g, u)| (activate(*act, f64::from(*g)) * f64::from(*u)) as f32)
                .collect();
            Ok(vec![Array {
                dims: gate.dims,
                data,
            }])
        }
        FusedOp::AddRmsNorm { eps } => {
            let sum = zip(args, |a, b| a + b)?;
            let normed = rms_norm(args, &sum, 2, *eps)?;
            Ok(vec![sum, normed])
        }
        FusedOp::RopeKvWrite(spec) => {
            let (id, v) = (args.cache(0)?, args.array(2)?);
            let k = rope(args, spec, 1, 5, ctx.batch)?;
            ctx.caches
                .write(id, &k, v, ctx.batch)
                .map_err(|(f, e)| args.bad("keys and values", f, e))?;
            Ok(Vec::new())
        }
    }
}

struct Args<'a> {
    op: &'a Op,
    inputs: &'a [Arg<'a>],
}

impl<'a> Args<'a> {
    fn bad(&self, what: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> Error {
        Error::BadInput {
            op: self.op.name().to_string(),
            what: what.to_string(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    fn array(&self, i: usize) -> Result<&'a Array> {
        match self.inputs.get(i) {
            Some(Arg::Array(a)) => Ok(a),
            other => Err(self.bad("input", format_args!("{other:?} at {i}"), "a tensor")),
        }
    }

    fn cache(&self, i: usize) -> Result<CacheId> {
        match self.inputs.get(i) {
            Some(Arg::Cache(id)) => Ok(*id),
            other => Err(self.bad("input", format_args!("{other:?} at {i}"), "a cache")),
        }
    }

    /// Input `i` as a vector of `len` values.
    fn vector(&self, i: usize, len: usize) -> Result<&'a [f32]> {
        let a = self.array(i)?;
        if a.data.len() != len {
            return Err(self.bad("vector", format_args!("{:?}", a.dims), len));
        }
        Ok(&a.data)
    }
}

fn map(x: &Array, f: impl Fn(f64) -> f64) -> Array {
    Array {
        dims: x.dims.clone(),
        data: x.data.iter().map(|v| f(f64::from(*v)) as f32).collect(),
    }
}

/// The first two inputs, element by element.
fn zip(args: &Args<'_>, f: impl Fn(f64, f64) -> f64) -> Result<Array> {
    let (a, b) = (args.array(0)?, args.array(1)?);
    if a.dims != b.dims {
        return Err(args.bad(
            "input 1",
            format_args!("{:?}", b.dims),
            format_args!("{:?}", a.dims),
        ));
    }
    let data = a
        .data
        .iter()
        .zip(&b.data)
        .map(|(x, y)| f(f64::from(*x), f64::from(*y)) as f32)
        .collect();
    Ok(Array {
        dims: a.dims.clone(),
        data,
    })
}

fn embed(weight: &Array, batch: &BatchMeta, args: &Args<'_>) -> Result<Array> {
    let h = weight.cols();
    let mut data = Vec::with_capacity(batch.tokens.len() * h);
    for id in &batch.tokens {
        let at = *id as usize * h;
        let row = weight.data.get(at..at + h).ok_or_else(|| {
            args.bad(
                "token id",
                id,
                format_args!("below {}", weight.data.len() / h.max(1)),
            )
        })?;
        data.extend_from_slice(row);
    }
    Ok(Array {
        dims: vec![batch.tokens.len(), h],
        data,
    })
}

/// `x` times input `weight` transposed, plus the input after it where `bias`.
fn linear(args: &Args<'_>, x: &Array, weight: usize, bias: bool) -> Result<Array> {
    let w = args.array(weight)?;
    let k = x.cols();
    if w.cols() != k || k == 0 {
        return Err(args.bad("weight", format_args!("{:?}", w.dims), format_args!("[M, {k}]")));
    }
    let m = w.data.len() / k;
    let bias = if bias {
        Some(args.vector(weight + 1, m)?)
    } else {
        None
    };
    let mut data = Vec::with_capacity(x.data.len() / k * m);
    for row in x.rows() {
        for (i, column) in w.rows().enumerate() {
            data.push((dot(row, column) + bias.map_or(0.0, |b| f64::from(b[i]))) as f32);
        }
    }
    Ok(Array {
        dims: vec![x.data.len() / k, m],
        data,
    })
}

fn rms_norm(args: &Args<'_>, x: &Array, weight: usize, eps: f32) -> Result<Array> {
    let w = args.vector(weight, x.cols())?;
    let mut data = Vec::with_capacity(x.data.len());
    for row in x.rows() {
        let inverse = 1.0 / (dot(row, row) / row.len() as f64 + f64::from(eps)).sqrt();
        data.extend(
            row.iter()
                .zip(w)
                .map(|(v, w)| (f64::from(*v) * inverse * f64::from(*w)) as f32),
        );
    }
    Ok(Array {
        dims: x.dims.clone(),
        data,
    })
}

/// Rotary embedding of input `x`; factors are input `factors` if there is one.
fn rope(args: &Args<'_>, spec: &RopeSpec, x: usize, factors: usize, batch: &BatchMeta) -> Result<Array> {
    let x = args.array(x)?;
    let factors = match args.inputs.get(factors) {
        Some(_) => Some(args.vector(factors, spec.dims / 2)?),
        None => None,
    };
    let [t, heads, dim] = x.dims[..] else {
        return Err(args.bad("input", format_args!("{:?}", x.dims), "[T, heads, D]"));
    };
    if t != batch.positions.len() || spec.dims > dim {
        return Err(args.bad(
            "rows and head size",
            format_args!("{t} and {dim}"),
            format_args!("{} and at least {}", batch.positions.len(), spec.dims),
        ));
    }
    let mut out = x.clone();
    for (row, position) in batch.positions.iter().enumerate() {
        let angles = rope_angles(spec, factors, *position);
        for head in 0..heads {
            let at = (row * heads + head) * dim;
            math::turn(spec, &angles, &mut out.data[at..at + dim]);
        }
    }
    Ok(out)
}

fn view(args: &Args<'_>, shape: Shape, batch: &BatchMeta) -> Result<Array> {
    let x = args.array(0)?;
    let (t, r) = (batch.tokens.len(), batch.output_rows.len());
    let dims: Vec<usize> = shape.dims().iter().map(|d| d.bind(t, r)).collect();
    if dims.iter().product::<usize>() != x.data.len() {
        return Err(args.bad("elements", format_args!("{:?}", x.dims), format_args!("{dims:?}")));
    }
    Ok(Array {
        dims,
        data: x.data.clone(),
    })
}

fn take_outputs(args: &Args<'_>, batch: &BatchMeta) -> Result<Array> {
    let x = args.array(0)?;
    let h = x.cols();
    let mut data = Vec::with_capacity(batch.output_rows.len() * h);
    for row in &batch.output_rows {
        let at = *row as usize * h;
        let values = x.data.get(at..at + h);
        data.extend_from_slice(values.ok_or_else(|| args.bad("output row", row, "a row of the step"))?);
    }
    Ok(Array {
        dims: vec![batch.output_rows.len(), h],
        data,
    })
}

/// Evaluates a whole step; gives the logits `[R, V]`. Copies of blocks are done first.
///
/// # Errors
/// As [`eval_op`]; whatever `weights` gives; [`Error::Invalid`] if the graph has no result.
///
/// # Panics
/// If the graph or the batch breaks a rule of [`crate::verify`].
pub fn eval_graph(
    graph: &Graph,
    weights: &Weights<'_>,
    caches: &mut Caches,
    batch: &BatchMeta,
) -> Result<Array> {
    enum Slot {
        Empty,
        Own(Array),
        Shared(Arc<Array>),
        Source(Arg<'static>),
    }
    caches.copy_blocks(batch);
    let mut slots: Vec<Slot> = graph.values.iter().map(|_| Slot::Empty).collect();
    for node in &graph.nodes {
        let source = match &node.op {
            Op::Weight(id) => Some(Slot::Shared(weights(&graph.weights[id.0 as usize])?)),
            Op::Tokens => Some(Slot::Source(Arg::Tokens)),
            Op::Positions => Some(Slot::Source(Arg::Positions)),
            Op::Batch => Some(Slot::Source(Arg::Batch)),
            Op::Cache(id) => Some(Slot::Source(Arg::Cache(*id))),
            _ => None,
        };
        if let Some(slot) = source {
            slots[node.outputs[0].0 as usize] = slot;
            continue;
        }
        let mut args = Vec::with_capacity(node.inputs.len());
        for v in &node.inputs {
            args.push(match &slots[v.0 as usize] {
                Slot::Own(a) => Arg::Array(a),
                Slot::Shared(a) => Arg::Array(a),
                Slot::Source(s) => *s,
                Slot::Empty => panic!("%{} is read before it is made: verify the graph first", v.0),
            });
        }
        let results = eval_op(&node.op, &args, &mut Context { batch, caches })?;
        if results.is_empty() {
            slots[node.outputs[0].0 as usize] = match graph.values[node.outputs[0].0 as usize] {
                crate::ty::ValueType::Cache(id) => Slot::Source(Arg::Cache(id)),
                _ => Slot::Empty,
            };
        }
        for (v, result) in node.outputs.iter().zip(results) {
            slots[v.0 as usize] = Slot::Own(result);
        }
    }
    let no_result = || Error::Invalid {
        what: "graph",
        rule: "logits",
        at: "logits".into(),
        detail: "the graph has no result".into(),
    };
    let v = graph.logits.ok_or_else(no_result)?;
    match std::mem::replace(&mut slots[v.0 as usize], Slot::Empty) {
        Slot::Own(a) => Ok(a),
        _ => Err(no_result()),
    }
}

/// Evaluates a plan in an arena as a device would; gives the logits `[R, V]`.
///
/// # Errors
/// As [`eval_op`]; whatever `weights` gives.
///
/// # Panics
/// If the plan or the batch breaks a rule of [`crate::verify`].
pub fn eval_plan(
    plan: &Plan,
    weights: &Weights<'_>,
    caches: &mut Caches,
    batch: &BatchMeta,
) -> Result<Array> {
    const F32: usize = 4;
    caches.copy_blocks(batch);
    let (t, r) = (batch.tokens.len(), batch.output_rows.len());
    let mut arena = vec![f32::NAN; plan.arena_bytes.div_ceil(F32)];
    let load = |arena: &[f32], operand: &Operand| -> Result<Option<Arc<Array>>> {
        match operand {
            Operand::Arena { offset, ty } => {
                let at = offset / F32;
                let dims: Vec<usize> = ty.shape.dims().iter().map(|d| d.bind(t, r)).collect();
                let data = arena[at..at + ty.shape.elements(t, r)].to_vec();
                Ok(Some(Arc::new(Array { dims, data })))
            }
            Operand::Weight(id) => weights(&plan.weights[id.0 as usize]).map(Some),
            _ => Ok(None),
        }
    };
    for step in &plan.steps {
        let mut arrays = Vec::with_capacity(step.inputs.len());
        for operand in &step.inputs {
            arrays.push(load(&arena, operand)?);
        }
        let args: Vec<Arg<'_>> = step
            .inputs
            .iter()
            .zip(&arrays)
            .map(|(operand, array)| match (operand, array) {
                (_, Some(a)) => Arg::Array(a),
                (Operand::Tokens, _) => Arg::Tokens,
                (Operand::Positions, _) => Arg::Positions,
                (Operand::Cache(id), _) => Arg::Cache(*id),
                _ => Arg::Batch,
            })
            .collect();
        let results = eval_op(&step.op, &args, &mut Context { batch, caches })?;
        for (operand, result) in step.outputs.iter().zip(results) {
            if let Operand::Arena { offset, .. } = operand {
                arena[offset / F32..offset / F32 + result.data.len()].copy_from_slice(&result.data);
            }
        }
    }
    let logits = load(&arena, &plan.logits)?;
    Ok(logits.map(|a| Array::clone(&a)).unwrap_or_default())
}
