//! The prefix tree: which computed tokens are still in the cache, so that nobody computes them twice.
//!
//! A node stands for one block of tokens after its parent's; a path from the root spells a prefix. Children
//! are kept in token order, so an exact child is one ordered lookup, and the child with the longest common
//! beginning is a neighbour of the place where the searched tokens would stand: reuse is exact to the token,
//! the last, partly equal block being copied by the finder. A node with fewer than `block_tokens` tokens is
//! the partly filled end of a finished sequence; it has no children and goes when a longer one with the same
//! beginning comes.
//!
//! A node holds a share of one block in each full group, and in each windowed group unless that one was
//! evicted. A prefix of n tokens can be used if every windowed group still has the blocks that a token at
//! position n reads; [`RadixTree::find`] gives the longest such n.
//!
//! Eviction. Full groups: the least recently used leaf that nobody has locked, with all its blocks. A
//! sequence locks the last node of its path and holds the blocks of all of them, so an unlocked leaf is used
//! by nobody. Windowed groups: blocks in any node that only the tree holds, first those that a sequence slid
//! past and nobody matched since (*cold*), then the least recently used. A node left without any block and
//! without children is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dynair::BlockId;

use super::first_needed;
use super::pool::KvPool;
use super::table::BlockTable;
use crate::sample::params::TokenId;

/// How many equally good neighbours are tried for a partial match if windowed blocks are missing.
const PARTIAL_CANDIDATES: usize = 8;

/// Number of a node of the tree. Valid while the node, or one below it, is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

/// Result of [`RadixTree::find`]: not counted anywhere until [`RadixTree::take`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Tokens that need not be computed.
    pub tokens: usize,
    /// Nodes of the whole blocks, from the root down.
    pub path: Vec<NodeId>,
    /// The node whose first tokens continue the match, if it ends inside a block.
    pub partial: Option<NodeId>,
}

#[derive(Debug)]
struct Node {
    tokens: Arc<[TokenId]>,
    parent: NodeId,
    children: BTreeMap<Arc<[TokenId]>, NodeId>,
    /// One per group.
    blocks: Box<[Option<BlockId>]>,
    /// Key of each windowed group's block in `RadixTree::windowed`.
    heat: Box<[Heat]>,
    /// Whether a second sequence matched it while it lay in the window: then sliding past it says nothing.
    reused: bool,
    used: u64,
    locks: u32,
}

/// Order of eviction in windowed groups: cold before hot, then by last use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Heat {
    hot: bool,
    used: u64,
}

/// The prefix tree of one model. See the module's docs.
#[derive(Debug)]
pub struct RadixTree {
    block_tokens: usize,
    windows: Vec<Option<u32>>,
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeId>,
    /// Unlocked nodes without children, by last use.
    leaves: BTreeSet<(u64, NodeId)>,
    /// Per group: nodes that hold a windowed block, in order of eviction. Empty sets for full groups.
    windowed: Vec<BTreeSet<(Heat, NodeId)>>,
    /// Counts uses; not time.
    ticks: u64,
}

impl RadixTree {
    /// The root, which spells nothing and is never removed.
    pub const ROOT: NodeId = NodeId(0);

    /// An empty tree for blocks of `block_tokens` tokens and groups with these windows.
    pub fn new(block_tokens: usize, windows: Vec<Option<u32>>) -> Self {
        assert!(block_tokens > 0, "a block holds at least one token");
        let root = Node {
            tokens: Arc::from([]),
            parent: Self::ROOT,
            children: BTreeMap::new(),
            blocks: vec![None; windows.len()].into(),
            heat: vec![Heat::default(); windows.len()].into(),
            reused: false,
            used: 0,
            locks: 1,
        };
        RadixTree {
            block_tokens,
            windowed: vec![BTreeSet::new(); windows.len()],
            windows,
            nodes: vec![Some(root)],
            vacant: Vec::new(),
            leaves: BTreeSet::new(),
            ticks: 0,
        }
    }

