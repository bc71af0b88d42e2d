//! Products with quantised weights for sets that multiply bytes: the integers of [`super::quant`], otherwise summed.
//!
//! Codes of weights fit signed bytes as they come out of a word ([`QuantFormat::bytes`]), so they are not widened. Codes
//! of activations have 15 bits and stand in two planes ([`super::prepare::Planes`]), the floor of the 128th and the
//! remainder, both of them bytes: `sum w * x = 128 * sum w * (x >> 7) + sum w * (x & 127)`, exactly. A group's two sums
//! are at most `32 * 128 * 128` in magnitude. From there on all is as in [`super::quant`], so results have the same bits.
//!
//! **Few rows** ([`gemv`]): one vector of rows after the other within a group; each octet of codes meets all rows of
//! activations. **Many rows** ([`expand`], [`tile`]): a panel of signed bytes, half of the panel of 16-bit codes. Integer
//! scales of sub-blocks are not multiplied in (they would not fit a byte) but multiply the sums, as they do for few rows.

use std::mem::MaybeUninit;

use super::quant::{Expand, Gemv, Tile, combine, finish_group, prefetch, records};
use super::types::{Factors, QuantFormat};
use super::{Lanes, split, with_rows};
use crate::cpu::kernels::{GROUP, GroupArgs, LINE, RECORD, ROWS};

/// A set that multiplies bytes, beside the vectors of 32-bit lanes it has.
///
/// An *octet* is the codes of eight elements of a vector of rows; it is two vectors of four elements.
pub(crate) trait Bytes: Copy {
    /// The other operations.
    type Lanes: Lanes;
    /// Eight activation codes, both planes.
    type X: Copy;
    /// Sums of both planes for a vector of rows.
    type Sum: Copy;
    /// Rows of activations a tile of the many-row kernels holds in registers.
    const TILE: usize;

    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn new() -> Self;
    /// The vectors.
    fn lanes(self) -> Self::Lanes;
    /// The octet of elements 8q to 8q + 3 and 8q + 4 to 8q + 7, in the order that [`Bytes::dot`] takes it.
    fn octet(self, a: I<Self>, b: I<Self>) -> [I<Self>; 2];
    /// Eight codes.
    /// # Safety
    /// 16 bytes at `p` can be read: eight of each plane.
    unsafe fn codes(self, p: *const u8) -> Self::X;
    /// No sums yet.
    fn zero(self) -> Self::Sum;
    /// `sum + octet * x` in both planes.
    fn dot(self, sum: Self::Sum, octet: [I<Self>; 2], x: Self::X) -> Self::Sum;
    /// Both planes in one: 128 times the first and the second.
    fn total(self, sum: Self::Sum) -> I<Self>;
    /// Bytes `a - b`, modulo 256.
    fn sub8(self, a: I<Self>, b: I<Self>) -> I<Self>;

    /// [`gemv`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn gemv<T: QuantFormat, const N: usize>(self, a: &Gemv, acc: *mut f32);
    /// [`expand`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn expand<T: QuantFormat>(self, a: &Expand, panel: *mut u8);
    /// [`tile`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn tile<const HALVES: bool, const MINS: usize, const N: usize>(self, a: &Tile, acc: *mut f32);
}

/// The integers of a set.
type I<B> = <<B as Bytes>::Lanes as Lanes>::I;
/// The floats of a set.
type F<B> = <<B as Bytes>::Lanes as Lanes>::F;

/// The last three methods of [`Bytes`], with the target features of the instruction set.
macro_rules! out_of_line_bytes {
    ($features:tt) => {
        unsafe fn gemv<T: QuantFormat, const N: usize>(self, a: &quant::Gemv, acc: *mut f32) {
            #[target_feature(enable = $features)]
            unsafe fn inner<B: Bytes, T: QuantFormat, const N: usize>(b: B, a: &quant::Gemv, acc: *mut f32) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { bytes::gemv::<B, T, N>(b, a, acc) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, T, N>(self, a, acc) }
        }

        unsafe fn expand<T: QuantFormat>(self, a: &quant::Expand, panel: *mut u8) {
            #[target_feature(enable = $features)]
            unsafe fn inner<B: Bytes, T: QuantFormat>(b: B, a: &quant::Expand, panel: *mut u8) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { bytes::expand::<B, T>(b, a, panel) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, T>(self, a, panel) }
        }

        unsafe fn tile<const HALVES: bool, const MINS: usize, const N: usize>(
            self,
            a: &quant::Tile,
            acc: *mut f32,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn inner<B: Bytes, const HALVES: bool, const MINS: usize, const N: usize>(
                b: B,
                a: &quant::Tile,
                acc: *mut f32,
            ) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { bytes::tile::<B, HALVES, MINS, N>(b, a, acc) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, HALVES, MINS, N>(self, a, acc) }
        }
    };
}
pub(crate) use out_of_line_bytes;

