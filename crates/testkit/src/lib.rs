//! Test support shared by the crates: never a dependency of shipped code.