    /// Number of nodes without the root.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len() - 1
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The longest usable prefix of `tokens[..limit]`. With `partial` the match may end inside a block.
    /// Changes nothing.
    pub fn find(&self, tokens: &[TokenId], limit: usize, partial: bool) -> Found {
        let tokens = &tokens[..limit.min(tokens.len())];
        let mut path = Vec::new();
        let mut at = Self::ROOT;
        for block in tokens.chunks_exact(self.block_tokens) {
            match self.node(at).children.get(block) {
                Some(&child) => at = child,
                None => break,
            }
            path.push(at);
        }
        // present[g]: how many blocks at the end of the path group g has without a gap.
        let mut present: Vec<usize> = vec![0; self.windows.len()];
        for (g, count) in present.iter_mut().enumerate() {
            *count = path
                .iter()
                .rev()
                .take_while(|&&n| self.node(n).blocks[g].is_some())
                .count();
        }
        if partial && let Some((node, common)) = self.find_partial(at, tokens, path.len(), &present) {
            return Found {
                tokens: path.len() * self.block_tokens + common,
                path,
                partial: Some(node),
            };
        }
        while !path.is_empty() && !self.usable(&path) {
            path.pop();
        }
        Found {
            tokens: path.len() * self.block_tokens,
            path,
            partial: None,
        }
    }

    /// The child of `at` that shares most tokens with what follows the `depth` whole blocks of the match.
    fn find_partial(
        &self,
        at: NodeId,
        tokens: &[TokenId],
        depth: usize,
        present: &[usize],
    ) -> Option<(NodeId, usize)> {
        let start = depth * self.block_tokens;
        let rest = &tokens[start..tokens.len().min(start + self.block_tokens)];
        if rest.is_empty() {
            return None;
        }
        let children = &self.node(at).children;
        let before =
            children.range::<[TokenId], _>((std::ops::Bound::Unbounded, std::ops::Bound::Excluded(rest)));
        let after =
            children.range::<[TokenId], _>((std::ops::Bound::Included(rest), std::ops::Bound::Unbounded));
        let mut best: Option<(NodeId, usize)> = None;
        let sides: [&mut dyn Iterator<Item = (&Arc<[TokenId]>, &NodeId)>; 2] =
            [&mut before.rev(), &mut after.into_iter()];
        for side in sides {
            for (key, &child) in side.take(PARTIAL_CANDIDATES) {
                let common = common_prefix(key, rest);
                if common == 0 || best.is_some_and(|(_, known)| known >= common) {
                    break;
                }
                let n = start + common;
                let complete = self.windows.iter().enumerate().all(|(g, &window)| {
                    let needed = depth - (first_needed(window, n) / self.block_tokens).min(depth);
                    self.node(child).blocks[g].is_some() && present[g] >= needed
                });
                if complete {
                    best = Some((child, common));
                    break;
                }
            }
        }
        best
    }

    /// Whether every windowed group has what a token after this path reads.
    fn usable(&self, path: &[NodeId]) -> bool {
        let n = path.len() * self.block_tokens;
        self.windows.iter().enumerate().all(|(g, &window)| {
            let first = (first_needed(window, n) / self.block_tokens).min(path.len());
            path[first..]
                .iter()
                .all(|&node| self.node(node).blocks[g].is_some())
        })
    }

    /// How many blocks of `group` that a match needs have other holders than the tree.
    pub fn shared_blocks(&self, found: &Found, group: usize, pool: &KvPool) -> usize {
        let first = first_needed(self.windows[group], found.tokens) / self.block_tokens;
        let used = |node: &NodeId| self.node(*node).blocks[group].is_some_and(|b| pool.holders(b) > 1);
        found.path.iter().skip(first).filter(|node| used(node)).count()
    }

    /// Shares the whole blocks of a match into `tables` (one per group, without blocks), marks all it uses as
    /// just used and locks the path's last node, or the root.
    pub fn take(&mut self, found: &Found, tables: &mut [BlockTable], pools: &mut [KvPool]) {
        self.ticks += 1;
        for g in 0..self.windows.len() {
            let first = first_needed(self.windows[g], found.tokens) / self.block_tokens;
            tables[g] = BlockTable::starting_at(first);
            for &node in found.path.iter().skip(first) {
                let block = self.node(node).blocks[g].expect("a usable match has all blocks it reads");
                pools[g].share(block);
                tables[g].push(block);
                self.warm(node, g);
                self.node_mut(node).reused = true;
            }
        }
        for &node in found.path.iter().chain(&found.partial) {
            self.touch(node);
        }
        self.lock(found.path.last().copied().unwrap_or(Self::ROOT));
    }