/// Rows that [`gemv`] takes at once: their sums of a vector of rows fill half of 32 registers.
const FEW: usize = 4;

/// From this many rows on, a panel is made: two passes of [`FEW`] rows expand the codes twice, as the panel does once and
/// stores them. Not measured.
const MANY: usize = 9;

/// Groups of 32 that a panel holds, a multiple of every type's groups per block.
const PANEL: usize = 8;

/// Octets of a group.
const OCTETS: usize = GROUP / 8;

/// Bytes of an octet of a vector of rows.
const fn octet_bytes<L: Lanes>() -> usize {
    8 * L::WIDTH
}

/// Lines of a group in a panel: its codes (by vector of rows, then by octet), D, two sub-scales and two M.
const CODE_LINES: usize = GROUP / 4;
const AT_D: usize = CODE_LINES * LINE;
const AT_SUBSCALES: usize = AT_D + LINE;
const AT_MINS: usize = AT_SUBSCALES + 2 * LINE;
const PANEL_GROUP: usize = AT_MINS + 2 * LINE;

#[repr(align(64))]
struct Panel(MaybeUninit<[u8; PANEL * PANEL_GROUP]>);

/// See [`crate::cpu::kernels::GroupFn`].
///
/// # Safety
/// As there; the codes of `records` stand in planes.
pub(crate) unsafe fn group<B: Bytes, T: QuantFormat>(args: &GroupArgs<'_>, acc: &mut [[f32; ROWS]]) {
    // SAFETY: the caller promises the instruction set.
    let b = unsafe { B::new() };
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
                let a = Gemv {
                    weight,
                    blocks: args.cols / T::GEOMETRY.block,
                    records: records.add(first * stride),
                    stride,
                };
                with_rows!(rows, FEW, N => b.gemv::<T, N>(&a, out));
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
        unsafe { b.expand::<T>(&Expand { weight, first, count }, panel) };
        for (row, rows) in split(acc.len(), B::TILE) {
            let out = acc[row..row + rows].as_mut_ptr().cast::<f32>();
            // SAFETY: `rows` rows of records from `row` on exist, with `count` groups from `first` on.
            unsafe {
                let a = Tile {
                    panel,
                    count,
                    records: records.add(row * stride + first * RECORD),
                    stride,
                };
                match (T::HALVES, T::MINS) {
                    (false, 0) => with_rows!(rows, B::TILE, N => b.tile::<false, 0, N>(&a, out)),
                    (false, 1) => with_rows!(rows, B::TILE, N => b.tile::<false, 1, N>(&a, out)),
                    (true, 0) => with_rows!(rows, B::TILE, N => b.tile::<true, 0, N>(&a, out)),
                    (true, 2) => with_rows!(rows, B::TILE, N => b.tile::<true, 2, N>(&a, out)),
                    (halves, mins) => unreachable!("no type has {mins} minima and halves: {halves}"),
                }
            }
        }
    }
}

/// The body with `$q` equal to 0 to 3: written out, so that its arrays live in registers.
macro_rules! four_times {
    ($q:ident => $body:block) => {
        four_times!($q => $body; 0 1 2 3)
    };
    ($q:ident => $body:block; $($n:literal)*) => {
        $({
            let $q: usize = $n;
            $body
        })*
    };
}

/// `acc[n][16] = x * weight` for N rows, all of K.
///
/// # Safety
/// As [`super::quant::gemv`]; the records' codes stand in planes.
#[inline(always)]
pub(crate) unsafe fn gemv<B: Bytes, T: QuantFormat, const N: usize>(b: B, a: &Gemv, acc: *mut f32) {
    let l = b.lanes();
    let mut sums = [[l.zero_f(); N]; 2];
    for block in 0..a.blocks {
        // SAFETY: the block is one of `blocks`, and each of its groups has a record in each of the N rows.
        unsafe {
            let parts = (
                a.weight.add(T::GEOMETRY.head(block)),
                a.weight.add(T::GEOMETRY.body(block)),
            );
            let x = (a.records.add(block * T::GROUPS * RECORD), a.stride);
            gemv_half::<B, T, N, 0>(b, parts, x, &mut sums);
            if const { T::GROUPS > 4 } {
                gemv_half::<B, T, N, 1>(b, parts, x, &mut sums);
            }
        }
    }
    let acc = acc.cast::<u8>();
    for (v, sums) in sums.into_iter().enumerate().take(ROWS / B::Lanes::WIDTH) {
        for (n, sum) in sums.into_iter().enumerate() {
            // SAFETY: row n < N, vector v of a line.
            unsafe { l.store_f(acc.add(n * LINE + v * 4 * B::Lanes::WIDTH), sum) };
        }
    }
}

