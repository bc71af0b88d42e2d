//! Weights and activations to bf16 tiles, by way of f16 arithmetic, which does 32 weights at once.
//!
//! # Weights
//!
//! Codes become f16 exactly: those of up to five bits by a table look-up (of their type's own table, where it has one),
//! others by putting them into the fraction of 1024. A multiplication, or a multiply-add where there is a minimum, makes
//! f16 weights of them, of 11 significant bits. Moving the bits of an f16 three places down and clearing what is not sign,
//! exponent or fraction leaves a bf16 number 2^112 times smaller ([`SHRUNK`]), cut, not rounded: cutting loses 0.72 / 256
//! of a value on average (the mean of `2^-8 / m` for fractions m that are distributed as in any product), which the scales
//! make up for ([`CUT`]), and the spread is that of rounding.
//!
//! f16 reaches from 2^-24 to 2^16, so each row group has a power of two ([`group_exponent`]) that brings its largest
//! factors near the upper end. What is 2^-28 times smaller than that becomes zero.
//!
//! # Activations
//!
//! Products with weights that small must not fall below the least f32. A row of activations is multiplied by a power of
//! two that brings its largest value near 2^64, and the row's sums by the inverse ([`Scales`]). Powers of two change no
//! digit.

use std::arch::x86_64::*;

use dynair::{DType, QuantType};

use super::few::{Panel, Products, Sink, StreamFn};
use super::{PrepareTilesFn, TILE, TILE_ROWS, TileKernels};
use crate::cpu::kernels::avx512::Avx512;
use crate::cpu::kernels::lanes::Lanes;
use crate::cpu::kernels::lanes::types::{self, Factors, QuantFormat};
use crate::cpu::kernels::{GROUP, Geometry, LINE, ROWS};

/// Expands groups `first..first + count` of 32 along K of a row group into as many tiles, `scale` times as large.
///
/// # Safety
/// The CPU has the table's instruction set; the weight is a row group of the kernel's type that has those groups;
/// `first` is the first group of a block; `count * TILE` bytes at `panel` can be written.
pub(crate) type ExpandFn = unsafe fn(weight: &[u8], first: usize, count: usize, scale: f32, panel: *mut u8);

/// The kernels of a type.
#[derive(Clone, Copy)]
pub(crate) struct Expand {
    /// Into panels.
    pub(crate) panel: ExpandFn,
    /// While groups are multiplied with one or two tiles of activations.
    pub(crate) stream: (StreamFn<Products<1>>, StreamFn<Products<2>>),
}

/// The kernels that function `$into` makes, for each sink.
macro_rules! kernels {
    ($into:ident $(, $format:ty)?) => {{
        /// See [`ExpandFn`].
        ///
        /// # Safety
        /// As there.
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512fp16")]
        unsafe fn panel(weight: &[u8], first: usize, count: usize, scale: f32, panel: *mut u8) {
            // SAFETY: the caller's promise is the callee's; a panel has room for `count` tiles.
            unsafe { $into::<$($format,)? _>(weight, first, count, scale, &mut Panel(panel)) }
        }
        /// See [`StreamFn`].
        ///
        /// # Safety
        /// As there.
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512fp16")]
        unsafe fn stream<const TILES: usize>(
            weight: &[u8],
            groups: usize,
            scale: f32,
            sink: &mut Products<TILES>,
        ) {
            // SAFETY: the caller's promise is the callee's.
            unsafe { $into::<$($format,)? _>(weight, 0, groups, scale, sink) }
        }
        Some(Expand {
            panel,
            stream: (stream::<1>, stream::<2>),
        })
    }};
}

/// How far ahead of its use a line is asked for: what is asked for earlier drives activations out of the nearest cache.
const AHEAD: usize = 1024;

/// What makes up for cutting instead of rounding; see the module's docs.
const CUT: f32 = 1.0 + 0.72 / 256.0;

/// log2 of how many times too small weights in tiles are that came by way of f16.
const SHRUNK: i32 = 112;

/// log2 of what a row's largest activation is brought near.
const LIFTED: i32 = 64;

pub(crate) const KERNELS: TileKernels = TileKernels {
    prepare: prepare as PrepareTilesFn,
    // In the order of `DType::WEIGHTS`.
    expand: [
        None,
        kernels!(expand_f16),
        kernels!(expand_bf16),
        kernels!(expand, types::Q4_0),
        kernels!(expand, types::Q4_1),
        kernels!(expand, types::Q5_0),
        kernels!(expand, types::Q5_1),
        kernels!(expand, types::Q8_0),
        kernels!(expand, types::Q2K),
        kernels!(expand, types::Q3K),
        kernels!(expand, types::Q4K),
        kernels!(expand, types::Q5K),
        kernels!(expand, types::Q6K),
        kernels!(expand, types::Iq4Nl),
        kernels!(expand, types::Iq4Xs),
        kernels!(expand, types::Mxfp4),
    ],
};

