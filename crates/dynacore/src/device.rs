//! The interface every device implements, and the only one the runtime uses.

use std::fmt;
use std::sync::Arc;

use dynair::{BatchMeta, CacheDecl, FusedOp, Op, Operand, Plan, Step, Target, WeightDecl};

use crate::buffer::{Layout, Tensor, WeightBytes};
use crate::error::{Error, Result};
use crate::kv::{KvGeometry, KvStorage};

/// What a device is.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Kind as on the command line: `cpu`, `cuda`, …
    pub kind: &'static str,
    /// The product's name.
    pub name: String,
    /// The kernel table or architecture in use: `avx2`, `sm_90a`, …
    pub isa: String,
    /// Worker threads of a CPU device, multiprocessors of a GPU.
    pub units: usize,
    /// Memory in bytes that this process may use.
    pub total_bytes: u64,
}

/// A place where plans run.
pub trait Device: Target + Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Memory free for weights and caches, bytes.
    ///
    /// # Errors
    /// If the driver or operating system does not say.
    fn free_bytes(&self) -> Result<u64>;

    /// Takes a weight: keeps the map (zero copy), copies, or repacks, as the device decides. Called from several
    /// threads at once. `usage` says which ops will read it.
    ///
    /// # Errors
    /// If the bytes do not fit the declaration or memory is short.
    fn load_weight(&self, decl: &WeightDecl, bytes: &WeightBytes, usage: WeightUsage) -> Result<Tensor>;

    /// Allocates the paged cache of a model.
    ///
    /// # Errors
    /// If memory is short or the element type cannot hold a layer's head size.
    fn alloc_kv(&self, caches: &[CacheDecl], geometry: &KvGeometry) -> Result<KvStorage>;

    /// How this device runs `step` of a plan whose weights are used as `usage` says (see [`weight_usage`]), for people.
    fn step_note(&self, plan: &Plan, step: &Step, usage: &[WeightUsage]) -> StepNote;

    /// Binds a plan to its weights (by [`dynair::WeightId`]) and cache.
    ///
    /// # Errors
    /// If a step has no kernel or scratch memory is short.
    fn compile(&self, plan: Plan, weights: Vec<Tensor>, kv: KvStorage) -> Result<Box<dyn Executor>>;
}

/// How a device runs a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepNote {
    /// What is called: the kernel's name, and after `@` the table it stands in.
    pub kernel: String,
    /// How the weights lie that are the right operand of a product or a table of rows; `None` if the step has none.
    pub layout: Option<Layout>,
}

impl fmt::Display for StepNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}", self.kernel)?;
        match self.layout {
            Some(layout) => write!(f, ", layout {layout}"),
            None => Ok(()),
        }
    }
}

/// Which kinds of op read a weight; a weight may have several uses (tied embeddings).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightUsage {
    /// Right operand of a matrix product.
    pub linear: bool,
    /// Table of an `Embed`.
    pub embed: bool,
    /// Read element-wise: norms, biases, frequency factors.
    pub vector: bool,
}

/// A step in flight.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a submitted step must be waited for"]
pub struct Ticket(pub u64);

/// Logits of a step, row-major `[R, vocab]`.
#[derive(Debug, Clone, Default)]
pub struct Logits {
    /// Row-major values.
    pub data: Vec<f32>,
    /// Columns.
    pub vocab: usize,
}

impl Logits {
    /// The logits of output row `row`.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.vocab..(row + 1) * self.vocab]
    }

    /// Number of output rows R.
    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.vocab).unwrap_or(0)
    }
}

/// What takes the logits of one output row of a step, `[vocab]`: called with the row's number, for several rows at once.
/// It may change the values; nobody reads them after it.
pub type TakeRow = dyn Fn(usize, &mut [f32]) + Send + Sync;

/// Time of a phase: a part of a plan's step that a device's units do without waiting for each other.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseTime {
    /// Label of the plan's step.
    pub label: Arc<str>,
    /// What the phase does.
    pub phase: &'static str,
    /// Work of all units together, nanoseconds.
    pub work_ns: u64,
    /// From the end of the stage before to the end of this phase's stage, nanoseconds; 0 for all but the last phase
    /// of a stage.
    pub wall_ns: u64,
}

/// A plan bound to its weights and cache. Steps run in the order submitted.
pub trait Executor: Send {
    /// Starts a step; returns at once where the device is asynchronous.
    ///
    /// # Errors
    /// If the batch breaks the plan's limits or names blocks that do not exist. Nothing has been done then.
    fn submit(&mut self, batch: &BatchMeta) -> Result<Ticket>;

    /// Waits for a step and gives its logits.
    ///
    /// # Errors
    /// If the device failed.
    fn wait(&mut self, ticket: Ticket, logits: &mut Logits) -> Result<()>;

    /// Waits for a step and gives each of its output rows to `take`, once, in any order; returns when all have been taken.
    /// A device with worker threads lets these take the rows, and gives them the logits where they lie; one without has
    /// nothing to write: this body takes them one after another.
    ///
    /// # Errors
    /// If the device failed, or `take` panicked under a device that lets others than the caller take rows.
    fn wait_rows(&mut self, ticket: Ticket, take: &Arc<TakeRow>) -> Result<()> {
        let mut logits = Logits::default();
        self.wait(ticket, &mut logits)?;
        if logits.vocab > 0 {
            let rows = logits.data.chunks_exact_mut(logits.vocab);
            rows.enumerate().for_each(|(row, logits)| take(row, logits));
        }
        Ok(())
    }

    /// Executes a step as [`Executor::submit`] and [`Executor::wait`] do and gives the time of each phase in place of
    /// logits; the cache is written as in any step. Steps that are submitted take no times.
    ///
    /// # Errors
    /// As [`Executor::submit`], or if the device cannot take times.
    fn profile(&mut self, _batch: &BatchMeta) -> Result<Vec<PhaseTime>> {
        Err(Error::Unsupported {
            device: "this device".into(),
            what: "times by phase".into(),
        })
    }
}

/// How the steps of `plan` use each of its weights, by [`dynair::WeightId`].
pub fn weight_usage(plan: &Plan) -> Vec<WeightUsage> {
    let mut usage = vec![WeightUsage::default(); plan.weights.len()];
    for step in &plan.steps {
        for (i, input) in step.inputs.iter().enumerate() {
            let Operand::Weight(id) = input else { continue };
            let use_of = &mut usage[id.0 as usize];
            match &step.op {
                Op::Embed => use_of.embed = true,
                Op::Linear if i == 1 => use_of.linear = true,
                Op::Fused(FusedOp::LinearGlu(_)) | Op::ExpertGlu(_) | Op::ExpertDown => use_of.linear = true,
                Op::Fused(FusedOp::LinearGroup { bias }) => {
                    // Members in order: a weight, then its bias if it has one.
                    let mut at = 1;
                    let is_weight = bias.iter().any(|has_bias| {
                        let found = at == i;
                        at += 1 + usize::from(*has_bias);
                        found
                    });
                    use_of.linear |= is_weight;
                    use_of.vector |= !is_weight;
                }
                _ => use_of.vector = true,
            }
        }
    }
    usage
}
