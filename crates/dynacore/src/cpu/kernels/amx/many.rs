//! More than 32 rows of activations: the weights of a chunk of K are expanded, then meet all rows of a block.
//!
//! ```text
//! for each chunk of K              so that a block's tiles of x for it stay in the second-level cache
//!     for each two row groups      32 outputs
//!         expand their weights
//!         for each 32 rows of x    2 x 2 accumulators of 16 x 16, in registers for the whole chunk
//! ```
//!
//! Both operands come from the second-level cache. A product takes 16 cycles; the core runs little ahead of it, so that
//! the loop loads the operands of the next products between those of this step. Two ways of loading give the same bits,
//! and [`Pace`] takes the faster one: cores were met that did products at a third of their usual rate for seconds at a
//! time, where asking for x ahead won 20 to 30 %; at the usual rate it lost 15 % (DD-012).

use std::arch::asm;
use std::ops::Range;
use std::time::Instant;

use super::{Buffers, Line, RowGroup, TILE, TILE_ROWS, TileArgs, grow, rows_bytes, scale, set};
use crate::cpu::kernels::{GROUP, LINE, ROWS};

/// Most groups of K of a chunk.
const CHUNK: usize = 48;

/// Groups that chunks are multiples of, whole blocks of every type.
const WHOLE: usize = 8;

/// Bytes of sums that wait for the next chunk together: with a block of activations, a second-level cache.
const SUM_BYTES: usize = 704 << 10;

/// Bytes of a chunk's activations that meet a panel before the next is expanded: about half a second-level cache.
const BLOCK_BYTES: usize = 800 << 10;

/// Products of x with a panel, in tiles of x, from which on a step of it is timed: the clock costs a hundredth of them.
const TIMED: usize = 256;

const _: () = assert!(
    CHUNK.is_multiple_of(WHOLE) && WHOLE * GROUP == 256,
    "the longest blocks are whole"
);

/// Groups of K of a chunk: chunks of about one length, none longer than [`CHUNK`].
fn chunk_groups(groups: usize) -> usize {
    let chunks = groups.div_ceil(CHUNK).max(1);
    groups.div_ceil(chunks).next_multiple_of(WHOLE)
}

/// Rows of activations, of `rows` in all, that meet a panel before the next is expanded: whole pairs of tiles.
pub(crate) fn block_rows(cols: usize, rows: usize) -> usize {
    let groups = cols / GROUP;
    let row_bytes = 2 * GROUP * chunk_groups(groups).min(groups).max(1);
    let most = BLOCK_BYTES / row_bytes / 32 * 32;
    // As few as can be, of about one length.
    rows.div_ceil(rows.div_ceil(most).max(1))
        .next_multiple_of(32)
        .max(32)
}

/// How operands are loaded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Past the nearest cache.
    Past,
    /// Through it, asked for a step ahead.
    Asked,
}

/// Which way was faster of late for this thread. One step of each panel that is worth it is timed; other steps take the
/// faster way. Times of panels of different lengths are compared with each other, which matters little.
pub(super) struct Pace {
    /// Seconds of a product by each way; 0 where it was not tried.
    seconds: [f32; 2],
    panels: usize,
}

impl Pace {
    /// Of so many timed steps one takes the slower way: the core's state changes.
    const TRY: usize = 5;

    pub(super) const fn new() -> Pace {
        Pace {
            seconds: [0.0; 2],
            panels: 0,
        }
    }

    /// The faster way.
    fn best(&self) -> Way {
        if self.seconds[Way::Asked as usize] < self.seconds[Way::Past as usize] {
            Way::Asked
        } else {
            Way::Past
        }
    }

    /// The way of the next timed step.
    fn next(&mut self) -> Way {
        self.panels = self.panels.wrapping_add(1);
        match (self.best(), self.panels.is_multiple_of(Pace::TRY)) {
            (Way::Past, true) | (Way::Asked, false) => Way::Asked,
            _ => Way::Past,
        }
    }