/// Up to four groups of a block, as in [`super::quant`].
///
/// # Safety
/// As [`gemv_group`] for all vectors of a row group.
#[inline(always)]
unsafe fn gemv_half<B: Bytes, T: QuantFormat, const N: usize, const HALF: usize>(
    b: B,
    (head, body): (*const u8, *const u8),
    (x, stride): (*const u8, usize),
    sums: &mut [[F<B>; N]; 2],
) {
    let width = B::Lanes::WIDTH;
    for j in 4 * HALF..4 * HALF + T::GROUPS.min(4) {
        prefetch::<B::Lanes, T>(b.lanes(), body, j);
        for (v, sums) in sums.iter_mut().enumerate().take(ROWS / width) {
            // SAFETY: the caller's promise; group j has its record, and vector v lies in the row group.
            unsafe {
                let block = (
                    head.add(T::GEOMETRY.head_width * v * width),
                    body.add(4 * v * width),
                    j,
                );
                gemv_group::<B, T, N, HALF>(b, block, (x.add(j * RECORD), stride), sums);
            }
        }
    }
}

/// Moves sums of both planes into totals.
#[inline(always)]
fn totals<B: Bytes, const N: usize>(b: B, sums: &mut [B::Sum; N], totals: &mut [I<B>; N]) {
    for n in 0..N {
        totals[n] = b.total(sums[n]);
        sums[n] = b.zero();
    }
}

/// One group of 32 and one vector of rows.
///
/// # Safety
/// As [`QuantFormat::bytes`] and [`QuantFormat::factors`]; `x` points to a record, with another each `stride` bytes.
#[inline(always)]
unsafe fn gemv_group<B: Bytes, T: QuantFormat, const N: usize, const HALF: usize>(
    b: B,
    (head, body, j): (*const u8, *const u8, usize),
    (x, stride): (*const u8, usize),
    sums: &mut [F<B>; N],
) {
    let l = b.lanes();
    // SAFETY: all reads are of the group's block and records, as the caller promises.
    unsafe {
        let x = records::<N>(x, stride);
        let mut acc = [b.zero(); N];
        let mut first = [l.zero(); N];
        four_times!(q => {
            let octet = b.octet(
                T::bytes::<B::Lanes, HALF>(l, body, j, 2 * q),
                T::bytes::<B::Lanes, HALF>(l, body, j, 2 * q + 1),
            );
            for n in 0..N {
                acc[n] = b.dot(acc[n], octet, b.codes(x[n].add(16 * q)));
            }
            if T::HALVES && q == 1 {
                totals(b, &mut acc, &mut first);
            }
        });
        let mut last = [l.zero(); N];
        totals(b, &mut acc, &mut last);
        let block = (head, body, j);
        finish_group::<B::Lanes, T, N, HALF>(l, T::BYTE_OFFSET_BITS, block, x, (&first, &last), sums);
    }
}

/// Expands groups into a panel.
///
/// # Safety
/// As [`super::quant::expand`].
#[inline(always)]
pub(crate) unsafe fn expand<B: Bytes, T: QuantFormat>(b: B, a: &Expand, panel: *mut u8) {
    for block in a.first / T::GROUPS..(a.first + a.count) / T::GROUPS {
        // SAFETY: the block and its groups lie in the row group, and each group has its place in the panel.
        unsafe {
            let parts = (
                a.weight.add(T::GEOMETRY.head(block)),
                a.weight.add(T::GEOMETRY.body(block)),
            );
            let out = panel.add((block * T::GROUPS - a.first) * PANEL_GROUP);
            expand_half::<B, T, 0>(b, parts, out);
            if const { T::GROUPS > 4 } {
                expand_half::<B, T, 1>(b, parts, out);
            }
        }
    }
}

/// Up to four groups of a block.
///
/// # Safety
/// As [`expand_group`] for all vectors of a row group; `out` is the place of the block's first group.
#[inline(always)]
unsafe fn expand_half<B: Bytes, T: QuantFormat, const HALF: usize>(
    b: B,
    (head, body): (*const u8, *const u8),
    out: *mut u8,
) {
    let width = B::Lanes::WIDTH;
    for j in 4 * HALF..4 * HALF + T::GROUPS.min(4) {
        prefetch::<B::Lanes, T>(b.lanes(), body, j);
        for v in 0..ROWS / width {
            // SAFETY: the caller's promise.
            unsafe {
                let block = (
                    head.add(T::GEOMETRY.head_width * v * width),
                    body.add(4 * v * width),
                    j,
                );
                expand_group::<B, T, HALF>(b, block, out.add(j * PANEL_GROUP), v);
            }
        }
    }
}

