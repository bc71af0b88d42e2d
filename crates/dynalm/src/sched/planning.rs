//! How a batch is put together: decodes, then prefills, then the device's description of both. The policy is
//! described in [`super::scheduler`].

use std::cmp::Reverse;

use dynair::{BatchMeta, BlockTables, SeqSpan};

use super::scheduler::{Admission, Batch, BatchRow, Scheduler};
use super::sequence::{CopySource, Rank, SeqId, SeqState};
use crate::kv::radix::common_prefix;

/// How many waiting sequences are looked at per step.
const LOOKAHEAD: usize = 64;

/// A sequence waits for a running prefill if that spares it one part in this many of what it has to compute.
const WORTH_WAITING: usize = 4;

/// Rows given to a sequence.
struct Planned {
    id: SeqId,
    /// Tokens of the sequence to compute.
    rows: usize,
    /// Draft tokens to verify after them.
    draft: usize,
}

/// A batch in the making.
struct Step {
    tokens_left: usize,
    outputs_left: usize,
    planned: Vec<Planned>,
    admitted: Vec<Admission>,
    preempted: Vec<SeqId>,
    /// Waiting sequences for which memory is short, best first.
    blocked: Vec<Rank>,
}

impl Step {
    fn has(&self, id: SeqId) -> bool {
        self.planned.iter().any(|planned| planned.id == id)
    }
}

impl Scheduler {
    /// The next step, or `None` if no sequence is left.
    ///
    /// # Panics
    /// If the batch before has not been committed.
    pub fn next_batch(&mut self) -> Option<Batch> {
        assert!(
            !self.in_flight,
            "a batch is committed before the next one is made"
        );
        let mut step = Step {
            tokens_left: self.config.limits.max_tokens,
            outputs_left: self.config.limits.max_outputs,
            planned: Vec::new(),
            admitted: Vec::new(),
            preempted: Vec::new(),
            blocked: Vec::new(),
        };
        self.plan_decodes(&mut step);
        self.plan_prefills(&mut step);
        if step.planned.is_empty() {
            assert!(self.seqs.is_empty(), "some sequence can always go on");
            return None;
        }
        self.in_flight = true;
        Some(self.build(step))
    }

    fn plan_decodes(&mut self, step: &mut Step) {
        let decoding: Vec<SeqId> = self
            .running
            .iter()
            .map(|rank| rank.1)
            .filter(|id| self.seqs[id].is_decoding())
            .collect();
        for (i, &id) in decoding.iter().enumerate() {
            let seq = &self.seqs[&id];
            if seq.state != SeqState::Running {
                continue; // preempted for one before it
            }
            let others = decoding.len() - i - 1;
            let room = (seq.max_len - seq.tokens.len()).saturating_sub(1);
            let mut draft = seq
                .draft
                .len()
                .min(room)
                .min(step.tokens_left.saturating_sub(1 + others))
                .min(step.outputs_left.saturating_sub(1 + others));
            let computed = seq.computed;
            let outputs = seq.outputs(&(computed..computed + 1));
            loop {
                if self.grow(id, computed + 1 + draft) {
                    step.tokens_left -= 1 + draft;
                    step.outputs_left -= outputs + draft;
                    step.planned.push(Planned { id, rows: 1, draft });
                    break;
                }
                if draft > 0 {
                    draft = 0;
                    continue;
                }
                let victim = self
                    .victim(step, None)
                    .expect("the sequence itself can be preempted");
                self.preempt(victim, step);
                if victim == id {
                    break;
                }
            }
        }
    }

    fn plan_prefills(&mut self, step: &mut Step) {
        let mut budget = step.tokens_left;
        if !step.planned.is_empty() {
            budget = budget.min(self.config.mixed_prefill_tokens);
        }
        if budget == 0 {
            return;
        }
        let mut candidates: Vec<Rank> = self
            .running
            .iter()
            .filter(|rank| !self.seqs[&rank.1].is_decoding())
            .copied()
            .collect();
        self.startable(&mut candidates, step);
        candidates.sort();
        let Some((&first, rest)) = candidates.split_first() else {
            return;
        };
        let mut rest: Vec<(Reverse<i32>, usize, SeqId)> = rest
            .iter()
            .map(|&(priority, id)| (priority, self.seqs[&id].remaining(), id))
            .collect();
        rest.sort();
        let contended = rest.first().is_some_and(|other| other.0 == first.0);
        let share = if contended { budget.div_ceil(2) } else { budget };
        budget -= self.plan_chunk(first.1, share, step);
        for (_, _, id) in rest {
            if budget == 0 {
                break;
            }
            budget -= self.plan_chunk(id, budget, step);
        }
        if budget > 0 {
            self.plan_chunk(first.1, budget, step);
        }
    }

