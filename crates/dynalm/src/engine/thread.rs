//! The engine's thread: take commands, make a step, send what came of it; and the handle that others hold.
//!
//! One iteration: commands and deadlines, [`Scheduler::next_batch`], the executor, sampling, [`Scheduler::commit`],
//! events. Rows are sampled where the device takes them: a CPU's workers do it. A request that fails (an unusable row, a
//! panic while its row was sampled, a deadline, a listener that has gone) ends alone. A device error or any other panic ends
//! the engine: every request gets an error, later ones are refused, and whoever started the engine is told.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dynacore::{Executor, TakeRow};

use super::active::Active;
use super::{EngineConfig, EngineModel, Event, FinishReason, Request};
use crate::error::{Error, Result};
use crate::metrics::{Metrics, Outcome as MetricOutcome, StepPhase};
use crate::sample::params::TokenId;
use crate::sample::rows::panic_text;
use crate::sample::{RowTask, StepRows};
use crate::sched::{
    Batch, BatchRow, EndReason, Ended, GroupConfig, NewSequence, Outcome, Scheduler, SchedulerConfig, SeqId,
};
use crate::text::Tokenizer;

/// How often a waiting sequence for which memory is short may be passed by others.
const MAX_SKIPS: u32 = 16;
/// How long the engine sleeps if there are requests but no step can be made; a command wakes it earlier.
const STALLED: Duration = Duration::from_millis(20);

/// Number of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(u64);

enum Command {
    Submit(RequestId, Instant, Box<Request>),
    Abort(RequestId),
    Shutdown,
}

#[derive(Debug, Default)]
struct Shared {
    next_id: AtomicU64,
    /// Submitted and not admitted yet.
    waiting: AtomicUsize,
    max_waiting: usize,
    max_context: usize,
    failure: OnceLock<String>,
    metrics: Arc<Metrics>,
}

/// Counts of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Requests in the batch.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Cache pages that requests hold.
    pub pages_used: usize,
    /// Cache pages in all.
    pub pages_total: usize,
}

/// Talks to an engine; cheap to clone. When the last handle is dropped, the engine finishes what it has and ends.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
}

impl EngineHandle {
    /// Starts an engine on a thread of its own. `on_failure` is called there if it breaks, with the reason.
    ///
    /// # Errors
    /// If the configuration does not fit the model, or the thread cannot be had.
    pub fn spawn(
        model: EngineModel,
        config: &EngineConfig,
        metrics: Arc<Metrics>,
        on_failure: impl FnOnce(&str) + Send + 'static,
    ) -> Result<(EngineHandle, JoinHandle<()>)> {
        let groups = model.geometry.blocks.iter().zip(&model.windows);
        let scheduler = Scheduler::new(SchedulerConfig {
            limits: model.limits,
            block_tokens: model.geometry.block_tokens,
            groups: groups
                .map(|(&blocks, &window)| GroupConfig { blocks, window })
                .collect(),
            max_context: model.max_context,
            mixed_prefill_tokens: config.mixed_prefill_tokens,
            max_skips: MAX_SKIPS,
            prefix_cache: config.prefix_cache,
        })?;
        let geometry = &model.geometry;
        metrics.set_cache_info(
            geometry.block_tokens,
            geometry.blocks.iter().sum(),
            geometry.kind.name(),
            config.prefix_cache,
        );
        let shared = Arc::new(Shared {
            max_waiting: config.max_waiting,
            max_context: scheduler.window(),
            metrics,
            ..Shared::default()
        });
        let ends = model.tokenizer.vocab().eog_tokens().into();
        let (commands, receiver) = mpsc::channel();
        let handle = EngineHandle {
            commands,
            shared: Arc::clone(&shared),
        };
        let body = move || {
            let engine = Engine {
                tokenizer: model.tokenizer,
                executor: model.executor,
                scheduler,
                receiver,
                shared,
                requests: HashMap::new(),
                sequences: HashMap::new(),
                ends,
                vocab_size: model.vocab_size,
                counted: Counted::default(),
                stalled: false,
            };
            engine.run(on_failure);
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(body)
            .map_err(|source| Error::Io {
                what: "cannot start the engine's thread".into(),
                source,
            })?;
        Ok((handle, thread))
    }

    /// Hands a request over.
    ///
    /// # Errors
    /// If the queue is full or the engine has ended. All else is reported to the request's callback.
    pub fn submit(&self, request: Request) -> Result<RequestId> {
        let shared = &self.shared;
        let room = |waiting: usize| (waiting < shared.max_waiting).then_some(waiting + 1);
        if let Err(waiting) = shared
            .waiting
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, room)
        {
            shared.metrics.rejected.inc();
            return Err(Error::QueueFull { waiting });
        }
        let id = RequestId(shared.next_id.fetch_add(1, Ordering::Relaxed));
        let command = Command::Submit(id, Instant::now(), Box::new(request));
        if self.commands.send(command).is_err() {
            shared.waiting.fetch_sub(1, Ordering::AcqRel);
            return Err(match shared.failure.get() {
                Some(why) => Error::Internal(format!("the engine has failed: {why}")),
                None => Error::Unavailable("the engine has ended".into()),
            });
        }
        Ok(id)
    }

