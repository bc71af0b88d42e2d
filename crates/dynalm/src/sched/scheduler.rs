//! Admission, batches and commits.
//!
//! The engine calls, in a loop: [`Scheduler::admit`] and [`Scheduler::abort`] between steps;
//! [`Scheduler::next_batch`]; then, with the step executed and its rows sampled, [`Scheduler::commit`].
//!
//! *Prefix cache.* Blocks become matchable at the commit of the step that computed them, those of a prompt
//! still being prefilled too. A waiting sequence is matched when it first gets rows, not at its arrival. If a
//! running prefill is about to compute much of what a waiting sequence needs, that one waits for it instead
//! of computing it as well. Blocks of ended, aborted and preempted sequences stay in the tree until their
//! memory is needed.
//!
//! *Memory.* Blocks are taken as rows need them: from the free list, else by evicting what nobody uses, else
//! by preempting the sequence that is served last (lowest priority, then youngest), which gives its blocks
//! back, keeps its tokens, and is computed again later. A sequence whose prompt can never fit is refused at
//! admission.
//!
//! *Order.* Every decoding sequence gets its row in each step. What is left of the token budget goes to
//! prefills; with somebody decoding at most `mixed_prefill_tokens`. The first in order gets at least half,
//! the rest goes to those with the fewest tokens left, so that a short prompt need not wait for a long one
//! and a long one always moves. A waiting sequence for which memory is short may be passed by others
//! `max_skips` times, then all wait for it.

use std::collections::{BTreeMap, BTreeSet};

use dynair::{BatchMeta, Limits};

use super::sequence::{NewSequence, Rank, SeqId, SeqState, Sequence};
use crate::error::{Error, Result};
use crate::kv::{KvPool, RadixTree, first_needed};
use crate::sample::params::TokenId;

/// One cache group's pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Blocks in its pool.
    pub blocks: usize,
    /// Its layers read the last `window` tokens only; `None`: all.
    pub window: Option<u32>,
}

/// How a scheduler works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The largest step. `max_tokens` and `max_outputs` are at least `max_seqs`.
    pub limits: Limits,
    /// Tokens per block.
    pub block_tokens: usize,
    /// The cache groups, in the plan's order.
    pub groups: Vec<GroupConfig>,
    /// The model's window, tokens.
    pub max_context: usize,
    /// Most prefill rows of a step in which somebody decodes; bounds the gap between two tokens.
    pub mixed_prefill_tokens: usize,
    /// How often a sequence for which memory is short may be passed.
    pub max_skips: u32,
    /// Whether computed blocks are kept for later sequences at all.
    pub prefix_cache: bool,
}

/// A sequence that starts with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// The sequence.
    pub seq: SeqId,
    /// Tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Whether it had started before and was preempted.
    pub resumed: bool,
}

/// One sequence's rows in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRow {
    /// The sequence.
    pub seq: SeqId,
    /// Rows: tokens computed by this step, drafts included.
    pub rows: usize,
    /// Position of the first row.
    pub position: usize,
    /// Its first output row.
    pub first_output: usize,
    /// How many output rows, from `first_output` on, score the prompt: output i judges the token at
    /// `score_position + i + 1`.
    pub scores: usize,
    /// See `scores`.
    pub score_position: usize,
    /// How many output rows after those are to be sampled: 0 in the middle of a prompt, 1, or 1 + the draft's
    /// length.
    pub samples: usize,
}

/// A step to execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// What the device gets.
    pub meta: BatchMeta,
    /// Whose rows these are, in the order of [`BatchMeta::seqs`].
    pub rows: Vec<BatchRow>,
    /// Sequences that start (again) with this step.
    pub admitted: Vec<Admission>,
    /// Sequences preempted to make room for it.
    pub preempted: Vec<SeqId>,
}

