//! The types whose codes of four bits index a table of signed bytes: IQ4_NL, IQ4_XS, MXFP4.
//!
//! ```text
//! IQ4_NL   d: f16                                             qs: [u8; 16]    value = d * IQ4[q]
//! IQ4_XS   d: f16   high: u16   low: [u8; 4]                  qs: [u8; 128]   value = (d * (sc - 32)) * IQ4[q]
//! MXFP4    e: u8                                              qs: [u8; 16]    value = 2^(e - 128) * E2M1[q]
//! ```
//!
//! In each run of 16 bytes of `qs`, byte `i` holds element `i` of 32 in its low half and element `16 + i` in its high
//! half. IQ4_XS has eight sub-blocks of 32, each with its run of `qs` and a scale of six bits: the low four of scale
//! `s` are bits `4 * s` of `low`, as a little-endian word, its upper two are bits `2 * s` of `high`.
//!
//! The table of the IQ types is spaced as normally distributed values are, closer around zero. MXFP4 is the format of
//! the OCP's microscaling specification: the codes are floats of four bits (sign, two bits of exponent, one of
//! mantissa), the scale is a power of two. Their doubles are integers, so table and scale are stored doubled and
//! halved. The specification's NaN, exponent 255, is the number 2^127 to the reference, and so here.
//!
//! The encoders of the IQ types search a scale as [`super::fit`] does. MXFP4's is the reference's: the exponent of the
//! largest magnitude less two, which clips what is above 1.5 times a power of two.

use super::{ScaleOverflow, fit, get_f16, k, put_f16};

/// What the codes of IQ4_NL and IQ4_XS mean.
pub const IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// What the codes of MXFP4 mean, doubled.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half the scale that an E8M0 byte stands for: 2^(e - 128).
pub fn half_e8m0(e: u8) -> f32 {
    // The two smallest are subnormal.
    f32::from_bits(match e {
        0..2 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// `scale * table[q]` for the 32 codes of a run.
fn decode_run(scale: f32, table: &[i8; 16], qs: &[u8], out: &mut [f32]) {
    for (i, v) in out.iter_mut().enumerate() {
        let byte = qs[i % 16];
        let code = if i < 16 { byte & 15 } else { byte >> 4 };
        *v = scale * f32::from(table[usize::from(code)]);
    }
}

/// Writes the 32 codes of a run; `qs` must be zero before.
fn encode_run(codes: impl Iterator<Item = usize>, qs: &mut [u8]) {
    for (i, code) in codes.enumerate() {
        qs[i % 16] |= (code as u8) << if i < 16 { 0 } else { 4 };
    }
}

/// Decodes one IQ4_NL block; the layout stands in the module's text.
pub fn decode_iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    decode_run(get_f16(block, 0), &IQ4, &block[2..], out);
}

/// Decodes one IQ4_XS block; the layout stands in the module's text.
pub fn decode_iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = get_f16(block, 0);
    for (s, (out, qs)) in out
        .chunks_exact_mut(32)
        .zip(block[8..].chunks_exact(16))
        .enumerate()
    {
        decode_run(d * f32::from(scale_iq4_xs(block, s)), &IQ4, qs, out);
    }
}

/// Decodes one MXFP4 block; the layout stands in the module's text.
pub fn decode_mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    decode_run(half_e8m0(block[0]), &E2M1, &block[1..], out);
}

/// Scale `s` of an IQ4_XS block, from -32 to 31.
fn scale_iq4_xs(block: &[u8; 136], s: usize) -> i8 {
    let low = block[4 + s / 2] >> (4 * (s % 2)) & 15;
    let high = block[2 + s / 4] >> (2 * (s % 4)) & 3;
    (low | high << 4) as i8 - 32
}

fn put_scale_iq4_xs(block: &mut [u8; 136], s: usize, scale: i8) {
    let stored = (scale + 32) as u8;
    block[4 + s / 2] |= (stored & 15) << (4 * (s % 2));
    block[2 + s / 4] |= (stored >> 4) << (2 * (s % 4));
}

/// The nearest code of [`IQ4`] by twice the distance from its lowest value, rounded down: where two codes are equally
/// near lies a whole or a half, so every number in a step of a half has one code.
const NEAREST: [u8; 481] = {
    let mut nearest = [0; 481];
    let mut n = 0;
    let mut code = 0;
    while n < nearest.len() {
        if code < 15 && n as i32 - 2 * 127 >= IQ4[code] as i32 + IQ4[code + 1] as i32 {
            code += 1;
        }
        nearest[n] = code as u8;
        n += 1;
    }
    nearest
};