    /// Ends a request without a further event. A request that has ended already is left alone.
    pub fn abort(&self, id: RequestId) {
        // An engine that has ended has nothing left to abort.
        let _ = self.commands.send(Command::Abort(id));
    }

    /// Fails all requests and ends the engine after the step it is in.
    pub fn shutdown(&self) {
        // An engine that has ended needs no end.
        let _ = self.commands.send(Command::Shutdown);
    }

    /// Most tokens of prompt and reply together: the model's window, or less where the cache holds less.
    pub fn max_context(&self) -> usize {
        self.shared.max_context
    }

    /// Counts as of the last step.
    pub fn stats(&self) -> EngineStats {
        let (running, waiting, pages_used, pages_total) = self.shared.metrics.load();
        EngineStats {
            running,
            waiting,
            pages_used,
            pages_total,
        }
    }
}

/// What the metrics have been told of the scheduler's sums.
#[derive(Debug, Default)]
struct Counted {
    prefix_queries: u64,
    prefix_hits: u64,
    preemptions: u64,
}

struct Engine {
    tokenizer: Arc<Tokenizer>,
    executor: Box<dyn Executor>,
    scheduler: Scheduler,
    receiver: Receiver<Command>,
    shared: Arc<Shared>,
    requests: HashMap<SeqId, Active>,
    sequences: HashMap<RequestId, SeqId>,
    /// Tokens that end a turn.
    ends: Arc<[TokenId]>,
    vocab_size: usize,
    counted: Counted,
    /// The last attempt gave no step.
    stalled: bool,
}

/// Whether the loop goes on.
enum Flow {
    On,
    End,
}

impl Engine {
    fn run(mut self, on_failure: impl FnOnce(&str)) {
        let result = catch_unwind(AssertUnwindSafe(|| self.work()));
        let why = match result {
            Ok(Ok(())) => return self.fail_all(|| Error::Unavailable("the server is shutting down".into())),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("panic: {}", panic_text(&*panic)),
        };
        tracing::error!("the engine has failed: {why}");
        // Set before the channel closes, so that a refused `submit` can say why.
        let why = self.shared.failure.get_or_init(|| why).clone();
        self.fail_all(|| Error::Internal(format!("the engine has failed: {why}")));
        on_failure(&why);
    }

    /// The loop. Ends after `Shutdown`, or when nobody holds a handle and nothing is left to do.
    fn work(&mut self) -> Result<()> {
        loop {
            if let Flow::End = self.commands() {
                return Ok(());
            }
            self.expire();
            match self.scheduler.next_batch() {
                Some(batch) => self.step(batch)?,
                None => self.stalled = true,
            }
        }
    }

    /// Takes all commands that are there; waits for one if there is nothing else to do.
    fn commands(&mut self) -> Flow {
        loop {
            let command = if self.scheduler.is_idle() {
                self.report_load();
                match self.receiver.recv() {
                    Ok(command) => command,
                    Err(_) => return Flow::End,
                }
            } else if std::mem::take(&mut self.stalled) {
                match self.receiver.recv_timeout(STALLED) {
                    Ok(command) => command,
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Flow::On,
                }
            } else {
                match self.receiver.try_recv() {
                    Ok(command) => command,
                    // Without handles there is nobody to add work; what is there is finished.
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Flow::On,
                }
            };
            match command {
                Command::Submit(id, arrival, request) => self.admit(id, arrival, *request),
                Command::Abort(id) => self.abort(id),
                Command::Shutdown => return Flow::End,
            }
        }
    }