/// What came of a sequence's rows; one per [`Batch::rows`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Go on with these new tokens: none in the middle of a prompt, else one, or the accepted draft tokens
    /// and the one drawn after them.
    Continue(Vec<TokenId>),
    /// The reply ends after these new tokens.
    End(Vec<TokenId>),
    /// The rows are unusable; the sequence ends and what this step computed for it is not kept.
    Fail,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// The engine said so.
    Stop,
    /// `max_tokens` or the window was reached.
    Length,
    /// Its rows were unusable.
    Failed,
}

/// A sequence that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The sequence.
    pub seq: SeqId,
    /// Why.
    pub reason: EndReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// How often it was preempted.
    pub preemptions: u32,
}

/// Use of one group's pool, blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupStats {
    /// All blocks.
    pub total: usize,
    /// Free blocks.
    pub free: usize,
    /// Blocks only the prefix cache holds: to be had by eviction.
    pub cached: usize,
    /// Blocks that sequences hold.
    pub held: usize,
}

/// Counts for metrics. All but the gauges `running`, `waiting` and `groups` only grow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stats {
    /// Sequences that hold blocks.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Pools, by group.
    pub groups: Vec<GroupStats>,
    /// Tokens looked up in the prefix cache, when sequences start.
    pub prefix_queried_tokens: u64,
    /// Tokens found there.
    pub prefix_hit_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Rows computed for prompts and for recomputation.
    pub prefill_tokens: u64,
    /// Rows computed for newly drawn tokens, drafts included.
    pub decode_tokens: u64,
    /// Sequences ended, aborted ones not counted.
    pub ended: u64,
    /// Sequences aborted.
    pub aborted: u64,
}

/// Decides what runs in the next step. See the module's docs.
#[derive(Debug)]
pub struct Scheduler {
    pub(super) config: SchedulerConfig,
    /// Longest sequence: the model's window or what the pools can hold.
    window: usize,
    pub(super) pools: Vec<KvPool>,
    pub(super) tree: RadixTree,
    pub(super) seqs: BTreeMap<SeqId, Sequence>,
    pub(super) running: BTreeSet<Rank>,
    pub(super) waiting: BTreeSet<Rank>,
    next_id: u64,
    pub(super) in_flight: bool,
    pub(super) stats: Stats,
}

