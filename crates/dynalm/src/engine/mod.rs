//! The engine's interface: requests in, events out.

use std::time::Instant;

use crate::error::Error;
use crate::sample::params::{SamplingParams, TokenId};

pub use crate::sample::logprobs::TokenLogprobs;

/// One prompt to continue.
pub struct Request {
    /// Prompt tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// How tokens are drawn.
    pub params: SamplingParams,
    /// Most tokens to generate; `None`: until the end or the window. 0 only scores the prompt.
    pub max_tokens: Option<usize>,
    /// Texts that end the reply; they are not part of it.
    pub stop: Vec<String>,
    /// Go on past the model's end-of-turn tokens (they are never drawn then).
    pub ignore_eos: bool,
    /// Report log-probabilities of the prompt's tokens too (`echo` with `logprobs`): the n most likely each.
    pub prompt_logprobs: Option<u32>,
    /// Whether cached prefixes may be used and this prompt kept for others.
    pub cache_prompt: bool,
    /// Larger goes first; 0 is normal.
    pub priority: i32,
    /// Fails with [`Error::Deadline`] when passed.
    pub deadline: Option<Instant>,
    /// Receives the request's events in order, on the engine's thread; it must not block. `false`: nobody listens any
    /// more, the engine cancels the request.
    pub events: Box<dyn FnMut(Event) -> bool + Send>,
}

/// What happens to a request, in order: `Admitted`, `Token`…, then exactly one of `Finished` and `Failed`.
#[derive(Debug)]
pub enum Event {
    /// The request has entered the running batch.
    Admitted {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: usize,
    },
    /// Log-probabilities of the prompt's tokens (only when asked for); the first token has none.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// A token was drawn. `text` is what became certain to be shown: whole characters, never part of a stop string.
    Token {
        /// The token.
        token: TokenId,
        /// Text to show; may be empty.
        text: String,
        /// Only when asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The reply is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Text held back that belongs to the reply after all.
        text: String,
        /// Token counts.
        usage: Usage,
        /// Durations.
        timings: Timings,
    },
    /// The request failed; nothing follows.
    Failed(Error),
}

/// Why a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn, or a stop text appeared.
    Stop,
    /// `max_tokens` or the window was reached.
    Length,
    /// Cancelled by the client or at shutdown.
    Cancelled,
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens drawn.
    pub completion_tokens: usize,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
}

/// Durations of a request, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Timings {
    /// From arrival to admission.
    pub queued_s: f64,
    /// From admission to the first token.
    pub prefill_s: f64,
    /// From the first token to the last.
    pub decode_s: f64,
}
