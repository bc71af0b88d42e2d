//! Products with quantised weights, in integers per group of 32 and f32 over the groups.
//!
//! **Few rows** ([`gemv`]): codes are expanded in registers, straight from the stream of packed lines, which is asked
//! for [`AHEAD`] bytes before its use. **Many rows** ([`expand`], [`tile`]): a chunk of K of the row group becomes a
//! *panel* of signed 16-bit codes (with the integer scales of sub-blocks multiplied in) and f32 factors in the
//! first-level cache, and one micro-kernel for all types multiplies it with tiles of rows. Both compute the same
//! integers and the same f32 operations in the same order.
//!
//! # What is reached
//!
//! AMD Zen 3 at 3.2 GHz (2 cores, AVX2), matrices `[4096, 2048]`, best of many samples on a busy machine, `cargo run
//! --release -p dynacore --example bench_linear`. GB/s of packed weights, in brackets the share of a streaming read by
//! as many threads; the peak of `vpmaddwd` is 104 G multiply-adds a second and core.
//!
//! | type | 1 row, 1 thread | 1 row, 2 threads | 4 rows, 2 threads | 512 rows, 2 threads |
//! |---|---|---|---|---|
//! | Q4_0 | 19.5 (114 %) | 38.0 (123 %) | 14.7 | 120 GMAC/s, 58 % of the peak |
//! | Q4_1 | 20.5 (122 %) | 37.8 (134 %) | 18.0 | 116, 56 % |
//! | Q4_K | 16.5 (94 %) | 27.6 (92 %) | 14.4 | 117, 56 % |
//! | Q6_K | 16.1 (91 %) | 31.3 (104 %) | 15.0 | 110, 53 % |
//! | Q8_0 | 18.9 (126 %) | 36.2 (106 %) | 28.6 (86 %) | 114, 55 % |
//!
//! The types whose codes index a table, beside those without a table that are nearest to them: Intel Xeon at 2 cores
//! (AVX-512; AVX2 in brackets), same method, the best of two to four runs on a busy machine. A streaming read by one thread
//! is 9 to 10 GB/s here, by two 18 to 21.
//!
//! | type | 1 row, 1 thread | 1 row, 2 threads | 4 rows, 2 threads | 512 rows, 2 threads, GMAC/s |
//! |---|---|---|---|---|
//! | Q4_0 | 14.4 (13.9) | 27.1 (27.1) | 18.0 (13.1) | 135 (109) |
//! | IQ4_NL | 15.2 (13.4) | 29.7 (25.8) | 17.6 (12.5) | 136 (109) |
//! | MXFP4 | 14.4 (12.2) | 28.8 (23.5) | 16.1 (11.3) | 136 (109) |
//! | Q4_K | 13.4 (11.7) | 26.6 (23.5) | 16.0 (11.9) | 151 (104) |
//! | IQ4_XS | 14.0 (12.1) | 27.9 (23.2) | 15.5 (10.9) | 158 (109) |
//!
//! A scale of MXFP4 so small that products with it are subnormal costs ten times as much; no model has such scales.
//!
//! From one thread on the Zen 3: Q5_0 16.5, Q5_K 14.8, Q2_K 9.2, Q3_K 7.5 GB/s at one row; F32 and F16 in [`super::float`] stream at
//! full speed up to 5 rows. (Above 100 %: the plain sum they are compared with does not prefetch by software.) A
//! register-only loop of `vpmaddwd` and `vpaddd` reaches 80 % of the peak here.
//!
//! # What was tried and lost
//!
//! - A runtime choice of shift direction inside the loop over groups: unswitched loops with arrays in memory, Q4_K at one
//!   row 10 instead of 16 GB/s.
//! - One vector of rows after the other within a group: the broadcasts of x are kept for the second and spilled, a
//!   third of the speed at 2 to 4 rows.
//! - Intrinsics for product and sum: see `dot` of the AVX2 vector.
//! - Six-bit codes unpacked pair by pair (12 instructions for 4 codes) instead of in bytes (8): Q6_K 12 instead of
//!   16 GB/s.
//! - Four pairs instead of two in the body of the tile's inner loop: no difference (60 of 104 GMAC/s from one thread).
//! - Panels of 16 groups: as fast at 2048 columns, but with the records of a tile they fill the first-level cache.

