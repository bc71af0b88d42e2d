//! One sequence: its tokens, how many of them the cache holds, and the blocks that hold them.

use std::cmp::Reverse;
use std::ops::Range;

use dynair::BlockId;

use crate::kv::{BlockTable, NodeId};
use crate::sample::params::TokenId;

/// Number of a sequence, in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// What the scheduler needs to know of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSequence {
    /// Prompt tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate; `None`: until the window is full. 0 only computes the prompt.
    pub max_tokens: Option<usize>,
    /// Larger goes first; 0 is normal.
    pub priority: i32,
    /// Whether cached prefixes may be used and this sequence's blocks kept for others.
    pub cache: bool,
    /// Whether logits of all prompt positions are wanted. Cached prefixes are not used then, as they have
    /// none.
    pub score_prompt: bool,
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeqState {
    /// Not started, or preempted: it holds no block.
    Waiting,
    /// It holds blocks and takes part in steps.
    Running,
}

/// Order in which sequences are served: priority, then arrival.
pub(super) type Rank = (Reverse<i32>, SeqId);

/// Blocks of the tree that the next step copies for a sequence, held until that step is committed.
#[derive(Debug)]
pub(super) struct CopySource {
    pub(super) node: NodeId,
    /// One per group.
    pub(super) blocks: Vec<BlockId>,
}

/// One sequence. See the module's docs.
#[derive(Debug)]
pub struct Sequence {
    pub(super) id: SeqId,
    /// Prompt, then generated tokens.
    pub(super) tokens: Vec<TokenId>,
    pub(super) prompt_len: usize,
    /// Length at which it ends.
    pub(super) max_len: usize,
    pub(super) priority: i32,
    pub(super) cache: bool,
    pub(super) score_prompt: bool,
    pub(super) state: SeqState,
    /// Tokens whose keys and values are in the cache.
    pub(super) computed: usize,
    /// Prompt tokens found in the cache when it first started.
    pub(super) cached: Option<usize>,
    /// Prompt positions whose logits have been given out.
    pub(super) scored: usize,
    /// Proposed continuation, verified in the next step.
    pub(super) draft: Vec<TokenId>,
    /// One per group.
    pub(super) tables: Vec<BlockTable>,
    /// Nodes of the prefix tree for its first blocks; the last one, or the root, is locked while it runs.
    pub(super) path: Vec<NodeId>,
    /// Copies the next step must do: group, from, to.
    pub(super) copies: Vec<(usize, BlockId, BlockId)>,
    pub(super) copy_source: Option<CopySource>,
    /// How often another sequence was started before it while it lacked memory.
    pub(super) skips: u32,
    pub(super) preemptions: u32,
}

impl Sequence {
    pub(super) fn new(id: SeqId, new: NewSequence, max_len: usize, groups: usize) -> Self {
        Sequence {
            id,
            prompt_len: new.prompt.len(),
            tokens: new.prompt,
            max_len,
            priority: new.priority,
            cache: new.cache,
            score_prompt: new.score_prompt,
            state: SeqState::Waiting,
            computed: 0,
            cached: None,
            scored: 0,
            draft: Vec::new(),
            tables: vec![BlockTable::default(); groups],
            path: Vec::new(),
            copies: Vec::new(),
            copy_source: None,
            skips: 0,
            preemptions: 0,
        }
    }

    /// Its number.
    pub fn id(&self) -> SeqId {
        self.id
    }

    /// Prompt and generated tokens.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Length of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> &[TokenId] {
        &self.tokens[self.prompt_len..]
    }

    /// Length, prompt included, at which it ends.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Tokens in the cache.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Prompt tokens found in the prefix cache when it first started.
    pub fn cached_tokens(&self) -> usize {
        self.cached.unwrap_or(0)
    }

    /// How often it was preempted.
    pub fn preemptions(&self) -> u32 {
        self.preemptions
    }

    /// Where it stands.
    pub fn state(&self) -> SeqState {
        self.state
    }

    /// Whether only its newest token is left to compute.
    pub fn is_decoding(&self) -> bool {
        self.state == SeqState::Running && self.remaining() == 1
    }

    /// Tokens to compute before the next one can be drawn.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(super) fn rank(&self) -> Rank {
        (Reverse(self.priority), self.id)
    }

    /// Whether a token is drawn after the last known one.
    pub(super) fn samples(&self) -> bool {
        self.tokens.len() < self.max_len
    }

    /// Most tokens that may come from the prefix cache: one must be computed, and so must all whose logits
    /// are owed.
    pub(super) fn reuse_limit(&self) -> usize {
        let all_but_one = self.tokens.len() - 1;
        if self.score_prompt {
            self.scored.min(all_but_one)
        } else {
            all_but_one
        }
    }

    /// Prompt positions of `rows` whose logits are owed for scoring: the logits at p judge the token at p +
    /// 1.
    pub(super) fn scoring(&self, rows: &Range<usize>) -> Range<usize> {
        if !self.score_prompt {
            return rows.start..rows.start;
        }
        let start = rows.start.max(self.scored);
        start..rows.end.min(self.prompt_len - 1).max(start)
    }

    /// Output rows of a step that computes the positions `rows` without drafts.
    pub(super) fn outputs(&self, rows: &Range<usize>) -> usize {
        self.scoring(rows).len() + usize::from(rows.end == self.tokens.len() && self.samples())
    }
}
