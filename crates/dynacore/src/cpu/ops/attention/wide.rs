//! Attention of many lines of a sequence, from vectors ([`crate::cpu::kernels::generic::wide`]) or tiles of the matrix
//! unit.

use super::{Layer, Lines};
#[cfg(target_arch = "x86_64")]
use crate::cpu::kernels::amx::attention::OnTiles;
use crate::cpu::kernels::generic::attention::CHUNK;
use crate::cpu::kernels::generic::wide::{BLOCK, PANEL, Panels, Scoring, TILE, TOKENS, Wide};
use crate::cpu::kernels::ops::OpTable;
use crate::cpu::storage::CpuCache;
use crate::cpu::table::KernelTable;

/// A worker's own memory.
pub(super) struct Memory {
    kernels: Box<dyn Wide>,
    /// Rows of the cache, of queries or of results, `[TOKENS][stride]`.
    rows: Vec<f32>,
    /// `start..end` of each line.
    seen: Vec<[i32; 2]>,
}

impl Memory {
    /// For the kernels of a table, if it has any for many lines.
    pub(super) fn of(table: &KernelTable) -> Option<Memory> {
        Some(Memory {
            kernels: kernels(table)?,
            rows: Vec::new(),
            seen: Vec::new(),
        })
    }
}

/// A table's kernels of many lines.
fn kernels(table: &KernelTable) -> Option<Box<dyn Wide>> {
    #[cfg(target_arch = "x86_64")]
    if let Some(tiles) = OnTiles::of(table) {
        return Some(Box::new(tiles));
    }
    super::Many::of(table)?;
    Some(Box::new(OnVectors {
        table: OpTable::of(table.isa)?,
        panels: Panels::default(),
    }))
}

/// The kernels of vectors.
struct OnVectors {
    table: &'static OpTable,
    panels: Panels,
}

impl Wide for OnVectors {
    fn deep(&self) -> usize {
        PANEL
    }

    fn largest(&self) -> f32 {
        f32::MAX
    }

    fn begin(&mut self, lines: usize, stride: usize) {
        self.panels.begin(lines, stride);
    }

    fn queries(&mut self, tile: usize, rows: &[f32], scoring: &Scoring) {
        self.table.wide_queries(&mut self.panels, tile, rows, scoring);
    }

    fn keys(&mut self, group: usize, rows: &[f32]) {
        self.table.wide_keys(&mut self.panels, group, rows);
    }

    fn values(&mut self, group: usize, rows: &[f32]) -> bool {
        self.table.wide_values(&mut self.panels, group, rows);
        self.panels.finite()
    }

    fn chunk(&mut self, seen: &[[i32; 2]], scoring: &Scoring) {
        self.table.wide_chunk(&mut self.panels, seen, scoring);
    }

    fn finish(&mut self, tile: usize, rows: &mut [f32]) {
        self.table.wide_finish(&mut self.panels, tile, rows);
    }
}

/// Takes a group's values. Tokens whose values are not finite, a bit each, are taken as zeros: with a weight of zero they
/// would spoil lines that do not see them. Keys that are no numbers spoil those that do.
fn take_values(kernels: &mut dyn Wide, group: usize, stride: usize, rows: &mut [f32]) -> u32 {
    let mut broken = 0;
    if !kernels.values(group, rows) {
        for (token, row) in rows.chunks_exact_mut(stride).enumerate() {
            if !row.iter().all(|v| v.abs() <= kernels.largest()) {
                broken |= 1 << token;
                row.fill(0.0);
            }
        }
        kernels.values(group, rows);
    }
    broken
}

/// Tokens of a piece that lies in one block of the cache, and at the same place in every group of [`TOKENS`].
const PIECE: usize = 16;

