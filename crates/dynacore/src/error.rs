//! The crate's error type.

use std::path::PathBuf;

/// Result alias of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened or mapped.
    #[error("cannot map `{path}`: {source}")]
    Map {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The bytes given for a weight do not have the length its declaration implies.
    #[error("weight `{name}`: {found} bytes, expected {expected}")]
    WeightBytes {
        /// Checkpoint name.
        name: String,
        /// Bytes given.
        found: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// The device has no kernel for this.
    #[error("device `{device}` does not support {what}")]
    Unsupported {
        /// Device name.
        device: String,
        /// What was asked.
        what: String,
    },
    /// Memory could not be had.
    #[error("device `{device}` cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// Device name.
        device: String,
        /// Bytes asked for.
        bytes: usize,
        /// What for.
        what: String,
    },
    /// A worker thread panicked during a step: a broken invariant of ours. The executor refuses further steps.
    #[error("a worker of device `{device}` panicked, its executor cannot be used any more: {message}")]
    Worker {
        /// Device name.
        device: String,
        /// The panic's message.
        message: String,
    },
    /// A step exceeds the plan's limits or breaks a rule of [`dynair::BatchMeta`].
    #[error("invalid batch: {0}")]
    Batch(String),
    /// An option or environment variable has a value this device cannot honour.
    #[error("{name}: found `{found}`, expected {expected}")]
    Option {
        /// Name of the option or variable.
        name: String,
        /// Its value.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// An error of the plan.
    #[error(transparent)]
    Ir(#[from] dynair::Error),
}
