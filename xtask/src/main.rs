//! Developer commands of the workspace: `cargo xtask <command>`.

mod neon;
mod test;
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
    /// Make a GGUF of random weights in the shape of a real model, or a tiny one (`make-model --help` says more).
    #[command(disable_help_flag = true)]
    MakeModel {
        /// Passed on to the program of that name.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Run every test of the workspace, then the real `openai` client against the real server.
    Test,
    /// Run the tests of `dynacore` for AArch64 in QEMU's user-mode emulation (says what is missing, installs nothing).
    TestNeon {
        /// Names of tests, or parts of them; none: all on the largest emulated CPU, a few on smaller ones.
        filters: Vec<String>,
    },
    /// Check floors, `unsafe` places, file and function sizes, file headers and documented variables.
    Tidy,
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::MakeModel { args } => make_model(&args),
        Command::Test => test::run(),
        Command::TestNeon { filters } => neon::run(&filters),
        Command::Tidy => tidy::run(),
    }
}

/// Runs the program, which needs the runtime's crates and is therefore not part of this one.
fn make_model(args: &[std::ffi::OsString]) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        .args([
            "run",
            "--quiet",
            "--package",
            "modelkit",
            "--bin",
            "make-model",
            "--",
        ])
        .args(args)
        .status()?;
    std::process::exit(status.code().unwrap_or(1));
}