    /// A step has taken `seconds` a product.
    fn took(&mut self, way: Way, seconds: f32) {
        let known = &mut self.seconds[way as usize];
        *known = if *known == 0.0 || seconds < *known {
            seconds
        } else {
            // A step that was interrupted changes little.
            0.5 * (*known + seconds.min(1.1 * *known))
        };
    }
}

/// # Safety
/// As [`super::product`]; tiles are configured.
pub(super) unsafe fn many_rows<const W: usize>(
    args: &TileArgs<'_>,
    rows: usize,
    buffers: &mut Buffers,
    done: &mut impl FnMut(usize, usize, [&mut [[f32; ROWS]]; W]),
) {
    let groups = args.cols / GROUP;
    let chunk = chunk_groups(groups);
    // Sums wait for the next chunk; where there is none, a pair's are done with before the next pair's begin.
    let together = if chunk < groups {
        (SUM_BYTES / (rows * size_of::<Line>())).max(2) / 2 * 2
    } else {
        2
    };
    let Buffers { panel, sums, pace } = buffers;
    grow(panel, 2 * chunk.min(groups) * TILE / size_of::<Line>());
    grow(sums, together.min(args.weights.len().next_multiple_of(2)) * rows);
    let panel: *mut u8 = panel.as_mut_ptr().cast();
    for (block, weights) in args.weights.chunks(together).enumerate() {
        for first in (0..groups).step_by(chunk) {
            let range = first..groups.min(first + chunk);
            for (i, pair) in weights.chunks(2).enumerate() {
                let sums = Line::values(&mut sums[2 * i * rows..(2 * i + pair.len()) * rows]);
                if first == 0 {
                    sums.fill([0.0; ROWS]);
                }
                let number = block * together + 2 * i;
                let mut finish = |which: Range<usize>, sums: &mut [[f32; ROWS]]| {
                    if range.end < groups || which.is_empty() {
                        return;
                    }
                    let mut parts = sums.chunks_exact_mut(rows).zip(pair).map(|(sums, weight)| {
                        let sums = &mut sums[which.clone()];
                        // SAFETY: the caller promises the instruction set.
                        unsafe { scale(args, weight, which.start, sums) };
                        sums
                    });
                    for set_of_pair in 0..pair.len() / W {
                        done(number / W + set_of_pair, which.start, set(&mut parts));
                    }
                };
                // SAFETY: the caller promises the instruction set and the weights; tiles are configured, and the panel
                // has room; chunks are not empty and begin at multiples of WHOLE groups, with which blocks begin too.
                unsafe {
                    expand(pair, range.clone(), panel);
                    multiply(args, pair.len(), range.clone(), panel, sums, pace, &mut finish);
                }
            }
        }
    }
}

/// Expands groups of K of one or two row groups, one row group after the other.
///
/// # Safety
/// The CPU has the table's instruction set; the row groups are of their kernels' types and have those groups, of which the
/// first begins a block; `panel` has room for as many tiles as there are groups of K, for each row group.
unsafe fn expand(weights: &[RowGroup<'_>], range: Range<usize>, panel: *mut u8) {
    let count = range.len();
    for (i, weight) in weights.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let panel = panel.add(i * count * TILE);
            (weight.expand.panel)(weight.packed, range.start, count, weight.scales.weights, panel);
        };
    }
}

