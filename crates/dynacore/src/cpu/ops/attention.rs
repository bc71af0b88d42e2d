//! Attention over the paged cache: how a step splits into work items, and what an item does.
//!
//! An item is (sequence, key/value head, a tile of rows, a run of chunks); its *lines* are the query heads of the
//! group times the tile's rows, so that keys and values are read once for all of them. A line's parts of the softmax
//! are made chunk by chunk (see [`crate::cpu::kernels::generic::attention`]) and merged in the order of the chunks.
//! A tile of rows that is a large part of the step (one user, or one long context among short ones) is split: its chunks
//! become items of their own, their parts go to memory, and a second phase merges them in that same order. The split changes
//! who computes, never what.
//!
//! Where the mode allows it, rows of a sequence that make up [`Many::from`] lines or more go to [`wide`], which takes many
//! lines together, from tiles of the matrix unit or from vectors, does all chunks of an item and is never split.
//!
//! Cost follows each sequence's own length (or window); neither pool size nor other sequences enter.

mod wide;

use std::ops::Range;

use dynair::{AttnSpec, BatchMeta};

use crate::cpu::isa::Isa;
use crate::cpu::kernels::generic::attention::{CHUNK, Chunk, ChunkOut, MAX_LINES, Segment, TOKEN_STEP};
use crate::cpu::kernels::ops::OpTable;
use crate::cpu::pool::shared::SharedMem;
use crate::cpu::program::AttnClass;
use crate::cpu::storage::CpuCache;
use crate::cpu::table::KernelTable;

/// A tile that costs more than this part of a worker's share of the step is split.
const ITEMS_PER_WORKER: usize = 4;

/// Most lines of a wide item: what is done to keys and values once is spread over them, and queries
/// and sums stay in the second-level cache.
const WIDE_LINES: usize = 256;

/// Least, where there are more: a block.
const WIDE_LEAST: usize = 32;

/// What a line costs in a chunk. Like the other costs it moves work between workers and changes no result.
const LINE_COST: usize = 8;

/// What reading the keys and values of a chunk costs.
const READ_COST: usize = 4 * LINE_COST;

/// How the kernels of many lines of a table compare with those of few.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Many {
    /// From this many lines of a sequence on they are used.
    from: usize,
    /// What a line costs, see [`LINE_COST`].
    cost: usize,
}

impl Many {
    /// `step_profile`, SmolLM2's shape at a context of 512: 18 lines take 0.7 of the time of few lines' kernels, 24 half, 33
    /// (which fill one block and a bit of the next) 0.8, 66 half. Fewer were not measured.
    #[cfg(target_arch = "x86_64")]
    const TILES: Many = Many { from: 16, cost: 2 };

    /// Kernels alone over 1,024 tokens, AMD Zen 4, time in those of few lines', AVX-512 and f16: with heads of 64, 128 and
    /// 256 elements 16 lines 0.74, 0.93, 1.07, 17 lines 1.16, 1.47, 1.62 (two vectors), 24 lines 0.80, 0.99, 1.13, 32 lines
    /// 0.63, 0.80, 0.90, 33 lines 0.86, 1.09, 1.20, 40 lines 0.67, 0.87, 0.98, 256 lines 0.58, 0.66, 0.75. Other sets and
    /// caches are alike.
    const VECTORS: Many = Many { from: 32, cost: 5 };

    /// Of a table; none: the kernels of few lines are for all.
    pub(crate) fn of(table: &KernelTable) -> Option<Many> {
        #[cfg(target_arch = "x86_64")]
        if table.tiles.is_some() {
            return Some(Many::TILES);
        }
        (table.isa != Isa::Portable).then_some(Many::VECTORS)
    }
}

/// Rows of one sequence that are computed together.
#[derive(Debug, Clone, PartialEq)]
struct Tile {
    seq: usize,
    /// Rows of the step.
    rows: Range<usize>,
    /// Position of the first row.
    position: usize,
    /// Chunks any row sees.
    chunks: Range<usize>,
    /// Where its parts lie, if it is split: the first element of its first (head, chunk) slot.
    parts: Option<usize>,
    /// Whether it goes to the kernels of many lines; it is never split then.
    wide: Option<Many>,
}

impl Tile {
    /// What a chunk of it costs, with `heads` query heads.
    fn chunk_cost(&self, heads: usize) -> usize {
        let line = self.wide.map_or(LINE_COST, |many| many.cost);
        READ_COST + self.rows.len() * heads * line
    }
}

