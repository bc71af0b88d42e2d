//! The command line: one file per command. Results go to stdout, everything else to stderr.
//!
//! Exit codes: 0 ok, 1 failed, 2 bad usage, 130 interrupted.

mod benchmark;
mod chat;
mod config;
mod console;
mod direct;
mod doctor;
mod inspect;
mod models;
mod options;
mod parity;
mod pull;
mod run;
mod serve;
mod session;
mod text;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::settings::Settings;
use options::GlobalArgs;

/// Local inference engine and OpenAI-compatible server for large language models.
#[derive(Debug, Parser)]
#[command(name = "dynalm", version, about, disable_help_subcommand = true)]
struct Args {
    #[command(flatten)]
    global: GlobalArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Download a model, verify and parse it, and say whether it runs here
    Pull(pull::PullArgs),
    /// List local models, or with --available the catalogue
    #[command(visible_aliases = ["list", "ls"])]
    Models(models::ModelsArgs),
    /// Delete models from the store
    Rm(models::RmArgs),
    /// Show a model's metadata, tensors, tokenizer, template and memory
    Inspect(inspect::InspectArgs),
    /// Answer one prompt
    Run(run::RunArgs),
    /// Talk with a model
    Chat(chat::ChatArgs),
    /// Serve a model over HTTP, OpenAI-compatible
    Serve(serve::ServeArgs),
    /// Say what this machine supports, and with MODEL how it would run
    Doctor(doctor::DoctorArgs),
    /// Measure prefill, decode and several users, here or of a server
    Benchmark(benchmark::BenchmarkArgs),
    /// Compare a model's results with a reference
    Parity(parity::ParityArgs),
    /// Show the token ids and pieces of a text
    Tokenize(text::TokenizeArgs),
    /// Turn token ids into text
    Detokenize(text::DetokenizeArgs),
    /// Show a conversation as the model's chat template renders it
    Template(text::TemplateArgs),
    /// Show or create the configuration
    Config(config::ConfigArgs),
}

/// A failure that is the caller's usage, not the program's work: exit code 2.
#[derive(Debug)]
struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The user pressed Ctrl-C: exit code 130.
#[derive(Debug)]
struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Parses the arguments, runs the command, and turns its result into the exit code.
pub fn main() -> ExitCode {
    // clap ends with 2 for bad usage, 0 for --help and --version.
    let args = Args::parse();
    match dispatch(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => ExitCode::from(130),
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            console::error(&error);
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

/// The reader of our output has gone (`dynalm … | head`): a quiet end, not a failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<std::io::Error>())
        .any(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

fn dispatch(args: Args) -> anyhow::Result<()> {
    let Args { global, command } = args;
    let flags = match &command {
        Command::Run(a) => a.model.flags()?,
        Command::Chat(a) => a.model.flags()?,
        Command::Serve(a) => a.flags()?,
        Command::Doctor(a) => a.model.flags()?,
        Command::Inspect(a) => a.flags(),
        Command::Benchmark(a) => a.flags()?,
        Command::Parity(a) => a.flags(),
        _ => Vec::new(),
    };
    let settings = global.settings(flags)?;
    console::start_logging(&settings);
    match command {
        Command::Pull(a) => pull::run(&a, &settings),
        Command::Models(a) => models::list(&a, &settings),
        Command::Rm(a) => models::remove(&a, &settings),
        Command::Inspect(a) => inspect::run(&a, &settings),
        Command::Run(a) => run::run(&a, &settings),
        Command::Chat(a) => chat::run(&a, &settings),
        Command::Serve(a) => serve::run(&a, &settings),
        Command::Doctor(a) => doctor::run(&a, &settings),
        Command::Benchmark(a) => benchmark::run(&a, &settings),
        Command::Parity(a) => parity::run(&a, &settings),
        Command::Tokenize(a) => text::tokenize(&a, &settings),
        Command::Detokenize(a) => text::detokenize(&a, &settings),
        Command::Template(a) => text::template(&a, &settings),
        Command::Config(a) => config::run(&a, &settings, global_path(&settings)),
    }
}

fn global_path(settings: &Settings) -> Option<std::path::PathBuf> {
    settings.environment().config_path()
}