use std::mem::MaybeUninit;

use super::types::{Factors, QuantFormat};
use super::{Lanes, Pairs, split, with_rows};
use crate::cpu::kernels::{
    AT_CODE_SUM, AT_HALF_CODE_SUMS, AT_HALF_SUMS, AT_SCALE, AT_SUM, GROUP, GroupArgs, LINE, RECORD, ROWS,
};

/// How far ahead of its use a line is asked for.
const AHEAD: usize = 4096;

/// Rows that [`gemv`] takes at once.
const FEW: usize = 4;

/// From this many rows on, a panel is made. Measured with `bench_linear`: passes of up to [`FEW`] rows win up to 8 rows,
/// except for types with halves, whose integer scales cost a multiplication for every row.
const fn many<T: QuantFormat>() -> usize {
    if T::HALVES { 4 } else { 9 }
}

/// Groups of 32 that a panel holds: with the records of a tile it must leave room in 32 KiB of first-level cache.
const PANEL: usize = 8;

/// Lines of codes of a group in a panel.
const CODE_LINES: usize = GROUP / 2;

/// Bytes of a group in a panel: codes, D and up to two M.
const PANEL_GROUP: usize = (CODE_LINES + 3) * LINE;

#[repr(align(64))]
struct Panel(MaybeUninit<[u8; PANEL * PANEL_GROUP]>);

/// A row group and the first of [`Pairs::gemv`]'s rows.
pub(crate) struct Gemv {
    pub(super) weight: *const u8,
    pub(super) blocks: usize,
    pub(super) records: *const u8,
    /// Bytes from one row's records to the next.
    pub(super) stride: usize,
}

/// Groups `first..first + count` of 32 of a row group.
pub(crate) struct Expand {
    pub(super) weight: *const u8,
    pub(super) first: usize,
    pub(super) count: usize,
}

/// A panel of `count` groups and the first of a tile's rows.
pub(crate) struct Tile {
    pub(super) panel: *const u8,
    pub(super) count: usize,
    pub(super) records: *const u8,
    /// Bytes from one row's records to the next.
    pub(super) stride: usize,
}

