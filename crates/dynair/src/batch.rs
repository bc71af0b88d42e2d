//! What one step holds besides weights and cache contents.
//!
//! The scheduler makes it, executors read it; models never see it. Rows of a step are the tokens of several sequences,
//! end to end: a decoding sequence has one row, a prefilling one a chunk of rows, a draft verification 1 + k rows.
//!
//! A model's caches fall into *groups* of layers that keep the same tokens: layers that keep everything, and layers
//! with a sliding window. Each group has a block table per sequence. All layers of a group use the same block numbers;
//! numbers of different groups are independent (each group has its own pool).

/// Number of a block in a group's pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The rows of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeqSpan {
    /// Its first row.
    pub first_row: u32,
    /// How many rows, at least 1. They are consecutive tokens of the sequence.
    pub rows: u32,
    /// Tokens of the sequence after this step: the last row's position is `context_len − 1`.
    pub context_len: u32,
}

/// The block tables of one cache group, those of the step's sequences end to end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockTables {
    /// Block numbers, in the order of the sequences in [`BatchMeta::seqs`].
    pub blocks: Vec<BlockId>,
    /// `[S + 1]`: sequence `s` owns `blocks[first[s]..first[s + 1]]`.
    pub first: Vec<u32>,
    /// `[S]`: position of the token in slot 0 of the sequence's first listed block, a multiple of the block size;
    /// larger than 0 where a windowed group has let go of old blocks. The token at position p lies in block
    /// `blocks[first[s] + (p − start[s]) / block_tokens]`, slot `p % block_tokens`.
    pub start: Vec<u32>,
    /// Copies of whole blocks (from, to), done in all layers of the group before anything else in the step.
    pub copies: Vec<(BlockId, BlockId)>,
}

/// One step. See the module's docs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BatchMeta {
    /// `[T]` token ids.
    pub tokens: Vec<u32>,
    /// `[T]` position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `[S]` the sequences; their row ranges are disjoint, ascending and cover all rows.
    pub seqs: Vec<SeqSpan>,
    /// One entry per cache group of the plan, in the plan's order.
    pub tables: Vec<BlockTables>,
    /// `[R]` ascending rows whose logits are wanted.
    pub output_rows: Vec<u32>,
}
