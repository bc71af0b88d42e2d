//! Drives a scheduler with the scripted device through arrivals, aborts and steps, and checks all that must
//! hold: every batch is valid and reads only its own tokens, every reply equals what the sequence gets alone,
//! every prompt position is scored once, nobody starves, and in the end every block is free or cached.

use std::collections::BTreeMap;

use dynacore::{Executor, Logits};
use dynair::Limits;
use dynalm::sched::{
    Batch, BatchRow, EndReason, Ended, GroupConfig, NewSequence, Outcome, Scheduler, SchedulerConfig, SeqId,
};
use testkit::scripted::{ScriptedExecutor, ScriptedGroup};

/// Tokens of the scripted model.
pub const VOCAB: usize = 97;
/// The token that ends a reply.
pub const END: u32 = 7;

/// What happens to the scheduler.
#[derive(Debug, Clone)]
pub enum Event {
    /// A sequence arrives.
    Arrive(NewSequence),
    /// The n-th sequence that lives, in order of arrival, is aborted.
    Abort(usize),
    /// So many steps are made.
    Steps(usize),
    /// The next sequences' drafts have this many tokens, of which so many are right.
    Drafts { tokens: usize, right: usize },
    /// The prefix cache is cleared.
    Clear,
}

/// What is known of a sequence that lives.
struct Expected {
    new: NewSequence,
    reply: Vec<u32>,
    scored: usize,
}

/// A scheduler and its device. See the module's docs.
pub struct Harness {
    pub scheduler: Scheduler,
    pub device: ScriptedExecutor,
    config: SchedulerConfig,
    expected: BTreeMap<SeqId, Expected>,
    drafts: (usize, usize),
    /// Ended sequences, in order.
    pub ended: Vec<Ended>,
    /// Sequences that started, with the tokens they found in the cache; resumed ones too.
    pub started: Vec<(SeqId, usize)>,
    /// Work that could at most be needed, in rows.
    work: usize,
}

/// A configuration with usual values.
pub fn config(block_tokens: usize, groups: &[(usize, Option<u32>)]) -> SchedulerConfig {
    SchedulerConfig {
        limits: Limits {
            max_tokens: 32,
            max_seqs: 8,
            max_outputs: 16,
        },
        block_tokens,
        groups: groups
            .iter()
            .map(|&(blocks, window)| GroupConfig { blocks, window })
            .collect(),
        max_context: 4096,
        mixed_prefill_tokens: 8,
        max_skips: 4,
        prefix_cache: true,
    }
}

/// A sequence with usual values.
pub fn sequence(prompt: Vec<u32>, max_tokens: usize) -> NewSequence {
    NewSequence {
        prompt,
        max_tokens: Some(max_tokens),
        priority: 0,
        cache: true,
        score_prompt: false,
    }
}

impl Harness {
    pub fn new(config: SchedulerConfig) -> Self {
        let groups = config
            .groups
            .iter()
            .map(|g| ScriptedGroup {
                blocks: g.blocks,
                window: g.window,
            })
            .collect();
        Harness {
            device: ScriptedExecutor::new(VOCAB, config.block_tokens, config.limits, groups).ending(END, 40),
            scheduler: Scheduler::new(config.clone()).expect("the test's configuration is valid"),
            config,
            expected: BTreeMap::new(),
            drafts: (0, 0),
            ended: Vec::new(),
            started: Vec::new(),
            work: 0,
        }
    }

    /// Lets an event happen.
    pub fn apply(&mut self, event: Event) {
        match event {
            Event::Arrive(new) => {
                self.arrive(new);
            }
            Event::Abort(n) => {
                if let Some(&id) = self.expected.keys().nth(n % self.expected.len().max(1)) {
                    self.abort(id);
                }
            }
            Event::Steps(n) => {
                for _ in 0..n {
                    self.step();
                }
            }
            Event::Drafts { tokens, right } => self.drafts = (tokens, right),
            Event::Clear => self.scheduler.clear_cache(),
        }
        self.scheduler.check();
    }

    /// Admits a sequence, or expects the refusal of one that does not fit.
    pub fn arrive(&mut self, new: NewSequence) -> Option<SeqId> {
        let least = new.prompt.len() + usize::from(new.max_tokens != Some(0));
        let fits = least <= self.scheduler.window();
        match self.scheduler.admit(new.clone()) {
            Ok(id) => {
                assert!(fits, "a prompt that can never fit is refused");
                let room = self.scheduler.window() - new.prompt.len();
                let count = new.max_tokens.map_or(room, |n| n.min(room));
                self.work += new.prompt.len() + count + 1;
                let mut reply = self.device.reply(&new.prompt, count);
                if let Some(end) = reply.iter().position(|&token| token == END) {
                    reply.truncate(end + 1);
                }
                self.expected.insert(
                    id,
                    Expected {
                        new,
                        reply,
                        scored: 0,
                    },
                );
                Some(id)
            }
            Err(error) => {
                assert!(!fits, "a prompt that fits is taken: {error}");
                None
            }
        }
    }

    /// Aborts a sequence.
    pub fn abort(&mut self, id: SeqId) {
        assert!(self.scheduler.abort(id), "a living sequence can be aborted");
        self.expected.remove(&id);
    }

    /// One step; `false` when nothing is left to do.
    pub fn step(&mut self) -> bool {
        self.propose();
        let Some(batch) = self.scheduler.next_batch() else {
            assert!(self.expected.is_empty(), "no sequence is forgotten");
            return false;
        };
        self.scheduler.check();
        self.started
            .extend(batch.admitted.iter().map(|a| (a.seq, a.cached_tokens)));
        let ticket = self
            .device
            .submit(&batch.meta)
            .expect("batches are valid and read what was written");
        let mut logits = Logits::default();
        self.device
            .wait(ticket, &mut logits)
            .expect("the step is in flight");
        let outcomes: Vec<Outcome> = (0..batch.rows.len())
            .map(|s| self.outcome(&batch, s, &logits))
            .collect();
        for ended in self.scheduler.commit(batch, &outcomes) {
            self.check_end(ended);
        }
        for g in 0..self.config.groups.len() {
            for &block in self.scheduler.pool(g).free_blocks() {
                self.device.poison(g, block);
            }
        }
        self.scheduler.check();
        true
    }