/// See [`crate::cpu::kernels::GroupFn`].
///
/// # Safety
/// As there.
pub(crate) unsafe fn group<L: Pairs, T: QuantFormat>(args: &GroupArgs<'_>, acc: &mut [[f32; ROWS]]) {
    const { assert!(2 * L::WIDTH == ROWS, "a row group is two vectors") };
    // SAFETY: the caller promises the instruction set.
    let l = unsafe { L::new() };
    let groups = args.cols / GROUP;
    let stride = groups * RECORD;
    assert!(
        args.cols.is_multiple_of(T::GEOMETRY.block)
            && args.weight.len() >= T::GEOMETRY.group_bytes(args.cols)
            && args.records.len() >= acc.len() * stride,
        "whole rows of whole blocks"
    );
    let (weight, records) = (args.weight.as_ptr(), args.records.as_ptr());
    if acc.len() < many::<T>() {
        for (first, rows) in split(acc.len(), FEW) {
            let out = acc[first..first + rows].as_mut_ptr().cast::<f32>();
            // SAFETY: the lengths were checked above; row `first` is one of the records' rows.
            unsafe {
                let records = records.add(first * stride);
                let a = Gemv {
                    weight,
                    blocks: args.cols / T::GEOMETRY.block,
                    records,
                    stride,
                };
                match rows {
                    1 => l.gemv::<T, 1>(&a, out),
                    2 => l.gemv::<T, 2>(&a, out),
                    3 => l.gemv::<T, 3>(&a, out),
                    _ => l.gemv::<T, FEW>(&a, out),
                }
            }
        }
        return;
    }
    acc.fill([0.0; ROWS]);
    let mut panel = Panel(MaybeUninit::uninit());
    let panel = panel.0.as_mut_ptr().cast::<u8>();
    // A panel holds whole blocks: PANEL is a multiple of every type's groups per block.
    for first in (0..groups).step_by(PANEL) {
        let count = PANEL.min(groups - first);
        // SAFETY: the groups lie inside the row group; the panel holds PANEL groups, and `count` are written before
        // they are read.
        unsafe { l.expand::<T>(&Expand { weight, first, count }, panel) };
        for (row, rows) in split(acc.len(), L::TILE) {
            let out = acc[row..row + rows].as_mut_ptr().cast::<f32>();
            // SAFETY: `rows` rows of records from `row` on exist, with `count` groups from `first` on.
            unsafe {
                let records = records.add(row * stride + first * RECORD);
                let a = Tile {
                    panel,
                    count,
                    records,
                    stride,
                };
                match T::MINS {
                    0 => with_rows!(rows, L::TILE, N => l.tile::<0, N>(&a, out)),
                    1 => with_rows!(rows, L::TILE, N => l.tile::<1, N>(&a, out)),
                    _ => with_rows!(rows, L::TILE, N => l.tile::<2, N>(&a, out)),
                }
            }
        }
    }
}

/// Asks for the lines that group `j` of a block some blocks ahead will need: each group a share of the block.
#[inline(always)]
pub(super) fn prefetch<L: Lanes, T: QuantFormat>(l: L, body: *const u8, j: usize) {
    let lines = (T::GEOMETRY.words + 1).div_ceil(T::GROUPS);
    for i in 0..lines {
        l.prefetch(body.wrapping_add((j * lines + i) * LINE + AHEAD));
    }
}

/// The body with `$k` equal to 0 to 7: written out, because whether the compiler unrolls a loop decides whether its
/// arrays live in registers.
macro_rules! eight_times {
    ($k:ident => $body:block) => {
        eight_times!($k => $body; 0 1 2 3 4 5 6 7)
    };
    ($k:ident => $body:block; $($n:literal)*) => {
        $({
            let $k: usize = $n;
            $body
        })*
    };
}

/// The order in which the quads of a group are expanded: those that share words in the legacy types follow each
/// other, or the words would be kept for long; the halves of a group, where there are any, follow each other.
const fn quad_at<T: QuantFormat>(k: usize) -> usize {
    if T::HALVES { k } else { k / 2 + k % 2 * 4 }
}

/// `acc[n][16] = x * weight` for N rows, all of K.
///
/// # Safety
/// `weight` holds a row group of `blocks` blocks, `records` N rows of a record per group; `acc` can be written for N
/// rows of 16.
#[inline(always)]
pub(crate) unsafe fn gemv<L: Pairs, T: QuantFormat, const N: usize>(l: L, a: &Gemv, acc: *mut f32) {
    let mut sums = [[l.zero_f(); N]; 2];
    for b in 0..a.blocks {
        // SAFETY: block b is one of `blocks`, and each of its groups has a record in each of the N rows.
        unsafe {
            let block = (
                a.weight.add(T::GEOMETRY.head(b)),
                a.weight.add(T::GEOMETRY.body(b)),
            );
            let x = (a.records.add(b * T::GROUPS * RECORD), a.stride);
            gemv_half::<L, T, N, 0>(l, block, x, &mut sums);
            if const { T::GROUPS > 4 } {
                gemv_half::<L, T, N, 1>(l, block, x, &mut sums);
            }
        }
    }
    let acc = acc.cast::<u8>();
    for (n, (first, second)) in sums[0].into_iter().zip(sums[1]).enumerate() {
        // SAFETY: row n < N, vectors 0 and 1 of a line.
        unsafe {
            l.store_f(acc.add(n * LINE), first);
            l.store_f(acc.add(n * LINE + 4 * L::WIDTH), second);
        }
    }
}