/// 2^e.
fn power(e: i32) -> f32 {
    f32::from_bits(((e.clamp(-126, 127) + 127) as u32) << 23)
}

/// What the weights of a row group are multiplied with in f16, and its sums with in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scales {
    pub(crate) weights: f32,
    pub(crate) sums: f32,
}

/// The scales of a packed row group.
pub(crate) fn scales(dtype: DType, packed: &[u8], cols: usize) -> Scales {
    let shrunk = match dtype {
        DType::Bf16 | DType::F32 | DType::I32 => 0,
        DType::F16 | DType::Quant(_) => SHRUNK,
    };
    let exponent = if shrunk == 0 {
        0
    } else {
        group_exponent(dtype, packed, cols)
    };
    // Sums of a tensor whose exponent is beyond f32's reach would be zero or infinite anyhow.
    Scales {
        weights: power(-exponent),
        sums: power(shrunk - LIFTED + exponent),
    }
}

/// The least e for which weights of the row group, divided by 2^e, stay below 2^15.
fn group_exponent(dtype: DType, packed: &[u8], cols: usize) -> i32 {
    // The largest number a factor d is multiplied with; minima are multiplied with less.
    let most = match dtype {
        DType::Quant(q) => match q {
            QuantType::Q4_0 | QuantType::Q4_1 => 16,
            QuantType::Q5_0 | QuantType::Q5_1 => 32,
            QuantType::Q8_0 => 128,
            QuantType::Q2K => 15 * 4,
            QuantType::Q3K => 32 * 4,
            QuantType::Q4K => 63 * 16,
            QuantType::Q5K => 63 * 32,
            QuantType::Q6K => 128 * 32,
            QuantType::Iq4Nl => 127,
            QuantType::Iq4Xs => 127 * 32,
            QuantType::Mxfp4 => 12,
        },
        _ => 1,
    };
    let half = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes) & 0x7fff;
    let geometry = Geometry::of(dtype);
    let factors = match dtype {
        // The second are bits of scales.
        DType::Quant(QuantType::Iq4Xs) => 1,
        _ => geometry.heads,
    };
    let heads = |b| &packed[geometry.head(b)..][..factors * geometry.head_width * ROWS];
    let blocks = 0..cols / geometry.block;
    // As integers, magnitudes are ordered like the floats.
    let e = if dtype == DType::Quant(QuantType::Mxfp4) {
        // Factors 2^(e - 128).
        let largest = blocks.flat_map(heads).max();
        i32::from(*largest.unwrap_or(&0)) - 127
    } else {
        let largest = match dtype {
            DType::Quant(_) => blocks.flat_map(|b| heads(b).as_chunks().0).map(half).max(),
            _ => packed.as_chunks().0.iter().map(half).max(),
        };
        // Exponents of f16: 2^(e - 15) <= |d| < 2^(e - 14).
        i32::from(largest.unwrap_or(0) >> 10) - 14
    };
    let e = e + (most as u32).next_power_of_two().ilog2() as i32 - 15;
    match dtype {
        // Factors are scaled in f32, F16 weights by an f16.
        DType::F16 => e.max(-15),
        // What both scales reach. Weights from 2^94 on saturate, those below 2^-140 vanish; no model has either.
        DType::Quant(QuantType::Mxfp4) => e.clamp(-126, 127 - SHRUNK + LIFTED),
        _ => e,
    }
}

