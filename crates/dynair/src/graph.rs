//! The graph: vectors of nodes and values, addressed by number.

use crate::dtype::DType;
use crate::op::Op;
use crate::ty::ValueType;

/// Number of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// Number of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// Number of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// Number of a cache: one per layer that keeps state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheId(pub u32);

/// A weight the graph needs: rows `first_row..first_row + rows` of a checkpoint tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WeightDecl {
    /// Checkpoint (GGUF) name.
    pub name: String,
    /// Element type in the checkpoint.
    pub dtype: DType,
    /// First row of the tensor this weight takes; 0 unless the tensor holds several merged weights.
    pub first_row: usize,
    /// Rows, of all stacked matrices together; 1 for vectors.
    pub rows: usize,
    /// Columns: the length of a vector, the input size K of a matrix.
    pub cols: usize,
    /// Matrices of `rows / experts` rows that are stacked in the tensor; 1 for vectors and matrices.
    pub experts: usize,
}

impl WeightDecl {
    /// Dimensions, row-major: `[cols]`, `[rows, cols]` or `[experts, rows of one, cols]`.
    pub fn dims(&self) -> Vec<usize> {
        match (self.experts, self.rows) {
            (0 | 1, 1) => vec![self.cols],
            (0 | 1, rows) => vec![rows, self.cols],
            (experts, rows) => vec![experts, rows / experts, self.cols],
        }
    }
}

/// State a layer keeps from step to step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheDecl {
    /// Keys and values in paged blocks.
    Kv {
        /// Key and value heads G.
        num_kv_heads: usize,
        /// Head size D.
        head_dim: usize,
        /// Only the last `window` tokens are ever read.
        window: Option<u32>,
        /// Which of the step's block tables the layer uses: caches of one window share a group. Groups are numbered
        /// from 0 in order of first use.
        group: usize,
    },
    /// Recurrent state of fixed size per sequence.
    State {
        /// Bytes per sequence.
        bytes: usize,
    },
}

/// An op applied to values.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The op.
    pub op: Op,
    /// Its inputs.
    pub inputs: Vec<ValueId>,
    /// Its outputs.
    pub outputs: Vec<ValueId>,
    /// Checkpoint-like name of what the node computes, e.g. `blk.3.attn_norm`; for plans, traces and errors.
    pub label: String,
}

/// A forward pass. Nodes stand in a valid order of execution.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Graph {
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// Types of all values, by [`ValueId`].
    pub values: Vec<ValueType>,
    /// Weights, by [`WeightId`].
    pub weights: Vec<WeightDecl>,
    /// Caches, by [`CacheId`].
    pub caches: Vec<CacheDecl>,
    /// The result, `F32[R, V]`.
    pub logits: Option<ValueId>,
}
