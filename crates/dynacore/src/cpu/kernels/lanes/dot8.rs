//! Products with quantised weights for sets that multiply bytes, with activations of 8 bits ([`Short`], for `auto` mode) or
//! of 15 in two planes ([`Whole`]).
//!
//! Four products of an unsigned byte (of the weight) and a signed one (of x) are one lane of one instruction. With [`Short`]
//! codes a group of 32 takes half the products of [`super::quant`], and what remains of it is in f32:
//!
//! ```text
//! i_h = sum of code_w * code_x - offset * sum of code_x      exact; h: the halves of a group, or its whole
//! t   = f32(i_0) * D_0;  t = fma(f32(i_1), D_1, t)           D: d, or d times the integer scale
//! acc = fma(t, a, acc);  acc = fma(M, s, acc)                per minimum, as in [`crate::cpu::kernels`]
//! ```
//!
//! With [`Whole`] codes it takes as many products as there, of codes that are not widened, and the same integers and float
//! operations follow: the bits are the same.
//!
//! The order is the same for few rows ([`gemv`], straight from the stream of packed lines) and for many ([`expand`],
//! [`tile`]): for one form of the activations an output depends on its own two rows alone. Signed codes are lifted by 128
//! where the set wants an unsigned operand ([`Dot8::LIFT`]), and the offset takes it away.
//!
//! # What is reached
//!
//! Matrices `[4096, 2048]`, GMAC/s of one thread, best of many samples on busy machines, `cargo run --release -p dynacore
//! --example bench_linear -- form=short`, or `form=records`. On the Zen 4 `vpdpbusd` does 236, and a group's three float
//! operations leave 73 % of that, or 82 % of the half that is there for whole codes.
//!
//! | type | Zen 4, AVX-512, short: 4 rows | 16 rows | 512 rows | whole: 4 rows | 16 rows | 512 rows |
//! |---|---|---|---|---|---|---|
//! | Q4_K | 97 | 138 | 156 | 78 | 87 | 93 |
//! | Q6_K | 66 | 113 | 132 | 63 | 78 | 80 |
//! | Q8_0 | 57 | 125 | 155 | 57 | 92 | 93 |
//!
//! Short codes on a Xeon with AVX-VNNI, in brackets whole ones by [`super::quant`]: Q4_K 80 (43) at 4 rows, 83 (49) at 16,
//! 106 (53) at 512; Q6_K 54 (22), 54 (37), 85 (53); Q8_0 58 (43), 90 (48), 109 (55). AVX2 on the Zen 4: Q4_K 79 (63) at 16
//! rows, 94 (72) at 512; Q6_K 71 (73) and Q8_0 54 (74) at 512, so that only unsigned codes of up to five bits use it there.

mod codes;

use std::mem::MaybeUninit;

pub(crate) use self::codes::{Codes, Short, Whole};
use self::codes::{InPanel, Packed, Quads as _, SCALES, each};
use super::quant::{Expand, Gemv, Tile, prefetch, records};
use super::types::QuantFormat;
use super::{Lanes, split, with_rows};
use crate::cpu::kernels::{GROUP, GroupArgs, LINE, ROWS};
use crate::cpu::table::slot;
use dynair::DType;

/// A set that multiplies bytes, beside the vectors of 32-bit lanes it has.
pub(crate) trait Dot8: Copy {
    /// The other operations.
    type Lanes: Lanes;
    /// Rows of activations a tile of the many-row kernels holds in registers.
    const TILE: usize;
    /// Rows that [`gemv`] takes at once, at most 8.
    const FEW: usize;
    /// From this many rows on, a panel is made.
    const MANY: usize;
    /// Whether sums of unsigned codes have 32 bits from the start; otherwise they have 16 until [`Dot8::total`].
    const FULL: bool;
    /// log2 of what signed codes are stored too large by; 0: they are stored as they are.
    const LIFT: u32;

    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn new() -> Self;
    /// The vectors.
    fn lanes(self) -> Self::Lanes;
    /// Signed codes as they are stored.
    fn lift(self, codes: I<Self>) -> I<Self>;
    /// `sum + codes * x` over the four bytes of each lane, for unsigned codes: see [`Dot8::FULL`].
    fn dot(self, sum: I<Self>, codes: I<Self>, x: I<Self>) -> I<Self>;
    /// `sum + codes * x` over the four bytes of each lane in 32 bits, for codes that were signed and are lifted.
    fn dot_signed(self, sum: I<Self>, codes: I<Self>, x: I<Self>) -> I<Self>;
    /// 16-bit sums in 32 bits, where sums are not full.
    fn total(self, sum: I<Self>) -> I<Self>;

