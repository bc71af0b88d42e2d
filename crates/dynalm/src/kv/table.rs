//! The blocks that hold one sequence's tokens in one cache group.

use std::collections::VecDeque;

use dynair::BlockId;

use super::pool::KvPool;

/// Block numbers of one sequence and group: block `i` of the sequence holds positions
/// `i × block_tokens .. (i + 1) × block_tokens`. A windowed group has let go of the first `first` blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockTable {
    first: usize,
    blocks: VecDeque<BlockId>,
}

impl BlockTable {
    /// A table without blocks whose first block will be block `first` of the sequence.
    pub fn starting_at(first: usize) -> Self {
        BlockTable {
            first,
            blocks: VecDeque::new(),
        }
    }

    /// Index of the first block still listed.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Index after the last block listed.
    pub fn end(&self) -> usize {
        self.first + self.blocks.len()
    }

    /// Number of blocks listed.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is listed.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Block `index` of the sequence, if listed.
    pub fn get(&self, index: usize) -> Option<BlockId> {
        self.blocks.get(index.checked_sub(self.first)?).copied()
    }

    /// The blocks listed, in order.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.blocks.iter().copied()
    }

    /// Appends a block that the caller holds; the table releases it one day.
    pub fn push(&mut self, block: BlockId) {
        self.blocks.push_back(block);
    }

    /// Puts `shared` (held by somebody else too) in the place of block `index`, which is released.
    ///
    /// # Panics
    /// If block `index` is not listed.
    pub fn replace(&mut self, index: usize, shared: BlockId, pool: &mut KvPool) {
        let slot = &mut self.blocks[index - self.first];
        pool.share(shared);
        pool.release(*slot);
        *slot = shared;
    }

    /// Releases all blocks before block `index`.
    pub fn release_before(&mut self, index: usize, pool: &mut KvPool) {
        while self.first < index {
            match self.blocks.pop_front() {
                Some(block) => pool.release(block),
                None => {
                    self.first = index;
                    return;
                }
            }
            self.first += 1;
        }
    }

    /// Releases everything; the table starts at block 0 again.
    pub fn clear(&mut self, pool: &mut KvPool) {
        for block in self.blocks.drain(..) {
            pool.release(block);
        }
        self.first = 0;
    }
}
