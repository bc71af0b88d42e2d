//! From logits to a token.
//!
//! One [`Sampler`](chain::Sampler) per sequence holds what its history means for the next draw. Everything
//! but reported log-probabilities is arithmetic that IEEE 754 defines exactly, in a fixed order, so equal
//! logits, parameters and seed give the same token on every platform.

pub mod chain;
pub mod logprobs;
pub mod math;
pub mod params;
pub mod penalty;
pub mod rng;
pub mod rows;

pub use chain::{SampleError, Sampled, Sampler, TokenMask};
pub use logprobs::TokenLogprobs;
pub use rows::{RowError, RowOutcome, RowTask, RowsFault, StepRows};

#[cfg(test)]
mod tests;