    /// [`gemv`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn gemv<X: Codes<Self>, T: QuantFormat, const N: usize>(self, a: &Gemv, acc: *mut f32);
    /// [`expand`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn expand<X: Codes<Self>, T: QuantFormat>(self, a: &Expand, panel: *mut u8);
    /// [`tile`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn tile<X: Codes<Self>, const HALVES: bool, const MINS: usize, const RUN: usize, const N: usize>(
        self,
        a: &ByteTile,
        acc: *mut f32,
    );
}

/// The integers of a set.
type I<S> = <<S as Dot8>::Lanes as Lanes>::I;
/// The floats of a set.
type F<S> = <<S as Dot8>::Lanes as Lanes>::F;

/// The last three methods of [`Dot8`], with the target features of the instruction set.
macro_rules! out_of_line_dot8 {
    ($features:tt) => {
        unsafe fn gemv<X: Codes<Self>, T: QuantFormat, const N: usize>(self, a: &quant::Gemv, acc: *mut f32) {
            #[target_feature(enable = $features)]
            unsafe fn inner<S: Dot8, X: Codes<S>, T: QuantFormat, const N: usize>(
                s: S,
                a: &quant::Gemv,
                acc: *mut f32,
            ) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { dot8::gemv::<S, X, T, N>(s, a, acc) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, X, T, N>(self, a, acc) }
        }

        unsafe fn expand<X: Codes<Self>, T: QuantFormat>(self, a: &quant::Expand, panel: *mut u8) {
            #[target_feature(enable = $features)]
            unsafe fn inner<S: Dot8, X: Codes<S>, T: QuantFormat>(s: S, a: &quant::Expand, panel: *mut u8) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { dot8::expand::<S, X, T>(s, a, panel) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, X, T>(self, a, panel) }
        }

        unsafe fn tile<
            X: Codes<Self>,
            const HALVES: bool,
            const MINS: usize,
            const RUN: usize,
            const N: usize,
        >(
            self,
            a: &dot8::ByteTile,
            acc: *mut f32,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn inner<
                S: Dot8,
                X: Codes<S>,
                const HALVES: bool,
                const MINS: usize,
                const RUN: usize,
                const N: usize,
            >(
                s: S,
                a: &dot8::ByteTile,
                acc: *mut f32,
            ) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { dot8::tile::<S, X, HALVES, MINS, RUN, N>(s, a, acc) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, X, HALVES, MINS, RUN, N>(self, a, acc) }
        }
    };
}
pub(crate) use out_of_line_dot8;

/// Groups of 32 that a panel holds, a multiple of every type's groups per block.
const PANEL: usize = 8;

/// Quads of a group.
const QUADS: usize = GROUP / 4;

/// Lines of a group in a panel: its codes, its scales and two M.
const AT_SCALES: usize = QUADS * LINE;
const AT_MINS: usize = AT_SCALES + SCALES * LINE;
const PANEL_GROUP: usize = AT_MINS + 2 * LINE;

#[repr(align(64))]
struct Panel(MaybeUninit<[u8; PANEL * PANEL_GROUP]>);

/// A panel and the first of a tile's rows.
pub(crate) struct ByteTile {
    tile: Tile,
    /// log2 of what codes are too large by, or 0.
    offset_bits: u32,
}

/// Stands for signed codes in place of a run.
const SIGNED: usize = 0;

/// Whether a type's bytes are signed.
const fn is_signed<T: QuantFormat>() -> bool {
    T::SIGNED || T::VALUES.is_some()
}

/// Quads whose products 16-bit sums can take, or [`SIGNED`].
const fn run<S: Dot8, T: QuantFormat>() -> usize {
    if is_signed::<T>() {
        return if S::FULL { QUADS } else { SIGNED };
    }
    if S::FULL {
        return QUADS;
    }
    // A 16-bit sum takes two products a quad.
    match i16::MAX as usize / (2 * 127 * ((1 << T::CODE_BITS) - 1)) {
        0 => panic!("a product of codes fits 16 bits"),
        1 => 1,
        2..4 => 2,
        4..8 => 4,
        _ => 8,
    }
}

