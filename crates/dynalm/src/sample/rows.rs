//! The output rows of a step, sampled by whoever takes them.
//!
//! Rows of a step belong to different sequences, or score different tokens of one prompt: none needs another. A
//! [`StepRows`] holds what each is for and keeps what came of it, so that any threads may take its rows at once and in any
//! order. What comes of a row depends on the row and its task alone. A row that cannot be used, or whose sampling panics,
//! is an error of that row.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::chain::{SampleError, Sampled, Sampler, TokenMask};
use super::logprobs::{TokenLogprobs, score};
use super::params::TokenId;

/// A sequence's sampler, which its rows share with their sequence.
pub type SharedSampler = Arc<Mutex<Sampler>>;

/// What a row is for.
#[derive(Debug, Clone)]
pub enum RowTask {
    /// The sequence's next token; the sampler takes note of it.
    Draw {
        /// The sequence's sampler.
        sampler: SharedSampler,
        /// Tokens that are taken out of the distribution before everything else.
        excluded: Option<Arc<[TokenId]>>,
        /// Tokens a grammar allows, as in [`TokenMask`].
        mask: Option<Arc<[u32]>>,
    },
    /// The log-probability of a token of the prompt.
    Score {
        /// The token.
        token: TokenId,
        /// How many of the most likely tokens to report.
        top: usize,
    },
}

/// What came of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum RowOutcome {
    /// Of [`RowTask::Draw`].
    Drawn(Sampled),
    /// Of [`RowTask::Score`].
    Scored(TokenLogprobs),
}

/// Why nothing came of a row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// The row has no token to give.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A broken rule of ours. The sequence's sampler is in no known state.
    #[error("sampling panicked: {0}")]
    Panic(String),
}

struct Row {
    task: RowTask,
    outcome: Option<Result<RowOutcome, RowError>>,
}

/// The output rows of a step. See the module's docs.
pub struct StepRows {
    vocab: usize,
    /// `None`: nobody needs the row.
    rows: Vec<Option<Mutex<Row>>>,
}

/// A lock whose data stays meaningful when a holder panicked: panics are caught while a row's is held, and a sampler whose
/// draw panicked fails its sequence.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StepRows {
    /// Rows of logits of `vocab` columns, by number; `None` for one that nobody needs.
    pub fn new(vocab: usize, tasks: Vec<Option<RowTask>>) -> StepRows {
        let row = |task| Mutex::new(Row { task, outcome: None });
        StepRows {
            vocab,
            rows: tasks.into_iter().map(|task| task.map(row)).collect(),
        }
    }

    /// Does what row `row` is for with its logits `[vocab]`, which may be changed. Rows that do not exist and rows of
    /// another length are left alone: [`StepRows::outcome`] has nothing then.
    pub fn take(&self, row: usize, logits: &mut [f32]) {
        let Some(Some(row)) = self.rows.get(row) else {
            return;
        };
        if logits.len() != self.vocab {
            return;
        }
        let row = &mut *lock(row);
        let outcome = catch_unwind(AssertUnwindSafe(|| row.task.run(logits)));
        row.outcome =
            Some(outcome.unwrap_or_else(|panic| Err(RowError::Panic(panic_text(&*panic).to_owned()))));
    }

    /// Whether anybody needs row `row`.
    pub fn is_needed(&self, row: usize) -> bool {
        matches!(self.rows.get(row), Some(Some(_)))
    }

    /// What came of row `row`; `None` if it has not been taken, nobody needs it, or it was asked for before.
    pub fn outcome(&self, row: usize) -> Option<Result<RowOutcome, RowError>> {
        lock(self.rows.get(row)?.as_ref()?).outcome.take()
    }
}

impl RowTask {
    fn run(&self, logits: &mut [f32]) -> Result<RowOutcome, RowError> {
        match self {
            RowTask::Draw {
                sampler,
                excluded,
                mask,
            } => {
                for &token in excluded.iter().flat_map(|tokens| tokens.iter()) {
                    if let Some(logit) = logits.get_mut(token as usize) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
                let mut sampler = lock(sampler);
                let drawn = sampler.sample(logits, mask.as_deref().map(TokenMask))?;
                sampler.accept(drawn.token);
                Ok(RowOutcome::Drawn(drawn))
            }
            RowTask::Score { token, top } => {
                let scored = score(logits, *token, *top).ok_or(SampleError::NotFinite)?;
                Ok(RowOutcome::Scored(scored))
            }
        }
    }
}

/// What a panic said.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}
