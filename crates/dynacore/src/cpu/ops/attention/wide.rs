//! Attention of many lines of a sequence from tiles; see [`crate::cpu::kernels::amx::attention`].

use super::{Layer, Lines};
use crate::cpu::kernels::ROWS;
use crate::cpu::kernels::amx::attention::{BLOCK, LARGEST, Scoring, TOKENS, Wide};
use crate::cpu::kernels::generic::attention::CHUNK;
use crate::cpu::storage::CpuCache;
use crate::cpu::table::KernelTable;

/// A worker's own memory.
pub(super) struct Memory {
    tiles: Wide,
    /// Rows of the cache, of queries or of results, `[32][stride]`.
    rows: Vec<f32>,
    /// `start..end` of each line.
    seen: Vec<[i32; 2]>,
}

impl Memory {
    /// If the table has tiles.
    pub(super) fn of(table: &KernelTable) -> Option<Memory> {
        Wide::of(table).map(|tiles| Memory {
            tiles,
            rows: Vec::new(),
            seen: Vec::new(),
        })
    }
}

/// Takes a group's values. Tokens whose values are not finite, a bit each, are taken as zeros: with a weight of zero they
/// would spoil lines that do not see them. Keys that are no numbers spoil those that do.
fn take_values(tiles: &mut Wide, group: usize, stride: usize, rows: &mut [f32]) -> u32 {
    let mut broken = 0;
    if !tiles.values(group, rows) {
        for (token, row) in rows.chunks_exact_mut(stride).enumerate() {
            if !row.iter().all(|v| v.abs() <= LARGEST) {
                broken |= 1 << token;
                row.fill(0.0);
            }
        }
        tiles.values(group, rows);
    }
    broken
}

/// Tokens of a piece that lies in one block of the cache, and at the same place in every group of [`TOKENS`].
const PIECE: usize = 16;

impl Layer<'_> {
    /// All chunks of an item.
    pub(super) fn attend_wide(&self, cache: &CpuCache, q: usize, lines: &Lines<'_>, memory: &mut Memory) {
        let Memory { tiles, rows, seen } = memory;
        let stride = self.spec.head_dim.next_multiple_of(TOKENS);
        let count = lines.heads * lines.tile.rows.len();
        let scoring = Scoring {
            scale: self.spec.scale,
            softcap: self.spec.softcap,
        };
        rows.clear();
        rows.resize(TOKENS * stride, 0.0);
        tiles.begin(count, stride);
        for tile in 0..count.next_multiple_of(BLOCK) / ROWS {
            let rows = &mut rows[..ROWS * stride];
            self.load_lines(lines, q, tile * ROWS..count, stride, rows);
            tiles.queries(tile, rows, &scoring);
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
                let broken = take_values(tiles, group, stride, rows);
                self.load_tokens(cache, lines, chunk, group, low..high, 0, stride, rows);
                for (token, row) in rows.chunks_exact_mut(stride).enumerate() {
                    if broken >> token & 1 == 1 {
                        row.fill(f32::NAN);
                    }
                }
                tiles.keys(group, rows);
            }
            tiles.chunk(seen, &scoring);
        }
        for tile in 0..count.div_ceil(ROWS) {
            let rows = &mut rows[..ROWS * stride];
            tiles.finish(tile, rows);
            let lines_of = tile * ROWS..count.min((tile + 1) * ROWS);
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