/// By slot of the weight's type: 0 for floats, `few` for unsigned codes of up to `bits` bits, `many` for others.
pub(crate) const fn from_rows(bits: u32, few: usize, many: usize) -> [usize; DType::WEIGHTS.len()] {
    let mut from = [0; DType::WEIGHTS.len()];
    macro_rules! each {
        ($($format:ty),*) => {
            $({
                let dtype = <$format>::DTYPE;
                let small = !is_signed::<$format>() && <$format>::CODE_BITS <= bits;
                from[slot(dtype)] = if small { few } else { many };
            })*
        };
    }
    use super::types::*;
    each!(
        Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Nl, Iq4Xs, Mxfp4
    );
    from
}

/// log2 of what a type's codes, as they are stored, are too large by, or 0.
const fn offset_bits<S: Dot8, T: QuantFormat>() -> u32 {
    if is_signed::<T>() { S::LIFT } else { T::OFFSET_BITS }
}

/// `$with!(halves, minima, run)` with a type's constants.
macro_rules! by_kind {
    ($set:ty, $format:ty, $with:ident) => {
        match const { (<$format>::HALVES, <$format>::MINS, run::<$set, $format>()) } {
            (false, 0, SIGNED) => $with!(false, 0, SIGNED),
            (false, 0, 4) => $with!(false, 0, 4),
            (false, 0, 8) => $with!(false, 0, 8),
            (false, 1, 4) => $with!(false, 1, 4),
            (false, 1, 8) => $with!(false, 1, 8),
            (true, 0, 2) => $with!(true, 0, 2),
            (true, 0, 8) => $with!(true, 0, 8),
            (true, 2, 8) => $with!(true, 2, 8),
            (halves, mins, run) => {
                unreachable!("no type has {mins} minima, runs of {run} and halves: {halves}")
            }
        }
    };
}

/// See [`crate::cpu::kernels::GroupFn`].
///
/// # Safety
/// As there; `records` are of form `X`.
pub(crate) unsafe fn group<S: Dot8, X: Codes<S>, T: QuantFormat>(
    args: &GroupArgs<'_>,
    acc: &mut [[f32; ROWS]],
) {
    // SAFETY: the caller promises the instruction set.
    let s = unsafe { S::new() };
    let groups = args.cols / GROUP;
    let stride = groups * X::RECORD;
    assert!(
        args.cols.is_multiple_of(T::GEOMETRY.block)
            && args.weight.len() >= T::GEOMETRY.group_bytes(args.cols)
            && args.records.len() >= acc.len() * stride,
        "whole rows of whole blocks"
    );
    let (weight, records) = (args.weight.as_ptr(), args.records.as_ptr());
    if acc.len() < S::MANY {
        for (first, rows) in split(acc.len(), S::FEW) {
            let out = acc[first..first + rows].as_mut_ptr().cast::<f32>();
            // SAFETY: the lengths were checked above; row `first` is one of the records' rows.
            unsafe {
                let a = Gemv {
                    weight,
                    blocks: args.cols / T::GEOMETRY.block,
                    records: records.add(first * stride),
                    stride,
                };
                with_rows!(rows, S::FEW, N => s.gemv::<X, T, N>(&a, out));
            }
        }
        return;
    }
    acc.fill([0.0; ROWS]);
    let mut panel = Panel(MaybeUninit::uninit());
    let panel = panel.0.as_mut_ptr().cast::<u8>();
    for first in (0..groups).step_by(PANEL) {
        let count = PANEL.min(groups - first);
        // SAFETY: the groups lie inside the row group; the panel holds PANEL groups, and of each of `count` all that is
        // read is written before.
        unsafe { s.expand::<X, T>(&Expand { weight, first, count }, panel) };
        for (row, rows) in split(acc.len(), S::TILE) {
            let out = acc[row..row + rows].as_mut_ptr().cast::<f32>();
            let a = ByteTile {
                tile: Tile {
                    panel,
                    count,
                    // SAFETY: `rows` rows of records from `row` on exist, with `count` groups from `first` on.
                    records: unsafe { records.add(row * stride + first * X::RECORD) },
                    stride,
                },
                offset_bits: offset_bits::<S, T>(),
            };
            // SAFETY: as above; the panel was made for this type.
            unsafe { any_tile::<S, X, T>(s, &a, rows, out) };
        }
    }
}

