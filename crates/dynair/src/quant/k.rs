//! The types of 256 elements a block: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
//!
//! A block is cut into sub-blocks (16 of 16 elements, or 8 of 32), each with a small integer scale, and for the affine
//! types a minimum, that multiply one or two `f16` of the whole block:
//!
//! ```text
//! Q2_K   scales: [u8; 16]  qs: [u8; 64]  d: f16  dmin: f16          value = (d * sc) * q - (dmin * m)
//! Q3_K   hmask: [u8; 32]   qs: [u8; 64]  scales: [u8; 12]  d: f16   value = (d * sc) * (q - 4)
//! Q4_K   d: f16  dmin: f16  scales: [u8; 12]  qs: [u8; 128]         value = (d * sc) * q - (dmin * m)
//! Q5_K   d: f16  dmin: f16  scales: [u8; 12]  qh: [u8; 32]  qs: [u8; 128]    likewise
//! Q6_K   ql: [u8; 128]  qh: [u8; 64]  scales: [i8; 16]  d: f16      value = (d * sc) * (q - 32)
//! ```
//!
//! Codes lie in *planes*: a group of `G` bytes holds `8 / b` runs of `G` consecutive elements, `b` bits each, the first
//! run in the lowest bits. `qs` of Q2_K and Q3_K and `qh` of Q6_K: `b = 2, G = 32`. `qs` of Q4_K and Q5_K: `b = 4,
//! G = 32`; `ql` of Q6_K: `b = 4, G = 64`. `hmask` (the third bit) and `qh` of Q5_K (the fifth): `b = 1, G = 32`.
//!
//! Scales: Q2_K has the scale in the low and the minimum in the high half of a byte. The packings of six bits of
//! Q3_K, and of Q4_K and Q5_K, stand with [`scales_q3_k`] and [`scales_mins_q4_k`].
//!
//! Encoding fits each sub-block by least squares ([`super::fit`]), takes the `f16` of the block from the largest scale
//! and minimum, and then tries the integer scales and minima next to the rounded ones, with the codes they imply:
//! a sub-block whose scale was rounded down may be better off with one more.

use super::{ScaleOverflow, fit, get_f16, put_f16};

/// Elements of one block.
pub const BLOCK: usize = 256;

/// ORs the codes of one set of planes, shifted left by `shift`, into `codes`.
fn unpack<const BITS: usize, const GROUP: usize>(bytes: &[u8], shift: u32, codes: &mut [u8; BLOCK]) {
    let runs = 8 / BITS;
    for (group, codes) in bytes
        .chunks_exact(GROUP)
        .zip(codes.chunks_exact_mut(GROUP * runs))
    {
        for (run, codes) in codes.chunks_exact_mut(GROUP).enumerate() {
            for (c, b) in codes.iter_mut().zip(group) {
                *c |= ((b >> (run * BITS)) & ((1 << BITS) - 1)) << shift;
            }
        }
    }
}

/// The inverse of [`unpack`]: writes bits `shift..shift + BITS` of each code; `bytes` must be zero before.
fn pack<const BITS: usize, const GROUP: usize>(codes: &[u8; BLOCK], shift: u32, bytes: &mut [u8]) {
    let runs = 8 / BITS;
    for (group, codes) in bytes
        .chunks_exact_mut(GROUP)
        .zip(codes.chunks_exact(GROUP * runs))
    {
        for (run, codes) in codes.chunks_exact(GROUP).enumerate() {
            for (b, c) in group.iter_mut().zip(codes) {
                *b |= ((c >> shift) & ((1 << BITS) - 1)) << (run * BITS);
            }
        }
    }
}

/// The sixteen scales of Q3_K, from -32 to 31.
///
/// The low four bits of scale `i` are the low half of byte `i` for `i < 8`, else the high half of byte `i - 8`; its
/// upper two bits are bits `2 * (i / 4)` and the next of byte `8 + i % 4`. Stored is the scale plus 32.
pub fn scales_q3_k(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|i| {
        let low = if i < 8 { packed[i] & 15 } else { packed[i - 8] >> 4 };
        let high = (packed[8 + i % 4] >> (2 * (i / 4))) & 3;
        (low | high << 4) as i8 - 32
    })
}

