//! Test support shared by the crates: never a dependency of shipped code.

pub mod checkpoint;
pub mod random;
pub mod scripted;
pub mod vocab;