    /// Adds the waiting sequences to `candidates` that can start in this step.
    fn startable(&self, candidates: &mut Vec<Rank>, step: &mut Step) {
        let mut slots = self.config.limits.max_seqs - self.running.len();
        // What is left when all that run have the blocks they need to go on.
        let mut left: Vec<usize> = (0..self.pools.len())
            .map(|g| {
                let owed: usize = self
                    .running
                    .iter()
                    .map(|rank| &self.seqs[&rank.1])
                    .map(|seq| {
                        self.blocks_for(g, seq.tokens.len() + 1)
                            .saturating_sub(seq.tables[g].len())
                    })
                    .sum();
                self.pools[g].available().saturating_sub(owed)
            })
            .collect();
        for &rank in self.waiting.iter().take(LOOKAHEAD) {
            if slots == 0 {
                return;
            }
            if self.waits_for_prefix(rank, candidates) {
                continue;
            }
            let alone = self.running.is_empty() && candidates.is_empty();
            let need = self.blocks_to_start(rank.1, &left, if alone { 0 } else { self.running.len() });
            match need {
                Some(need) => {
                    left.iter_mut().zip(need).for_each(|(left, need)| *left -= need);
                    slots -= 1;
                    candidates.push(rank);
                }
                None => {
                    step.blocked.push(rank);
                    if self.seqs[&rank.1].skips >= self.config.max_skips {
                        return;
                    }
                }
            }
        }
    }

    /// Blocks per group that a waiting sequence takes out of `left`, `spare` staying for the others to grow
    /// into; `None` if they are not there.
    fn blocks_to_start(&self, id: SeqId, left: &[usize], spare: usize) -> Option<Vec<usize>> {
        let seq = &self.seqs[&id];
        let mut need: Vec<usize> = (0..left.len())
            .map(|g| self.blocks_for(g, (seq.tokens.len() + 1).min(seq.max_len)))
            .collect();
        let fits = |need: &[usize]| need.iter().zip(left).all(|(need, left)| need + spare <= *left);
        if fits(&need) {
            return Some(need);
        }
        if !seq.cache || self.running.is_empty() {
            return None;
        }
        // Blocks of the match that somebody uses cost nothing; idle ones are as good as free.
        let found = self.tree.find(&seq.tokens, seq.reuse_limit(), false);
        for (g, need) in need.iter_mut().enumerate() {
            *need = need.saturating_sub(self.tree.shared_blocks(&found, g, &self.pools[g]));
        }
        fits(&need).then_some(need)
    }

    /// Whether a sequence that is about to compute a good part of this one's prompt should go first.
    fn waits_for_prefix(&self, rank: Rank, candidates: &[Rank]) -> bool {
        let seq = &self.seqs[&rank.1];
        if !seq.cache {
            return false;
        }
        let wanted = &seq.tokens[..seq.reuse_limit()];
        let block_tokens = self.config.block_tokens;
        candidates
            .iter()
            .filter(|other| other.0 <= rank.0)
            .map(|other| &self.seqs[&other.1])
            .any(|other| {
                let known = &other.tokens[..];
                if !other.cache || known.first() != wanted.first() {
                    return false;
                }
                let common = common_prefix(known, wanted) / block_tokens * block_tokens;
                let gain = common.saturating_sub(other.computed.max(block_tokens - 1));
                gain > 0 && gain * WORTH_WAITING >= seq.tokens.len() - other.computed.min(common)
            })
    }

