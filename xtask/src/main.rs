//! Developer commands of the workspace: `cargo xtask <command>`.
fn main() {}