/// Up to four groups of a block. One more would be another four, not a longer loop: see [`QuantFormat`] on `HALF`.
///
/// # Safety
/// As [`gemv_group`] for both vectors of a row group.
#[inline(always)]
unsafe fn gemv_half<L: Pairs, T: QuantFormat, const N: usize, const HALF: usize>(
    l: L,
    (head, body): (*const u8, *const u8),
    (x, stride): (*const u8, usize),
    sums: &mut [[L::F; N]; 2],
) {
    for j in 4 * HALF..4 * HALF + T::GROUPS.min(4) {
        prefetch::<L, T>(l, body, j);
        // SAFETY: the caller's promise; group j has its record.
        unsafe { gemv_group::<L, T, N, HALF>(l, (head, body, j), (x.add(j * RECORD), stride), sums) };
    }
}

/// One group's records of N rows. A loop: what the library calls for the elements of an array is not always inlined, and
/// a call in the innermost loop empties the vector registers.
#[inline(always)]
pub(super) fn records<const N: usize>(first: *const u8, stride: usize) -> [*const u8; N] {
    let mut rows = [first; N];
    for (n, row) in rows.iter_mut().enumerate() {
        *row = first.wrapping_add(n * stride);
    }
    rows
}

/// Both pairs of a quad for [`Pairs::dot`].
#[inline(always)]
fn ordered<L: Pairs>(l: L, [a, b]: [L::I; 2]) -> [L::I; 2] {
    [l.ordered(a), l.ordered(b)]
}

/// One group of 32, both vectors of a row group: each broadcast of x serves both at once, which keeps few values alive.
///
/// # Safety
/// As [`QuantFormat::quad`] and [`QuantFormat::factors`] for both vectors; `x` points to a record, with another each
/// `stride` bytes.
#[inline(always)]
unsafe fn gemv_group<L: Pairs, T: QuantFormat, const N: usize, const HALF: usize>(
    l: L,
    (head, body, j): (*const u8, *const u8, usize),
    (x, stride): (*const u8, usize),
    sums: &mut [[L::F; N]; 2],
) {
    // SAFETY: all reads are of the group's block and records, as the caller promises.
    unsafe {
        let x = records::<N>(x, stride);
        let mut acc = [[l.zero(); N]; 2];
        let mut first = [[l.zero(); N]; 2];
        eight_times!(k => {
            let i = quad_at::<T>(k);
            let codes = ordered(l, T::quad::<L, HALF>(l, body, j, i));
            let second = ordered(l, T::quad::<L, HALF>(l, body.add(4 * L::WIDTH), j, i));
            for p in 0..2 {
                for n in 0..N {
                    let x = l.codes(x[n].add(8 * i + 4 * p));
                    acc[0][n] = l.dot(acc[0][n], codes[p], x);
                    acc[1][n] = l.dot(acc[1][n], second[p], x);
                }
            }
            if T::HALVES && k == 3 {
                first = acc;
                acc = [[l.zero(); N]; 2];
            }
        });
        finish_group::<L, T, N, HALF>(
            l,
            T::OFFSET_BITS,
            (head, body, j),
            x,
            (&first[0], &acc[0]),
            &mut sums[0],
        );
        let block = (
            head.add(T::GEOMETRY.head_width * L::WIDTH),
            body.add(4 * L::WIDTH),
            j,
        );
        finish_group::<L, T, N, HALF>(l, T::OFFSET_BITS, block, x, (&first[1], &acc[1]), &mut sums[1]);
    }
}

