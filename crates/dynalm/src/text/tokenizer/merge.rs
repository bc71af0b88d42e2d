//! Byte pair merging of one stretch of symbols in O(n log n).
//!
//! Idea: symbols form a linked list; every neighbouring pair that may merge waits in a heap, best first and leftmost
//! among equals. A pair is taken; if both symbols still are what they were when it was queued they become one, and the
//! two new neighbour pairs are queued. Each merge removes a symbol and queues at most two pairs, so the heap sees at
//! most 3n entries.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A stretch of text that is one token so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// Token id, or the caller's own marker for "none yet".
    pub(super) id: u32,
    /// Byte range in the text.
    pub(super) start: u32,
    /// End of the byte range; a symbol merged into its left neighbour is empty.
    pub(super) end: u32,
    prev: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

/// A pair that may merge. Order: rank, then position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    rank: u32,
    left: u32,
    right: u32,
    /// End of the right symbol and start of the left one when queued: tells stale entries.
    start: u32,
    end: u32,
    id: u32,
}

/// Buffers of the merging, reused between words.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Pair>>,
    /// Symbols and heap entries handled so far: what the cost of encoding is counted in.
    pub(super) work: u64,
}

impl Merger {
    /// Starts a new stretch.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.heap.clear();
    }

    /// Appends a symbol; symbols must be pushed in text order.
    pub(super) fn push(&mut self, id: u32, start: usize, end: usize) {
        let index = self.symbols.len() as u32;
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        let prev = if index == 0 { NONE } else { index - 1 };
        self.symbols.push(Symbol {
            id,
            start: start as u32,
            end: end as u32,
            prev,
            next: NONE,
        });
    }

    /// Merges until no pair is left. `lookup(left, right)` gives rank (smaller is better) and id of the merged symbol.
    pub(super) fn run(&mut self, mut lookup: impl FnMut(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        self.work += self.symbols.len() as u64;
        for left in 1..self.symbols.len() as u32 {
            self.queue(left - 1, left, &mut lookup);
        }
        while let Some(Reverse(pair)) = self.heap.pop() {
            self.work += 1;
            let left = self.symbols[pair.left as usize];
            let right = self.symbols[pair.right as usize];
            let fresh = left.next == pair.right
                && left.start == pair.start
                && right.end == pair.end
                && left.end == right.start
                && left.end > left.start
                && right.end > right.start;
            if !fresh {
                continue;
            }
            self.symbols[pair.right as usize].end = right.start;
            let merged = &mut self.symbols[pair.left as usize];
            merged.id = pair.id;
            merged.end = right.end;
            merged.next = right.next;
            if right.next != NONE {
                self.symbols[right.next as usize].prev = pair.left;
                self.queue(pair.left, right.next, &mut lookup);
            }
            if left.prev != NONE {
                self.queue(left.prev, pair.left, &mut lookup);
            }
        }
    }

    /// What is left, in text order.
    pub(super) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.end > symbol.start)
    }

    fn queue(
        &mut self,
        left: u32,
        right: u32,
        lookup: &mut impl FnMut(&Symbol, &Symbol) -> Option<(u32, u32)>,
    ) {
        let (l, r) = (&self.symbols[left as usize], &self.symbols[right as usize]);
        if let Some((rank, id)) = lookup(l, r) {
            self.heap.push(Reverse(Pair {
                rank,
                left,
                right,
                start: l.start,
                end: r.end,
                id,
            }));
        }
    }
}