/// One group of 32 and vector `v` of rows.
///
/// # Safety
/// As [`QuantFormat::bytes`] and [`QuantFormat::factors`]; `out` is the group's place in a panel.
#[inline(always)]
unsafe fn expand_group<B: Bytes, T: QuantFormat, const HALF: usize>(
    b: B,
    (head, body, j): (*const u8, *const u8, usize),
    out: *mut u8,
    v: usize,
) {
    let l = b.lanes();
    let vector = 4 * B::Lanes::WIDTH;
    // SAFETY: the caller's promise.
    unsafe {
        let Factors { d, subscales, mins } = T::factors::<B::Lanes, HALF>(l, head, body, j);
        let offset = l.splat(((1 << T::BYTE_OFFSET_BITS) & !1) * 0x0101_0101);
        four_times!(q => {
            let mut codes = [
                T::bytes::<B::Lanes, HALF>(l, body, j, 2 * q),
                T::bytes::<B::Lanes, HALF>(l, body, j, 2 * q + 1),
            ];
            if T::BYTE_OFFSET_BITS > 0 {
                codes = [b.sub8(codes[0], offset), b.sub8(codes[1], offset)];
            }
            let [first, second] = b.octet(codes[0], codes[1]);
            let out = out.add((v * OCTETS + q) * octet_bytes::<B::Lanes>());
            l.store(out, first);
            l.store(out.add(vector), second);
        });
        l.store_f(out.add(AT_D + v * vector), d);
        if T::HALVES {
            l.store(out.add(AT_SUBSCALES + v * vector), subscales[0]);
            l.store(out.add(AT_SUBSCALES + LINE + v * vector), subscales[1]);
        }
        for (i, min) in mins.into_iter().enumerate().take(T::MINS) {
            l.store_f(out.add(AT_MINS + i * LINE + v * vector), min);
        }
    }
}

/// `acc[n][16] += x * panel` for N rows.
///
/// # Safety
/// `panel` holds `count` groups of a type with these `HALVES` and `MINS`, `records` N rows of as many records; `acc` can
/// be read and written for N rows of 16.
#[inline(always)]
pub(crate) unsafe fn tile<B: Bytes, const HALVES: bool, const MINS: usize, const N: usize>(
    b: B,
    a: &Tile,
    acc: *mut f32,
) {
    let l = b.lanes();
    let vector = 4 * B::Lanes::WIDTH;
    let acc = acc.cast::<u8>();
    for v in 0..ROWS / B::Lanes::WIDTH {
        // SAFETY: group g < count of the panel, and its record in row n < N; row n and vector v of `acc`.
        unsafe {
            let mut outputs = [l.zero_f(); N];
            for (n, output) in outputs.iter_mut().enumerate() {
                *output = l.load_f(acc.add(n * LINE + v * vector));
            }
            for g in 0..a.count {
                let group = a.panel.add(g * PANEL_GROUP);
                let w = group.add(v * OCTETS * octet_bytes::<B::Lanes>());
                let x = records::<N>(a.records.add(g * RECORD), a.stride);
                let mut sums = [b.zero(); N];
                let mut first = [l.zero(); N];
                four_times!(q => {
                    let w = w.add(q * octet_bytes::<B::Lanes>());
                    let octet = [l.load(w), l.load(w.add(vector))];
                    for n in 0..N {
                        sums[n] = b.dot(sums[n], octet, b.codes(x[n].add(16 * q)));
                    }
                    if HALVES && q == 1 {
                        totals(b, &mut sums, &mut first);
                    }
                });
                let mut last = [l.zero(); N];
                totals(b, &mut sums, &mut last);
                let factors = group.add(v * vector);
                let d = l.load_f(factors.add(AT_D));
                let (mut scales, mut mins) = ([l.zero(); 2], [l.zero_f(); 2]);
                if HALVES {
                    scales = [
                        l.load(factors.add(AT_SUBSCALES)),
                        l.load(factors.add(AT_SUBSCALES + LINE)),
                    ];
                }
                for (i, min) in mins.iter_mut().enumerate().take(MINS) {
                    *min = l.load_f(factors.add(AT_MINS + i * LINE));
                }
                for n in 0..N {
                    let i = if HALVES {
                        l.add(l.mul(first[n], scales[0]), l.mul(last[n], scales[1]))
                    } else {
                        last[n]
                    };
                    outputs[n] = combine(l, MINS, i, (d, mins), x[n], outputs[n]);
                }
            }
            for (n, output) in outputs.into_iter().enumerate() {
                l.store_f(acc.add(n * LINE + v * vector), output);
            }
        }
    }
}
