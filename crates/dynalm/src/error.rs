//! The crate's error type. Messages name the thing, what was found, what was expected and what to do.

use std::path::PathBuf;
use std::time::Duration;

/// Result alias of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between a model's name and its last token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of a model is not what it should be.
    #[error("`{path}`: {detail}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What was found and expected, and what to do.
        detail: String,
    },
    /// The vocabulary or tokenizer metadata cannot be used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template does not compile or does not render.
    #[error("chat template: {0}")]
    Template(String),
    /// A model needs something this build does not have.
    #[error("{0}")]
    Unsupported(String),
    /// A name could not be resolved to files, or they could not be fetched.
    #[error("{0}")]
    Source(String),
    /// Another server cannot be reached, or does not answer as its API says.
    #[error("{0}")]
    Remote(String),
    /// An option, configuration key or environment variable cannot be honoured.
    #[error("{0}")]
    Settings(String),
    /// A request field cannot be honoured.
    #[error("{message}")]
    Request {
        /// The field.
        param: Option<String>,
        /// OpenAI error code, e.g. `context_length_exceeded`.
        code: Option<&'static str>,
        /// The message.
        message: String,
    },
    /// The queue is full.
    #[error("the queue is full ({waiting} requests wait); try again later")]
    QueueFull {
        /// Requests waiting.
        waiting: usize,
    },
    /// The engine is loading, draining or has stopped.
    #[error("{0}")]
    Unavailable(String),
    /// The request has taken longer than it may.
    #[error("the request's time limit of {} s passed {stage}", allowed.as_secs_f64())]
    Deadline {
        /// The limit.
        allowed: Duration,
        /// What the request was doing: `while …`.
        stage: &'static str,
    },
    /// A fault of ours.
    #[error("internal error: {0}")]
    Internal(String),
    /// An operating system error on a named thing.
    #[error("{what}: {source}")]
    Io {
        /// What was done to what.
        what: String,
        /// Cause.
        source: std::io::Error,
    },
    /// An error of the graph or plan.
    #[error(transparent)]
    Ir(#[from] dynair::Error),
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] dynacore::Error),
}