fn pack_scales_q3_k(scales: &[i8; 16]) -> [u8; 12] {
    let mut packed = [0u8; 12];
    for (i, &scale) in scales.iter().enumerate() {
        let stored = (scale + 32) as u8;
        packed[i % 8] |= (stored & 15) << if i < 8 { 0 } else { 4 };
        packed[8 + i % 4] |= (stored >> 4) << (2 * (i / 4));
    }
    packed
}

/// The eight scales and eight minima of Q4_K and Q5_K, from 0 to 63.
///
/// For `i < 4` scale and minimum `i` are the low six bits of bytes `i` and `4 + i`. For `i >= 4` the low four bits of
/// the scale are the low half of byte `4 + i` and those of the minimum its high half; their upper two bits are the
/// upper two of bytes `i - 4` and `i`.
pub fn scales_mins_q4_k(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let scales = std::array::from_fn(|i| match i {
        0..4 => packed[i] & 63,
        _ => packed[4 + i] & 15 | (packed[i - 4] >> 6) << 4,
    });
    let mins = std::array::from_fn(|i| match i {
        0..4 => packed[4 + i] & 63,
        _ => packed[4 + i] >> 4 | (packed[i] >> 6) << 4,
    });
    (scales, mins)
}

fn pack_scales_mins_q4_k(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut packed = [0u8; 12];
    for i in 0..4 {
        let (upper_s, upper_m) = (scales[4 + i], mins[4 + i]);
        packed[i] = scales[i] | (upper_s >> 4) << 6;
        packed[4 + i] = mins[i] | (upper_m >> 4) << 6;
        packed[8 + i] = upper_s & 15 | (upper_m & 15) << 4;
    }
    packed
}

/// Decodes one Q2_K block; the layout stands in the module's text.
pub fn decode_q2_k(block: &[u8; 84], out: &mut [f32; BLOCK]) {
    let mut codes = [0; BLOCK];
    unpack::<2, 32>(&block[16..80], 0, &mut codes);
    let scales = std::array::from_fn(|i| block[i] & 15);
    let mins = std::array::from_fn(|i| block[i] >> 4);
    decode_affine::<16>(
        get_f16(block, 80),
        get_f16(block, 82),
        (scales, mins),
        &codes,
        out,
    );
}

/// Decodes one Q3_K block; the layout stands in the module's text.
pub fn decode_q3_k(block: &[u8; 110], out: &mut [f32; BLOCK]) {
    let mut codes = [0; BLOCK];
    unpack::<2, 32>(&block[32..96], 0, &mut codes);
    unpack::<1, 32>(&block[..32], 2, &mut codes);
    decode_symmetric(
        get_f16(block, 108),
        scales_q3_k(&field(block, 96)),
        4,
        &codes,
        out,
    );
}

/// Decodes one Q4_K block; the layout stands in the module's text.
pub fn decode_q4_k(block: &[u8; 144], out: &mut [f32; BLOCK]) {
    let mut codes = [0; BLOCK];
    unpack::<4, 32>(&block[16..], 0, &mut codes);
    let scales_mins = scales_mins_q4_k(&field(block, 4));
    decode_affine::<8>(get_f16(block, 0), get_f16(block, 2), scales_mins, &codes, out);
}

/// Decodes one Q5_K block; the layout stands in the module's text.
pub fn decode_q5_k(block: &[u8; 176], out: &mut [f32; BLOCK]) {
    let mut codes = [0; BLOCK];
    unpack::<4, 32>(&block[48..], 0, &mut codes);
    unpack::<1, 32>(&block[16..48], 4, &mut codes);
    let scales_mins = scales_mins_q4_k(&field(block, 4));
    decode_affine::<8>(get_f16(block, 0), get_f16(block, 2), scales_mins, &codes, out);
}