    fn admit(&mut self, id: RequestId, arrival: Instant, mut request: Request) {
        let unknown = request
            .prompt
            .iter()
            .find(|&&token| token as usize >= self.vocab_size);
        let admitted = match unknown {
            Some(token) => Err(Error::Request {
                param: Some("prompt".into()),
                code: None,
                message: format!(
                    "token {token} is not below the vocabulary's size {}",
                    self.vocab_size
                ),
            }),
            None => self.scheduler.admit(NewSequence {
                prompt: request.prompt.clone(),
                max_tokens: request.max_tokens,
                priority: request.priority,
                cache: request.cache_prompt,
                score_prompt: request.prompt_logprobs.is_some(),
            }),
        };
        match admitted {
            Ok(seq) => {
                self.sequences.insert(id, seq);
                self.requests
                    .insert(seq, Active::new(id, arrival, request, &self.tokenizer));
            }
            Err(error) => {
                self.shared.waiting.fetch_sub(1, Ordering::AcqRel);
                self.shared.metrics.finish(MetricOutcome::error);
                // The request ends here whether or not anybody listens.
                let _ = (request.events)(Event::Failed(error));
            }
        }
    }

    fn abort(&mut self, id: RequestId) {
        if let Some(&seq) = self.sequences.get(&id) {
            self.scheduler.abort(seq);
            self.forget(seq);
            self.shared.metrics.finish(MetricOutcome::cancelled);
        }
    }

