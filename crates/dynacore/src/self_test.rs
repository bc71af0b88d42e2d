//! Small graphs that hold a device against [`dynair::eval`].
//!
//! A [`Case`] is a graph around one op (or a few), weights, and the steps to execute. Inputs of the op under test are
//! rows of f32 tables looked up by token id, so that a case needs nothing a model does not have and runs on every
//! device. [`run`] executes it on a device and in the evaluator and gives the normalised error. [`cases`] makes cases;
//! [`short`] is the selection `doctor` runs.

pub mod cases;
pub mod decoder;

use std::collections::BTreeMap;
use std::sync::Arc;

use dynair::eval::{Array, Caches, eval_graph};
use dynair::{
    BatchMeta, CacheDecl, DType, Graph, Limits, Op, Target, TensorIndex, ValueType, WeightDecl, plan, quant,
};

use crate::buffer::WeightBytes;
use crate::cpu::ops::linear::{self, Form, Meets};
use crate::cpu::table::KernelTable;
use crate::device::{Device, Executor, Logits, weight_usage};
use crate::error::Result;
use crate::kv::{KvGeometry, KvType};

/// Weights of a case, by name.
#[derive(Debug, Clone, Default)]
pub struct Tensors {
    all: BTreeMap<String, Stored>,
    /// How many matrices those tensors stack that are no single one.
    stacked: BTreeMap<String, usize>,
}

/// Type, rows, columns and bytes of a tensor.
type Stored = (DType, usize, usize, Arc<[u8]>);

impl Tensors {
    /// Adds `values [rows, cols]`, encoded as `dtype`.
    ///
    /// # Panics
    /// If the values do not fit the shape or the type's blocks.
    pub fn add(&mut self, name: &str, dtype: DType, rows: usize, values: &[f32]) {
        let cols = values.len() / rows;
        let mut bytes = Vec::new();
        for row in values.chunks_exact(cols) {
            quant::encode_row(dtype, row, &mut bytes).expect("a case's rows are whole blocks");
        }
        self.all
            .insert(name.to_owned(), (dtype, rows, cols, bytes.into()));
    }

    /// Adds `[rows, cols]` made of `values`, whole rows, over and over.
    ///
    /// # Panics
    /// As [`Tensors::add`].
    pub fn add_repeated(&mut self, name: &str, dtype: DType, rows: usize, cols: usize, values: &[f32]) {
        let mut encoded = Vec::new();
        for row in values.chunks_exact(cols) {
            quant::encode_row(dtype, row, &mut encoded).expect("a case's rows are whole blocks");
        }
        let row_bytes = encoded.len() / (values.len() / cols);
        let bytes: Vec<u8> = encoded.iter().copied().cycle().take(rows * row_bytes).collect();
        self.all
            .insert(name.to_owned(), (dtype, rows, cols, bytes.into()));
    }

    /// Says that a tensor stacks the matrices of so many experts.
    pub fn stack(&mut self, name: &str, experts: usize) {
        self.stacked.insert(name.to_owned(), experts);
    }

    /// The bytes of rows of a tensor.
    ///
    /// # Panics
    /// If the case has no such tensor.
    pub fn bytes(&self, decl: &WeightDecl) -> Arc<[u8]> {
        let (_, rows, _, bytes) = &self.all[&decl.name];
        let row = bytes.len() / rows;
        bytes[decl.first_row * row..(decl.first_row + decl.rows) * row].into()
    }
}

impl TensorIndex for Tensors {
    fn find(&self, name: &str) -> Option<(DType, usize, usize)> {
        self.all
            .get(name)
            .map(|(dtype, rows, cols, _)| (*dtype, *rows, *cols))
    }

    fn experts(&self, name: &str) -> usize {
        self.stacked.get(name).copied().unwrap_or(1)
    }
}

/// See the module's docs.
#[derive(Debug, Clone)]
pub struct Case {
    /// What it is, for people.
    pub name: String,
    /// The graph; its result is compared.
    pub graph: Graph,
    /// Its weights.
    pub tensors: Tensors,
    /// Steps, executed in order on one cache; results of all are compared.
    pub steps: Vec<BatchMeta>,
    /// The cache, if the graph has any.
    pub geometry: KvGeometry,
    /// Largest error allowed, see [`error`].
    pub tolerance: f64,
    /// Why that much.
    pub reason: &'static str,
}