    /// Shares a partial match's blocks, one per group, and locks its node, for the time until they are
    /// copied. The caller releases the blocks and then the lock.
    pub fn share_partial(&mut self, node: NodeId, pools: &mut [KvPool]) -> Vec<BlockId> {
        self.ticks += 1;
        self.touch(node);
        self.lock(node);
        (0..self.windows.len())
            .map(|g| {
                let block = self.node(node).blocks[g].expect("a partial match has a block in every group");
                pools[g].share(block);
                self.warm(node, g);
                block
            })
            .collect()
    }

    /// Keeps block `index` of a sequence below `parent`, whose tokens are `tokens`. If the same tokens are
    /// already there, the sequence's table takes the tree's block and its own is released. Returns the node.
    ///
    /// # Panics
    /// If a full group's table does not list the block.
    pub fn insert(
        &mut self,
        parent: NodeId,
        tokens: &[TokenId],
        index: usize,
        tables: &mut [BlockTable],
        pools: &mut [KvPool],
    ) -> NodeId {
        assert!(
            tokens.len() == self.block_tokens,
            "only a filled block can be continued"
        );
        self.ticks += 1;
        let node = match self.node(parent).children.get(tokens) {
            Some(&node) => node,
            None => {
                let node = self.add_child(parent, tokens);
                self.drop_prefix(parent, tokens, pools);
                node
            }
        };
        for g in 0..self.windows.len() {
            let own = tables[g].get(index);
            assert!(
                own.is_some() || self.windows[g].is_some(),
                "a full group lists every block"
            );
            match (self.node(node).blocks[g], own) {
                (Some(kept), Some(own)) if kept != own => tables[g].replace(index, kept, &mut pools[g]),
                (None, Some(own)) => self.hold(node, g, own, pools),
                _ => {}
            }
            if self.node(node).blocks[g].is_some() {
                self.warm(node, g);
            }
        }
        self.touch(node);
        node
    }

    /// Keeps the partly filled last block `index` of a finished sequence, unless a longer one with the same
    /// beginning is there or a group does not list it. The same ownership rules as [`RadixTree::insert`].
    pub fn insert_end(
        &mut self,
        parent: NodeId,
        tokens: &[TokenId],
        index: usize,
        tables: &[BlockTable],
        pools: &mut [KvPool],
    ) {
        assert!(
            !tokens.is_empty() && tokens.len() < self.block_tokens,
            "an end is a partly filled block"
        );
        let continued = self
            .node(parent)
            .children
            .range::<[TokenId], _>((std::ops::Bound::Included(tokens), std::ops::Bound::Unbounded))
            .next()
            .is_some_and(|(key, _)| key.starts_with(tokens));
        let blocks: Option<Vec<BlockId>> = tables.iter().map(|table| table.get(index)).collect();
        let (false, Some(blocks)) = (continued, blocks) else {
            return;
        };
        self.ticks += 1;
        let node = self.add_child(parent, tokens);
        for (g, block) in blocks.into_iter().enumerate() {
            self.hold(node, g, block, pools);
        }
        self.drop_prefix(parent, tokens, pools);
    }

    /// Removes the shorter end that `tokens` continues, if nobody uses it.
    fn drop_prefix(&mut self, parent: NodeId, tokens: &[TokenId], pools: &mut [KvPool]) {
        let before = self
            .node(parent)
            .children
            .range::<[TokenId], _>((std::ops::Bound::Unbounded, std::ops::Bound::Excluded(tokens)))
            .next_back();
        if let Some((key, &node)) = before
            && tokens.starts_with(key)
            && self.node(node).locks == 0
        {
            self.remove(node, pools);
        }
    }

    /// Says that a sequence no longer reads the windowed block of `node`: it goes first when memory is short,
    /// unless it has served a second sequence already.
    pub fn cool(&mut self, node: NodeId, group: usize) {
        let entry = self.node(node);
        if self.windows[group].is_some() && entry.blocks[group].is_some() && !entry.reused {
            self.set_heat(
                node,
                group,
                Heat {
                    hot: false,
                    used: self.ticks,
                },
            );
        }
    }

