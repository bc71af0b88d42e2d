//! The output rows of a step, sampled by whoever takes them.
//!
//! Rows of a step belong to different sequences, or score different tokens of one prompt: none needs another. A
//! [`StepRows`] holds what each is for and keeps what came of it, so that any threads may take its rows at once and in any
//! order. What comes of a row depends on the row and its task alone; therefore no sampler draws twice in a step, which
//! would make one draw depend on the other. A row that cannot be used, or whose sampling panics, is an error of that row.
//! Whether the device gave all rows, and as they should be, is for [`StepRows::check`] to say.

use std::any::Any;
use std::collections::HashMap;
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
    /// The sequence's next token; the sampler takes note of it, so that no other row of the step may draw from it.
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
    /// A broken rule of ours: so many rows of the step were to draw from this row's sampler, and none has.
    #[error("{0} rows of one step are to draw from one sampler, whose state only one draw can follow")]
    SharedSampler(usize),
}

/// In what a device did not give the output rows that were asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowsFault {
    /// A row that the step does not have.
    #[error("the device gave output row {row} of a step with {rows} of them")]
    Unknown {
        /// Its number.
        row: usize,
        /// How many there are.
        rows: usize,
    },
    /// A row of another length.
    #[error("the device gave {found} logits in output row {row}, where the vocabulary has {expected} tokens")]
    Size {
        /// Its number.
        row: usize,
        /// Its length.
        found: usize,
        /// What it should have been.
        expected: usize,
    },
    /// A row that was there before.
    #[error("the device gave output row {row} twice")]
    Twice {
        /// Its number.
        row: usize,
    },
    /// Too few rows.
    #[error("the device gave {given} of {rows} output rows; the first that is missing is row {row}")]
    Missing {
        /// How many came.
        given: usize,
        /// How many there are.
        rows: usize,
        /// The first that did not come.
        row: usize,
    },
}

#[derive(Default)]
struct Row {
    /// `None`: nobody needs the row.
    task: Option<RowTask>,
    given: bool,
    outcome: Option<Result<RowOutcome, RowError>>,
}

/// The output rows of a step. See the module's docs.
pub struct StepRows {
    vocab: usize,
    rows: Vec<Mutex<Row>>,
    /// The first that was found.
    fault: Mutex<Option<RowsFault>>,
}

/// A lock whose data stays meaningful when a holder panicked: panics are caught while a row's is held, and a sampler whose
/// draw panicked fails its sequence.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StepRows {
    /// Rows of logits of `vocab` columns, by number; `None` for one that nobody needs. Rows that are to draw from one and
    /// the same sampler are errors, all of them: whichever came first would be a matter of chance.
    pub fn new(vocab: usize, tasks: Vec<Option<RowTask>>) -> StepRows {
        let mut draws: HashMap<*const Mutex<Sampler>, usize> = HashMap::with_capacity(tasks.len());
        for sampler in tasks.iter().flatten().filter_map(RowTask::sampler) {
            *draws.entry(Arc::as_ptr(sampler)).or_default() += 1;
        }
        let row = |task: Option<RowTask>| {
            let sampler = task.as_ref().and_then(RowTask::sampler);
            let shared = sampler.map_or(1, |sampler| draws[&Arc::as_ptr(sampler)]);
            Mutex::new(Row {
                given: false,
                outcome: (shared > 1).then_some(Err(RowError::SharedSampler(shared))),
                task: task.filter(|_| shared == 1),
            })
        };
        StepRows {
            vocab,
            rows: tasks.into_iter().map(row).collect(),
            fault: Mutex::new(None),
        }
    }

    /// Does what row `row` is for with its logits `[vocab]`, which may be changed. Rows that do not exist, rows of another
    /// length and rows that were taken before are left alone, and [`StepRows::check`] will say so.
    pub fn take(&self, row: usize, logits: &mut [f32]) {
        if let Err(fault) = self.try_take(row, logits) {
            lock(&self.fault).get_or_insert(fault);
        }
    }

    fn try_take(&self, number: usize, logits: &mut [f32]) -> Result<(), RowsFault> {
        let row = self.rows.get(number).ok_or(RowsFault::Unknown {
            row: number,
            rows: self.rows.len(),
        })?;
        if logits.len() != self.vocab {
            return Err(RowsFault::Size {
                row: number,
                found: logits.len(),
                expected: self.vocab,
            });
        }
        let row = &mut *lock(row);
        if std::mem::replace(&mut row.given, true) {
            return Err(RowsFault::Twice { row: number });
        }
        if let Some(task) = &row.task {
            let outcome = catch_unwind(AssertUnwindSafe(|| task.run(logits)));
            row.outcome =
                Some(outcome.unwrap_or_else(|panic| Err(RowError::Panic(panic_text(&*panic).to_owned()))));
        }
        Ok(())
    }

    /// Once the device has given its rows: whether it gave every one, once, with a logit for each token of the vocabulary,
    /// and none besides.
    ///
    /// # Errors
    /// The first fault.
    pub fn check(&self) -> Result<(), RowsFault> {
        if let Some(fault) = lock(&self.fault).clone() {
            return Err(fault);
        }
        let given: Vec<bool> = self.rows.iter().map(|row| lock(row).given).collect();
        match given.iter().position(|given| !given) {
            None => Ok(()),
            Some(row) => Err(RowsFault::Missing {
                given: given.iter().filter(|given| **given).count(),
                rows: given.len(),
                row,
            }),
        }
    }

    /// What came of row `row`; `None` if it has not been taken, nobody needs it, or it was asked for before.
    pub fn outcome(&self, row: usize) -> Option<Result<RowOutcome, RowError>> {
        lock(self.rows.get(row)?).outcome.take()
    }
}

impl RowTask {
    /// The sampler that it changes.
    fn sampler(&self) -> Option<&SharedSampler> {
        match self {
            RowTask::Draw { sampler, .. } => Some(sampler),
            RowTask::Score { .. } => None,
        }
    }

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