/// Adds the products of a panel of one or two row groups with all rows of x to the sums. `finish` takes the sums and the
/// rows whose are complete, after the products of the rows that follow, so that no one waits for tiles to be stored.
///
/// # Safety
/// As [`super::product`]; tiles are configured; the range is not empty; `panel` holds as many tiles as there are groups of
/// K, for each row group.
unsafe fn multiply(
    args: &TileArgs<'_>,
    row_groups: usize,
    range: Range<usize>,
    panel: *const u8,
    sums: &mut [[f32; ROWS]],
    pace: &mut Pace,
    finish: &mut impl FnMut(Range<usize>, &mut [[f32; ROWS]]),
) {
    let count = range.len();
    let rows_bytes = rows_bytes(args.cols);
    let tiles = args.x.len() / rows_bytes;
    assert_eq!(sums.len(), row_groups * tiles * TILE_ROWS, "a sum per output");
    let best = pace.best();
    let mut complete = 0..0;
    for tile in (0..tiles).step_by(2) {
        let whole = tile + 1 < tiles && row_groups == 2;
        // Not the first, whose panel has just been written.
        let timed = (whole && tile == 2 && tiles * count >= TIMED).then(|| (pace.next(), Instant::now()));
        let way = timed.map_or(best, |(way, _)| way);
        let at = |t: usize| t * rows_bytes + range.start * TILE;
        // SAFETY: tile `tile` (and the next, where there is one) of x holds the groups of the range; the panel holds as
        // many for each row group; the sums of a row group are `tiles` tiles.
        unsafe {
            let x = args.x.as_ptr().add(at(tile));
            let x2 = args.x.as_ptr().add(at((tile + 1).min(tiles - 1)));
            let sum = sums.as_mut_ptr().cast::<u8>().add(tile * TILE);
            match (tile + 1 < tiles, row_groups, way) {
                (true, 2, Way::Past) => two_by_two_past([x, x2], panel, count, sum, tiles * TILE),
                (true, 2, Way::Asked) => two_by_two_asked([x, x2], panel, count, sum, tiles * TILE),
                (false, 2, _) => one_by_two(x, panel, count, sum, tiles * TILE),
                (true, _, _) => {
                    one_by_one(x, panel, count, sum);
                    one_by_one(x2, panel, count, sum.add(TILE));
                }
                _ => one_by_one(x, panel, count, sum),
            }
        }
        if let Some((way, start)) = timed {
            pace.took(way, start.elapsed().as_secs_f32() / (4 * count) as f32);
        }
        finish(complete, sums);
        complete = tile * TILE_ROWS..(tile + 2).min(tiles) * TILE_ROWS;
    }
    finish(complete, sums);
}