impl Scheduler {
    /// A scheduler without sequences.
    ///
    /// # Errors
    /// If the configuration has a zero, or limits below `max_seqs`.
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        let Limits {
            max_tokens,
            max_seqs,
            max_outputs,
        } = config.limits;
        let need = |what: &str, found: usize, least: usize| {
            if found < least {
                return Err(Error::Settings(format!(
                    "scheduler: {what} is {found}, expected at least {least}"
                )));
            }
            Ok(())
        };
        need("max_seqs", max_seqs, 1)?;
        need("max_tokens", max_tokens, max_seqs)?;
        need("max_outputs", max_outputs, max_seqs)?;
        need("block_tokens", config.block_tokens, 1)?;
        need("mixed_prefill_tokens", config.mixed_prefill_tokens, 1)?;
        need("max_context", config.max_context, 1)?;
        for (g, group) in config.groups.iter().enumerate() {
            need(&format!("blocks of cache group {g}"), group.blocks, 1)?;
            need(
                &format!("window of cache group {g}"),
                group.window.map_or(1, |w| w as usize),
                1,
            )?;
        }
        let windows = config.groups.iter().map(|group| group.window).collect();
        let mut scheduler = Scheduler {
            window: 0,
            pools: config
                .groups
                .iter()
                .map(|group| KvPool::new(group.blocks))
                .collect(),
            tree: RadixTree::new(config.block_tokens, windows),
            config,
            seqs: BTreeMap::new(),
            running: BTreeSet::new(),
            waiting: BTreeSet::new(),
            next_id: 0,
            in_flight: false,
            stats: Stats::default(),
        };
        scheduler.window = scheduler.capacity().min(scheduler.config.max_context);
        Ok(scheduler)
    }

    /// Longest sequence, prompt and reply together: the model's window, or less where the pools hold less.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Tokens that a sequence can have when it is alone.
    fn capacity(&self) -> usize {
        self.config
            .groups
            .iter()
            .map(|group| match group.window {
                Some(w) if group.blocks >= self.windowed_blocks(w) => usize::MAX,
                _ => group.blocks * self.config.block_tokens,
            })
            .min()
            .unwrap_or(usize::MAX)
    }

    /// Blocks that hold a window and the next token, wherever it stands.
    fn windowed_blocks(&self, window: u32) -> usize {
        (window as usize - 1).div_ceil(self.config.block_tokens) + 1
    }

    /// Blocks of `group` a sequence of `tokens` tokens needs at least to go on.
    pub(super) fn blocks_for(&self, group: usize, tokens: usize) -> usize {
        let all = tokens.div_ceil(self.config.block_tokens);
        match self.config.groups[group].window {
            Some(window) => all.min(self.windowed_blocks(window)),
            None => all,
        }
    }

    /// Takes a sequence into the queue.
    ///
    /// # Errors
    /// If the prompt is empty, or if it and one more token (unless `max_tokens` is 0) exceed
    /// [`Scheduler::window`].
    pub fn admit(&mut self, mut new: NewSequence) -> Result<SeqId> {
        new.cache &= self.config.prefix_cache;
        let prompt = new.prompt.len();
        if prompt == 0 {
            return Err(Error::Request {
                param: Some("prompt".into()),
                code: None,
                message: "the prompt has no tokens, expected at least one".into(),
            });
        }
        let least = prompt + usize::from(new.max_tokens != Some(0));
        if least > self.window {
            let (limit, what) = if self.window < self.config.max_context {
                ("cache", "use a shorter prompt, or start with more cache memory")
            } else {
                ("context window", "use a shorter prompt")
            };
            return Err(Error::Request {
                param: Some("prompt".into()),
                code: Some("context_length_exceeded"),
                message: format!(
                    "the prompt has {prompt} tokens, but the {limit} holds {} with at least {} for the reply; {what}",
                    self.window,
                    least - prompt,
                ),
            });
        }
        let id = SeqId(self.next_id);
        self.next_id += 1;
        let max_len = new
            .max_tokens
            .map_or(self.window, |n| prompt.saturating_add(n).min(self.window));
        let seq = Sequence::new(id, new, max_len, self.pools.len());
        self.waiting.insert(seq.rank());
        self.seqs.insert(id, seq);
        Ok(id)
    }

    /// Ends a sequence at once and takes its blocks back; `false` if there is no such sequence (any more).
    pub fn abort(&mut self, id: SeqId) -> bool {
        if !self.seqs.contains_key(&id) {
            return false;
        }
        self.remove(id);
        self.stats.aborted += 1;
        true
    }

    /// Proposes tokens that may follow sequence `id`; the next step verifies as many as fit. Ignored unless
    /// it decodes.
    pub fn propose(&mut self, id: SeqId, draft: Vec<TokenId>) {
        if let Some(seq) = self.seqs.get_mut(&id).filter(|seq| seq.is_decoding()) {
            seq.draft = draft;
        }
    }

    /// A sequence that has not ended.
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.seqs.get(&id)
    }

    /// Whether no sequence is left.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Takes in what came of a batch: one outcome per row of [`Batch::rows`]. Rows of sequences aborted
    /// meanwhile are passed over.
    ///
    /// # Panics
    /// If the batch is not the one in flight, or an outcome does not fit its row.
    pub fn commit(&mut self, batch: Batch, outcomes: &[Outcome]) -> Vec<Ended> {
        assert!(self.in_flight, "a batch is committed once, after it was made");
        assert_eq!(batch.rows.len(), outcomes.len(), "one outcome per row");
        self.in_flight = false;
        let mut ended = Vec::new();
        for (row, outcome) in batch.rows.iter().zip(outcomes) {
            let Some(seq) = self.seqs.get_mut(&row.seq) else {
                continue;
            };
            debug_assert_eq!(seq.computed, row.position, "nothing moves a sequence in flight");
            let reason = match outcome {
                Outcome::Fail => Some(EndReason::Failed),
                Outcome::Continue(tokens) | Outcome::End(tokens) => {
                    let stops = matches!(outcome, Outcome::End(_));
                    append(seq, row, tokens, stops);
                    let done = !seq.samples() && (row.samples > 0 || seq.remaining() == 0);
                    stops
                        .then_some(EndReason::Stop)
                        .or(done.then_some(EndReason::Length))
                }
            };
            self.stats.decode_tokens += row.samples as u64;
            self.stats.prefill_tokens += (row.rows - row.samples) as u64;
            self.release_copy_source(row.seq);
            if reason != Some(EndReason::Failed) {
                self.publish(row.seq);
                self.slide(row.seq);
            }
            if let Some(reason) = reason {
                ended.push(self.end(row.seq, reason));
            }
        }
        #[cfg(debug_assertions)]
        if self.is_idle() {
            self.check();
        }
        ended
    }

    /// Gives the blocks computed so far to the tree.
    fn publish(&mut self, id: SeqId) {
        let block_tokens = self.config.block_tokens;
        let seq = self
            .seqs
            .get_mut(&id)
            .expect("only a known sequence is published");
        if !seq.cache {
            return;
        }
        for index in seq.path.len()..seq.computed / block_tokens {
            let parent = seq.path.last().copied().unwrap_or(RadixTree::ROOT);
            let tokens = &seq.tokens[index * block_tokens..(index + 1) * block_tokens];
            let node = self
                .tree
                .insert(parent, tokens, index, &mut seq.tables, &mut self.pools);
            self.tree.advance(parent, node, &mut self.pools);
            seq.path.push(node);
        }
    }

    /// Lets go of blocks that windowed groups no longer read.
    fn slide(&mut self, id: SeqId) {
        let seq = self.seqs.get_mut(&id).expect("only a known sequence slides");
        for (g, group) in self.config.groups.iter().enumerate() {
            if group.window.is_none() {
                continue;
            }
            let first = first_needed(group.window, seq.computed) / self.config.block_tokens;
            for index in seq.tables[g].first()..first.min(seq.path.len()) {
                self.tree.cool(seq.path[index], g);
            }
            seq.tables[g].release_before(first, &mut self.pools[g]);
        }
    }

    fn end(&mut self, id: SeqId, reason: EndReason) -> Ended {
        let block_tokens = self.config.block_tokens;
        let seq = &self.seqs[&id];
        let whole = seq.path.len() * block_tokens;
        if reason != EndReason::Failed && seq.cache && seq.computed > whole {
            let parent = seq.path.last().copied().unwrap_or(RadixTree::ROOT);
            let end = &seq.tokens[whole..seq.computed];
            self.tree
                .insert_end(parent, end, seq.path.len(), &seq.tables, &mut self.pools);
        }
        self.stats.ended += 1;
        let seq = self.remove(id);
        Ended {
            seq: id,
            reason,
            prompt_tokens: seq.prompt_len,
            completion_tokens: seq.tokens.len() - seq.prompt_len,
            cached_tokens: seq.cached_tokens(),
            preemptions: seq.preemptions,
        }
    }

    fn remove(&mut self, id: SeqId) -> Sequence {
        self.release_blocks(id);
        let seq = self.seqs.remove(&id).expect("only a known sequence is removed");
        self.running.remove(&seq.rank());
        self.waiting.remove(&seq.rank());
        seq
    }

    /// Takes back all that a sequence holds, and its lock.
    pub(super) fn release_blocks(&mut self, id: SeqId) {
        self.release_copy_source(id);
        let seq = self
            .seqs
            .get_mut(&id)
            .expect("only a known sequence holds blocks");
        seq.copies.clear();
        seq.draft.clear();
        for (table, pool) in seq.tables.iter_mut().zip(&mut self.pools) {
            table.clear(pool);
        }
        if seq.state == SeqState::Running && seq.cache {
            self.tree.unlock(
                seq.path.last().copied().unwrap_or(RadixTree::ROOT),
                &mut self.pools,
            );
        }
        seq.path.clear();
        seq.computed = 0;
        seq.state = SeqState::Waiting;
    }

    pub(super) fn release_copy_source(&mut self, id: SeqId) {
        let seq = self.seqs.get_mut(&id).expect("only a known sequence copies");
        if let Some(source) = seq.copy_source.take() {
            for (block, pool) in source.blocks.into_iter().zip(&mut self.pools) {
                pool.release(block);
            }
            self.tree.unlock(source.node, &mut self.pools);
        }
    }

    /// Forgets all cached prefixes that nobody uses.
    pub fn clear_cache(&mut self) {
        self.tree.clear(&mut self.pools);
    }

    /// The pool of a cache group.
    pub fn pool(&self, group: usize) -> &KvPool {
        &self.pools[group]
    }

    /// Counts for metrics.
    pub fn stats(&self) -> Stats {
        Stats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            groups: self
                .pools
                .iter()
                .map(|pool| GroupStats {
                    total: pool.total(),
                    free: pool.free(),
                    cached: pool.idle(),
                    held: pool.total() - pool.available(),
                })
                .collect(),
            ..self.stats.clone()
        }
    }

    /// Checks the accounting of pools, tree and sequences; costs time in proportion to all blocks.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        self.tree.check(&self.pools);
        for (g, pool) in self.pools.iter().enumerate() {
            pool.check();
            let mut held = vec![0u32; pool.total()];
            for seq in self.seqs.values() {
                let source = seq.copy_source.iter().map(|source| source.blocks[g]);
                seq.tables[g]
                    .iter()
                    .chain(source)
                    .for_each(|block| held[block.0 as usize] += 1);
            }
            let used = held.iter().filter(|&&n| n > 0).count();
            assert_eq!(
                used,
                pool.total() - pool.available(),
                "blocks not available are those sequences hold"
            );
        }
        for seq in self.seqs.values() {
            let running = self.running.contains(&seq.rank());
            assert_eq!(
                running,
                seq.state == SeqState::Running,
                "running sequences are listed"
            );
            assert_eq!(
                !running,
                self.waiting.contains(&seq.rank()),
                "waiting sequences are listed"
            );
            assert!(
                running || seq.tables.iter().all(|t| t.is_empty()),
                "who waits holds nothing"
            );
        }
        assert_eq!(
            self.seqs.len(),
            self.running.len() + self.waiting.len(),
            "nobody is listed twice"
        );
    }
}

/// Adds what a step computed and drew to a sequence.
fn append(seq: &mut Sequence, row: &BatchRow, tokens: &[TokenId], stops: bool) {
    assert!(tokens.len() <= row.samples, "no more tokens than rows sampled");
    match tokens.len().checked_sub(1) {
        Some(accepted) => {
            assert_eq!(
                tokens[..accepted],
                seq.draft[..accepted],
                "only draft tokens are accepted"
            );
            assert!(
                seq.tokens.len() + tokens.len() <= seq.max_len,
                "a reply stays within its length"
            );
            seq.tokens.extend_from_slice(tokens);
            seq.computed = seq.tokens.len() - 1;
        }
        None => {
            assert!(row.samples == 0 || stops, "a sampled row gives a token");
            seq.computed = seq.tokens.len().min(seq.computed + row.rows);
        }
    }
    if seq.score_prompt {
        seq.scored = seq.scored.max(seq.computed.min(seq.prompt_len));
    }
    seq.draft.clear();
}
