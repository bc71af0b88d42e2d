//! The crate's error type. Every variant names the thing, what was found and what was expected.

/// Result alias of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong while building, verifying, parsing or planning a graph.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor the architecture needs is not in the checkpoint.
    #[error("tensor `{name}` is missing from the checkpoint")]
    MissingTensor {
        /// Checkpoint name.
        name: String,
    },
    /// A tensor has another shape than the architecture needs.
    #[error("tensor `{name}` has shape {found}, expected {expected}")]
    TensorShape {
        /// Checkpoint name.
        name: String,
        /// Shape in the file.
        found: String,
        /// Shape the architecture needs.
        expected: String,
    },
    /// An op was given inputs it is not defined for.
    #[error("{op}: {what}, found {found}, expected {expected}")]
    BadInput {
        /// Name of the op.
        op: String,
        /// Which input or parameter.
        what: String,
        /// What it was.
        found: String,
        /// What the op needs.
        expected: String,
    },
    /// A graph or plan breaks an invariant; `rule` is the verifier's name for it.
    #[error("invalid {what}: rule `{rule}` broken at {at}: {detail}")]
    Invalid {
        /// "graph" or "plan".
        what: &'static str,
        /// Name of the rule.
        rule: &'static str,
        /// Node, value or step.
        at: String,
        /// Explanation.
        detail: String,
    },
    /// The device has no kernel for an op of the graph.
    #[error("the device does not support `{op}` of {inputs} (step `{label}`)")]
    Unsupported {
        /// Name of the op.
        op: String,
        /// Types of its inputs.
        inputs: String,
        /// The step's label.
        label: String,
    },
    /// The text form of a graph does not parse.
    #[error("line {line}: {detail}")]
    Parse {
        /// 1-based line.
        line: usize,
        /// What was found and expected.
        detail: String,
    },
    /// The bytes of a quantised row do not have the length their type and element count imply.
    #[error("{dtype} data of {elements} elements takes {expected} bytes, found {found}")]
    ByteLength {
        /// Type name.
        dtype: &'static str,
        /// Number of elements.
        elements: usize,
        /// Bytes these take.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
}
