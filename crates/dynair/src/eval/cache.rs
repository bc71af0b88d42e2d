//! The paged cache modelled plainly: f32 keys and values in blocks, addressed through a batch's block tables.

use crate::batch::{BatchMeta, BlockId};
use crate::eval::{Array, dot};
use crate::graph::{CacheDecl, CacheId};
use crate::op::AttnSpec;

/// The cache of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct PagedCache {
    /// Key and value heads G.
    pub num_kv_heads: usize,
    /// Head size D.
    pub head_dim: usize,
    /// Cache group: which block table addresses it.
    pub group: usize,
    /// Tokens per block.
    pub block_tokens: usize,
    /// Keys, `[blocks, block_tokens, G, D]`.
    pub k: Vec<f32>,
    /// Values, `[blocks, block_tokens, G, D]`.
    pub v: Vec<f32>,
}

impl PagedCache {
    /// Where the G·D numbers of a token begin.
    fn at(&self, block: BlockId, slot: usize) -> usize {
        (block.0 as usize * self.block_tokens + slot) * self.num_kv_heads * self.head_dim
    }

    /// Where the token at `position` of the batch's sequence `seq` lies.
    fn locate(&self, batch: &BatchMeta, seq: usize, position: usize) -> usize {
        let table = &batch.tables[self.group];
        let index = table.first[seq] as usize + (position - table.start[seq] as usize) / self.block_tokens;
        self.at(table.blocks[index], position % self.block_tokens)
    }

    /// Key (or value) vector of `head` for the token at `position` of the batch's sequence `seq`.
    pub fn token(&self, batch: &BatchMeta, seq: usize, position: usize, head: usize) -> (&[f32], &[f32]) {
        let at = self.locate(batch, seq, position) + head * self.head_dim;
        (&self.k[at..at + self.head_dim], &self.v[at..at + self.head_dim])
    }
}

/// The caches of a model, by [`CacheId`].
#[derive(Debug, Clone, PartialEq)]
pub struct Caches {
    /// One per declared cache.
    pub layers: Vec<PagedCache>,
}

/// What was found and what was expected.
type Mismatch = (String, String);

impl Caches {
    /// Caches filled with NaN, so that reading what was never written shows. `blocks[g]` is the pool size of group g.
    ///
    /// # Panics
    /// If a cache's group has no pool, or a cache holds recurrent state, which no op of this evaluator uses.
    pub fn new(decls: &[CacheDecl], block_tokens: usize, blocks: &[usize]) -> Caches {
        let layers = decls.iter().map(|decl| match *decl {
            CacheDecl::Kv {
                num_kv_heads,
                head_dim,
                group,
                ..
            } => {
                let n = blocks[group] * block_tokens * num_kv_heads * head_dim;
                PagedCache {
                    num_kv_heads,
                    head_dim,
                    group,
                    block_tokens,
                    k: vec![f32::NAN; n],
                    v: vec![f32::NAN; n],
                }
            }
            CacheDecl::State { .. } => panic!("the evaluator has no op for recurrent state"),
        });
        Caches {
            layers: layers.collect(),
        }
    }

    /// Does the copies of blocks that the batch asks for, in all layers, in order.
    pub fn copy_blocks(&mut self, batch: &BatchMeta) {
        for layer in &mut self.layers {
            let size = layer.at(BlockId(1), 0);
            for (from, to) in &batch.tables[layer.group].copies {
                let (from, to) = (layer.at(*from, 0), layer.at(*to, 0));
                layer.k.copy_within(from..from + size, to);
                layer.v.copy_within(from..from + size, to);
            }
        }
    }

    fn layer(&self, id: CacheId) -> Result<usize, Mismatch> {
        let i = id.0 as usize;
        if i < self.layers.len() {
            return Ok(i);
        }
        Err((format!("cache {i}"), format!("one of {}", self.layers.len())))
    }

    /// Writes the keys and values `[T, G, D]` of the step's tokens.
    pub(super) fn write(
        &mut self,
        id: CacheId,
        k: &Array,
        v: &Array,
        batch: &BatchMeta,
    ) -> Result<(), Mismatch> {
        let i = self.layer(id)?;
        let layer = &mut self.layers[i];
        let n = layer.num_kv_heads * layer.head_dim;
        let want = batch.tokens.len() * n;
        if k.data.len() != want || v.data.len() != want {
            return Err((
                format!("{:?} and {:?}", k.dims, v.dims),
                format!("{want} numbers each"),
            ));
        }
        for (s, seq) in batch.seqs.iter().enumerate() {
            for row in seq.first_row as usize..(seq.first_row + seq.rows) as usize {
                let at = layer.locate(batch, s, batch.positions[row] as usize);
                layer.k[at..at + n].copy_from_slice(&k.data[row * n..(row + 1) * n]);
                layer.v[at..at + n].copy_from_slice(&v.data[row * n..(row + 1) * n]);
            }
        }
        Ok(())
    }

    /// Causal attention of the step's queries `[T, N, D]` over the cache: per head, softmax of scaled (and capped)
    /// scores over the positions it sees, then the weighted sum of values.
    pub(super) fn attend(
        &self,
        id: CacheId,
        q: &Array,
        spec: &AttnSpec,
        batch: &BatchMeta,
    ) -> Result<Array, Mismatch> {
        let layer = &self.layers[self.layer(id)?];
        let (heads, dim) = (spec.num_heads, spec.head_dim);
        let same = (layer.num_kv_heads, layer.head_dim) == (spec.num_kv_heads, dim);
        if !same || q.data.len() != batch.tokens.len() * heads * dim {
            let found = format!(
                "{:?}, cache of {} heads of {}",
                q.dims, layer.num_kv_heads, layer.head_dim
            );
            let expected = format!(
                "[{}, {heads}, {dim}], cache of {} heads of {dim}",
                batch.tokens.len(),
                spec.num_kv_heads
            );
            return Err((found, expected));
        }
        let mut out = Array {
            dims: q.dims.clone(),
            data: vec![0.0; q.data.len()],
        };
        for (s, seq) in batch.seqs.iter().enumerate() {
            for row in seq.first_row as usize..(seq.first_row + seq.rows) as usize {
                let last = batch.positions[row] as usize;
                let first = spec
                    .sliding_window
                    .map_or(0, |w| (last + 1).saturating_sub(w as usize));
                for head in 0..heads {
                    let at = (row * heads + head) * dim;
                    let seen = (first..=last)
                        .map(|p| layer.token(batch, s, p, head / (heads / spec.num_kv_heads)))
                        .collect::<Vec<_>>();
                    attend_one(spec, &q.data[at..at + dim], &seen, &mut out.data[at..at + dim]);
                }
            }
        }
        Ok(out)
    }
}

fn attend_one(spec: &AttnSpec, q: &[f32], seen: &[(&[f32], &[f32])], out: &mut [f32]) {
    let scale = f64::from(spec.scale);
    let mut scores: Vec<f64> = seen
        .iter()
        .map(|(k, _)| {
            let score = dot(q, k) * scale;
            spec.softcap
                .map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh())
        })
        .collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - top).exp());
    let total: f64 = scores.iter().sum();
    let mut sums = vec![0.0f64; out.len()];
    for (weight, (_, v)) in scores.iter().zip(seen) {
        sums.iter_mut()
            .zip(*v)
            .for_each(|(sum, v)| *sum += weight / total * f64::from(*v));
    }
    out.iter_mut().zip(sums).for_each(|(o, s)| *o = s as f32);
}
