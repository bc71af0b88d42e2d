//! The engine: one thread that owns scheduler, cache accounting and executor. Requests in, events out.
//!
//! This file is its interface. [`thread`] is the loop; [`output`] turns tokens into text that may be shown. The engine
//! knows no HTTP and no async runtime: a request brings a callback, which gets its events.

mod active;
mod output;
mod thread;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dynacore::{Executor, KvGeometry};
use dynair::Limits;

use crate::error::Error;
use crate::sample::params::{SamplingParams, TokenId};
use crate::text::Tokenizer;

pub use thread::{EngineHandle, EngineStats, RequestId};

/// What the engine needs of a loaded model.
pub struct EngineModel {
    /// The plan bound to weights and cache.
    pub executor: Box<dyn Executor>,
    /// Size of the cache; `blocks` has one entry per cache group.
    pub geometry: KvGeometry,
    /// Sliding window of each cache group; `None`: it keeps everything.
    pub windows: Vec<Option<u32>>,
    /// The largest step the plan holds.
    pub limits: Limits,
    /// Most tokens of prompt and reply together.
    pub max_context: usize,
    /// Columns of the logits.
    pub vocab_size: usize,
    /// Turns tokens into text; it also says which tokens end a turn.
    pub tokenizer: Arc<Tokenizer>,
}

/// How the engine works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Most requests that wait; one more is refused with [`Error::QueueFull`].
    pub max_waiting: usize,
    /// Most prompt tokens of a step in which others generate.
    pub mixed_prefill_tokens: usize,
    /// Whether computed prefixes are kept for later requests.
    pub prefix_cache: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            max_waiting: 256,
            mixed_prefill_tokens: 256,
            prefix_cache: true,
        }
    }
}

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
    /// The reply begins a text of its own (a chat's turn) rather than continuing the prompt's: a SentencePiece
    /// vocabulary's leading space is then left out.
    pub starts_text: bool,
    /// Report log-probabilities of the prompt's tokens too (`echo` with `logprobs`): the n most likely each.
    pub prompt_logprobs: Option<u32>,
    /// Whether cached prefixes may be used and this prompt kept for others.
    pub cache_prompt: bool,
    /// Larger goes first; 0 is normal.
    pub priority: i32,
    /// Fails with [`Error::Deadline`] when passed.
    pub deadline: Option<Deadline>,
    /// Receives the request's events in order, on the engine's thread; it must not block. `false`: nobody listens any
    /// more, the engine cancels the request.
    pub events: Box<dyn FnMut(Event) -> bool + Send>,
}

/// How long a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// When it is over.
    pub at: Instant,
    /// The limit it was computed from, for the message.
    pub allowed: Duration,
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
    /// A token was drawn that belongs to the reply for certain. Tokens that may turn out to be part of a stop string
    /// are held back, so the texts of all `Token`s, joined, are the reply.
    Token {
        /// The token.
        token: TokenId,
        /// The characters that this token completed; empty in the middle of one. Cut where a stop string begins.
        text: String,
        /// Only when asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The reply is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Text of the reply that no token was reported with.
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

impl Timings {
    /// From arrival to the last token.
    pub fn total_s(&self) -> f64 {
        self.queued_s + self.prefill_s + self.decode_s
    }
}