/// The nearest code of [`IQ4`], of two the higher.
pub(super) fn nearest(value: f64) -> usize {
    let low = f64::from(IQ4[0]);
    let value = value.clamp(low, IQ4[15].into());
    NEAREST[((value - low) * 2.0) as usize].into()
}

/// Sum of squares of `x - scale * IQ4[q]` with the best codes.
fn error(x: &[f32], scale: f64) -> f64 {
    let inverse = fit::inverse(scale);
    x.iter()
        .map(|&v| {
            let v = f64::from(v);
            let e = v - scale * f64::from(IQ4[nearest(v * inverse)]);
            e * e
        })
        .sum()
}

/// The `scale`, of either sign, with which `scale * IQ4[q]` is nearest to `x`: the search of [`super::fit`], from both
/// ends of the table.
fn fit_iq4(x: &[f32]) -> f64 {
    let peak = x.iter().fold(0.0f64, |best, &v| best.max(f64::from(v).abs()));
    let mut best = (f64::INFINITY, 0.0);
    if peak == 0.0 {
        return 0.0;
    }
    for sign in [1.0, -1.0] {
        let cover = sign * peak / f64::from(IQ4[0]);
        for factor in fit::fan() {
            let inverse = factor / cover;
            let (mut xq, mut qq) = (0.0, 0.0);
            for &v in x {
                let q = f64::from(IQ4[nearest(f64::from(v) * inverse)]);
                xq += f64::from(v) * q;
                qq += q * q;
            }
            // No value of the table is zero, so `qq` is not.
            let scale = xq / qq;
            let e = error(x, scale);
            if e < best.0 {
                best = (e, scale);
            }
        }
    }
    best.1
}

pub(super) fn encode_iq4_nl(x: &[f32; 32]) -> Result<[u8; 18], ScaleOverflow> {
    let mut block = [0; 18];
    let d = put_f16(&mut block, 0, fit_iq4(x) as f32)?;
    let inverse = fit::inverse(d.into());
    encode_run(
        x.iter().map(|&v| nearest(f64::from(v) * inverse)),
        &mut block[2..],
    );
    Ok(block)
}

pub(super) fn encode_iq4_xs(x: &[f32; 256]) -> Result<[u8; 136], ScaleOverflow> {
    const LEAST: f64 = -32.0;
    let mut block = [0; 136];
    let (runs, _) = x.as_chunks::<32>();
    let fits: Vec<f64> = runs.iter().map(|x| fit_iq4(x)).collect();
    let peak = fits
        .iter()
        .fold(0.0f64, |best, &s| if s.abs() > best.abs() { s } else { best });
    let d = f64::from(put_f16(&mut block, 0, (peak / LEAST) as f32)?);
    for (s, (x, wanted)) in runs.iter().zip(fits).enumerate() {
        let rounded = fit::code(wanted * fit::inverse(d), LEAST, -LEAST - 1.0);
        let (mut best, mut scale) = (f64::INFINITY, 0.0);
        for near in k::near(rounded, LEAST, -LEAST - 1.0) {
            let e = error(x, d * near);
            if e < best {
                (best, scale) = (e, near);
            }
        }
        put_scale_iq4_xs(&mut block, s, scale as i8);
        let inverse = fit::inverse(d * scale);
        encode_run(
            x.iter().map(|&v| nearest(f64::from(v) * inverse)),
            &mut block[8 + 16 * s..][..16],
        );
    }
    Ok(block)
}

pub(super) fn encode_mxfp4(x: &[f32; 32]) -> Result<[u8; 17], ScaleOverflow> {
    let mut block = [0; 17];
    let peak = x.iter().fold(0f32, |best, &v| best.max(v.abs()));
    if peak > 0.0 {
        // In single precision, as the reference: a magnitude just below a power of two counts as the power.
        let exponent = (f64::from(peak).log2() as f32).floor();
        // Too small for the reference too, which then wraps around to the largest scale and codes of zero.
        block[0] = (exponent - 2.0 + 127.0).max(0.0) as u8;
    }
    let d = half_e8m0(block[0]);
    let code = |v: f32| {
        let (mut best, mut code) = (f32::INFINITY, 0);
        for (i, &value) in E2M1.iter().enumerate() {
            let e = (d * f32::from(value) - v).abs();
            if e < best {
                (best, code) = (e, i);
            }
        }
        code
    };
    encode_run(x.iter().map(|&v| code(v)), &mut block[1..]);
    Ok(block)
}