/// Adds a group's integer sums, of its first 16 (where the type has halves) and of the rest, to the f32 sums of one
/// vector of rows. `offset_bits` is the log2 of what the codes are too large by, or 0.
///
/// # Safety
/// As [`QuantFormat::factors`]; `x` are records.
#[inline(always)]
pub(super) unsafe fn finish_group<L: Lanes, T: QuantFormat, const N: usize, const HALF: usize>(
    l: L,
    offset_bits: u32,
    (head, body, j): (*const u8, *const u8, usize),
    x: [*const u8; N],
    (first, acc): (&[L::I; N], &[L::I; N]),
    sums: &mut [L::F; N],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let f = T::factors::<L, HALF>(l, head, body, j);
        for n in 0..N {
            let offset = |acc: L::I, at: usize| match offset_bits {
                0 => acc,
                bits => l.sub(acc, l.shl(l.each(x[n].add(at)), bits)),
            };
            let i = if T::HALVES {
                l.add(
                    l.mul(offset(first[n], AT_HALF_CODE_SUMS), f.subscales[0]),
                    l.mul(offset(acc[n], AT_HALF_CODE_SUMS + 4), f.subscales[1]),
                )
            } else {
                offset(acc[n], AT_CODE_SUM)
            };
            sums[n] = combine(l, T::MINS, i, (f.d, f.mins), x[n], sums[n]);
        }
    }
}

/// The f32 part of a group: the same for [`gemv`] and [`tile`].
///
/// # Safety
/// `x` points to a record.
#[inline(always)]
pub(super) unsafe fn combine<L: Lanes>(
    l: L,
    count: usize,
    i: L::I,
    (d, mins): (L::F, [L::F; 2]),
    x: *const u8,
    sum: L::F,
) -> L::F {
    // SAFETY: the caller's promise.
    unsafe {
        let sum = l.fma(l.to_f(i), l.mul_f(d, l.each_f(x.add(AT_SCALE))), sum);
        match count {
            0 => sum,
            1 => l.fma(mins[0], l.each_f(x.add(AT_SUM)), sum),
            _ => {
                let sum = l.fma(mins[0], l.each_f(x.add(AT_HALF_SUMS)), sum);
                l.fma(mins[1], l.each_f(x.add(AT_HALF_SUMS + 4)), sum)
            }
        }
    }
}

/// Expands groups into a panel.
///
/// # Safety
/// The groups lie in the row group at `weight` and start and end with a block; `panel` can be written for `count`
/// groups.
#[inline(always)]
pub(crate) unsafe fn expand<L: Pairs, T: QuantFormat>(l: L, a: &Expand, panel: *mut u8) {
    for b in a.first / T::GROUPS..(a.first + a.count) / T::GROUPS {
        // SAFETY: block b and its groups lie in the row group, and each group has its place in the panel.
        unsafe {
            let block = (
                a.weight.add(T::GEOMETRY.head(b)),
                a.weight.add(T::GEOMETRY.body(b)),
            );
            let out = panel.add((b * T::GROUPS - a.first) * PANEL_GROUP);
            expand_half::<L, T, 0>(l, block, out);
            if const { T::GROUPS > 4 } {
                expand_half::<L, T, 1>(l, block, out);
            }
        }
    }
}

/// Up to four groups of a block, as [`gemv_half`].
///
/// # Safety
/// As [`expand_group`] for all vectors of a row group; `out` is the place of the block's first group.
#[inline(always)]
unsafe fn expand_half<L: Pairs, T: QuantFormat, const HALF: usize>(
    l: L,
    (head, body): (*const u8, *const u8),
    out: *mut u8,
) {
    for j in 4 * HALF..4 * HALF + T::GROUPS.min(4) {
        prefetch::<L, T>(l, body, j);
        for r in (0..ROWS).step_by(L::WIDTH) {
            // SAFETY: the caller's promise.
            unsafe {
                let out = out.add(j * PANEL_GROUP + 4 * r);
                let head = head.add(T::GEOMETRY.head_width * r);
                expand_group::<L, T, HALF>(l, (head, body.add(4 * r), j), out);
            }
        }
    }
}