/// [`tile`] of a type for some rows.
///
/// # Safety
/// As there; `rows` is at most [`Dot8::TILE`].
#[inline(always)]
unsafe fn any_tile<S: Dot8, X: Codes<S>, T: QuantFormat>(s: S, a: &ByteTile, rows: usize, out: *mut f32) {
    macro_rules! with {
        ($halves:literal, $mins:literal, $run:expr) => {
            with_rows!(rows, S::TILE, N => s.tile::<X, $halves, $mins, { $run }, N>(a, out))
        };
    }
    // SAFETY: the caller's promise.
    unsafe { by_kind!(S, T, with) }
}

/// `acc[n][16] = x * weight` for N rows, all of K.
///
/// # Safety
/// As [`super::quant::gemv`]; the records are of form `X`.
#[inline(always)]
pub(crate) unsafe fn gemv<S: Dot8, X: Codes<S>, T: QuantFormat, const N: usize>(
    s: S,
    a: &Gemv,
    acc: *mut f32,
) {
    let l = s.lanes();
    let mut outputs = [[l.zero_f(); N]; 2];
    for block in 0..a.blocks {
        // SAFETY: the block is one of `blocks`, and each of its groups has a record in each of the N rows.
        unsafe {
            let parts = (
                a.weight.add(T::GEOMETRY.head(block)),
                a.weight.add(T::GEOMETRY.body(block)),
            );
            let x = (a.records.add(block * T::GROUPS * X::RECORD), a.stride);
            gemv_half::<S, X, T, N, 0>(s, parts, x, &mut outputs);
            if const { T::GROUPS > 4 } {
                gemv_half::<S, X, T, N, 1>(s, parts, x, &mut outputs);
            }
        }
    }
    let acc = acc.cast::<u8>();
    for (v, outputs) in outputs.into_iter().enumerate().take(ROWS / S::Lanes::WIDTH) {
        for (n, output) in outputs.into_iter().enumerate() {
            // SAFETY: row n < N, vector v of a line.
            unsafe { l.store_f(acc.add(n * LINE + v * 4 * S::Lanes::WIDTH), output) };
        }
    }
}

/// Up to four groups of a block, as in [`super::quant`].
///
/// # Safety
/// As [`QuantFormat::bytes`] and [`QuantFormat::factors`] for all vectors of a row group; `x` points to the block's first
/// record, with another row's each `stride` bytes.
#[inline(always)]
unsafe fn gemv_half<S: Dot8, X: Codes<S>, T: QuantFormat, const N: usize, const HALF: usize>(
    s: S,
    (head, body): (*const u8, *const u8),
    (x, stride): (*const u8, usize),
    outputs: &mut [[F<S>; N]; 2],
) {
    let (l, width) = (s.lanes(), S::Lanes::WIDTH);
    for j in 4 * HALF..4 * HALF + T::GROUPS.min(4) {
        prefetch::<S::Lanes, T>(l, body, j);
        for (v, outputs) in outputs.iter_mut().enumerate().take(ROWS / width) {
            // SAFETY: the caller's promise; group j has its record, and vector v lies in the row group.
            unsafe {
                let head = head.add(T::GEOMETRY.head_width * v * width);
                let body = body.add(4 * v * width);
                let x = records::<N>(x.add(j * X::RECORD), stride);
                let f = T::factors::<S::Lanes, HALF>(l, head, body, j);
                let factors = (X::scales::<T>(s, &f), f.mins);
                let quads = Packed::<T, HALF>::new(body, j);
                let quads = (quads, offset_bits::<S, T>());
                macro_rules! with {
                    ($halves:literal, $mins:literal, $run:expr) => {
                        X::add_group::<_, $halves, $mins, { $run }, N>(s, quads, x, factors, outputs)
                    };
                }
                by_kind!(S, T, with);
            }
        }
    }
}

