//! Pool and tree against naive models.

use std::collections::BTreeMap;

use dynair::BlockId;
use proptest::prelude::*;

use super::radix::common_prefix;
use super::{BlockTable, KvPool, NodeId, RadixTree, first_needed, group_windows};

proptest! {
    /// Pool operations against a map of holder counts.
    #[test]
    fn a_pool_counts_like_a_map(blocks in 1usize..12, ops in prop::collection::vec((0u8..5, 0usize..12), 0..200)) {
        let mut pool = KvPool::new(blocks);
        // Per held block: its other holders, and whether the tree is one.
        let mut model: BTreeMap<BlockId, (u32, bool)> = BTreeMap::new();
        for (op, pick) in ops {
            let chosen = model.keys().nth(pick % model.len().max(1)).copied();
            match (op, chosen) {
                (0, _) => {
                    let got = pool.alloc();
                    prop_assert_eq!(got.is_some(), model.len() < blocks);
                    if let Some(block) = got {
                        prop_assert!(model.insert(block, (1, false)).is_none(), "a held block is not given out");
                    }
                }
                (1, Some(block)) => {
                    pool.share(block);
                    model.get_mut(&block).unwrap().0 += 1;
                }
                (2, Some(block)) if model[&block].0 > 0 => {
                    pool.release(block);
                    model.get_mut(&block).unwrap().0 -= 1;
                }
                (3, Some(block)) if !model[&block].1 => {
                    pool.cache(block);
                    model.get_mut(&block).unwrap().1 = true;
                }
                (4, Some(block)) if model[&block].1 => {
                    prop_assert_eq!(pool.uncache(block), model[&block].0 == 0);
                    model.get_mut(&block).unwrap().1 = false;
                }
                _ => {}
            }
            model.retain(|_, holders| *holders != (0, false));
            pool.check();
            prop_assert_eq!(pool.free(), blocks - model.len());
            prop_assert_eq!(pool.idle(), model.values().filter(|&&holders| holders == (0, true)).count());
        }
    }
}

/// A tree with one full and one windowed group, and what a list of prefixes knows about it.
struct Model {
    tree: RadixTree,
    pools: Vec<KvPool>,
    windows: Vec<Option<u32>>,
    /// Every prefix whose tokens were inserted, whole blocks or with a partly filled end.
    prefixes: Vec<Vec<u32>>,
}

const BLOCK: usize = 4;

impl Model {
    fn new(window: Option<u32>, blocks: usize) -> Self {
        let windows = vec![None, window];
        Model {
            tree: RadixTree::new(BLOCK, windows.clone()),
            pools: vec![KvPool::new(blocks), KvPool::new(blocks)],
            windows,
            prefixes: Vec::new(),
        }
    }

    /// Computes and keeps a sequence as the scheduler does; `false` if there are no blocks for it.
    fn keep(&mut self, tokens: &[u32]) -> bool {
        let need = tokens.len().div_ceil(BLOCK);
        for g in 0..2 {
            let free = self.pools[g].free();
            self.tree.evict(g, need.saturating_sub(free), &mut self.pools);
            if self.pools[g].free() < need {
                return false;
            }
        }
        let mut tables = vec![BlockTable::default(); 2];
        for (table, pool) in tables.iter_mut().zip(&mut self.pools) {
            (0..need).for_each(|_| table.push(pool.alloc().expect("counted above")));
        }
        let mut at = RadixTree::ROOT;
        self.tree.lock(at);
        for (index, block) in tokens.chunks(BLOCK).enumerate() {
            if block.len() == BLOCK {
                let node = self.tree.insert(at, block, index, &mut tables, &mut self.pools);
                self.tree.advance(at, node, &mut self.pools);
                at = node;
            } else {
                self.tree.insert_end(at, block, index, &tables, &mut self.pools);
            }
        }
        tables
            .iter_mut()
            .zip(&mut self.pools)
            .for_each(|(table, pool)| table.clear(pool));
        self.tree.unlock(at, &mut self.pools);
        self.prefixes.push(tokens.to_vec());
        true
    }

    /// The longest common beginning with anything ever kept: no match may be longer.
    fn longest(&self, tokens: &[u32]) -> usize {
        self.prefixes
            .iter()
            .map(|prefix| common_prefix(prefix, tokens))
            .max()
            .unwrap_or(0)
    }

    fn take(&mut self, tokens: &[u32], limit: usize) -> (usize, Vec<BlockTable>, Option<NodeId>) {
        let found = self.tree.find(tokens, limit, false);
        let mut tables = vec![BlockTable::default(); 2];
        self.tree.take(&found, &mut tables, &mut self.pools);
        (found.tokens, tables, found.path.last().copied())
    }
}