    /// Gives `id` up to `limit` rows (more rows, if it has some); returns how many. Starts it if it waits.
    fn plan_chunk(&mut self, id: SeqId, limit: usize, step: &mut Step) -> usize {
        let starts = self.seqs[&id].state == SeqState::Waiting;
        if starts {
            self.start(id);
        }
        let at = step.planned.iter().position(|planned| planned.id == id);
        let planned = at.map_or(0, |at| step.planned[at].rows);
        let seq = &self.seqs[&id];
        let (computed, from) = (seq.computed, seq.computed + planned);
        let given = seq.outputs(&(computed..from));
        let mut rows = (seq.tokens.len() - from).min(limit).min(step.tokens_left);
        loop {
            let extra = (seq.outputs(&(computed..from + rows)) - given).saturating_sub(step.outputs_left);
            if extra == 0 {
                break;
            }
            rows -= extra.min(rows);
        }
        rows = self.fit_memory(id, from, rows, planned, step);
        if rows == 0 {
            if starts {
                self.release_blocks(id);
                self.running.remove(&self.seqs[&id].rank());
                self.waiting.insert(self.seqs[&id].rank());
            }
            return 0;
        }
        let seq = &self.seqs[&id];
        step.outputs_left -= seq.outputs(&(computed..from + rows)) - given;
        step.tokens_left -= rows;
        match at {
            Some(at) => step.planned[at].rows += rows,
            None => step.planned.push(Planned { id, rows, draft: 0 }),
        }
        if starts {
            self.note_start(id, step);
        }
        rows
    }

    /// How many of `rows` rows from position `from` on memory can be had for, and takes it. Preempts
    /// sequences served later than this one if it would otherwise have no row at all.
    fn fit_memory(&mut self, id: SeqId, from: usize, rows: usize, planned: usize, step: &mut Step) -> usize {
        loop {
            let seq = &self.seqs[&id];
            let room = (0..self.pools.len())
                .map(|g| (seq.tables[g].end() + self.pools[g].available()) * self.config.block_tokens)
                .min()
                .unwrap_or(usize::MAX);
            let rank = seq.rank();
            let fitting = rows.min(room.saturating_sub(from));
            if fitting > 0 && self.grow(id, from + fitting) {
                return fitting;
            }
            if rows == 0 || planned > 0 {
                return 0;
            }
            match self.victim(step, Some(rank)) {
                Some(victim) => self.preempt(victim, step),
                None => return 0,
            }
        }
    }

    /// Records that a waiting sequence got its first rows.
    fn note_start(&mut self, id: SeqId, step: &mut Step) {
        let seq = self.seqs.get_mut(&id).expect("only a known sequence starts");
        let resumed = seq.cached.is_some();
        seq.cached.get_or_insert(seq.computed);
        seq.skips = 0;
        self.stats.prefix_queried_tokens += if seq.cache { seq.tokens.len() as u64 } else { 0 };
        self.stats.prefix_hit_tokens += seq.computed as u64;
        step.admitted.push(Admission {
            seq: id,
            cached_tokens: seq.computed,
            resumed,
        });
        let rank = seq.rank();
        for blocked in step.blocked.iter().filter(|&&blocked| blocked < rank) {
            self.seqs.get_mut(&blocked.1).expect("who waits is known").skips += 1;
        }
    }

    /// Makes a waiting sequence a running one that holds what the prefix tree has of it.
    fn start(&mut self, id: SeqId) {
        let seq = self.seqs.get_mut(&id).expect("only a known sequence starts");
        let rank = seq.rank();
        self.waiting.remove(&rank);
        self.running.insert(rank);
        seq.state = SeqState::Running;
        if !seq.cache {
            return;
        }
        for partial in [true, false] {
            let found = self.tree.find(&seq.tokens, seq.reuse_limit(), partial);
            self.tree.take(&found, &mut seq.tables, &mut self.pools);
            if let Some(node) = found.partial {
                let blocks = self.tree.share_partial(node, &mut self.pools);
                for g in 0..self.pools.len() {
                    if self.pools[g].free() == 0 {
                        self.tree.evict(g, 1, &mut self.pools);
                    }
                }
                if self.pools.iter().any(|pool| pool.free() == 0) {
                    // No room for the copy: do without the partly equal block.
                    for (block, pool) in blocks.into_iter().zip(&mut self.pools) {
                        pool.release(block);
                    }
                    self.tree.unlock(node, &mut self.pools);
                    for (table, pool) in seq.tables.iter_mut().zip(&mut self.pools) {
                        table.clear(pool);
                    }
                    let last = found.path.last().copied().unwrap_or(crate::kv::RadixTree::ROOT);
                    self.tree.unlock(last, &mut self.pools);
                    continue;
                }
                for (g, &from) in blocks.iter().enumerate() {
                    let to = self.pools[g].alloc().expect("checked just above");
                    seq.tables[g].push(to);
                    seq.copies.push((g, from, to));
                }
                seq.copy_source = Some(CopySource { node, blocks });
            }
            seq.computed = found.tokens;
            seq.path = found.path;
            return;
        }
    }

