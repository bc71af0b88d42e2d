//! Test support shared by the crates: never a dependency of shipped code.

pub mod checkpoint;
pub mod op_cases;
pub mod random;
pub mod scripted;
pub mod vocab;
