//! Plans: a graph in execution order with every intermediate value at a fixed place of one arena.

use std::sync::Arc;

use crate::graph::{CacheDecl, CacheId, WeightDecl, WeightId};
use crate::op::Op;
use crate::ty::{TensorType, ValueType};

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