/// One group of 32 and one vector of rows.
///
/// # Safety
/// As [`QuantFormat::quad`] and [`QuantFormat::factors`]; `out` can be written for a vector of each line of a group.
#[inline(always)]
unsafe fn expand_group<L: Pairs, T: QuantFormat, const HALF: usize>(
    l: L,
    (head, body, j): (*const u8, *const u8, usize),
    out: *mut u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let Factors { d, subscales, mins } = T::factors::<L, HALF>(l, head, body, j);
        let twice = |s: L::I| l.or(l.and(s, l.splat(0xffff)), l.shl(s, 16));
        let scales = [twice(subscales[0]), twice(subscales[1])];
        let offset = l.splat(((1 << T::OFFSET_BITS) & !1) * 0x0001_0001);
        eight_times!(k => {
            let i = quad_at::<T>(k);
            let pairs = T::quad::<L, HALF>(l, body, j, i);
            for (p, mut codes) in pairs.into_iter().enumerate() {
                if T::OFFSET_BITS > 0 {
                    codes = l.sub16(codes, offset);
                }
                if T::HALVES {
                    codes = l.mul16(codes, scales[i / 4]);
                }
                l.store(out.add((2 * i + p) * LINE), l.ordered(codes));
            }
        });
        l.store_f(out.add(CODE_LINES * LINE), d);
        for (m, min) in mins.into_iter().enumerate().take(T::MINS) {
            l.store_f(out.add((CODE_LINES + 1 + m) * LINE), min);
        }
    }
}

/// `acc[n][16] += x * panel` for N rows.
///
/// # Safety
/// `panel` holds `count` groups with `MINS` minima, `records` N rows of as many records; `acc` can be read and
/// written for N rows of 16.
#[inline(always)]
pub(crate) unsafe fn tile<L: Pairs, const MINS: usize, const N: usize>(l: L, a: &Tile, acc: *mut f32) {
    /// Pairs of codes in the body of the inner loop.
    const UNROLL: usize = 2;
    let acc = acc.cast::<u8>();
    // SAFETY: group g < count of the panel, and its record in row n < N; row n and vector v of `acc`.
    unsafe {
        let mut totals = [[l.zero_f(); 2]; N];
        for (n, totals) in totals.iter_mut().enumerate() {
            for (v, total) in totals.iter_mut().enumerate() {
                *total = l.load_f(acc.add(n * LINE + v * 4 * L::WIDTH));
            }
        }
        for g in 0..a.count {
            let w = a.panel.add(g * PANEL_GROUP);
            let x = records::<N>(a.records.add(g * RECORD), a.stride);
            let mut sums = [[l.zero(); 2]; N];
            for outer in 0..CODE_LINES / UNROLL {
                for inner in 0..UNROLL {
                    let p = outer * UNROLL + inner;
                    let first = l.load(w.add(p * LINE));
                    let second = l.load(w.add(p * LINE + 4 * L::WIDTH));
                    for (sums, x) in sums.iter_mut().zip(x) {
                        let x = l.codes(x.add(4 * p));
                        sums[0] = l.dot(sums[0], first, x);
                        sums[1] = l.dot(sums[1], second, x);
                    }
                }
            }
            for v in 0..2 {
                let w = w.add(v * 4 * L::WIDTH);
                let line = |i: usize| l.load_f(w.add((CODE_LINES + i) * LINE));
                let factors = (
                    line(0),
                    [
                        if MINS > 0 { line(1) } else { l.zero_f() },
                        if MINS > 1 { line(2) } else { l.zero_f() },
                    ],
                );
                for n in 0..N {
                    totals[n][v] = combine(l, MINS, sums[n][v], factors, x[n], totals[n][v]);
                }
            }
        }
        for (n, totals) in totals.iter().enumerate() {
            for (v, total) in totals.iter().enumerate() {
                l.store_f(acc.add(n * LINE + v * 4 * L::WIDTH), *total);
            }
        }
    }
}
