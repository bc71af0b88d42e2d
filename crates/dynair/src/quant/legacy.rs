//! The types of 32 elements a block: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! The four small ones are one format with two switches, the number of bits and whether there is a minimum:
//!
//! ```text
//! Q4_0   d: f16                          qs: [u8; 16]     value = d * (q - 8)
//! Q4_1   d: f16   m: f16                 qs: [u8; 16]     value = d * q + m
//! Q5_0   d: f16            qh: [u8; 4]   qs: [u8; 16]     value = d * (q - 16)
//! Q5_1   d: f16   m: f16   qh: [u8; 4]   qs: [u8; 16]     value = d * q + m
//! Q8_0   d: f16                          qs: [i8; 32]     value = d * q
//! ```
//!
//! Element `i < 16` has its low four bits in the low half of `qs[i]`, element `16 + i` in the high half; bit `i` of
//! `qh` (as a little-endian word) is the fifth bit of element `i`.
//!
//! Encoding follows the reference: without a minimum the element of largest magnitude gets the lowest code, so that
//! it is met exactly up to the rounding of `d`; with a minimum the smallest and largest get the lowest and highest.

use super::{ScaleOverflow, get_f16, put_f16};

/// Elements of one block.
pub const BLOCK: usize = 32;

/// Where the fields of one of the small types start, and how many codes it has.
struct Small<const BITS: u32, const MIN: bool>;

impl<const BITS: u32, const MIN: bool> Small<BITS, MIN> {
    const CODES: u32 = 1 << BITS;
    /// What is subtracted from a code where there is no minimum.
    const OFFSET: i32 = if MIN { 0 } else { Self::CODES as i32 / 2 };
    const HIGH: usize = if MIN { 4 } else { 2 };
    const LOW: usize = Self::HIGH + if BITS == 5 { 4 } else { 0 };

    fn decode(block: &[u8], out: &mut [f32; BLOCK]) {
        let d = get_f16(block, 0);
        let high = if BITS == 5 {
            let h = &block[Self::HIGH..];
            u32::from_le_bytes([h[0], h[1], h[2], h[3]])
        } else {
            0
        };
        let m = if MIN { get_f16(block, 2) } else { 0.0 };
        for (i, v) in out.iter_mut().enumerate() {
            let byte = block[Self::LOW + i % 16];
            let low = u32::from(if i < 16 { byte & 15 } else { byte >> 4 });
            let code = (low | ((high >> i) & 1) << 4) as i32;
            let scaled = d * (code - Self::OFFSET) as f32;
            *v = if MIN { scaled + m } else { scaled };
        }
    }

    fn encode<const BYTES: usize>(x: &[f32; BLOCK]) -> Result<[u8; BYTES], ScaleOverflow> {
        let mut block = [0u8; BYTES];
        // A code is the integer part of (x - low) * inverse + shift.
        let (d, low, shift) = if MIN {
            let (min, max) = min_max(x);
            put_f16(&mut block, 2, min)?;
            ((max - min) / (Self::CODES - 1) as f32, min, 0.5)
        } else {
            (peak(x) / -(Self::OFFSET as f32), 0.0, Self::OFFSET as f32 + 0.5)
        };
        put_f16(&mut block, 0, d)?;
        let inverse = inverse(d);
        let mut high = 0u32;
        for (i, &v) in x.iter().enumerate() {
            let v = if MIN { v - low } else { v };
            let code = ((v * inverse + shift) as u32).min(Self::CODES - 1);
            block[Self::LOW + i % 16] |= ((code & 15) as u8) << if i < 16 { 0 } else { 4 };
            high |= (code >> 4) << i;
        }
        if BITS == 5 {
            block[Self::HIGH..Self::LOW].copy_from_slice(&high.to_le_bytes());
        }
        Ok(block)
    }
}

/// The first of the elements of largest magnitude, with its sign.
fn peak(x: &[f32; BLOCK]) -> f32 {
    x.iter()
        .fold(x[0], |best, &v| if v.abs() > best.abs() { v } else { best })
}

fn min_max(x: &[f32; BLOCK]) -> (f32, f32) {
    x.iter().fold((x[0], x[0]), |(lo, hi), &v| {
        (if v < lo { v } else { lo }, if v > hi { v } else { hi })
    })
}

/// `1 / d`; zero where `d` is zero, or so small that its inverse is no number (its `f16` is zero then).
fn inverse(d: f32) -> f32 {
    let inverse = 1.0 / d;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Decodes one Q4_0 block; the layout stands in the module's text.
pub fn decode_q4_0(block: &[u8; 18], out: &mut [f32; BLOCK]) {
    Small::<4, false>::decode(block, out);
}

/// Decodes one Q4_1 block; the layout stands in the module's text.
pub fn decode_q4_1(block: &[u8; 20], out: &mut [f32; BLOCK]) {
    Small::<4, true>::decode(block, out);
}

/// Decodes one Q5_0 block; the layout stands in the module's text.
pub fn decode_q5_0(block: &[u8; 22], out: &mut [f32; BLOCK]) {
    Small::<5, false>::decode(block, out);
}

/// Decodes one Q5_1 block; the layout stands in the module's text.
pub fn decode_q5_1(block: &[u8; 24], out: &mut [f32; BLOCK]) {
    Small::<5, true>::decode(block, out);
}

/// Decodes one Q8_0 block; the layout stands in the module's text.
pub fn decode_q8_0(block: &[u8; 34], out: &mut [f32; BLOCK]) {
    let d = get_f16(block, 0);
    for (v, &q) in out.iter_mut().zip(&block[2..]) {
        *v = f32::from(q as i8) * d;
    }
}

pub(super) fn encode_q4_0(x: &[f32; BLOCK]) -> Result<[u8; 18], ScaleOverflow> {
    Small::<4, false>::encode(x)
}

pub(super) fn encode_q4_1(x: &[f32; BLOCK]) -> Result<[u8; 20], ScaleOverflow> {
    Small::<4, true>::encode(x)
}

pub(super) fn encode_q5_0(x: &[f32; BLOCK]) -> Result<[u8; 22], ScaleOverflow> {
    Small::<5, false>::encode(x)
}

pub(super) fn encode_q5_1(x: &[f32; BLOCK]) -> Result<[u8; 24], ScaleOverflow> {
    Small::<5, true>::encode(x)
}

pub(super) fn encode_q8_0(x: &[f32; BLOCK]) -> Result<[u8; 34], ScaleOverflow> {
    let mut block = [0u8; 34];
    let d = peak(x).abs() / 127.0;
    put_f16(&mut block, 0, d)?;
    let inverse = inverse(d);
    for (q, &v) in block[2..].iter_mut().zip(x) {
        // `round` takes halves away from zero, as the reference does.
        *q = (v * inverse).round() as i8 as u8;
    }
    Ok(block)
}