    /// Moves a lock from `from` to its child `to`.
    pub fn advance(&mut self, from: NodeId, to: NodeId, pools: &mut [KvPool]) {
        self.lock(to);
        self.unlock(from, pools);
    }

    /// Protects `node` and all above it from removal.
    pub fn lock(&mut self, node: NodeId) {
        let key = (self.node(node).used, node);
        self.leaves.remove(&key);
        self.node_mut(node).locks += 1;
    }

    /// Takes a lock back.
    ///
    /// # Panics
    /// If the node is not locked.
    pub fn unlock(&mut self, node: NodeId, pools: &mut [KvPool]) {
        let entry = self.node_mut(node);
        assert!(entry.locks > 0, "every unlock has its lock");
        entry.locks -= 1;
        self.settle(node, pools);
    }

    /// Frees at least `want` blocks of `group` if it can; returns how many it freed.
    pub fn evict(&mut self, group: usize, want: usize, pools: &mut [KvPool]) -> usize {
        let before = pools[group].free();
        if self.windows[group].is_none() {
            while pools[group].free() - before < want {
                let Some(&(_, leaf)) = self.leaves.first() else {
                    break;
                };
                self.remove(leaf, pools);
            }
        } else {
            let victims: Vec<NodeId> = self.windowed[group]
                .iter()
                .map(|&(_, node)| node)
                .filter(|&node| {
                    self.node(node).blocks[group].is_some_and(|block| pools[group].holders(block) == 1)
                })
                .take(want)
                .collect();
            for node in victims {
                let heat = self.node(node).heat[group];
                self.windowed[group].remove(&(heat, node));
                let block = self.node_mut(node).blocks[group]
                    .take()
                    .expect("chosen because it has a block");
                pools[group].uncache(block);
                self.settle(node, pools);
            }
        }
        pools[group].free() - before
    }

    /// Lets go of everything nobody uses.
    pub fn clear(&mut self, pools: &mut [KvPool]) {
        while let Some(&(_, leaf)) = self.leaves.first() {
            self.remove(leaf, pools);
        }
        for group in 0..self.windows.len() {
            if self.windows[group].is_some() {
                self.evict(group, usize::MAX, pools);
            }
        }
    }

    /// After a node lost a lock, a child or a block: it becomes an evictable leaf, or goes if it holds
    /// nothing.
    fn settle(&mut self, node: NodeId, pools: &mut [KvPool]) {
        let entry = self.node(node);
        if entry.locks > 0 || !entry.children.is_empty() {
            return;
        }
        if entry.blocks.iter().all(Option::is_none) {
            self.remove(node, pools);
        } else {
            self.leaves.insert((entry.used, node));
        }
    }

    /// Removes an unlocked node without children, then settles its parent.
    fn remove(&mut self, id: NodeId, pools: &mut [KvPool]) {
        let mut next = Some(id);
        while let Some(id) = next {
            let node = self.nodes[id.0 as usize].take().expect("a removed node exists");
            assert!(
                node.locks == 0 && node.children.is_empty(),
                "only an unlocked leaf is removed"
            );
            self.vacant.push(id);
            self.leaves.remove(&(node.used, id));
            for (g, block) in node.blocks.iter().enumerate() {
                if let Some(block) = *block {
                    self.windowed[g].remove(&(node.heat[g], id));
                    pools[g].uncache(block);
                }
            }
            let parent = self.node_mut(node.parent);
            parent.children.remove(&node.tokens);
            next = None;
            if parent.locks == 0 && parent.children.is_empty() {
                if parent.blocks.iter().all(Option::is_none) {
                    next = Some(node.parent);
                } else {
                    let used = parent.used;
                    self.leaves.insert((used, node.parent));
                }
            }
        }
    }

