//! Products with quantised weights, in integers per group of 32 and f32 over the groups.
//!
//! **Few rows** ([`gemv`]): codes are expanded in registers, straight from the stream of packed lines, which is asked
//! for [`AHEAD`] bytes before its use. **Many rows** ([`expand`], [`tile`]): a chunk of K of the row group becomes a
//! *panel* of signed 16-bit codes (with the integer scales of sub-blocks multiplied in) and f32 factors in the
//! first-level cache, and one micro-kernel for all types multiplies it with tiles of rows. Both compute the same
//! integers and the same f32 operations in the same order.

use std::mem::MaybeUninit;

use super::types::{Factors, QuantFormat};
use super::{Lanes, split, with_rows};
use crate::cpu::kernels::{
    AT_CODE_SUM, AT_HALF_CODE_SUMS, AT_HALF_SUMS, AT_SCALE, AT_SUM, GROUP, GroupArgs, LINE, RECORD, ROWS,
};

/// How far ahead of its use a line is asked for.
const AHEAD: usize = 4096;

/// Rows that [`gemv`] takes at once.
const FEW: usize = 4;

/// From this many rows on, a panel is made. Measured: see `bench_linear`.
const MANY: usize = 5;

/// Groups of 32 that a panel holds.
const PANEL: usize = 16;

/// Lines of codes of a group in a panel.
const CODE_LINES: usize = GROUP / 2;

/// Bytes of a group in a panel: codes, D and up to two M.
const PANEL_GROUP: usize = (CODE_LINES + 3) * LINE;

#[repr(align(64))]
struct Panel(MaybeUninit<[u8; PANEL * PANEL_GROUP]>);

/// A row group and the first of [`Lanes::gemv`]'s rows.
pub(crate) struct Gemv {
    weight: *const u8,
    blocks: usize,
    records: *const u8,
    /// Bytes from one row's records to the next.
    stride: usize,
}

/// Groups `first..first + count` of 32 of a row group.
pub(crate) struct Expand {
    weight: *const u8,
    first: usize,
    count: usize,
}

/// A panel of `count` groups and the first of a tile's rows.
pub(crate) struct Tile {
    panel: *const u8,
    count: usize,
    records: *const u8,
    /// Bytes from one row's records to the next.
    stride: usize,
}

/// See [`crate::cpu::kernels::GroupFn`].
///
/// # Safety
/// As there.
pub(crate) unsafe fn group<L: Lanes, T: QuantFormat>(args: &GroupArgs<'_>, acc: &mut [[f32; ROWS]]) {
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
    if acc.len() < MANY {
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
                    0 => with_rows!(rows, N => l.tile::<0, N>(&a, out)),
                    1 => with_rows!(rows, N => l.tile::<1, N>(&a, out)),
                    _ => with_rows!(rows, N => l.tile::<2, N>(&a, out)),
                }
            }
        }
    }
}

/// Asks for the lines that group `j` of a block some blocks ahead will need: each group a share of the block.
#[inline(always)]
fn prefetch<L: Lanes, T: QuantFormat>(l: L, body: *const u8, j: usize) {
    let lines = (T::GEOMETRY.words + 1).div_ceil(T::GROUPS);
    for i in 0..lines {
        l.prefetch(body.wrapping_add((j * lines + i) * LINE + AHEAD));
    }
}

/// `acc[n][16] = x * weight` for N rows, all of K.
///
/// # Safety
/// `weight` holds a row group of `blocks` blocks, `records` N rows of a record per group; `acc` can be written for N
/// rows of 16.
#[inline(always)]
pub(crate) unsafe fn gemv<L: Lanes, T: QuantFormat, const N: usize>(l: L, a: &Gemv, acc: *mut f32) {
    let acc = acc.cast::<u8>();
    let vectors = ROWS / L::WIDTH;
    let mut sums = [[l.zero_f(); N]; 2];
    let mut x = a.records;
    for b in 0..a.blocks {
        // SAFETY: block b is one of `blocks`; group j of it has a record in each of the N rows, and `x` has passed one
        // record for each group before.
        unsafe {
            let head = a.weight.add(T::GEOMETRY.head(b));
            let body = a.weight.add(T::GEOMETRY.body(b));
            for j in 0..T::GROUPS {
                prefetch::<L, T>(l, body, j);
                for (v, sums) in sums.iter_mut().enumerate().take(vectors) {
                    let head = head.add(v * 2 * L::WIDTH);
                    let body = body.add(v * 4 * L::WIDTH);
                    *sums = gemv_group::<L, T, N>(l, (head, body, j), (x, a.stride), *sums);
                }
                x = x.add(RECORD);
            }
        }
    }
    for (v, sums) in sums.iter().enumerate().take(vectors) {
        for (n, sum) in sums.iter().enumerate() {
            // SAFETY: row n < N, vector v of a line.
            unsafe { l.store_f(acc.add(n * LINE + v * 4 * L::WIDTH), *sum) };
        }
    }
}

