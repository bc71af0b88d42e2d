//! Rows of the cache: f32 to the stored type and back.
//!
//! Q8_0 here: per 32 elements one f16 scale d = max|x| / 127, rounded first, then 32 signed bytes round(x / d).

use half::f16;

use crate::cpu::kernels::simd::{MAX_LANES, Simd};
use crate::kv::KvType;

/// Elements and bytes of a Q8_0 block.
const Q8: (usize, usize) = (32, 34);

/// One row, encoded.
#[inline(always)]
pub(crate) fn store_row<S: Simd>(s: S, kind: KvType, x: &[f32], out: &mut [u8]) {
    match kind {
        KvType::F32 => {
            assert_eq!(out.len(), 4 * x.len(), "a row's bytes fit its elements");
            for (x, o) in x.iter().zip(out.chunks_exact_mut(4)) {
                o.copy_from_slice(&x.to_le_bytes());
            }
        }
        KvType::F16 => {
            assert_eq!(out.len(), 2 * x.len(), "a row's bytes fit its elements");
            for (x, o) in x.chunks(S::LANES).zip(out.chunks_mut(2 * S::LANES)) {
                if x.len() == S::LANES {
                    s.store_f16(s.load(x), o);
                } else {
                    let mut all = [0; 2 * MAX_LANES];
                    s.store_f16(s.load_part(x, 0.0), &mut all);
                    o.copy_from_slice(&all[..o.len()]);
                }
            }
        }
        KvType::Q8_0 => {
            assert_eq!(out.len() / Q8.1, x.len() / Q8.0, "a row's bytes fit its elements");
            for (x, o) in x.chunks_exact(Q8.0).zip(out.chunks_exact_mut(Q8.1)) {
                let largest = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                let d = f16::from_f32(largest / 127.0);
                let d32 = d.to_f32();
                let inverse = if d32 > 0.0 { 1.0 / d32 } else { 0.0 };
                o[..2].copy_from_slice(&d.to_le_bytes());
                let mut rounded = [0.0f32; Q8.0];
                for (x, r) in x.chunks_exact(S::LANES).zip(rounded.chunks_exact_mut(S::LANES)) {
                    s.store(s.round(s.mul(s.load(x), s.splat(inverse))), r);
                }
                for (r, o) in rounded.iter().zip(&mut o[2..]) {
                    *o = (*r as i8).max(-127) as u8;
                }
            }
        }
    }
}

/// `rows` rows of `cols` elements, decoded into rows of `stride` elements; what lies between stays as it is.
#[inline(always)]
pub(crate) fn load_rows<S: Simd>(
    s: S,
    kind: KvType,
    bytes: &[u8],
    cols: usize,
    stride: usize,
    out: &mut [f32],
) {
    let row_bytes = kind
        .bytes(cols)
        .expect("the cache was allocated for rows of whole blocks");
    for (row, out) in bytes.chunks_exact(row_bytes).zip(out.chunks_mut(stride)) {
        let out = &mut out[..cols];
        match kind {
            KvType::F32 => {
                for (o, b) in out.iter_mut().zip(row.chunks_exact(4)) {
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            KvType::F16 if cols.is_multiple_of(S::LANES) => {
                for (o, b) in out.chunks_exact_mut(S::LANES).zip(row.chunks_exact(2 * S::LANES)) {
                    s.store(s.load_f16(b), o);
                }
            }
            KvType::F16 => {
                for (o, b) in out.chunks_mut(S::LANES).zip(row.chunks(2 * S::LANES)) {
                    if o.len() == S::LANES {
                        s.store(s.load_f16(b), o);
                    } else {
                        let mut all = [0; 2 * MAX_LANES];
                        all[..b.len()].copy_from_slice(b);
                        s.store_part(s.load_f16(&all), o);
                    }
                }
            }
            KvType::Q8_0 => {
                for (o, b) in out.chunks_exact_mut(Q8.0).zip(row.chunks_exact(Q8.1)) {
                    let d = s.splat(f16::from_le_bytes([b[0], b[1]]).to_f32());
                    for (o, b) in o.chunks_exact_mut(S::LANES).zip(b[2..].chunks_exact(S::LANES)) {
                        s.store(s.mul(d, s.load_i8(b)), o);
                    }
                }
            }
        }
    }
}
