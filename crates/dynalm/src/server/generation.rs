//! One HTTP request's replies: submits a sequence per choice, receives their events in one channel, and cancels what
//! still runs when it is dropped, which happens whenever the client leaves.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc;

use super::error::ApiError;
use super::params::Options;
use super::state::{AppState, InFlight, ServedModel};
use crate::engine::{Deadline, EngineHandle, Event, FinishReason, Request, RequestId, Timings, Usage};
use crate::sample::params::TokenId;

/// What a request asks the engine for, read and encoded.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) model: Arc<ServedModel>,
    pub(super) prompts: Vec<Arc<[TokenId]>>,
    pub(super) options: Options,
    /// See [`Request::starts_text`].
    pub(super) starts_text: bool,
    /// See [`Request::prompt_logprobs`].
    pub(super) prompt_logprobs: Option<u32>,
}

/// Cancels requests when dropped.
#[derive(Debug)]
struct CancelOnDrop {
    engine: EngineHandle,
    running: Vec<Option<RequestId>>,
    _in_flight: InFlight,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        for id in self.running.iter().flatten() {
            self.engine.abort(*id);
        }
    }
}

/// The replies under way.
#[derive(Debug)]
pub(super) struct Generation {
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    guard: CancelOnDrop,
    open: usize,
    /// Cached tokens of each prompt: the most that one of its choices found.
    cached: Vec<usize>,
    choices_per_prompt: usize,
    /// Sums over the finished choices.
    pub(super) totals: Totals,
}

/// What all choices together took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Totals {
    /// Tokens: each prompt counts once, whatever the number of its choices.
    pub(super) usage: Usage,
    /// Durations of the choice that took longest.
    pub(super) timings: Timings,
}

impl Generation {
    /// Submits `options.n` sequences per prompt; choice `i` continues prompt `i / n` with seed `seed + i`. `arrival` is
    /// when the request's time began; `param` names the field that the prompts came from.
    ///
    /// # Errors
    /// 400 for a prompt without tokens or longer than the window, 429 if the queue is full, 503 if the engine ends.
    pub(super) fn start(
        app: &AppState,
        work: &Work,
        arrival: Instant,
        param: &str,
    ) -> Result<Generation, ApiError> {
        let Work {
            model,
            prompts,
            options,
            ..
        } = work;
        for prompt in prompts {
            check_length(prompt.len(), options.max_tokens, model.max_context, param)?;
        }
        let deadline = options.time_limit.map(|allowed| Deadline {
            at: arrival + allowed,
            allowed,
        });
        let (sender, events) = mpsc::unbounded_channel();
        let mut guard = CancelOnDrop {
            engine: model.engine.clone(),
            running: Vec::new(),
            _in_flight: app.enter(),
        };
        for choice in 0..prompts.len() * options.n {
            let sender = sender.clone();
            let mut params = options.sampling.clone();
            params.seed = params.seed.wrapping_add(choice as u64);
            let id = model.engine.submit(Request {
                prompt: prompts[choice / options.n].to_vec(),
                params,
                max_tokens: options.max_tokens,
                stop: options.stop.clone(),
                ignore_eos: options.ignore_eos,
                starts_text: work.starts_text,
                prompt_logprobs: work.prompt_logprobs,
                cache_prompt: options.cache_prompt,
                priority: options.priority,
                deadline,
                events: Box::new(move |event| sender.send((choice, event)).is_ok()),
            })?;
            guard.running.push(Some(id));
        }
        let open = guard.running.len();
        let mut totals = Totals::default();
        totals.usage.prompt_tokens = prompts.iter().map(|prompt| prompt.len()).sum();
        let cached = vec![0; prompts.len()];
        Ok(Generation {
            events,
            guard,
            open,
            cached,
            choices_per_prompt: options.n,
            totals,
        })
    }

    /// The next event and its choice; `None` after the last choice has ended.
    ///
    /// # Errors
    /// What made a choice fail; the others are cancelled when this value is dropped.
    pub(super) async fn next(&mut self) -> Result<Option<(usize, Event)>, ApiError> {
        if self.open == 0 {
            return Ok(None);
        }
        let Some((choice, event)) = self.events.recv().await else {
            return Err(ApiError::internal("the engine dropped the request"));
        };
        match event {
            Event::Failed(error) => {
                self.close(choice);
                Err(error.into())
            }
            Event::Finished {
                reason: FinishReason::Cancelled,
                ..
            } => {
                self.close(choice);
                Err(ApiError::unavailable(
                    "the request was cancelled because the server is shutting down",
                ))
            }
            Event::Finished {
                reason,
                text,
                usage,
                timings,
            } => {
                self.close(choice);
                let totals = &mut self.totals;
                totals.usage.completion_tokens += usage.completion_tokens;
                let cached = &mut self.cached[choice / self.choices_per_prompt];
                *cached = usage.cached_tokens.max(*cached);
                totals.usage.cached_tokens = self.cached.iter().sum();
                if timings.total_s() >= totals.timings.total_s() {
                    totals.timings = timings;
                }
                Ok(Some((
                    choice,
                    Event::Finished {
                        reason,
                        text,
                        usage,
                        timings,
                    },
                )))
            }
            other => Ok(Some((choice, other))),
        }
    }

    /// Whether every choice has ended.
    pub(super) fn finished(&self) -> bool {
        self.open == 0
    }

    fn close(&mut self, choice: usize) {
        self.guard.running[choice] = None;
        self.open -= 1;
    }
}

/// # Errors
/// 400 if the prompt is empty or leaves no room in the window.
fn check_length(
    prompt_tokens: usize,
    max_tokens: Option<usize>,
    max_context: usize,
    param: &str,
) -> Result<(), ApiError> {
    if prompt_tokens == 0 {
        return Err(ApiError::invalid(
            param,
            format!("`{param}` gives a prompt without any token"),
        ));
    }
    // Scoring a prompt needs no room for a reply.
    let reply = usize::from(max_tokens != Some(0));
    if prompt_tokens + reply > max_context {
        return Err(ApiError::context_length(prompt_tokens, max_context, param));
    }
    Ok(())
}