    /// Steps until nothing is left; fails if that takes longer than any fair order of the work could.
    pub fn finish(&mut self) {
        let most = 100 + 20 * self.work;
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(
                steps <= most,
                "{steps} steps do not suffice for {} rows of work",
                self.work
            );
        }
        assert!(self.scheduler.is_idle());
        let stats = self.scheduler.stats();
        for group in &stats.groups {
            assert_eq!(group.held, 0, "with nobody there, every block is free or cached");
        }
        self.scheduler.clear_cache();
        self.scheduler.check();
        for group in self.scheduler.stats().groups {
            assert_eq!(group.free, group.total, "a cleared cache holds nothing");
        }
    }

    fn propose(&mut self) {
        let (count, right) = self.drafts;
        for &id in self.expected.keys() {
            let seq = self.scheduler.sequence(id).expect("an expected sequence lives");
            if count > 0 && seq.is_decoding() {
                let mut draft = self.device.reply(seq.tokens(), count);
                if let Some(wrong) = draft.get_mut(right) {
                    *wrong = (*wrong + 1) % VOCAB as u32;
                }
                self.scheduler.propose(id, draft);
            }
        }
    }

    fn outcome(&mut self, batch: &Batch, s: usize, logits: &Logits) -> Outcome {
        let row = &batch.rows[s];
        self.check_scores(row, logits);
        let first = row.first_output + row.scores;
        let sampled: Vec<u32> = (first..first + row.samples)
            .map(|r| argmax(logits.row(r)))
            .collect();
        let last_row = (batch.meta.seqs[s].first_row + batch.meta.seqs[s].rows) as usize;
        let draft = &batch.meta.tokens[last_row + 1 - row.samples.max(1)..last_row];
        let mut tokens = Vec::new();
        for (i, &token) in sampled.iter().enumerate() {
            tokens.push(token);
            if token == END {
                return Outcome::End(tokens);
            }
            if draft.get(i) != Some(&token) {
                break;
            }
        }
        Outcome::Continue(tokens)
    }

    fn check_scores(&mut self, row: &BatchRow, logits: &Logits) {
        let expected = self
            .expected
            .get_mut(&row.seq)
            .expect("only living sequences have rows");
        assert!(
            row.scores == 0 || expected.new.score_prompt,
            "scores are given where asked for"
        );
        for i in 0..row.scores {
            let position = row.score_position + i;
            assert_eq!(
                position, expected.scored,
                "each position is scored once, in order"
            );
            expected.scored += 1;
            let want = self.device.next_token(&expected.new.prompt[..=position]);
            assert_eq!(
                argmax(logits.row(row.first_output + i)),
                want,
                "scores belong to their position"
            );
        }
    }

    fn check_end(&mut self, ended: Ended) {
        let expected = self.expected.remove(&ended.seq).expect("a sequence ends once");
        assert_eq!(
            ended.completion_tokens,
            expected.reply.len(),
            "replies have their length"
        );
        let reason = if expected.reply.last() == Some(&END) {
            EndReason::Stop
        } else {
            EndReason::Length
        };
        assert_eq!(ended.reason, reason);
        assert_eq!(ended.prompt_tokens, expected.new.prompt.len());
        if expected.new.score_prompt {
            assert_eq!(
                expected.scored,
                expected.new.prompt.len() - 1,
                "all positions are scored"
            );
        }
        self.ended.push(ended);
    }
}

fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = i;
        }
    }
    best as u32
}

/// Makes a configuration and events out of bytes and lets them happen: what the fuzzer calls.
pub fn replay(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut next = |most: usize| bytes.next().map_or(0, |byte| usize::from(byte) % (most + 1));
    let block_tokens = 1 + next(5);
    let groups: Vec<(usize, Option<u32>)> = (0..1 + next(2))
        .map(|_| (4 + next(40), (next(1) == 1).then_some(2)))
        .map(|(blocks, window)| (blocks, window.map(|least: u32| least + blocks as u32 / 3)))
        .collect();
    let mut config = config(block_tokens, &groups);
    config.limits.max_seqs = 1 + next(7);
    config.limits.max_tokens = config.limits.max_seqs + next(40);
    config.limits.max_outputs = config.limits.max_seqs + next(12);
    config.mixed_prefill_tokens = 1 + next(11);
    config.max_skips = next(4) as u32;
    config.max_context = 20 + next(100);
    let mut harness = Harness::new(config);
    for _ in 0..64 {
        let event = match next(12) {
            0..=4 => {
                let (shared, own, seed) = (next(40), 1 + next(30), next(5));
                let prompt = (0..shared).map(|i| i * 13).chain((0..own).map(|i| i * 7 + seed));
                Event::Arrive(NewSequence {
                    prompt: prompt.map(|token| (token % VOCAB) as u32).collect(),
                    max_tokens: Some(next(24)),
                    priority: next(2) as i32 - 1,
                    cache: next(5) > 0,
                    score_prompt: next(6) == 0,
                })
            }
            5 => Event::Abort(next(7)),
            6 => Event::Drafts {
                tokens: next(4),
                right: next(4),
            },
            7 => Event::Clear,
            _ => Event::Steps(1 + next(5)),
        };
        harness.apply(event);
    }
    harness.finish();
}
