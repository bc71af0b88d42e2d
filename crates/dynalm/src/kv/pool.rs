//! The blocks of one cache group: a free list and a count of holders per block.
//!
//! A block is *free* (no holder), or *held* by sequences, by the prefix tree, or by both. A block that only
//! the tree holds is *idle*: it can be had by evicting it. Invariants, checked by [`KvPool::check`]: free +
//! held = total; no free block has a holder; a block is in the free list at most once.

use dynair::BlockId;

/// The blocks of one cache group.
#[derive(Debug, Clone)]
pub struct KvPool {
    /// Free blocks; the last is taken first, so that a small load touches little memory.
    free: Vec<BlockId>,
    /// Holders per block, the tree included.
    holders: Vec<u32>,
    /// Whether the tree is one of them.
    cached: Vec<bool>,
    /// Blocks whose only holder is the tree.
    idle: usize,
}

impl KvPool {
    /// A pool of `blocks` free blocks.
    pub fn new(blocks: usize) -> Self {
        let count = u32::try_from(blocks).expect("block numbers are 32 bits wide");
        KvPool {
            free: (0..count).rev().map(BlockId).collect(),
            holders: vec![0; blocks],
            cached: vec![false; blocks],
            idle: 0,
        }
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.holders.len()
    }

    /// Blocks without a holder.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// The free blocks, in no useful order: what they hold is dead, and may be overwritten to find out who
    /// reads it.
    pub fn free_blocks(&self) -> &[BlockId] {
        &self.free
    }

    /// Blocks held by the prefix tree alone.
    pub fn idle(&self) -> usize {
        self.idle
    }

    /// Blocks that a sequence can get: free now, or after eviction.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle
    }

    /// Holders of `block`.
    pub fn holders(&self, block: BlockId) -> u32 {
        self.holders[block.0 as usize]
    }

    /// Takes a free block for one holder; `None` if there is none.
    pub fn alloc(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.holders[block.0 as usize] = 1;
        Some(block)
    }

    /// Adds a holder.
    ///
    /// # Panics
    /// If nobody holds the block: only a holder may share.
    pub fn share(&mut self, block: BlockId) {
        self.update(block, |holders, _| {
            assert!(*holders > 0, "only a held block can be shared");
            *holders += 1;
        });
    }

    /// Removes a holder; the last one frees the block.
    ///
    /// # Panics
    /// If nobody holds the block, or the tree is the only holder: the tree lets go through
    /// [`KvPool::uncache`].
    pub fn release(&mut self, block: BlockId) {
        self.update(block, |holders, cached| {
            assert!(
                *holders > u32::from(*cached),
                "a block is released only by a holder"
            );
            *holders -= 1;
        });
        self.free_if_unheld(block);
    }

    /// Adds the tree as a holder.
    ///
    /// # Panics
    /// If nobody holds the block or the tree already does.
    pub fn cache(&mut self, block: BlockId) {
        self.update(block, |holders, cached| {
            assert!(*holders > 0 && !*cached, "the tree takes a held block once");
            *holders += 1;
            *cached = true;
        });
    }

    /// Removes the tree as a holder; returns whether that freed the block.
    ///
    /// # Panics
    /// If the tree does not hold it.
    pub fn uncache(&mut self, block: BlockId) -> bool {
        self.update(block, |holders, cached| {
            assert!(*cached, "the tree releases only what it holds");
            *holders -= 1;
            *cached = false;
        });
        self.free_if_unheld(block)
    }

    /// Checks the invariants of the module's docs.
    ///
    /// # Panics
    /// If one is broken.
    pub fn check(&self) {
        let held = self.holders.iter().filter(|&&n| n > 0).count();
        assert_eq!(self.free.len() + held, self.total(), "free + held = total");
        let mut seen = vec![false; self.total()];
        for block in &self.free {
            let i = block.0 as usize;
            assert!(!seen[i], "a block is in the free list at most once");
            seen[i] = true;
            assert_eq!(self.holders[i], 0, "a free block has no holder");
            assert!(!self.cached[i], "a free block is not in the tree");
        }
        let idle = (0..self.total())
            .filter(|&i| self.cached[i] && self.holders[i] == 1)
            .count();
        assert_eq!(idle, self.idle, "idle blocks are those only the tree holds");
    }

    fn update(&mut self, block: BlockId, change: impl FnOnce(&mut u32, &mut bool)) {
        let i = block.0 as usize;
        let is_idle = |holders: u32, cached: bool| cached && holders == 1;
        let before = is_idle(self.holders[i], self.cached[i]);
        change(&mut self.holders[i], &mut self.cached[i]);
        match (before, is_idle(self.holders[i], self.cached[i])) {
            (false, true) => self.idle += 1,
            (true, false) => self.idle -= 1,
            _ => {}
        }
    }

    fn free_if_unheld(&mut self, block: BlockId) -> bool {
        let unheld = self.holders[block.0 as usize] == 0;
        if unheld {
            self.free.push(block);
        }
        unheld
    }
}
