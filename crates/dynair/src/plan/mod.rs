//! Plans: a graph in execution order with every intermediate value at a fixed place of one arena.
//!
//! [`plan`] fuses ([`crate::fuse`]), drops what nothing needs and turns sources into operands (`order`), lays the
//! intermediate values out (`memory`), asks the target about every op, and verifies the result. A `View` costs
//! nothing: its output is its input's place under another type. A step's outputs never overlap its inputs, but may
//! overlap what earlier steps read: steps run one after the other.

mod cost;
mod memory;
mod order;

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::fuse;
use crate::graph::{CacheDecl, CacheId, Graph, ValueId, WeightDecl, WeightId};
use crate::op::Op;
use crate::ty::{TensorType, ValueType};
use crate::verify;

pub use cost::{Cost, StepSize};
pub(crate) use order::compact;

/// The largest step a plan must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens T of a step.
    pub max_tokens: usize,
    /// Most sequences S of a step.
    pub max_seqs: usize,
    /// Most output rows R of a step.
    pub max_outputs: usize,
}

/// What the planner must know of a device.
pub trait Target {
    /// Whether the device can execute `op` on inputs of these types.
    fn supports(&self, op: &Op, inputs: &[ValueType]) -> bool;
    /// Alignment of values in the arena, bytes; a power of two.
    fn alignment(&self) -> usize;
}

/// Where a step finds an input or puts an output.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    /// An intermediate value: `offset` bytes into the arena, laid out row-major without gaps for the bound shape.
    Arena {
        /// Byte offset.
        offset: usize,
        /// Type; symbolic dimensions are bound per step.
        ty: TensorType,
    },
    /// A weight.
    Weight(WeightId),
    /// The step's token ids.
    Tokens,
    /// The step's positions.
    Positions,
    /// The step's batch description.
    Batch,
    /// A layer's cache. Versions have become order.
    Cache(CacheId),
}

/// One op of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The op.
    pub op: Op,
    /// Its inputs.
    pub inputs: Vec<Operand>,
    /// Its outputs; a cache output is written as the `Operand::Cache` it updates.
    pub outputs: Vec<Operand>,
    /// The node's label.
    pub label: Arc<str>,
}

/// An executable order of steps with one arena.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Steps in order.
    pub steps: Vec<Step>,
    /// Size of the arena in bytes for a step at the limits.
    pub arena_bytes: usize,
    /// The largest step.
    pub limits: Limits,
    /// Weights, by [`WeightId`].
    pub weights: Vec<WeightDecl>,
    /// Caches, by [`CacheId`].
    pub caches: Vec<CacheDecl>,
    /// Where the logits `F32[R, V]` stand after the last step.
    pub logits: Operand,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operand::Arena { offset, ty } => write!(f, "{ty}@{offset}"),
            Operand::Weight(w) => write!(f, "w{}", w.0),
            Operand::Tokens => f.write_str("tokens"),
            Operand::Positions => f.write_str("positions"),
            Operand::Batch => f.write_str("batch"),
            Operand::Cache(c) => write!(f, "c{}", c.0),
        }
    }
}

impl Plan {
    /// Type of an operand of this plan; `None` if it names a weight or cache the plan does not declare.
    pub fn operand_type(&self, operand: &Operand) -> Option<ValueType> {
        operand_type(operand, &self.weights, &self.caches)
    }

    /// Number of cache groups: how many block tables a step needs.
    pub fn cache_groups(&self) -> usize {
        let groups = self.caches.iter().filter_map(|c| match c {
            CacheDecl::Kv { group, .. } => Some(group + 1),
            CacheDecl::State { .. } => None,
        });
        groups.max().unwrap_or(0)
    }

    /// The plan as text: limits and arena, then one line a step with op, operands, label, and the bytes and
    /// operations of a step of `size`.
    pub fn to_text(&self, size: &StepSize) -> String {
        self.to_text_with(size, &|_| String::new())
    }

    /// As [`Plan::to_text`], with what `note` says of a step at the end of its line.
    pub fn to_text_with(&self, size: &StepSize, note: &dyn Fn(&Step) -> String) -> String {
        cost::to_text(self, size, note)
    }
}

fn operand_type(operand: &Operand, weights: &[WeightDecl], caches: &[CacheDecl]) -> Option<ValueType> {
    use crate::dtype::DType;
    use crate::ty::{Dim, Shape};
    match operand {
        Operand::Arena { ty, .. } => Some(ValueType::Tensor(*ty)),
        Operand::Weight(id) => verify::declared(weights, id.0),
        Operand::Tokens | Operand::Positions => Some(ValueType::Tensor(TensorType {
            dtype: DType::I32,
            shape: Shape::new(&[Dim::Tokens]),
        })),
        Operand::Batch => Some(ValueType::Batch),
        Operand::Cache(id) => ((id.0 as usize) < caches.len()).then_some(ValueType::Cache(*id)),
    }
}

/// Makes the plan of `graph` for `target`.
///
/// # Errors
/// [`Error::Unsupported`] if the target has no kernel for an op, [`Error::Invalid`] or [`Error::BadInput`] if the
/// graph is not valid or the limits are not positive.
pub fn plan(graph: Graph, target: &dyn Target, limits: Limits) -> Result<Plan> {
    verify::graph(&graph)?;
    let graph = fuse::fuse(graph, target);
    for node in &graph.nodes {
        let types: Vec<ValueType> = node.inputs.iter().map(|v| graph.values[v.0 as usize]).collect();
        let free = node.op.is_source() || matches!(node.op, Op::View(_));
        if !free && !target.supports(&node.op, &types) {
            return Err(Error::Unsupported {
                op: node.op.name().to_string(),
                inputs: types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", "),
                label: node.label.clone(),
            });
        }
    }
    let places = memory::place(&graph, target.alignment(), &limits)?;
    let operand = |v: &ValueId| order::operand(&graph, &places, *v);
    let steps: Result<Vec<Step>> = graph
        .nodes
        .iter()
        .filter(|n| !n.op.is_source() && !matches!(n.op, Op::View(_)))
        .map(|n| {
            Ok(Step {
                op: n.op.clone(),
                inputs: n.inputs.iter().map(operand).collect::<Result<_>>()?,
                outputs: n.outputs.iter().map(operand).collect::<Result<_>>()?,
                label: Arc::from(n.label.as_str()),
            })
        })
        .collect();
    let logits = graph.logits.expect("a verified graph has a result");
    let plan = Plan {
        steps: steps?,
        arena_bytes: places.arena_bytes,
        limits,
        logits: operand(&logits)?,
        weights: graph.weights,
        caches: graph.caches,
    };
    verify::plan(&plan, target.alignment())?;
    Ok(plan)
}