/// Decodes one Q6_K block; the layout stands in the module's text.
pub fn decode_q6_k(block: &[u8; 210], out: &mut [f32; BLOCK]) {
    let mut codes = [0; BLOCK];
    unpack::<4, 64>(&block[..128], 0, &mut codes);
    unpack::<2, 32>(&block[128..192], 4, &mut codes);
    let scales = field::<16>(block, 192).map(|s| s as i8);
    decode_symmetric(get_f16(block, 208), scales, 32, &codes, out);
}

fn field<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| block[at + i])
}

fn decode_affine<const SUB: usize>(
    d: f32,
    dmin: f32,
    (scales, mins): ([u8; SUB], [u8; SUB]),
    codes: &[u8; BLOCK],
    out: &mut [f32; BLOCK],
) {
    let n = BLOCK / SUB;
    for (i, (out, codes)) in out.chunks_exact_mut(n).zip(codes.chunks_exact(n)).enumerate() {
        let scale = d * f32::from(scales[i]);
        let min = dmin * f32::from(mins[i]);
        for (v, &q) in out.iter_mut().zip(codes) {
            *v = scale * f32::from(q) - min;
        }
    }
}

fn decode_symmetric(d: f32, scales: [i8; 16], offset: i8, codes: &[u8; BLOCK], out: &mut [f32; BLOCK]) {
    for (i, (out, codes)) in out.chunks_exact_mut(16).zip(codes.chunks_exact(16)).enumerate() {
        let scale = d * f32::from(scales[i]);
        for (v, &q) in out.iter_mut().zip(codes) {
            *v = scale * f32::from(q as i8 - offset);
        }
    }
}

pub(super) fn encode_q2_k(x: &[f32; BLOCK]) -> Result<[u8; 84], ScaleOverflow> {
    let mut block = [0; 84];
    let fit = Affine::<16>::of(x, 3.0, 15.0, &mut block, 80)?;
    for (i, byte) in block[..16].iter_mut().enumerate() {
        *byte = fit.scales[i] | fit.mins[i] << 4;
    }
    pack::<2, 32>(&fit.codes, 0, &mut block[16..80]);
    Ok(block)
}

pub(super) fn encode_q3_k(x: &[f32; BLOCK]) -> Result<[u8; 110], ScaleOverflow> {
    let mut block = [0; 110];
    let fit = Symmetric::of(x, -4.0, -32.0, &mut block, 108)?;
    block[96..108].copy_from_slice(&pack_scales_q3_k(&fit.scales));
    pack::<2, 32>(&fit.codes, 0, &mut block[32..96]);
    pack::<1, 32>(&fit.codes, 2, &mut block[..32]);
    Ok(block)
}

pub(super) fn encode_q4_k(x: &[f32; BLOCK]) -> Result<[u8; 144], ScaleOverflow> {
    let mut block = [0; 144];
    let fit = Affine::<8>::of(x, 15.0, 63.0, &mut block, 0)?;
    block[4..16].copy_from_slice(&pack_scales_mins_q4_k(&fit.scales, &fit.mins));
    pack::<4, 32>(&fit.codes, 0, &mut block[16..]);
    Ok(block)
}

pub(super) fn encode_q5_k(x: &[f32; BLOCK]) -> Result<[u8; 176], ScaleOverflow> {
    let mut block = [0; 176];
    let fit = Affine::<8>::of(x, 31.0, 63.0, &mut block, 0)?;
    block[4..16].copy_from_slice(&pack_scales_mins_q4_k(&fit.scales, &fit.mins));
    pack::<1, 32>(&fit.codes, 4, &mut block[16..48]);
    pack::<4, 32>(&fit.codes, 0, &mut block[48..]);
    Ok(block)
}

pub(super) fn encode_q6_k(x: &[f32; BLOCK]) -> Result<[u8; 210], ScaleOverflow> {
    let mut block = [0; 210];
    let fit = Symmetric::of(x, -32.0, -128.0, &mut block, 208)?;
    for (byte, scale) in block[192..208].iter_mut().zip(fit.scales) {
        *byte = scale as u8;
    }
    pack::<4, 64>(&fit.codes, 0, &mut block[..128]);
    pack::<2, 32>(&fit.codes, 4, &mut block[128..192]);
    Ok(block)
}

