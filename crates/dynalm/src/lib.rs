//! DynaLM runtime: from a model's name to streamed tokens.
//!
//! Modules stand on floors and import downward only (`cargo xtask tidy` holds this):
//! errors, settings and metrics; then formats, text, sampling and cache accounting; then sources, model families and
//! the scheduler; then the engine, then loading; then the HTTP server; then the command line.
#![forbid(unsafe_code)]

pub mod cli;
pub mod client;
pub mod engine;
pub mod error;
pub mod format;
pub mod kv;
pub mod load;
pub mod metrics;
pub mod models;
pub mod sample;
pub mod sched;
pub mod server;
pub mod settings;
pub mod source;
pub mod text;

pub use error::{Error, Result};