/// The work items of one attention class in one step.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Items {
    tiles: Vec<Tile>,
    /// (tile, chunks), each to be done for every head part.
    work: Vec<(usize, Range<usize>)>,
    /// Tiles that are split.
    split: Vec<usize>,
    /// Elements of memory for parts.
    pub(crate) part_elements: usize,
    /// Key/value heads times parts of a group.
    head_parts: usize,
    shape: Shape,
}

/// How the heads of a class form lines.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Shape {
    /// Query heads per key/value head.
    group: usize,
    /// Query heads of a group taken together.
    part: usize,
    /// Parts of a group.
    parts: usize,
    /// Elements of a line, head size rounded up to 16.
    stride: usize,
}

impl Shape {
    fn of(class: &AttnClass) -> Shape {
        let group = class.num_heads / class.num_kv_heads;
        let parts = group.div_ceil(MAX_LINES);
        Shape {
            group,
            part: group.div_ceil(parts),
            parts,
            stride: class.head_dim.next_multiple_of(16),
        }
    }

    /// Elements of the parts of one (head part, chunk): per line m, l and acc.
    fn slot(&self) -> usize {
        MAX_LINES * (2 + self.stride)
    }
}

impl Items {
    /// The items of a step; `many`: the kernels of many lines, if they may be used.
    pub(crate) fn new(class: &AttnClass, batch: &BatchMeta, workers: usize, many: Option<Many>) -> Items {
        let shape = Shape::of(class);
        let head_parts = class.num_kv_heads * shape.parts;
        let wide = |rows: usize| many.filter(|many| rows * shape.part >= many.from);
        let rows = batch.seqs.iter().map(|s| s.rows as usize);
        let wide_rows = rows.filter(|rows| wide(*rows).is_some());
        let wide_lines =
            wide_rows.sum::<usize>() * class.num_kv_heads * shape.group / (ITEMS_PER_WORKER * workers);
        let wide_lines = (wide_lines / WIDE_LEAST * WIDE_LEAST).clamp(WIDE_LEAST, WIDE_LINES);
        let mut tiles = Vec::new();
        for (seq, span) in batch.seqs.iter().enumerate() {
            let (first, end) = (span.first_row as usize, (span.first_row + span.rows) as usize);
            let wide = wide(end - first);
            let lines = wide.map_or(MAX_LINES, |_| wide_lines);
            let tile_rows = (lines / shape.part).max(1);
            for start in (first..end).step_by(tile_rows) {
                let rows = start..end.min(start + tile_rows);
                let position = batch.positions[start] as usize;
                let low = class
                    .window
                    .map_or(0, |w| (position + 1).saturating_sub(w as usize));
                let chunks = low / CHUNK..(position + rows.len()).div_ceil(CHUNK);
                tiles.push(Tile {
                    seq,
                    rows,
                    position,
                    chunks,
                    parts: None,
                    wide,
                });
            }
        }
        let cost = |tile: &Tile| tile.chunk_cost(shape.part);
        let all: usize = tiles.iter().map(|t| t.chunks.len() * cost(t)).sum();
        let most = all * head_parts / (ITEMS_PER_WORKER * workers);
        let (mut work, mut split, mut part_elements) = (Vec::new(), Vec::new(), 0);
        for (i, tile) in tiles.iter_mut().enumerate() {
            let chunks = tile.chunks.clone();
            let whole = workers == 1 || tile.wide.is_some() || chunks.len() == 1;
            if whole || chunks.len() * cost(tile) <= most {
                work.push((i, chunks));
                continue;
            }
            tile.parts = Some(part_elements);
            part_elements += head_parts * chunks.len() * shape.slot();
            split.push(i);
            work.extend(chunks.map(|c| (i, c..c + 1)));
        }
        // Long items first, so that the last ones to be taken are short.
        work.sort_by_key(|(tile, chunks)| std::cmp::Reverse(chunks.len() * cost(&tiles[*tile])));
        Items {
            tiles,
            work,
            split,
            part_elements,
            head_parts,
            shape,
        }
    }

    /// Items of the first phase.
    pub(crate) fn count(&self) -> usize {
        self.work.len() * self.head_parts
    }

    /// Items of the merging phase; 0 if there is nothing to merge.
    pub(crate) fn merge_count(&self) -> usize {
        self.split.len() * self.head_parts
    }
}

/// A worker's own memory.
pub(crate) struct Scratch {
    q: Vec<f32>,
    scores: Vec<f32>,
    rows: Vec<f32>,
    part: Parts,
    total: Parts,
    wide: Option<wide::Memory>,
}

/// m, l and acc of up to [`MAX_LINES`] lines.
struct Parts {
    max: [f32; MAX_LINES],
    sum: [f32; MAX_LINES],
    acc: Vec<f32>,
}

