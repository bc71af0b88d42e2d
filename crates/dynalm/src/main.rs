//! The `dynalm` program: parse, dispatch, exit code. Everything else is in [`dynalm::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    dynalm::cli::main()
}