impl Layer<'_> {
    /// All chunks of an item.
    pub(super) fn attend_wide(&self, cache: &CpuCache, q: usize, lines: &Lines<'_>, memory: &mut Memory) {
        let Memory { kernels, rows, seen } = memory;
        let kernels = kernels.as_mut();
        let stride = self.spec.head_dim.next_multiple_of(kernels.deep());
        let count = lines.heads * lines.tile.rows.len();
        let scoring = Scoring {
            scale: self.spec.scale,
            softcap: self.spec.softcap,
        };
        rows.clear();
        rows.resize(TOKENS * stride, 0.0);
        kernels.begin(count, stride);
        for tile in 0..count.next_multiple_of(BLOCK) / TILE {
            let rows = &mut rows[..TILE * stride];
            self.load_lines(lines, q, tile * TILE..count, stride, rows);
            kernels.queries(tile, rows, &scoring);
        }
        for chunk in lines.tile.chunks.clone() {
            seen.clear();
            seen.extend((0..count).map(|line| {
                let (start, end) = self.seen_by(lines, chunk, line);
                [start as i32, end as i32]
            }));
            let visible = seen.iter().filter(|[start, end]| start < end);
            let low = visible.clone().map(|s| s[0]).min().unwrap_or(0) as usize;
            let high = visible.map(|s| s[1]).max().unwrap_or(0) as usize;
            seen.resize(count.next_multiple_of(BLOCK), [0, 0]);
            for group in low / TOKENS..high.div_ceil(TOKENS) {
                self.load_tokens(
                    cache,
                    lines,
                    chunk,
                    group,
                    low..high,
                    cache.value_distance(),
                    stride,
                    rows,
                );
                let broken = take_values(kernels, group, stride, rows);
                self.load_tokens(cache, lines, chunk, group, low..high, 0, stride, rows);
                for (token, row) in rows.chunks_exact_mut(stride).enumerate() {
                    if broken >> token & 1 == 1 {
                        row.fill(f32::NAN);
                    }
                }
                kernels.keys(group, rows);
            }
            kernels.chunk(seen, &scoring);
        }
        for tile in 0..count.div_ceil(TILE) {
            let rows = &mut rows[..TILE * stride];
            kernels.finish(tile, rows);
            let lines_of = tile * TILE..count.min((tile + 1) * TILE);
            for (line, row) in lines_of.zip(rows.chunks_exact(stride)) {
                let at = self.out + self.element(lines, line);
                let out = self.arena.write(at..at + self.spec.head_dim);
                out.copy_from_slice(&row[..self.spec.head_dim]);
            }
        }
    }

    /// Keys (values lie `distance` further) of the tokens of a group that are in `seen`; zeros for others, whose memory
    /// may hold anything.
    #[expect(clippy::too_many_arguments, reason = "names a group of tokens of a cache")]
    fn load_tokens(
        &self,
        cache: &CpuCache,
        lines: &Lines<'_>,
        chunk: usize,
        group: usize,
        seen: std::ops::Range<usize>,
        distance: usize,
        stride: usize,
        out: &mut [f32],
    ) {
        let table = &self.batch.tables[cache.group];
        let blocks = &table.blocks[table.first[lines.tile.seq] as usize..];
        let start = table.start[lines.tile.seq] as usize;
        let first = group * TOKENS;
        if first < seen.start || seen.end < first + TOKENS {
            out.fill(0.0);
        }
        for piece in (first..first + TOKENS).step_by(PIECE) {
            let (from, to) = (piece.max(seen.start), (piece + PIECE).min(seen.end));
            if from >= to {
                continue;
            }
            let position = chunk * CHUNK + from;
            let block = blocks[(position - start) / cache.block_tokens].0 as usize;
            let at = cache.key_at(block, lines.kv_head, position % cache.block_tokens) + distance;
            let bytes = cache.mem.read(at..at + (to - from) * cache.row_bytes);
            let out = &mut out[(from - first) * stride..];
            self.table
                .load_rows(cache.kind, bytes, self.spec.head_dim, stride, out);
        }
    }
}