/// A target that takes no fused ops, so that plain ones are tested too.
pub struct Unfused<'a>(pub &'a dyn Target);

impl Target for Unfused<'_> {
    fn supports(&self, op: &Op, inputs: &[ValueType]) -> bool {
        !matches!(op, Op::Fused(_)) && self.0.supports(op, inputs)
    }
    fn alignment(&self) -> usize {
        self.0.alignment()
    }
}

/// Distance of `found` from `truth`: the root of the summed squares of the differences over that of `truth`, of the
/// worst row of `cols` elements. Rows of zeros must be met exactly.
pub fn error(found: &[f32], truth: &[f32], cols: usize) -> f64 {
    if found.len() != truth.len() {
        return f64::INFINITY;
    }
    let mut worst = 0.0f64;
    for (found, truth) in found.chunks(cols.max(1)).zip(truth.chunks(cols.max(1))) {
        let (mut off, mut size) = (0.0f64, 0.0f64);
        for (f, t) in found.iter().zip(truth) {
            off += (f64::from(*f) - f64::from(*t)).powi(2);
            size += f64::from(*t).powi(2);
        }
        let error = if off == 0.0 { 0.0 } else { (off / size).sqrt() };
        // NaN must not pass as small.
        worst = if error <= worst {
            worst
        } else if error.is_nan() {
            f64::INFINITY
        } else {
            error
        };
    }
    worst
}

/// A case bound to a device.
pub fn compile(device: &dyn Device, case: &Case, fused: bool, limits: Limits) -> Result<Box<dyn Executor>> {
    let target: &dyn Target = device;
    let plan = if fused {
        plan(case.graph.clone(), target, limits)?
    } else {
        plan(case.graph.clone(), &Unfused(target), limits)?
    };
    let usage = weight_usage(&plan);
    let load = |(decl, usage): (&WeightDecl, _)| {
        device.load_weight(decl, &WeightBytes::Owned(case.tensors.bytes(decl)), usage)
    };
    let weights = plan
        .weights
        .iter()
        .zip(usage)
        .map(load)
        .collect::<Result<Vec<_>>>()?;
    let kv = device.alloc_kv(&plan.caches, &case.geometry)?;
    device.compile(plan, weights, kv)
}

/// Limits that hold all steps of a case.
pub fn limits(case: &Case) -> Limits {
    let most = |f: fn(&BatchMeta) -> usize| case.steps.iter().map(f).max().unwrap_or(1).max(1);
    Limits {
        max_tokens: most(|b| b.tokens.len()),
        max_seqs: most(|b| b.seqs.len()),
        max_outputs: most(|b| b.output_rows.len()),
    }
}

/// The results of all steps by the evaluator, end to end.
///
/// # Errors
/// If the case is not valid.
pub fn truth(case: &Case) -> Result<Vec<f32>> {
    let weights = |decl: &WeightDecl| -> dynair::Result<Arc<Array>> {
        let values = quant::decode(decl.dtype, &case.tensors.bytes(decl), decl.rows * decl.cols)?;
        Ok(Arc::new(Array::new(&decl.dims(), values)))
    };
    let mut caches = Caches::new(
        &case.graph.caches,
        case.geometry.block_tokens,
        &case.geometry.blocks,
    );
    let mut all = Vec::new();
    for batch in &case.steps {
        all.extend(eval_graph(&case.graph, &weights, &mut caches, batch)?.data);
    }
    Ok(all)
}

/// The results of all steps by a device, end to end, and the length of a row.
///
/// # Errors
/// Whatever the device gives.
pub fn execute(device: &dyn Device, case: &Case, fused: bool) -> Result<(Vec<f32>, usize)> {
    let mut executor = compile(device, case, fused, limits(case))?;
    let (mut all, mut logits) = (Vec::new(), Logits::default());
    for batch in &case.steps {
        let ticket = executor.submit(batch)?;
        executor.wait(ticket, &mut logits)?;
        all.extend_from_slice(&logits.data);
    }
    Ok((all, logits.vocab))
}