impl Parts {
    fn new(stride: usize) -> Parts {
        Parts {
            max: [0.0; MAX_LINES],
            sum: [0.0; MAX_LINES],
            acc: vec![0.0; MAX_LINES * stride],
        }
    }
}

impl Scratch {
    /// For heads of up to `head_dim` elements and blocks of `block_tokens`, under a table.
    pub(crate) fn new(head_dim: usize, block_tokens: usize, table: &KernelTable) -> Scratch {
        let stride = head_dim.next_multiple_of(16);
        Scratch {
            q: vec![0.0; MAX_LINES * stride],
            scores: vec![0.0; MAX_LINES * CHUNK],
            rows: vec![0.0; block_tokens.min(CHUNK) * stride],
            part: Parts::new(stride),
            total: Parts::new(stride),
            wide: wide::Memory::of(table),
        }
    }
}

/// What the items of a phase share.
pub(crate) struct Layer<'a> {
    pub(crate) table: &'static OpTable,
    pub(crate) spec: &'a AttnSpec,
    pub(crate) items: &'a Items,
    pub(crate) batch: &'a BatchMeta,
    pub(crate) arena: &'a SharedMem<f32>,
    /// Element of the arena where the result `[T, N, D]` begins.
    pub(crate) out: usize,
    /// Memory for parts of split tiles.
    pub(crate) parts: &'a SharedMem<f32>,
}

/// The lines of an item: tile, key/value head, first query head, query heads.
struct Lines<'a> {
    tile: &'a Tile,
    kv_head: usize,
    first_head: usize,
    heads: usize,
}

