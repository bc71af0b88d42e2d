//! One request inside the engine: its sampler state, its text, its times and its listener.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::output::{Shown, StopFilter};
use super::thread::RequestId;
use super::{Deadline, Event, FinishReason, Request, Timings, TokenLogprobs, Usage};
use crate::error::Error;
use crate::sample::params::TokenId;
use crate::sample::rows::SharedSampler;
use crate::sample::{RowError, RowOutcome, RowTask, SampleError, Sampled, Sampler};
use crate::sched::Ended;
use crate::text::{DetokenizeOptions, Detokenizer, Tokenizer};

/// A request that has been admitted to the scheduler.
pub(super) struct Active {
    pub(super) id: RequestId,
    pub(super) arrival: Instant,
    pub(super) deadline: Option<Deadline>,
    pub(super) admitted: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
    prompt: Vec<TokenId>,
    ignore_eos: bool,
    sampler: SharedSampler,
    detokenizer: Detokenizer,
    filter: StopFilter,
    /// How many alternatives to report, and what has been scored.
    prompt_scores: Option<(u32, Vec<Option<TokenLogprobs>>)>,
    events: Box<dyn FnMut(Event) -> bool + Send>,
    /// Nobody listens any more.
    pub(super) gone: bool,
    /// Why its rows could not be used.
    pub(super) failure: Option<Error>,
}

impl Active {
    pub(super) fn new(id: RequestId, arrival: Instant, request: Request, tokenizer: &Tokenizer) -> Self {
        let prompt_scores = request.prompt_logprobs.map(|top| (top, vec![None]));
        let options = DetokenizeOptions {
            specials: false,
            start: request.starts_text,
        };
        Active {
            id,
            arrival,
            deadline: request.deadline,
            admitted: None,
            first_token: None,
            last_token: None,
            ignore_eos: request.ignore_eos,
            sampler: Arc::new(Mutex::new(Sampler::new(request.params, &request.prompt))),
            prompt: request.prompt,
            detokenizer: Detokenizer::new(tokenizer, options),
            filter: StopFilter::new(request.stop),
            prompt_scores,
            events: request.events,
            gone: false,
            failure: None,
        }
    }

    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompt.len()
    }

    /// The error of a request whose deadline is before `now`.
    pub(super) fn overdue(&self, now: Instant) -> Option<Error> {
        let deadline = self.deadline.filter(|deadline| deadline.at <= now)?;
        let stage = match (self.admitted, self.first_token) {
            (None, _) => "while it waited in the queue",
            (Some(_), None) => "while its prompt was read",
            (Some(_), Some(_)) => "while its reply was generated",
        };
        Some(Error::Deadline {
            allowed: deadline.allowed,
            stage,
        })
    }

    pub(super) fn send(&mut self, event: Event) {
        if !self.gone {
            self.gone = !(self.events)(event);
        }
    }

    /// Scores the prompt's token after `position` by the logits at `position`; `None` if nobody asked for scores.
    pub(super) fn score_task(&self, position: usize) -> Option<RowTask> {
        let (top, _) = self.prompt_scores.as_ref()?;
        let token = *self.prompt.get(position + 1)?;
        Some(RowTask::Score {
            token,
            top: *top as usize,
        })
    }

    /// Takes in what came of [`Active::score_task`]. Positions come in order.
    pub(super) fn score(&mut self, position: usize, outcome: Result<RowOutcome, RowError>) {
        let Some((_, scores)) = &mut self.prompt_scores else {
            return;
        };
        assert_eq!(
            scores.len(),
            position + 1,
            "the scheduler gives a prompt's scores in order"
        );
        let scored = match outcome {
            Ok(RowOutcome::Scored(scored)) => Some(scored),
            Ok(RowOutcome::Drawn(_)) => unreachable!("a row that scores draws nothing"),
            Err(error) => {
                self.failure = Some(row_failure(&error));
                None
            }
        };
        scores.push(scored);
    }

    /// Sends the prompt's scores once they are complete.
    pub(super) fn send_scores(&mut self) {
        if let Some((_, scores)) = self
            .prompt_scores
            .take_if(|(_, scores)| scores.len() == self.prompt.len())
        {
            self.send(Event::PromptLogprobs(scores));
        }
    }

    /// Draws the next token; `ends` are the tokens that end a turn.
    pub(super) fn draw_task(&self, ends: &Arc<[TokenId]>) -> RowTask {
        RowTask::Draw {
            sampler: Arc::clone(&self.sampler),
            excluded: self.ignore_eos.then(|| Arc::clone(ends)),
            mask: None,
        }
    }

    /// What came of [`Active::draw_task`]; `None`, and the request has failed, if no token did.
    pub(super) fn drawn(&mut self, outcome: Result<RowOutcome, RowError>) -> Option<Sampled> {
        match outcome {
            Ok(RowOutcome::Drawn(sampled)) => Some(sampled),
            Ok(RowOutcome::Scored(_)) => unreachable!("a row that draws scores nothing"),
            Err(error) => {
                self.failure = Some(row_failure(&error));
                None
            }
        }
    }

    /// Takes a drawn token in and sends what may be shown; `true`: the reply ends with it.
    pub(super) fn accept(&mut self, drawn: Sampled, tokenizer: &Tokenizer) -> bool {
        if tokenizer.vocab().is_eog(drawn.token) {
            return true;
        }
        let text = self.detokenizer.push(drawn.token).to_owned();
        let mut shown = Vec::new();
        let stopped = self.filter.push(
            Shown {
                token: drawn.token,
                text,
                logprobs: drawn.logprobs,
            },
            &mut shown,
        );
        self.send_shown(shown);
        stopped
    }

    fn send_shown(&mut self, shown: Vec<Shown>) {
        for Shown {
            token,
            text,
            logprobs,
        } in shown
        {
            self.send(Event::Token {
                token,
                text,
                logprobs,
            });
        }
    }

    /// The last events; `false` if nobody heard them.
    pub(super) fn finish(&mut self, reason: FinishReason, ended: &Ended, now: Instant) -> bool {
        self.send_scores();
        let mut shown = Vec::new();
        // Empty after a stop text; else what was held back belongs to the reply after all. Bytes of a character that
        // was never completed are not shown.
        self.filter.flush(&mut shown);
        self.send_shown(shown);
        let usage = Usage {
            prompt_tokens: ended.prompt_tokens,
            completion_tokens: ended.completion_tokens,
            cached_tokens: ended.cached_tokens,
        };
        let admitted = self.admitted.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        let timings = Timings {
            queued_s: (admitted - self.arrival).as_secs_f64(),
            prefill_s: (first - admitted).as_secs_f64(),
            decode_s: self.last_token.map_or(0.0, |last| (last - first).as_secs_f64()),
        };
        self.send(Event::Finished {
            reason,
            text: String::new(),
            usage,
            timings,
        });
        !self.gone
    }
}

/// Why a request fails for want of a row.
fn row_failure(error: &RowError) -> Error {
    match error {
        RowError::Sample(SampleError::NothingAllowed) => Error::Request {
            param: Some("logit_bias".into()),
            code: None,
            message: error.to_string(),
        },
        RowError::Sample(_) => Error::Internal("the model gave unusable logits for this request".into()),
        RowError::Panic(_) | RowError::SharedSampler(_) => {
            tracing::error!("a request has failed: {error}");
            Error::Internal(error.to_string())
        }
    }
}