/// Brings rows of activations into bf16 tiles; see [`PrepareTilesFn`].
///
/// # Safety
/// The CPU has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn prepare(x: &[f32], cols: usize, tiles: &mut [u8], sums: &mut [f32; TILE_ROWS]) {
    let groups = cols / GROUP;
    assert!(
        cols.is_multiple_of(GROUP)
            && x.len().is_multiple_of(cols)
            && x.len() <= TILE_ROWS * cols
            && tiles.len() == groups * TILE,
        "a tile's rows"
    );
    // Each four values k, k+1, k+2, k+3 stand as k, k+2, k+1, k+3.
    let order = _mm512_set_epi16(
        31, 29, 30, 28, 27, 25, 26, 24, 23, 21, 22, 20, 19, 17, 18, 16, 15, 13, 14, 12, 11, 9, 10, 8, 7, 5,
        6, 4, 3, 1, 2, 0,
    );
    let rows = x.len() / cols;
    for (r, sum) in sums.iter_mut().enumerate() {
        *sum = 0.0;
        let lines = (0..groups).map(|g| g * TILE + r * LINE);
        if r >= rows {
            lines.for_each(|at| tiles[at..at + LINE].fill(0));
            continue;
        }
        let row = &x[r * cols..(r + 1) * cols];
        let lift = lift(row);
        *sum = power(LIFTED - lift);
        let scale = _mm512_set1_ps(power(lift));
        for (x, at) in row.as_chunks::<GROUP>().0.iter().zip(lines) {
            let line = &mut tiles[at..at + LINE];
            // SAFETY: the slices hold 32 values and 64 bytes.
            unsafe {
                let low = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), scale);
                let high = _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr().add(16)), scale);
                let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(line.as_mut_ptr().cast(), _mm512_permutexvar_epi16(order, both));
            }
        }
    }
}

/// log2 of what a row is multiplied with. A row that holds an infinity or a NaN stays one whose outputs are none.
#[inline(always)]
fn lift(row: &[f32]) -> i32 {
    let largest = row
        .iter()
        .fold(0i32, |m, v| m.max((v.to_bits() & 0x7fff_ffff) as i32));
    (LIFTED - ((largest >> 23) - 127)).min(126)
}

/// Expands groups `first..first + count`.
///
/// # Safety
/// As [`ExpandFn`]; the sink takes `count` tiles.
#[inline(always)]
unsafe fn expand<T: QuantFormat, S: Sink>(
    weight: &[u8],
    first: usize,
    count: usize,
    scale: f32,
    sink: &mut S,
) {
    // SAFETY: the caller promises the instruction set, the groups and the sink.
    unsafe {
        let l = Avx512::new();
        let codes = Codes::new::<T>();
        for b in first / T::GROUPS..(first + count) / T::GROUPS {
            let block = (
                weight.as_ptr().add(T::GEOMETRY.head(b)),
                weight.as_ptr().add(T::GEOMETRY.body(b)),
            );
            half::<T, S, 0>(l, &codes, block, scale, sink);
            if const { T::GROUPS > 4 } {
                half::<T, S, 1>(l, &codes, block, scale, sink);
            }
        }
    }
}

/// Up to four groups of a block, written out: shifts by constants cost less.
///
/// # Safety
/// As [`expand`], for the block.
#[inline(always)]
unsafe fn half<T: QuantFormat, S: Sink, const HALF: usize>(
    l: Avx512,
    codes: &Codes,
    block: (*const u8, *const u8),
    scale: f32,
    sink: &mut S,
) {
    macro_rules! groups {
        ($($j:literal)*) => {
            $(
                group::<T, HALF>(l, codes, block, 4 * HALF + $j, scale, sink.place());
                sink.written();
            )*
        };
    }
    // SAFETY: the caller's promise; a block has whole halves, or one group.
    unsafe {
        groups!(0);
        if const { T::GROUPS > 1 } {
            groups!(1 2 3);
        }
    }
}

/// How codes become f16.
struct Codes {
    /// Of codes of up to five bits.
    table: __m512i,
    /// 1024 and the offset.
    start: __m512h,
}

impl Codes {
    /// # Safety
    /// The CPU has the table's instruction set.
    #[inline(always)]
    unsafe fn new<T: QuantFormat>() -> Codes {
        // SAFETY: the caller promises the instruction set; a table is 64 bytes.
        unsafe {
            Codes {
                table: _mm512_loadu_si512((&raw const *const { &code_table::<T>() }).cast()),
                start: _mm512_castsi512_ph(_mm512_set1_epi16(const { integer(1024 + offset::<T>()) as i16 })),
            }
        }
    }

    /// The values of a vector of code pairs.
    #[inline(always)]
    fn values<T: QuantFormat>(&self, pairs: __m512i) -> __m512h {
        // SAFETY: whoever made `self` promised the instruction set, and no memory is touched.
        unsafe {
            if const { T::CODE_BITS <= 5 && !T::SIGNED } {
                return _mm512_castsi512_ph(_mm512_permutexvar_epi16(pairs, self.table));
            }
            let pairs = if const { T::SIGNED } {
                _mm512_xor_si512(
                    _mm512_and_si512(pairs, _mm512_set1_epi16(0xff)),
                    _mm512_set1_epi16(0x80),
                )
            } else {
                pairs
            };
            // 1024 + code, in f16.
            let sum = _mm512_or_si512(pairs, _mm512_set1_epi16(0x6400));
            _mm512_sub_ph(_mm512_castsi512_ph(sum), self.start)
        }
    }
}