    /// A new child without blocks. It is not an evictable leaf before it holds something (see `touch`).
    fn add_child(&mut self, parent: NodeId, tokens: &[TokenId]) -> NodeId {
        let key: Arc<[TokenId]> = Arc::from(tokens);
        let node = Node {
            tokens: Arc::clone(&key),
            parent,
            children: BTreeMap::new(),
            blocks: vec![None; self.windows.len()].into(),
            heat: vec![Heat::default(); self.windows.len()].into(),
            reused: false,
            used: self.ticks,
            locks: 0,
        };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.0 as usize] = Some(node);
                id
            }
            None => {
                self.nodes.push(Some(node));
                NodeId(
                    u32::try_from(self.nodes.len() - 1).expect("fewer nodes than blocks, whose numbers fit"),
                )
            }
        };
        let used = self.node(parent).used;
        self.leaves.remove(&(used, parent));
        self.node_mut(parent).children.insert(key, id);
        self.leaves.insert((self.ticks, id));
        id
    }

    fn hold(&mut self, node: NodeId, group: usize, block: BlockId, pools: &mut [KvPool]) {
        pools[group].cache(block);
        self.node_mut(node).blocks[group] = Some(block);
        if self.windows[group].is_some() {
            let heat = Heat {
                hot: true,
                used: self.ticks,
            };
            self.node_mut(node).heat[group] = heat;
            self.windowed[group].insert((heat, node));
        }
    }

    fn warm(&mut self, node: NodeId, group: usize) {
        if self.windows[group].is_some() {
            self.set_heat(
                node,
                group,
                Heat {
                    hot: true,
                    used: self.ticks,
                },
            );
        }
    }

    fn set_heat(&mut self, node: NodeId, group: usize, heat: Heat) {
        let old = std::mem::replace(&mut self.node_mut(node).heat[group], heat);
        self.windowed[group].remove(&(old, node));
        self.windowed[group].insert((heat, node));
    }

    fn touch(&mut self, node: NodeId) {
        let ticks = self.ticks;
        let entry = self.node_mut(node);
        let old = std::mem::replace(&mut entry.used, ticks);
        if self.leaves.remove(&(old, node)) {
            self.leaves.insert((ticks, node));
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize]
            .as_ref()
            .expect("a node number is used only while its node lives")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0 as usize]
            .as_mut()
            .expect("a node number is used only while its node lives")
    }

    /// Checks the tree against itself and the pools.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self, pools: &[KvPool]) {
        let mut cached = vec![0usize; self.windows.len()];
        let mut leaves = 0;
        for (i, node) in self.nodes.iter().enumerate().skip(1) {
            let Some(node) = node else { continue };
            let id = NodeId(i as u32);
            assert_eq!(
                self.node(node.parent).children.get(&node.tokens),
                Some(&id),
                "parents know their children"
            );
            assert!(
                node.tokens.len() == self.block_tokens || node.children.is_empty(),
                "a partly filled block has no children"
            );
            let leaf = node.locks == 0 && node.children.is_empty();
            assert_eq!(
                self.leaves.contains(&(node.used, id)),
                leaf,
                "the leaf set holds the unlocked leaves"
            );
            leaves += usize::from(leaf);
            for (g, block) in node.blocks.iter().enumerate() {
                assert!(
                    block.is_some() || self.windows[g].is_some(),
                    "a node has a block in every full group"
                );
                if let Some(block) = block {
                    cached[g] += 1;
                    assert!(pools[g].holders(*block) >= 1, "the tree holds its blocks");
                    assert!(
                        !leaf || self.windows[g].is_some() || pools[g].holders(*block) == 1,
                        "nobody uses an unlocked leaf"
                    );
                    let listed = self.windowed[g].contains(&(node.heat[g], id));
                    assert_eq!(
                        listed,
                        self.windows[g].is_some(),
                        "windowed blocks are listed for eviction"
                    );
                }
            }
            assert!(
                !leaf || node.blocks.iter().any(Option::is_some),
                "an unlocked leaf holds something"
            );
        }
        assert_eq!(leaves, self.leaves.len(), "the leaf set holds nothing else");
        for (g, set) in self.windowed.iter().enumerate() {
            assert!(
                self.windows[g].is_none() || set.len() == cached[g],
                "the windowed set holds nothing else"
            );
        }
    }
}

/// Length of the common beginning.
pub fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