impl<'a> Layer<'a> {
    fn lines(&self, tile: usize, head_part: usize) -> Lines<'a> {
        let shape = &self.items.shape;
        let (kv_head, part) = (head_part / shape.parts, head_part % shape.parts);
        let first = part * shape.part;
        Lines {
            tile: &self.items.tiles[tile],
            kv_head,
            first_head: kv_head * shape.group + first,
            heads: shape.part.min(shape.group - first),
        }
    }

    /// Item `item` of the first phase. `q` is the element of the arena where the queries begin.
    pub(crate) fn attend(&self, cache: &CpuCache, q: usize, item: usize, scratch: &mut Scratch) {
        let shape = &self.items.shape;
        // One key/value head after another: a worker meets the same keys and values again while they are near.
        let (head_part, place) = (item / self.items.work.len(), item % self.items.work.len());
        let (tile, ref chunks) = self.items.work[place];
        let lines = self.lines(tile, head_part);
        if lines.tile.wide.is_some() {
            let memory = scratch.wide.as_mut();
            let memory = memory.expect("tiles of rows are wide only under a table with kernels for it");
            return self.attend_wide(cache, q, &lines, memory);
        }
        let count = lines.heads * lines.tile.rows.len();
        self.load_lines(&lines, q, 0..count, shape.stride, &mut scratch.q);
        scratch.total.sum = [0.0; MAX_LINES];
        for chunk in chunks.clone() {
            let seen = self.seen(&lines, chunk);
            self.chunk(cache, &lines, chunk, &seen[..count], scratch);
            let Scratch { part, total, .. } = scratch;
            if let Some(parts) = lines.tile.parts {
                let at = parts + self.slot(lines.tile, head_part, chunk);
                let memory = self.parts.write(at..at + shape.slot());
                let (numbers, acc) = memory.split_at_mut(2 * MAX_LINES);
                numbers[..MAX_LINES].copy_from_slice(&part.max);
                numbers[MAX_LINES..].copy_from_slice(&part.sum);
                acc[..count * shape.stride].copy_from_slice(&part.acc[..count * shape.stride]);
            } else {
                self.merge(count, &part.max, &part.sum, &part.acc, total);
            }
        }
        if lines.tile.parts.is_none() {
            self.finish(&lines, &scratch.total);
        }
    }

    /// Item `item` of the merging phase.
    pub(crate) fn merge_item(&self, item: usize, scratch: &mut Scratch) {
        let tile = self.items.split[item / self.items.head_parts];
        let lines = self.lines(tile, item % self.items.head_parts);
        let parts = lines.tile.parts.expect("a tile that is split has parts");
        let count = lines.heads * lines.tile.rows.len();
        scratch.total.sum = [0.0; MAX_LINES];
        for chunk in lines.tile.chunks.clone() {
            let at = parts + self.slot(lines.tile, item % self.items.head_parts, chunk);
            let memory = self.parts.read(at..at + self.items.shape.slot());
            let (max, rest) = memory.split_at(MAX_LINES);
            let (sum, acc) = rest.split_at(MAX_LINES);
            self.merge(count, max, sum, acc, &mut scratch.total);
        }
        self.finish(&lines, &scratch.total);
    }

    /// Where the parts of a head part and chunk lie among those of their tile.
    fn slot(&self, tile: &Tile, head_part: usize, chunk: usize) -> usize {
        let index = head_part * tile.chunks.len() + (chunk - tile.chunks.start);
        index * self.items.shape.slot()
    }

    /// Where a line's head begins among the queries, and among the results.
    fn element(&self, lines: &Lines<'_>, line: usize) -> usize {
        let row = lines.tile.rows.start + line / lines.heads;
        (row * self.spec.num_heads + lines.first_head + line % lines.heads) * self.spec.head_dim
    }

    /// Queries of some lines, as many as there is room for; zeros behind them.
    fn load_lines(&self, lines: &Lines<'_>, q: usize, which: Range<usize>, stride: usize, out: &mut [f32]) {
        let dim = self.spec.head_dim;
        out.fill(0.0);
        for (line, out) in which.zip(out.chunks_exact_mut(stride)) {
            let at = q + self.element(lines, line);
            out[..dim].copy_from_slice(self.arena.read(at..at + dim));
        }
    }

    /// Which tokens of `chunk` each line sees.
    fn seen(&self, lines: &Lines<'_>, chunk: usize) -> [(usize, usize); MAX_LINES] {
        let mut seen = [(0, 0); MAX_LINES];
        let count = lines.heads * lines.tile.rows.len();
        for (line, seen) in seen.iter_mut().enumerate().take(count) {
            *seen = self.seen_by(lines, chunk, line);
        }
        seen
    }

    /// Which tokens of `chunk` line `line` sees.
    fn seen_by(&self, lines: &Lines<'_>, chunk: usize, line: usize) -> (usize, usize) {
        let first = chunk * CHUNK;
        let position = lines.tile.position + line / lines.heads;
        let low = self
            .spec
            .sliding_window
            .map_or(0, |w| (position + 1).saturating_sub(w as usize));
        let end = (position + 1).min(first + CHUNK).saturating_sub(first);
        (low.saturating_sub(first).min(end), end)
    }

    fn chunk(
        &self,
        cache: &CpuCache,
        lines: &Lines<'_>,
        chunk: usize,
        seen: &[(usize, usize)],
        s: &mut Scratch,
    ) {
        let table = &self.batch.tables[cache.group];
        let blocks = &table.blocks[table.first[lines.tile.seq] as usize..];
        let start = table.start[lines.tile.seq] as usize;
        let visible = seen.iter().filter(|(from, to)| from < to);
        let low = visible.clone().map(|s| s.0).min().unwrap_or(0) / TOKEN_STEP * TOKEN_STEP;
        let high = visible
            .map(|s| s.1)
            .max()
            .unwrap_or(0)
            .next_multiple_of(TOKEN_STEP);
        // A chunk of 256 tokens meets at most 17 blocks of 16 or more.
        let mut segments = [Segment {
            first: 0,
            tokens: 0,
            k: &[],
            v: &[],
        }; CHUNK / 16 + 1];
        let (mut count, mut at) = (0, low);
        while at < high {
            let position = chunk * CHUNK + at;
            let slot = position % cache.block_tokens;
            let tokens = (cache.block_tokens - slot).min(high - at);
            let block = blocks[(position - start) / cache.block_tokens].0 as usize;
            let k = cache.key_at(block, lines.kv_head, slot);
            let v = k + cache.value_distance();
            let bytes = tokens * cache.row_bytes;
            segments[count] = Segment {
                first: at,
                tokens,
                k: cache.mem.read(k..k + bytes),
                v: cache.mem.read(v..v + bytes),
            };
            count += 1;
            at += tokens;
        }
        let work = Chunk {
            kind: cache.kind,
            head_dim: cache.head_dim,
            stride: self.items.shape.stride,
            scale: self.spec.scale,
            softcap: self.spec.softcap,
            q: &s.q,
            seen,
            segments: &segments[..count],
        };
        let out = &mut ChunkOut {
            scores: &mut s.scores,
            rows: &mut s.rows,
            max: &mut s.part.max,
            sum: &mut s.part.sum,
            acc: &mut s.part.acc,
        };
        self.table.attend(&work, out);
    }

    /// Adds the parts of one chunk to the totals of the chunks before it.
    fn merge(&self, lines: usize, max: &[f32], sum: &[f32], acc: &[f32], total: &mut Parts) {
        let stride = self.items.shape.stride;
        for line in 0..lines {
            if sum[line] == 0.0 && max[line] == f32::NEG_INFINITY {
                continue;
            }
            let acc = &acc[line * stride..(line + 1) * stride];
            let out = &mut total.acc[line * stride..(line + 1) * stride];
            if total.sum[line] == 0.0 {
                out.copy_from_slice(acc);
                (total.max[line], total.sum[line]) = (max[line], sum[line]);
                continue;
            }
            let top = if max[line] > total.max[line] {
                max[line]
            } else {
                total.max[line]
            };
            let (old, new) = ((total.max[line] - top).exp(), (max[line] - top).exp());
            self.table.blend(old, new, acc, out);
            total.sum[line] = total.sum[line] * old + sum[line] * new;
            total.max[line] = top;
        }
    }

    /// Divides by the sums and writes the lines' results.
    fn finish(&self, lines: &Lines<'_>, total: &Parts) {
        let (dim, stride) = (self.spec.head_dim, self.items.shape.stride);
        for (i, row) in lines.tile.rows.clone().enumerate() {
            let at = self.out + (row * self.spec.num_heads + lines.first_head) * dim;
            let out = self.arena.write(at..at + lines.heads * dim);
            for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                let line = i * lines.heads + h;
                self.table
                    .scale(1.0 / total.sum[line], &total.acc[line * stride..][..dim], out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynair::SeqSpan;

    /// Rows and tokens in all of each sequence.
    fn items(seqs: &[(u32, u32)], workers: usize, many: Option<Many>) -> Items {
        let class = AttnClass {
            num_heads: 9,
            num_kv_heads: 3,
            window: None,
            group: 0,
            head_dim: 64,
        };
        let mut batch = BatchMeta::default();
        for &(rows, context_len) in seqs {
            let first_row = batch.positions.len() as u32;
            batch.positions.extend(context_len - rows..context_len);
            batch.seqs.push(SeqSpan {
                first_row,
                rows,
                context_len,
            });
        }
        Items::new(&class, &batch, workers, many)
    }

    /// Every chunk of every tile is in one item, and parts of split tiles do not overlap.
    fn check(items: &Items) {
        let mut chunks: Vec<Vec<usize>> = vec![Vec::new(); items.tiles.len()];
        for (tile, run) in &items.work {
            chunks[*tile].extend(run.clone());
        }
        let mut parts = 0;
        for (i, (tile, mut found)) in items.tiles.iter().zip(chunks).enumerate() {
            found.sort_unstable();
            assert!(found.into_iter().eq(tile.chunks.clone()), "{tile:?}");
            assert_eq!(tile.parts.is_some(), items.split.contains(&i));
            if let Some(at) = tile.parts {
                assert_eq!(at, parts);
                parts += items.head_parts * tile.chunks.len() * items.shape.slot();
            }
        }
        assert_eq!(items.part_elements, parts);
    }

    #[test]
    fn a_step_of_long_and_short_sequences_leaves_no_worker_idle() {
        let steps: [&[(u32, u32)]; 5] = [
            &[(1, 8000)],
            &[(1, 8000), (1, 100), (1, 300)],
            &[(1, 16000), (64, 64)],
            &[(256, 256), (1, 2000), (1, 500), (1, 9000)],
            &[(512, 8192)],
        ];
        let all = steps
            .iter()
            .flat_map(|s| [1, 2, 3, 8].map(|workers| (s, workers)));
        let kinds = [None, Some(Many::VECTORS), Some(Many { from: 16, cost: 2 })];
        for ((seqs, workers), many) in all.flat_map(|case| kinds.map(|many| (case, many))) {
            let items = items(seqs, workers, many);
            check(&items);
            let cost = |(tile, chunks): &(usize, Range<usize>)| {
                chunks.len() * items.tiles[*tile].chunk_cost(items.shape.part)
            };
            // Whoever is free takes the next item.
            let mut busy = vec![0; workers];
            for _ in 0..items.head_parts {
                for work in &items.work {
                    *busy.iter_mut().min().expect("a worker") += cost(work);
                }
            }
            let (last, all) = (busy.iter().max().expect("a worker"), busy.iter().sum::<usize>());
            let idle = 1.0 - all as f64 / (last * workers) as f64;
            assert!(
                idle < 0.1,
                "{seqs:?}, {workers} workers, {many:?}: idle {idle:.2}"
            );
            assert!(workers > 1 || items.split.is_empty(), "one worker merges nothing");
        }
    }
}