/// What is subtracted from codes.
const fn offset<T: QuantFormat>() -> i32 {
    if T::SIGNED {
        128
    } else {
        (1 << T::OFFSET_BITS) & !1
    }
}

/// The f16 values of codes of up to five bits, over and over where they have fewer.
const fn code_table<T: QuantFormat>() -> [u16; 32] {
    let mut table = [0; 32];
    let mut i = 0;
    while i < 32 {
        let bits = if T::CODE_BITS < 5 { T::CODE_BITS } else { 5 };
        table[i] = integer(match T::VALUES {
            Some(values) => values[i % 16] as i32,
            None => i as i32 % (1 << bits) - offset::<T>(),
        });
        i += 1;
    }
    table
}

/// The f16 of an integer of up to eleven bits.
const fn integer(n: i32) -> u16 {
    let size = n.unsigned_abs() as u16;
    assert!(size < 1 << 11);
    if size == 0 {
        return 0;
    }
    let exponent = size.ilog2() as u16;
    let fraction = (size << (10 - exponent)) & 0x3ff;
    (if n < 0 { 0x8000 } else { 0 }) | (exponent + 15) << 10 | fraction
}

/// f32 lanes as pairs of equal f16.
///
/// # Safety
/// The CPU has the table's instruction set.
#[inline(always)]
unsafe fn twice(x: __m512) -> __m512i {
    // SAFETY: the caller promises the instruction set, and no memory is touched.
    unsafe {
        let halves = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(x));
        _mm512_or_si512(halves, _mm512_slli_epi32::<16>(halves))
    }
}

/// The bits of f16 numbers as bf16 numbers 2^112 times smaller; see the module's docs.
///
/// # Safety
/// The CPU has the table's instruction set.
#[inline(always)]
unsafe fn shrink(x: __m512h) -> __m512i {
    // SAFETY: the caller promises the instruction set, and no memory is touched.
    unsafe {
        let moved = _mm512_srai_epi16::<3>(_mm512_castph_si512(x));
        _mm512_and_si512(moved, _mm512_set1_epi16(0x8fff_u16 as i16))
    }
}

/// One group: a tile.
///
/// # Safety
/// As [`QuantFormat::quad`] and [`QuantFormat::factors`]; a tile at `out` can be written.
#[inline(always)]
unsafe fn group<T: QuantFormat, const HALF: usize>(
    l: Avx512,
    codes: &Codes,
    (head, body): (*const u8, *const u8),
    j: usize,
    scale: f32,
    out: *mut u8,
) {
    let lines = (T::GEOMETRY.words + 1).div_ceil(T::GROUPS);
    for i in 0..lines {
        l.prefetch(body.wrapping_add((j * lines + i) * LINE + AHEAD));
    }
    // SAFETY: the caller's promise.
    unsafe {
        let Factors { d, subscales, mins } = T::factors::<Avx512, HALF>(l, head, body, j);
        let scale = _mm512_set1_ps(scale * CUT);
        let d = l.mul_f(d, scale);
        let (mut scales, mut starts) = ([twice(d); 2], [_mm512_setzero_si512(); 2]);
        if T::HALVES {
            scales = [
                twice(l.mul_f(d, l.to_f(subscales[0]))),
                twice(l.mul_f(d, l.to_f(subscales[1]))),
            ];
        }
        if T::MINS > 0 {
            starts = [twice(l.mul_f(mins[0], scale)); 2];
        }
        if T::MINS > 1 {
            starts[1] = twice(l.mul_f(mins[1], scale));
        }
        for i in 0..8 {
            let h = i / 4;
            let scale = _mm512_castsi512_ph(scales[h]);
            let pairs = T::loose_quad::<Avx512, HALF>(l, body, j, i);
            for (p, pairs) in pairs.into_iter().enumerate() {
                let value = codes.values::<T>(pairs);
                let value = if T::MINS > 0 {
                    _mm512_fmadd_ph(value, scale, _mm512_castsi512_ph(starts[h]))
                } else {
                    _mm512_mul_ph(value, scale)
                };
                _mm512_storeu_si512(out.add((2 * i + p) * LINE).cast(), shrink(value));
            }
        }
    }
}

