//! F32, F16 and BF16 weights: f32 multiply-add, one accumulator per output, over k in order.
//!
//! A packed row group is `[K][16]`. Few rows of activations convert weights in registers; many rows convert a chunk
//! of K into a panel of f32 once and then multiply it with tiles of rows. Both add in the same order.
//!
//! Reached on the machine of [`super::quant`]'s table: F32 18.5 GB/s from one thread and 35 from two at one row, 19 and
//! 38 at four (a streaming read); F16 20 from one thread at up to 5 rows; 45 of the 52 G multiply-adds a second of the
//! FMA peak at 512 rows.

use std::mem::MaybeUninit;

use super::{Lanes, split, with_rows};
use crate::cpu::kernels::{GroupArgs, LINE, ROWS};

/// A plain element type.
pub(crate) trait FloatType {
    /// Bytes of an element.
    const BYTES: usize;
    /// Loads and widens [`Lanes::WIDTH`] elements.
    ///
    /// # Safety
    /// That many elements at `p` can be read.
    unsafe fn load<L: Lanes>(l: L, p: *const u8) -> L::F;
}

/// IEEE binary32.
pub(crate) struct F32;
/// IEEE binary16.
pub(crate) struct F16;
/// The upper half of binary32.
pub(crate) struct Bf16;

impl FloatType for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, p: *const u8) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { l.load_f(p) }
    }
}

impl FloatType for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, p: *const u8) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { l.load_f16(p) }
    }
}

impl FloatType for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, p: *const u8) -> L::F {
        // SAFETY: the caller's promise.
        unsafe { l.load_bf16(p) }
    }
}

/// Elements of K a panel holds: 16 KiB, half a first-level cache.
const PANEL: usize = 256;

/// From this many rows on, a panel is made. Measured: see `bench_linear`.
const MANY: usize = 13;

/// How far ahead of its use a line is asked for.
const AHEAD: usize = 4096;

/// Part of K of a row group, and the first of a tile of activation rows.
pub(crate) struct Tile {
    weight: *const u8,
    count: usize,
    x: *const f32,
    /// Elements from one row of x to the next.
    stride: usize,
}

/// See [`crate::cpu::kernels::GroupFn`].
///
/// # Safety
/// As there.
pub(crate) unsafe fn group<L: Lanes, T: FloatType>(args: &GroupArgs<'_>, acc: &mut [[f32; ROWS]]) {
    // SAFETY: the caller promises the instruction set.
    let l = unsafe { L::new() };
    let (n, cols) = (acc.len(), args.cols);
    assert!(
        args.weight.len() >= cols * ROWS * T::BYTES && args.x.len() >= n * cols,
        "whole rows"
    );
    acc.fill([0.0; ROWS]);
    // More than one tile reads the weights more than once: a chunk of K at a time, which stays in the nearest cache.
    let chunk = if n > L::TILE { PANEL } else { cols.max(1) };
    let mut panel = Panel(MaybeUninit::uninit());
    let panel = panel.0.as_mut_ptr().cast::<u8>();
    for k in (0..cols).step_by(chunk) {
        let count = chunk.min(cols - k);
        // SAFETY: `k + count <= cols`, so weight and x are read inside. The panel holds PANEL lines, which is a chunk
        // if there is more than one tile, and MANY is more than one; `count` lines are written before they are read.
        unsafe {
            let weight = args.weight.as_ptr().add(k * ROWS * T::BYTES);
            let x = (args.x.as_ptr().add(k), cols);
            if n >= MANY.max(L::TILE + 1) && T::BYTES < 4 {
                l.float_expand::<T>(weight, count, panel);
                tiles::<L, F32>(l, panel, count, x, acc);
            } else {
                tiles::<L, T>(l, weight, count, x, acc);
            }
        }
    }
}

#[repr(align(64))]
struct Panel(MaybeUninit<[u8; PANEL * LINE]>);

/// Multiplies `count` elements of K with all rows, tile by tile.
///
/// # Safety
/// `count` lines of 16 elements at `weight`, and `count` elements of `acc.len()` rows of x, can be read.
#[inline(always)]
unsafe fn tiles<L: Lanes, T: FloatType>(
    l: L,
    weight: *const u8,
    count: usize,
    (x, stride): (*const f32, usize),
    acc: &mut [[f32; ROWS]],
) {
    for (first, rows) in split(acc.len(), L::TILE) {
        let out = acc[first..first + rows].as_mut_ptr().cast::<f32>();
        // SAFETY: row `first` is one of x's rows, so the pointer stays inside; the callee reads `rows` rows from there.
        unsafe {
            let a = Tile {
                weight,
                count,
                x: x.add(first * stride),
                stride,
            };
            with_rows!(rows, L::TILE, N => l.float_tile::<T, N>(&a, out));
        }
    }
}

/// Widens `count` lines.
///
/// # Safety
/// `count` lines of 16 elements at `weight` can be read, as many of f32 written at `panel`.
#[inline(always)]
pub(crate) unsafe fn expand<L: Lanes, T: FloatType>(l: L, weight: *const u8, count: usize, panel: *mut u8) {
    for k in 0..count {
        for r in (0..ROWS).step_by(L::WIDTH) {
            // SAFETY: line k is one of `count`.
            unsafe {
                let w = T::load(l, weight.add((k * ROWS + r) * T::BYTES));
                l.store_f(panel.add(k * LINE + r * 4), w);
            }
        }
        l.prefetch(weight.wrapping_add(k * ROWS * T::BYTES + AHEAD));
    }
}

/// `acc[n][16] += x * weight` for N rows.
///
/// # Safety
/// What [`Tile`] names can be read for `N` rows; `acc` can be read and written for `N` rows of 16.
#[inline(always)]
pub(crate) unsafe fn tile<L: Lanes, T: FloatType, const N: usize>(l: L, a: &Tile, acc: *mut f32) {
    let acc = acc.cast::<u8>();
    let vectors = ROWS / L::WIDTH;
    let mut sums = [[l.zero_f(); 2]; N];
    for (n, sums) in sums.iter_mut().enumerate() {
        for (v, sum) in sums.iter_mut().enumerate().take(vectors) {
            // SAFETY: row n < N, vector v of a line.
            *sum = unsafe { l.load_f(acc.add(n * LINE + v * 4 * L::WIDTH)) };
        }
    }
    for k in 0..a.count {
        let mut w = [l.zero_f(); 2];
        for (v, w) in w.iter_mut().enumerate().take(vectors) {
            // SAFETY: line k of `count`.
            *w = unsafe { T::load(l, a.weight.add((k * ROWS + v * L::WIDTH) * T::BYTES)) };
        }
        l.prefetch(a.weight.wrapping_add(k * ROWS * T::BYTES + AHEAD));
        for (n, sums) in sums.iter_mut().enumerate() {
            // SAFETY: element k < count of row n < N.
            let x = unsafe { l.each_f(a.x.add(n * a.stride + k).cast()) };
            for (sum, w) in sums.iter_mut().zip(w).take(vectors) {
                *sum = l.fma(w, x, *sum);
            }
        }
    }
    for (n, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate().take(vectors) {
            // SAFETY: as for the loads.
            unsafe { l.store_f(acc.add(n * LINE + v * 4 * L::WIDTH), *sum) };
        }
    }
}