/// The outcome of a case.
#[derive(Debug, Clone, PartialEq)]
pub struct SelfTestResult {
    /// The case.
    pub name: String,
    /// Kernel table or architecture.
    pub isa: String,
    /// Distance from the evaluator, see [`error`].
    pub error: f64,
    /// What was allowed.
    pub tolerance: f64,
    /// What failed, if the case could not be executed at all.
    pub failure: Option<String>,
}

impl SelfTestResult {
    /// Whether the case is met.
    pub fn passed(&self) -> bool {
        self.failure.is_none() && self.error <= self.tolerance
    }
}

/// Runs a case on a device, with the device's fused ops or without.
pub fn run(device: &dyn Device, case: &Case, fused: bool) -> SelfTestResult {
    let outcome = truth(case).and_then(|truth| {
        let (found, cols) = execute(device, case, fused)?;
        Ok(error(&found, &truth, cols))
    });
    SelfTestResult {
        name: if fused {
            case.name.clone()
        } else {
            format!("{} (unfused)", case.name)
        },
        isa: device.info().isa.clone(),
        error: *outcome.as_ref().unwrap_or(&f64::INFINITY),
        tolerance: case.tolerance,
        failure: outcome.err().map(|e| e.to_string()),
    }
}

/// Whether planning the case for `target` makes a fused op.
pub fn fuses(target: &dyn Target, case: &Case) -> bool {
    plan(case.graph.clone(), target, limits(case))
        .is_ok_and(|p| p.steps.iter().any(|s| matches!(s.op, Op::Fused(_))))
}

/// A cache geometry with enough blocks for every step of a case; a graph without caches has no pools.
pub fn geometry(graph: &Graph, kind: KvType, block_tokens: usize, blocks: usize) -> KvGeometry {
    let groups = graph.caches.iter().map(|c| match c {
        CacheDecl::Kv { group, .. } => group + 1,
        CacheDecl::State { .. } => 0,
    });
    KvGeometry {
        kind,
        block_tokens,
        blocks: vec![blocks; groups.max().unwrap_or(0)],
    }
}

/// What `doctor` runs on devices in `auto` mode for what they make from this form: few rows and many, of each type as far as
/// the table takes the form for it.
pub fn short_from(table: &KernelTable, form: Form) -> Vec<Case> {
    let shapes = [5, 20, 40].map(|rows| DType::WEIGHTS.map(|dtype| (rows, dtype)));
    let taken =
        |(rows, dtype): &(usize, DType)| linear::form(table, *rows, 256, Meets::of(false, [*dtype])) == form;
    let mut all: Vec<Case> = shapes
        .into_iter()
        .flatten()
        .filter(taken)
        .map(|(rows, dtype)| cases::from(form, cases::linear(dtype, rows, 256, 48, cases::Values::Normal)))
        .collect();
    if form == Form::Tiles {
        all.push(cases::wide_attention(&cases::Attention::default()));
    }
    all
}

/// What `doctor` runs on other devices in `auto` mode, which take many lines of attention together.
pub fn short_wide() -> Vec<Case> {
    let of = |kind| {
        cases::attention(&cases::Attention {
            kind,
            ..cases::Attention::default()
        })
    };
    let kinds = [KvType::F16, KvType::F32, KvType::Q8_0].map(of);
    kinds
        .into_iter()
        .map(|case| Case {
            name: format!("{} of many lines", case.name),
            ..case
        })
        .collect()
}

/// What `doctor` runs: one case of every op, in well under a second.
pub fn short() -> Vec<Case> {
    use cases::{Experts, Values, attention, elementwise, experts, linear, norm, rope};
    let mut all = elementwise(3, 67, Values::Mixed);
    all.push(norm(3, 576, Values::Mixed));
    all.push(rope(dynair::RopeStyle::Half, 64, 64));
    all.push(rope(dynair::RopeStyle::Interleaved, 80, 64));
    for dtype in DType::WEIGHTS {
        all.push(linear(dtype, 3, 256, 48, Values::Normal));
    }
    all.push(experts(&Experts::default()));
    all.push(experts(&Experts {
        dtype: DType::F16,
        n: 1,
        hidden: 40,
        inner: 24,
        ..Experts::default()
    }));
    for kind in [KvType::F16, KvType::F32, KvType::Q8_0] {
        all.push(attention(&cases::Attention {
            kind,
            ..cases::Attention::default()
        }));
    }
    all
}