/// Lines of pairs (k, k + 2) and (k + 1, k + 3) of four rows of 16-bit values: 64 bytes at `p`, and the next 64.
///
/// # Safety
/// 128 bytes at `p` can be read.
#[inline(always)]
unsafe fn pair_lines(p: *const u8) -> [__m512i; 2] {
    // Lane r of the first line: value r of the first row, value r of the third.
    let first: [i16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 32) as i16);
    let second = first.map(|i| i + 16);
    // SAFETY: the caller's promise; the arrays are 64 bytes.
    unsafe {
        let (low, high) = (
            _mm512_loadu_si512(p.cast()),
            _mm512_loadu_si512(p.add(LINE).cast()),
        );
        let pick = |order: [i16; 32]| {
            let order = std::mem::transmute::<[i16; 32], __m512i>(order);
            _mm512_permutex2var_epi16(low, order, high)
        };
        [pick(first), pick(second)]
    }
}

/// As [`expand`], of F16: each value is rounded to the nearest bf16, halves away from zero.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn expand_f16<S: Sink>(weight: &[u8], first: usize, count: usize, scale: f32, sink: &mut S) {
    // SAFETY: the caller promises the instruction set, the groups and the sink.
    unsafe {
        let scale = twice(_mm512_set1_ps(scale));
        float_lines(weight, first, count, sink, |values| {
            let scaled = _mm512_castph_si512(_mm512_mul_ph(
                _mm512_castsi512_ph(values),
                _mm512_castsi512_ph(scale),
            ));
            shrink(_mm512_castsi512_ph(_mm512_add_epi16(
                scaled,
                _mm512_set1_epi16(4),
            )))
        });
    }
}

/// As [`expand`], of BF16, which tiles take as it is.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn expand_bf16<S: Sink>(weight: &[u8], first: usize, count: usize, _: f32, sink: &mut S) {
    // SAFETY: the caller promises the instruction set, the groups and the sink.
    unsafe { float_lines(weight, first, count, sink, |values| values) }
}

/// Tiles of 16-bit weights, each line as `convert` makes it of the pairs.
///
/// # Safety
/// As [`expand`].
#[inline(always)]
unsafe fn float_lines<S: Sink>(
    weight: &[u8],
    first: usize,
    count: usize,
    sink: &mut S,
    convert: impl Fn(__m512i) -> __m512i,
) {
    /// Bytes of four rows.
    const FOUR: usize = 4 * ROWS * 2;
    for group in first..first + count {
        let tile = sink.place();
        for quad in 0..GROUP / 4 {
            // SAFETY: the caller promises the groups and the sink, eight times four rows and sixteen lines for each.
            unsafe {
                let p = weight.as_ptr().add(group * GROUP * ROWS * 2 + quad * FOUR);
                Avx512::new().prefetch(p.wrapping_add(AHEAD));
                Avx512::new().prefetch(p.wrapping_add(AHEAD + LINE));
                for (i, line) in pair_lines(p).into_iter().enumerate() {
                    _mm512_storeu_si512(tile.add((2 * quad + i) * LINE).cast(), convert(line));
                }
            }
        }
        // SAFETY: it has been written.
        unsafe { sink.written() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponents_bring_the_largest_factor_below_the_reach_of_f16() {
        for d in [1e-7f32, 3e-5, 0.01, 1.0, 700.0, 65504.0] {
            let (dtype, cols) = (DType::Quant(QuantType::Q6K), 512);
            let geometry = Geometry::of(dtype);
            let mut packed = vec![0; geometry.group_bytes(cols)];
            let at = geometry.head(1) + 2 * 5;
            packed[at..at + 2].copy_from_slice(&half::f16::from_f32(-d).to_le_bytes());
            let largest =
                half::f16::from_f32(d).to_f32() * 128.0 * 32.0 * scales(dtype, &packed, cols).weights;
            assert!((1.0..=32768.0).contains(&largest), "{d}: {largest}");
        }
        let f16 = scales(DType::F16, &half::f16::from_f32(1e-4).to_le_bytes(), 1);
        assert!(half::f16::from_f32(f16.weights).is_finite(), "{f16:?}");
        let scales = scales(DType::Bf16, &[0; 32], 1);
        assert_eq!((scales.weights, scales.sums), (1.0, power(-64)));
    }

    #[test]
    fn integers_are_their_f16() {
        for n in -2047..2048 {
            assert_eq!(integer(n), half::f16::from_f32(n as f32).to_bits(), "{n}");
        }
    }

    #[test]
    fn rows_are_lifted_within_the_reach_of_f32() {
        for x in [0.0, 1e-40, 1e-20, 1.0, 3e38] {
            let lift = lift(&[x, -x / 3.0]);
            assert!((x * power(lift)).is_finite() && power(lift) > 0.0 && power(LIFTED - lift).is_finite());
            assert!(x < 1e-18 || (x * power(lift)).log2().floor() == 64.0, "{x}");
        }
    }
}