fn prompt() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0u32..3, 1..24)
}

proptest! {
    /// With room for everything, the tree finds exactly the longest common beginning, to the token.
    #[test]
    fn a_roomy_tree_finds_the_longest_prefix(kept in prop::collection::vec(prompt(), 0..12), query in prompt()) {
        let mut model = Model::new(Some(5), 1000);
        for tokens in &kept {
            prop_assert!(model.keep(tokens));
            model.tree.check(&model.pools);
        }
        for limit in 0..=query.len() {
            let found = model.tree.find(&query, limit, true);
            prop_assert_eq!(found.tokens, model.longest(&query[..limit]));
        }
    }

    /// With little room, matches are never too long, have what a token after them reads, and survive eviction
    /// while taken.
    #[test]
    fn a_tight_tree_stays_sound(
        blocks in 6usize..20, window in prop::option::of(1u32..10),
        ops in prop::collection::vec((0u8..4, prompt(), 0usize..8), 1..40),
    ) {
        let mut model = Model::new(window, blocks);
        let mut taken: Vec<(usize, Vec<BlockTable>, Option<NodeId>)> = Vec::new();
        for (op, tokens, n) in ops {
            match op {
                0 | 1 => { model.keep(&tokens); }
                2 => taken.push(model.take(&tokens, tokens.len() - 1)),
                _ => {
                    model.tree.evict(n % 2, n, &mut model.pools);
                    if let Some((_, mut tables, node)) = taken.pop() {
                        tables.iter_mut().zip(&mut model.pools).for_each(|(table, pool)| table.clear(pool));
                        model.tree.unlock(node.unwrap_or(RadixTree::ROOT), &mut model.pools);
                    }
                }
            }
            model.tree.check(&model.pools);
            model.pools.iter().for_each(KvPool::check);
            let found = model.tree.find(&tokens, tokens.len(), true);
            prop_assert!(found.tokens <= model.longest(&tokens));
            for (n, tables, _) in &taken {
                for (table, &window) in tables.iter().zip(&model.windows) {
                    let first = first_needed(window, *n) / BLOCK;
                    prop_assert_eq!((table.first(), table.end()), (first, (n / BLOCK).max(first)));
                }
                for (table, pool) in tables.iter().zip(&model.pools) {
                    prop_assert!(table.iter().all(|block| pool.holders(block) >= 1), "taken blocks stay held");
                }
            }
        }
        for (_, mut tables, node) in taken {
            tables.iter_mut().zip(&mut model.pools).for_each(|(table, pool)| table.clear(pool));
            model.tree.unlock(node.unwrap_or(RadixTree::ROOT), &mut model.pools);
        }
        model.tree.clear(&mut model.pools);
        prop_assert!(model.tree.is_empty());
        model.pools.iter().for_each(|pool| assert_eq!(pool.free(), pool.total()));
    }
}

#[test]
fn the_least_recently_used_leaf_goes_first() {
    let mut model = Model::new(None, 100);
    let (a, b) = ([1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 3, 3, 3, 3]);
    model.keep(&a);
    model.keep(&b);
    let (_, mut tables, node) = model.take(&a, 8);
    tables
        .iter_mut()
        .zip(&mut model.pools)
        .for_each(|(table, pool)| table.clear(pool));
    model.tree.unlock(node.unwrap(), &mut model.pools);
    assert_eq!(model.tree.evict(0, 1, &mut model.pools), 1);
    assert_eq!(model.tree.find(&a, 8, true).tokens, 8, "used last");
    assert_eq!(
        model.tree.find(&b, 8, true).tokens,
        4,
        "its leaf is gone, the shared block is not"
    );
}

#[test]
fn groups_are_read_from_the_caches() {
    let kv = |window, group| dynair::CacheDecl::Kv {
        num_kv_heads: 1,
        head_dim: 32,
        window,
        group,
    };
    assert_eq!(
        group_windows(&[kv(None, 0), kv(Some(512), 1), kv(None, 0)]).unwrap(),
        [None, Some(512)]
    );
    assert!(group_windows(&[kv(None, 1)]).is_err(), "group 0 has no layer");
    assert!(
        group_windows(&[kv(None, 0), kv(Some(4), 0)]).is_err(),
        "two windows in one group"
    );
    assert!(
        group_windows(&[kv(None, usize::MAX)]).is_err(),
        "an absurd number is refused"
    );
    let state = group_windows(&[dynair::CacheDecl::State { bytes: 8 }])
        .unwrap_err()
        .to_string();
    assert!(state.contains("recurrent state"), "{state}");
}
