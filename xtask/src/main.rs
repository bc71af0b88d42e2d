//! Developer commands of the workspace: `cargo xtask <command>`.

mod tidy;

use clap::{Parser, Subcommand};

/// Developer commands of the DynaLM workspace.
#[derive(Parser)]
#[command(name = "xtask")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check floors, `unsafe` places, file and function sizes, file headers and documented variables.
    Tidy,
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::Tidy => tidy::run(),
    }
}