    /// Takes a request off all lists.
    fn forget(&mut self, seq: SeqId) -> Option<Active> {
        let active = self.requests.remove(&seq)?;
        self.sequences.remove(&active.id);
        if active.admitted.is_none() {
            self.shared.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        Some(active)
    }

    /// Fails the requests whose deadline has passed.
    fn expire(&mut self) {
        let now = Instant::now();
        let late = |(&seq, active): (&SeqId, &Active)| Some((seq, active.overdue(now)?));
        let expired: Vec<(SeqId, Error)> = self.requests.iter().filter_map(late).collect();
        for (seq, error) in expired {
            self.scheduler.abort(seq);
            self.fail(seq, error);
        }
    }

    /// Tells a request that it has failed, and forgets it.
    fn fail(&mut self, seq: SeqId, error: Error) {
        self.shared.metrics.finish(MetricOutcome::error);
        if let Some(mut active) = self.forget(seq) {
            active.send(Event::Failed(error));
        }
    }

    fn fail_all(&mut self, error: impl Fn() -> Error) {
        let all: Vec<SeqId> = self.requests.keys().copied().collect();
        for seq in all {
            self.fail(seq, error());
        }
        // Requests that were on their way.
        while let Ok(command) = self.receiver.try_recv() {
            if let Command::Submit(_, _, mut request) = command {
                self.shared.waiting.fetch_sub(1, Ordering::AcqRel);
                let _ = (request.events)(Event::Failed(error()));
            }
        }
        self.shared.metrics.set_load(0, 0);
    }

    /// Executes a batch and sends what came of it.
    fn step(&mut self, batch: Batch) -> Result<()> {
        let begin = Instant::now();
        self.note_admissions(&batch, begin);
        let ticket = self.executor.submit(&batch.meta)?;
        let rows = Arc::new(StepRows::new(self.vocab_size, self.tasks(&batch)));
        let taken = Arc::clone(&rows);
        let take: Arc<TakeRow> = Arc::new(move |row, logits: &mut [f32]| taken.take(row, logits));
        self.executor.wait_rows(ticket, &take)?;
        rows.check().map_err(|fault| Error::Internal(fault.to_string()))?;
        let now = Instant::now();
        let phase = phase(&batch);
        let outcomes = batch.rows.iter().map(|row| self.outcome(row, &rows, now));
        let outcomes = outcomes.collect::<Result<Vec<Outcome>>>()?;
        let seqs: Vec<SeqId> = batch.rows.iter().map(|row| row.seq).collect();
        let ended = self.scheduler.commit(batch, &outcomes);
        for ended in &ended {
            self.finish(ended, now);
        }
        for seq in seqs {
            // The listener has gone: cancel before the next step.
            if self.requests.get(&seq).is_some_and(|active| active.gone) {
                self.scheduler.abort(seq);
                self.forget(seq);
                self.shared.metrics.finish(MetricOutcome::cancelled);
            }
        }
        self.shared.metrics.step(phase, begin.elapsed());
        self.report_load();
        Ok(())
    }

    fn note_admissions(&mut self, batch: &Batch, now: Instant) {
        for admission in &batch.admitted {
            let Some(active) = self.requests.get_mut(&admission.seq) else {
                continue;
            };
            if active.admitted.is_some() {
                continue;
            }
            active.admitted = Some(now);
            self.shared.waiting.fetch_sub(1, Ordering::AcqRel);
            self.shared
                .metrics
                .queue_time
                .observe((now - active.arrival).as_secs_f64());
            self.shared
                .metrics
                .prompt_tokens
                .inc_by(active.prompt_tokens() as u64);
            active.send(Event::Admitted {
                cached_tokens: admission.cached_tokens,
            });
        }
    }

    /// What each output row of a batch is for.
    fn tasks(&self, batch: &Batch) -> Vec<Option<RowTask>> {
        let mut tasks = vec![None; batch.meta.output_rows.len()];
        for row in &batch.rows {
            let Some(active) = self.requests.get(&row.seq) else {
                continue;
            };
            let first = row.first_output;
            for i in 0..row.scores {
                tasks[first + i] = active.score_task(row.score_position + i);
            }
            if row.samples > 0 {
                tasks[first + row.scores] = Some(active.draw_task(&self.ends));
            }
        }
        tasks
    }

    /// What came of one sequence's rows: scores of its prompt, a token, or nothing yet.
    fn outcome(&mut self, row: &BatchRow, rows: &StepRows, now: Instant) -> Result<Outcome> {
        let Some(active) = self.requests.get_mut(&row.seq) else {
            // Aborted sequences are passed over by the commit; one that we do not know must not go on.
            return Ok(Outcome::Fail);
        };
        // A row without an outcome is one that nobody needs: all have been given.
        for i in 0..row.scores {
            if let Some(outcome) = rows.outcome(row.first_output + i) {
                active.score(row.score_position + i, outcome);
            }
        }
        if active.failure.is_some() {
            return Ok(Outcome::Fail);
        }
        if row.samples == 0 {
            return Ok(Outcome::Continue(Vec::new()));
        }
        active.send_scores();
        let output = row.first_output + row.scores;
        let outcome = rows.outcome(output).ok_or_else(|| {
            Error::Internal(format!(
                "nothing was drawn from output row {output}, which a sequence samples"
            ))
        })?;
        let Some(drawn) = active.drawn(outcome) else {
            return Ok(Outcome::Fail);
        };
        let metrics = &self.shared.metrics;
        metrics.generation_tokens.inc();
        match active.last_token.replace(now) {
            Some(last) => metrics.inter_token.observe((now - last).as_secs_f64()),
            None => {
                active.first_token = Some(now);
                metrics
                    .time_to_first_token
                    .observe((now - active.arrival).as_secs_f64());
            }
        }
        let tokens = vec![drawn.token];
        let ends = active.accept(drawn, &self.tokenizer);
        Ok(if ends {
            Outcome::End(tokens)
        } else {
            Outcome::Continue(tokens)
        })
    }

    /// A sequence has ended: the last events.
    fn finish(&mut self, ended: &Ended, now: Instant) {
        if ended.reason == EndReason::Failed {
            let lost = || Error::Internal("the request was lost".into());
            let failure = self
                .requests
                .get_mut(&ended.seq)
                .and_then(|active| active.failure.take());
            return self.fail(ended.seq, failure.unwrap_or_else(lost));
        }
        let metrics = Arc::clone(&self.shared.metrics);
        let Some(mut active) = self.forget(ended.seq) else {
            return;
        };
        let (reason, outcome) = match ended.reason {
            EndReason::Stop => (FinishReason::Stop, MetricOutcome::stop),
            EndReason::Length | EndReason::Failed => (FinishReason::Length, MetricOutcome::length),
        };
        let listened = active.finish(reason, ended, now);
        metrics.finish(if listened {
            outcome
        } else {
            MetricOutcome::cancelled
        });
        metrics.end_to_end.observe((now - active.arrival).as_secs_f64());
    }

    fn report_load(&mut self) {
        let stats = self.scheduler.stats();
        let metrics = &self.shared.metrics;
        metrics.set_load(stats.running, self.shared.waiting.load(Ordering::Acquire));
        let used = stats.groups.iter().map(|group| group.held).sum();
        metrics.set_kv(used, stats.groups.iter().map(|group| group.total).sum());
        let counted = &mut self.counted;
        let add = |counter: &prometheus_client::metrics::counter::Counter, total: u64, before: &mut u64| {
            counter.inc_by(total - std::mem::replace(before, total));
        };
        add(
            &metrics.prefix_queries,
            stats.prefix_queried_tokens,
            &mut counted.prefix_queries,
        );
        add(
            &metrics.prefix_hits,
            stats.prefix_hit_tokens,
            &mut counted.prefix_hits,
        );
        add(&metrics.preemptions, stats.preemptions, &mut counted.preemptions);
    }
}

fn phase(batch: &Batch) -> StepPhase {
    let decodes = batch
        .rows
        .iter()
        .filter(|row| row.samples == row.rows && row.position > 0)
        .count();
    match decodes {
        0 => StepPhase::prefill,
        all if all == batch.rows.len() => StepPhase::decode,
        _ => StepPhase::mixed,
    }
}