/// A block as integers of an affine type: `d * scale * code - dmin * min`.
struct Affine<const SUB: usize> {
    scales: [u8; SUB],
    mins: [u8; SUB],
    codes: [u8; BLOCK],
}

impl<const SUB: usize> Affine<SUB> {
    /// Codes up to `high`, scales and minima up to `most`; `d` and `dmin` are written to `block` at `at`.
    fn of(
        x: &[f32; BLOCK],
        high: f64,
        most: f64,
        block: &mut [u8],
        at: usize,
    ) -> Result<Self, ScaleOverflow> {
        let n = BLOCK / SUB;
        let fits: [(f64, f64); SUB] = std::array::from_fn(|i| fit::affine(&x[i * n..][..n], high));
        let largest = |f: fn(&(f64, f64)) -> f64| fits.iter().map(f).fold(0.0, f64::max) / most;
        let d = f64::from(put_f16(block, at, largest(|f| f.0) as f32)?);
        let dmin = f64::from(put_f16(block, at + 2, largest(|f| f.1) as f32)?);

        let mut out = Affine {
            scales: [0; SUB],
            mins: [0; SUB],
            codes: [0; BLOCK],
        };
        for (i, (x, codes)) in x.chunks_exact(n).zip(out.codes.chunks_exact_mut(n)).enumerate() {
            let scale = fit::code(fits[i].0 * fit::inverse(d), 0.0, most);
            let min = fit::code(fits[i].1 * fit::inverse(dmin), 0.0, most);
            let mut best = f64::INFINITY;
            for scale in near(scale, 0.0, most) {
                for min in near(min, 0.0, most) {
                    let e = fit::error(x, d * scale, dmin * min, 0.0, high);
                    if e < best {
                        (best, out.scales[i], out.mins[i]) = (e, scale as u8, min as u8);
                    }
                }
            }
            let inverse = fit::inverse(d * f64::from(out.scales[i]));
            let min = dmin * f64::from(out.mins[i]);
            for (c, &v) in codes.iter_mut().zip(x) {
                *c = fit::code((f64::from(v) + min) * inverse, 0.0, high) as u8;
            }
        }
        Ok(out)
    }
}

/// A block as integers of a symmetric type: `d * scale * (code + low)`; `codes` are stored, from zero.
struct Symmetric {
    scales: [i8; 16],
    codes: [u8; BLOCK],
}

impl Symmetric {
    /// Values from `low` to `-low - 1`, scales from `least` to `-least - 1`; `d` is written to `block` at `at`.
    fn of(
        x: &[f32; BLOCK],
        low: f64,
        least: f64,
        block: &mut [u8],
        at: usize,
    ) -> Result<Self, ScaleOverflow> {
        let fits: [f64; 16] = std::array::from_fn(|i| fit::symmetric(&x[i * 16..][..16], low));
        let peak = fits
            .iter()
            .fold(0.0f64, |best, &s| if s.abs() > best.abs() { s } else { best });
        let d = f64::from(put_f16(block, at, (peak / least) as f32)?);

        let mut out = Symmetric {
            scales: [0; 16],
            codes: [0; BLOCK],
        };
        for (i, (x, codes)) in x.chunks_exact(16).zip(out.codes.chunks_exact_mut(16)).enumerate() {
            let mut best = f64::INFINITY;
            for scale in near(
                fit::code(fits[i] * fit::inverse(d), least, -least - 1.0),
                least,
                -least - 1.0,
            ) {
                let e = fit::error(x, d * scale, 0.0, low, -low - 1.0);
                if e < best {
                    (best, out.scales[i]) = (e, scale as i8);
                }
            }
            let inverse = fit::inverse(d * f64::from(out.scales[i]));
            for (c, &v) in codes.iter_mut().zip(x) {
                *c = (fit::code(f64::from(v) * inverse, low, -low - 1.0) - low) as u8;
            }
        }
        Ok(out)
    }
}

/// The integer itself first, so that it wins a tie, then its neighbours.
pub(super) fn near(n: f64, least: f64, most: f64) -> impl Iterator<Item = f64> {
    [n, n - 1.0, n + 1.0]
        .into_iter()
        .filter(move |i| (least..=most).contains(i))
}