    /// Makes sure that `id` has blocks for its first `tokens` tokens; takes all of them or none.
    fn grow(&mut self, id: SeqId, tokens: usize) -> bool {
        let seq = self.seqs.get_mut(&id).expect("only a known sequence grows");
        let end = tokens.div_ceil(self.config.block_tokens);
        for g in 0..self.pools.len() {
            let need = end.saturating_sub(seq.tables[g].end());
            let free = self.pools[g].free();
            if free < need {
                self.tree.evict(g, need - free, &mut self.pools);
            }
            if self.pools[g].free() < need {
                return false;
            }
        }
        for (table, pool) in seq.tables.iter_mut().zip(&mut self.pools) {
            while table.end() < end {
                table.push(pool.alloc().expect("counted just above"));
            }
        }
        true
    }

    /// The running sequence served last that has no rows in this step, if it comes after `after`.
    fn victim(&self, step: &Step, after: Option<Rank>) -> Option<SeqId> {
        let last = *self.running.iter().rev().find(|rank| !step.has(rank.1))?;
        after.is_none_or(|after| last > after).then_some(last.1)
    }

    /// Takes a running sequence's blocks back; it waits to be computed again.
    fn preempt(&mut self, id: SeqId, step: &mut Step) {
        self.release_blocks(id);
        let seq = self
            .seqs
            .get_mut(&id)
            .expect("only a known sequence is preempted");
        seq.preemptions += 1;
        let rank = seq.rank();
        self.running.remove(&rank);
        self.waiting.insert(rank);
        self.stats.preemptions += 1;
        step.preempted.push(id);
    }

    /// Writes down the batch.
    fn build(&mut self, step: Step) -> Batch {
        let mut meta = BatchMeta {
            tables: vec![BlockTables::default(); self.pools.len()],
            ..BatchMeta::default()
        };
        let mut rows = Vec::with_capacity(step.planned.len());
        for planned in &step.planned {
            let seq = self
                .seqs
                .get_mut(&planned.id)
                .expect("only known sequences are planned");
            seq.draft.truncate(planned.draft);
            let span = seq.computed..seq.computed + planned.rows;
            let end = span.end + planned.draft;
            let first_row = meta.tokens.len();
            meta.tokens.extend_from_slice(&seq.tokens[span.clone()]);
            meta.tokens.extend_from_slice(&seq.draft);
            meta.positions.extend(span.start as u32..end as u32);
            meta.seqs.push(SeqSpan {
                first_row: first_row as u32,
                rows: (end - span.start) as u32,
                context_len: end as u32,
            });
            let blocks = end.div_ceil(self.config.block_tokens);
            for (table, out) in seq.tables.iter().zip(&mut meta.tables) {
                out.first.push(out.blocks.len() as u32);
                out.start.push((table.first() * self.config.block_tokens) as u32);
                out.blocks.extend(table.iter().take(blocks - table.first()));
            }
            for (group, from, to) in seq.copies.drain(..) {
                meta.tables[group].copies.push((from, to));
            }
            let scoring = seq.scoring(&span);
            let samples = if span.end == seq.tokens.len() && seq.samples() {
                1 + planned.draft
            } else {
                0
            };
            rows.push(BatchRow {
                seq: planned.id,
                rows: end - span.start,
                position: span.start,
                first_output: meta.output_rows.len(),
                scores: scoring.len(),
                score_position: scoring.start,
                samples,
            });
            let row_of = |position: usize| (first_row + position - span.start) as u32;
            meta.output_rows.extend(scoring.map(row_of));
            meta.output_rows.extend((end - samples..end).map(row_of));
        }
        for table in &mut meta.tables {
            table.first.push(table.blocks.len() as u32);
        }
        Batch {
            meta,
            rows,
            admitted: step.admitted,
            preempted: step.preempted,
        }
    }
}
