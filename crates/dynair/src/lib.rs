//! DynaIR: the vocabulary of a language model's forward pass.
//!
//! A model is a [`Graph`](graph::Graph): nodes that apply an [`Op`](op::Op) to values. It is built once per loaded
//! model by a [`GraphBuilder`](builder::GraphBuilder); only the number of tokens `T` and of output rows `R` of a step
//! stay symbolic ([`Dim`](ty::Dim)). [`fuse`] rewrites it, [`plan`] orders it and lays its values out in one arena,
//! and a device executes the resulting [`Plan`](plan::Plan) once per step, told by a
//! [`BatchMeta`](batch::BatchMeta) which tokens of which sequences the step holds.
//!
//! [`eval`] defines what every op means in slow scalar `f32`; [`quant`] defines what the bytes of every weight type
//! mean. All kernels of all devices are held against these two.
//!
//! This crate is pure data: no I/O, no threads, no clock, no device, no `unsafe`.
#![forbid(unsafe_code)]

pub mod batch;
pub mod builder;
pub mod dtype;
pub mod error;
pub mod eval;
pub mod fuse;
pub mod graph;
pub mod infer;
pub mod op;
pub mod plan;
pub mod quant;
#[cfg(test)]
mod testing;
pub mod text;
pub mod ty;
pub mod verify;

pub use batch::{BatchMeta, BlockId, BlockTables, SeqSpan};
pub use builder::{GraphBuilder, TensorIndex};
pub use dtype::{DType, QuantType};
pub use error::{Error, Result};
pub use graph::{CacheDecl, CacheId, Graph, Node, NodeId, ValueId, WeightDecl, WeightId};
pub use op::{
    Activation, AttnSpec, ExpertWeights, FusedOp, Op, RopeScaling, RopeSpec, RopeStyle, RouterSpec,
};
pub use plan::{Limits, Operand, Plan, Step, Target, plan};
pub use ty::{Dim, Shape, TensorType, ValueType};