/// Makes a function that adds x · panel for 32 rows of x and two row groups, of the instruction that loads operands and
/// what asks for those of the next step, as lines of assembly.
macro_rules! two_by_two {
    ($(#[$doc:meta])* $visible:vis $name:ident, $load:literal, $ask_x:literal, $ask_x2:literal) => {
        $(#[$doc])*
        /// One sum tile at `sum`, for the next rows [`TILE`] further, for the second row group `stride` further.
        ///
        /// # Safety
        /// Tiles are configured; `count >= 1` tiles at each `x`, twice as many at `panel` can be read; the sums can be
        /// read and written.
        #[inline]
        $visible unsafe fn $name(
            x: [*const u8; 2],
            panel: *const u8,
            count: usize,
            sum: *mut u8,
            stride: usize,
        ) {
            // Each operand is loaded as soon as its register is free; the last step loads none for a next.
            // SAFETY: the caller promises all memory, and what is asked for need not exist; every tile register is
            // declared.
            unsafe {
                asm!(
                    "tileloadd tmm0, [{s} + {line}*1]",
                    "tileloadd tmm1, [{s2} + {line}*1]",
                    "tileloadd tmm2, [{s} + {line}*1 + 1024]",
                    "tileloadd tmm3, [{s2} + {line}*1 + 1024]",
                    concat!($load, " tmm4, [{x} + {line}*1]"),
                    concat!($load, " tmm6, [{w} + {line}*1]"),
                    "dec {n}",
                    "jz 3f",
                    "2:",
                    concat!($load, " tmm7, [{w2} + {line}*1]"),
                    concat!($load, " tmm5, [{x2} + {line}*1]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    $ask_x,
                    "add {x}, 1024",
                    "add {w}, 1024",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    concat!($load, " tmm4, [{x} + {line}*1]"),
                    $ask_x2,
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    concat!($load, " tmm6, [{w} + {line}*1]"),
                    "add {x2}, 1024",
                    "add {w2}, 1024",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "dec {n}",
                    "jnz 2b",
                    "3:",
                    concat!($load, " tmm7, [{w2} + {line}*1]"),
                    concat!($load, " tmm5, [{x2} + {line}*1]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "tilestored [{s} + {line}*1], tmm0",
                    "tilestored [{s2} + {line}*1], tmm1",
                    "tilestored [{s} + {line}*1 + 1024], tmm2",
                    "tilestored [{s2} + {line}*1 + 1024], tmm3",
                    x = inout(reg) x[0] => _,
                    x2 = inout(reg) x[1] => _,
                    w = inout(reg) panel => _,
                    w2 = inout(reg) panel.add(count * TILE) => _,
                    n = inout(reg) count => _,
                    s = in(reg) sum,
                    s2 = in(reg) sum.add(stride),
                    line = in(reg) LINE,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

two_by_two!(
    /// Adds x · panel for 32 rows of x and two row groups, operands in the nearest caches.
    pub(super) two_by_two, "tileloadd", "", ""
);
two_by_two!(
    /// As [`two_by_two`], loading past the nearest cache.
    two_by_two_past, "tileloaddt1", "", ""
);
two_by_two!(
    /// As [`two_by_two`], asking for x of the next step.
    two_by_two_asked, "tileloadd",
    ".irp at, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960
     prefetcht0 [{x} + 2048 + \\at]
     .endr",
    ".irp at, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960
     prefetcht0 [{x2} + 1024 + \\at]
     .endr"
);

/// As [`two_by_two`] for 16 rows of x.
///
/// # Safety
/// As there.
#[inline]
unsafe fn one_by_two(x: *const u8, panel: *const u8, count: usize, sum: *mut u8, stride: usize) {
    // SAFETY: as there.
    unsafe {
        asm!(
            "tileloadd tmm0, [{s} + {line}*1]",
            "tileloadd tmm1, [{s2} + {line}*1]",
            "2:",
            "tileloadd tmm4, [{x} + {line}*1]",
            "tileloadd tmm6, [{w} + {line}*1]",
            "tileloadd tmm7, [{w2} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {x}, 1024",
            "add {w}, 1024",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {w2}, 1024",
            "dec {n}",
            "jnz 2b",
            "tilestored [{s} + {line}*1], tmm0",
            "tilestored [{s2} + {line}*1], tmm1",
            x = inout(reg) x => _,
            w = inout(reg) panel => _,
            w2 = inout(reg) panel.add(count * TILE) => _,
            n = inout(reg) count => _,
            s = in(reg) sum,
            s2 = in(reg) sum.add(stride),
            line = in(reg) LINE,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// As [`two_by_two`] for 16 rows of x and one row group.
///
/// # Safety
/// As there.
#[inline]
unsafe fn one_by_one(x: *const u8, panel: *const u8, count: usize, sum: *mut u8) {
    // SAFETY: as there.
    unsafe {
        asm!(
            "tileloadd tmm0, [{s} + {line}*1]",
            "2:",
            "tileloadd tmm4, [{x} + {line}*1]",
            "tileloadd tmm6, [{w} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {x}, 1024",
            "add {w}, 1024",
            "dec {n}",
            "jnz 2b",
            "tilestored [{s} + {line}*1], tmm0",
            x = inout(reg) x => _,
            w = inout(reg) panel => _,
            n = inout(reg) count => _,
            s = in(reg) sum,
            line = in(reg) LINE,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::{configure, permitted};
    use super::*;

    #[test]
    fn chunks_and_blocks_are_whole_and_of_about_one_length() {
        for groups in [1, 7, 18, 48, 49, 64, 96, 280, 1000] {
            let chunk = chunk_groups(groups);
            assert!(chunk.is_multiple_of(WHOLE) && chunk <= CHUNK, "{groups}: {chunk}");
            assert_eq!(
                groups.div_ceil(chunk),
                groups.div_ceil(CHUNK),
                "{groups}: no more chunks than needed"
            );
            for rows in [33, 64, 257, 512, 2000] {
                let block = block_rows(groups * GROUP, rows);
                let most = block_rows(groups * GROUP, usize::MAX / 64).min(rows);
                assert!(block.is_multiple_of(32), "{groups}, {rows}: {block}");
                assert!(
                    block * 2 * GROUP * chunk.min(groups) <= BLOCK_BYTES,
                    "{groups}, {rows}: {block}"
                );
                assert_eq!(
                    rows.div_ceil(block),
                    rows.div_ceil(most),
                    "{groups}, {rows}: {block}"
                );
            }
        }
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_tried_now_and_then() {
        let mut pace = Pace::new();
        let mut run = |past: f32, asked: f32, panels: usize| {
            (0..panels)
                .filter(|_| {
                    let way = pace.next();
                    pace.took(way, if way == Way::Past { past } else { asked });
                    way == Way::Asked
                })
                .count()
        };
        let tries = 40;
        let steps = tries * Pace::TRY;
        assert!(run(1.0, 1.2, steps) <= tries + 1, "past is faster");
        // What is slower is believed little by little.
        assert!(
            run(4.0, 3.0, steps) >= steps - tries - 20 * Pace::TRY,
            "the core has changed"
        );
        assert!(run(1.0, 1.2, steps) <= tries + 2 * Pace::TRY, "and changed back");
    }

    #[test]
    fn one_interrupted_panel_decides_little() {
        let mut pace = Pace::new();
        for _ in 0..2 * Pace::TRY {
            let way = pace.next();
            pace.took(way, if way == Way::Past { 1.0 } else { 1.2 });
        }
        assert!(
            pace.seconds.iter().all(|s| *s > 0.0),
            "both were tried: {:?}",
            pace.seconds
        );
        pace.took(Way::Past, 1000.0);
        assert!(pace.best() == Way::Past);
    }

    #[test]
    fn all_ways_add_every_product_once() {
        if !permitted() {
            eprintln!("skipped: this CPU or system has no tiles");
            return;
        }
        // bf16 values of few bits: every sum of them is exact.
        let value = |i: usize, at: usize| ((i * 37 + at * 11) % 13) as f32 - 6.0;
        for count in [1usize, 2, 5, 48] {
            let lines = TILE / size_of::<Line>();
            // Both rows of tiles, then both row groups.
            let mut data = vec![Line::ZERO; 4 * count * lines];
            let halves = {
                let all = data.len() * LINE / 2;
                // SAFETY: lines are plain memory, every value of which is valid.
                unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast::<u16>(), all) }
            };
            for (at, half) in halves.iter_mut().enumerate() {
                *half = (value(at / 512, at % 512).to_bits() >> 16) as u16;
            }
            // Element [row][k] of tile t of x; element [k][output] of tile t of the panel.
            let x = |t: usize, row: usize, k: usize| value(t, row * 32 + k);
            let w = |t: usize, k: usize, out: usize| value(2 * count + t, k / 2 * 32 + out * 2 + k % 2);
            let base: *const u8 = data.as_ptr().cast();
            for way in [two_by_two, two_by_two_past, two_by_two_asked] {
                let mut sums = vec![Line::ZERO; 4 * lines];
                // SAFETY: tiles are permitted; `count` tiles at each x, `2 * count` behind them, four tiles of sums.
                unsafe {
                    configure();
                    let x = [base, base.add(count * TILE)];
                    way(
                        x,
                        base.add(2 * count * TILE),
                        count,
                        sums.as_mut_ptr().cast(),
                        2 * TILE,
                    );
                    asm!("tilerelease", options(nomem, nostack, preserves_flags));
                }
                for (at, sums) in Line::values(&mut sums).iter().enumerate() {
                    let (group, tile, row) = (at / 32, at / 16 % 2, at % 16);
                    for (out, sum) in sums.iter().enumerate() {
                        let want: f32 = (0..count * 32)
                            .map(|k| {
                                x(tile * count + k / 32, row, k % 32) * w(group * count + k / 32, k % 32, out)
                            })
                            .sum();
                        assert_eq!(
                            *sum, want,
                            "{count} tiles, row {row} of tile {tile}, output {out}"
                        );
                    }
                }
            }
        }
    }
}