/// One group of 32 and one vector of rows.
///
/// # Safety
/// As [`QuantFormat::quad`] and [`QuantFormat::factors`]; `x` points to a record, with another each `stride` bytes.
#[inline(always)]
unsafe fn gemv_group<L: Lanes, T: QuantFormat, const N: usize>(
    l: L,
    (head, body, j): (*const u8, *const u8, usize),
    (x, stride): (*const u8, usize),
    mut sums: [L::F; N],
) -> [L::F; N] {
    // SAFETY: all reads are of the group's block and records, as the caller promises.
    unsafe {
        let mut acc = [[l.zero(); N]; 2];
        for i in 0..8 {
            let half = if T::HALVES { i / 4 } else { 0 };
            let [even, odd] = T::quad(l, body, j, i);
            for (n, acc) in acc[half].iter_mut().enumerate() {
                let codes = x.add(n * stride + 8 * i);
                *acc = l.dot(*acc, even, l.each(codes));
                *acc = l.dot(*acc, odd, l.each(codes.add(4)));
            }
        }
        let f = T::factors(l, head, body, j);
        for (n, sum) in sums.iter_mut().enumerate() {
            let x = x.add(n * stride);
            let offset = |acc: L::I, at: usize| match T::OFFSET_BITS {
                0 => acc,
                bits => l.sub(acc, l.shl(l.each(x.add(at)), bits)),
            };
            let i = if T::HALVES {
                l.add(
                    l.mul(offset(acc[0][n], AT_HALF_CODE_SUMS), f.subscales[0]),
                    l.mul(offset(acc[1][n], AT_HALF_CODE_SUMS + 4), f.subscales[1]),
                )
            } else {
                offset(acc[0][n], AT_CODE_SUM)
            };
            *sum = combine(l, T::MINS, i, (f.d, f.mins), x, *sum);
        }
        sums
    }
}

/// The f32 part of a group: the same for [`gemv`] and [`tile`].
///
/// # Safety
/// `x` points to a record.
#[inline(always)]
unsafe fn combine<L: Lanes>(
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
pub(crate) unsafe fn expand<L: Lanes, T: QuantFormat>(l: L, a: &Expand, panel: *mut u8) {
    let mut out = panel;
    for b in a.first / T::GROUPS..(a.first + a.count) / T::GROUPS {
        // SAFETY: block b and its groups lie in the row group, and each group has its place in the panel.
        unsafe {
            let head = a.weight.add(T::GEOMETRY.head(b));
            let body = a.weight.add(T::GEOMETRY.body(b));
            for j in 0..T::GROUPS {
                prefetch::<L, T>(l, body, j);
                for r in (0..ROWS).step_by(L::WIDTH) {
                    expand_group::<L, T>(l, (head.add(2 * r), body.add(4 * r), j), out.add(4 * r));
                }
                out = out.add(PANEL_GROUP);
            }
        }
    }
}

/// One group of 32 and one vector of rows.
///
/// # Safety
/// As [`QuantFormat::quad`] and [`QuantFormat::factors`]; `out` can be written for a vector of each line of a group.
#[inline(always)]
unsafe fn expand_group<L: Lanes, T: QuantFormat>(
    l: L,
    (head, body, j): (*const u8, *const u8, usize),
    out: *mut u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let Factors { d, subscales, mins } = T::factors(l, head, body, j);
        let scales = subscales.map(|s| l.or(l.and(s, l.splat(0xffff)), l.shl(s, 16)));
        let offset = l.splat(((1 << T::OFFSET_BITS) & !1) * 0x0001_0001);
        for i in 0..8 {
            let pairs = T::quad(l, body, j, i);
            for (p, mut codes) in pairs.into_iter().enumerate() {
                if T::OFFSET_BITS > 0 {
                    codes = l.sub16(codes, offset);
                }
                if T::HALVES {
                    codes = l.mul16(codes, scales[i / 4]);
                }
                l.store(out.add((2 * i + p) * LINE), codes);
            }
        }
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
pub(crate) unsafe fn tile<L: Lanes, const MINS: usize, const N: usize>(l: L, a: &Tile, acc: *mut f32) {
    let acc = acc.cast::<u8>();
    let vectors = ROWS / L::WIDTH;
    // SAFETY: group g < count of the panel, and its record in row n < N; row n and vector v of `acc`.
    unsafe {
        for g in 0..a.count {
            let w = a.panel.add(g * PANEL_GROUP);
            let x = a.records.add(g * RECORD);
            let mut sums = [[l.zero(); 2]; N];
            for p in 0..CODE_LINES {
                let mut codes = [l.zero(); 2];
                for (v, codes) in codes.iter_mut().enumerate().take(vectors) {
                    *codes = l.load(w.add(p * LINE + v * 4 * L::WIDTH));
                }
                for (n, sums) in sums.iter_mut().enumerate() {
                    let x = l.each(x.add(n * a.stride + 4 * p));
                    for (sum, codes) in sums.iter_mut().zip(codes).take(vectors) {
                        *sum = l.dot(*sum, codes, x);
                    }
                }
            }
            for v in 0..vectors {
                let w = w.add(v * 4 * L::WIDTH);
                let line = |i: usize| l.load_f(w.add((CODE_LINES + i) * LINE));
                let mins = [
                    if MINS > 0 { line(1) } else { l.zero_f() },
                    if MINS > 1 { line(2) } else { l.zero_f() },
                ];
                let d = line(0);
                for (n, sums) in sums.iter().enumerate() {
                    let out = acc.add(n * LINE + v * 4 * L::WIDTH);
                    let sum = combine(l, MINS, sums[v], (d, mins), x.add(n * a.stride), l.load_f(out));
                    l.store_f(out, sum);
                }
            }
        }
    }
}