/// Expands groups into a panel.
///
/// # Safety
/// As [`super::quant::expand`].
#[inline(always)]
pub(crate) unsafe fn expand<S: Dot8, X: Codes<S>, T: QuantFormat>(s: S, a: &Expand, panel: *mut u8) {
    for block in a.first / T::GROUPS..(a.first + a.count) / T::GROUPS {
        // SAFETY: the block and its groups lie in the row group, and each group has its place in the panel.
        unsafe {
            let parts = (
                a.weight.add(T::GEOMETRY.head(block)),
                a.weight.add(T::GEOMETRY.body(block)),
            );
            let out = panel.add((block * T::GROUPS - a.first) * PANEL_GROUP);
            expand_half::<S, X, T, 0>(s, parts, out);
            if const { T::GROUPS > 4 } {
                expand_half::<S, X, T, 1>(s, parts, out);
            }
        }
    }
}

/// Up to four groups of a block.
///
/// # Safety
/// As [`gemv_half`]; `out` is the place of the block's first group.
#[inline(always)]
unsafe fn expand_half<S: Dot8, X: Codes<S>, T: QuantFormat, const HALF: usize>(
    s: S,
    (head, body): (*const u8, *const u8),
    out: *mut u8,
) {
    let (l, width) = (s.lanes(), S::Lanes::WIDTH);
    for j in 4 * HALF..4 * HALF + T::GROUPS.min(4) {
        prefetch::<S::Lanes, T>(l, body, j);
        for v in 0..ROWS / width {
            // SAFETY: the caller's promise.
            unsafe {
                let head = head.add(T::GEOMETRY.head_width * v * width);
                let body = body.add(4 * v * width);
                let out = out.add(j * PANEL_GROUP + 4 * v * width);
                let quads = Packed::<T, HALF>::new(body, j);
                each!(q of 0 1 2 3 4 5 6 7 => { l.store(out.add(q * LINE), quads.quad(s, q)); });
                let f = T::factors::<S::Lanes, HALF>(l, head, body, j);
                X::store(s, X::scales::<T>(s, &f), T::HALVES, out.add(AT_SCALES));
                for (i, min) in f.mins.into_iter().enumerate().take(T::MINS) {
                    l.store_f(out.add(AT_MINS + i * LINE), min);
                }
            }
        }
    }
}

/// `acc[n][16] += x * panel` for N rows.
///
/// # Safety
/// `panel` holds `count` groups of a type with these `HALVES` and `MINS` whose codes fit `RUN`, `records` N rows of as
/// many records of form `X`; `acc` can be read and written for N rows of 16.
#[inline(always)]
pub(crate) unsafe fn tile<
    S: Dot8,
    X: Codes<S>,
    const HALVES: bool,
    const MINS: usize,
    const RUN: usize,
    const N: usize,
>(
    s: S,
    a: &ByteTile,
    acc: *mut f32,
) {
    let l = s.lanes();
    let vector = 4 * S::Lanes::WIDTH;
    let acc = acc.cast::<u8>();
    let ByteTile { tile, offset_bits } = a;
    for v in 0..ROWS / S::Lanes::WIDTH {
        // SAFETY: group g < count of the panel, and its record in row n < N; row n and vector v of `acc`.
        unsafe {
            let mut outputs = [l.zero_f(); N];
            for (n, output) in outputs.iter_mut().enumerate() {
                *output = l.load_f(acc.add(n * LINE + v * vector));
            }
            for g in 0..tile.count {
                let w = tile.panel.add(g * PANEL_GROUP + v * vector);
                let x = records::<N>(tile.records.add(g * X::RECORD), tile.stride);
                let scales = X::load(s, HALVES, w.add(AT_SCALES));
                let mut mins = [l.zero_f(); 2];
                for (i, min) in mins.iter_mut().enumerate().take(MINS) {
                    *min = l.load_f(w.add(AT_MINS + i * LINE));
                }
                let quads = (InPanel(w), *offset_bits);
                X::add_group::<_, HALVES, MINS, RUN, N>(s, quads, x, (scales, mins), &mut outputs);
            }
            for (n, output) in outputs.into_iter().enumerate() {
                l.store_f(acc.add(n * LINE + v * vector), output);
            }
        }
    }
}
