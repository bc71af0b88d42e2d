//! Activations to records by vectors of sixteen: the same bits as [`crate::cpu::kernels::lanes::prepare`] gives.

use std::arch::x86_64::*;

use crate::cpu::kernels::lanes::prepare::{put_short_sums, put_sums, row_of, scale_of};
use crate::cpu::kernels::{CODE_MAX, GROUP, RECORD, SHORT_CODE_MAX, SHORT_RECORD};

/// As [`crate::cpu::kernels::lanes::prepare::row`], with codes in planes.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
pub(super) fn planes_row(x: &[f32], records: &mut [u8]) {
    row_of(x, records, |x, record: &mut [u8; RECORD]| {
        let (scale, codes) = codes(x, CODE_MAX);
        for (half, codes) in codes.into_iter().enumerate() {
            let high = _mm512_cvtepi32_epi8(_mm512_srai_epi32::<7>(codes));
            let low = _mm512_cvtepi32_epi8(_mm512_and_si512(codes, _mm512_set1_epi32(127)));
            put(record, 32 * half, _mm_unpacklo_epi64(high, low));
            put(record, 32 * half + 16, _mm_unpackhi_epi64(high, low));
        }
        put_sums(record, scale, codes.map(|codes| _mm512_reduce_add_epi32(codes)));
    });
}

/// As [`crate::cpu::kernels::lanes::prepare::short_row`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
pub(super) fn short_row(x: &[f32], records: &mut [u8]) {
    row_of(x, records, |x, record: &mut [u8; SHORT_RECORD]| {
        let (scale, codes) = codes(x, SHORT_CODE_MAX);
        for (half, codes) in codes.into_iter().enumerate() {
            put(record, 16 * half, _mm512_cvtepi32_epi8(codes));
        }
        put_short_sums(record, scale, codes.map(|codes| _mm512_reduce_add_epi32(codes)));
    });
}

/// The scale of a group, and the codes of its halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn codes(x: &[f32; GROUP], max: f32) -> (f32, [__m512i; 2]) {
    // SAFETY: both halves of the group are read.
    let x = [0, GROUP / 2].map(|at| unsafe { _mm512_loadu_ps(x.as_ptr().add(at)) });
    let magnitude = x.map(|x| _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX)));
    let largest = _mm512_reduce_max_epi32(_mm512_max_epi32(magnitude[0], magnitude[1]));
    let (scale, inverse) = scale_of(largest, max);
    if inverse == 0.0 {
        return (scale, [_mm512_setzero_si512(); 2]);
    }
    // To the nearest integer, ties to even.
    let codes = x.map(|x| _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse))));
    (scale, codes)
}

/// Sixteen bytes of a record.
#[inline]
#[target_feature(enable = "avx2")]
fn put(record: &mut [u8], at: usize, bytes: __m128i) {
    let out = &mut record[at..at + 16];
    // SAFETY: `out` has sixteen bytes.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::kernels::lanes::prepare;

    #[test]
    fn records_have_the_bits_of_the_plain_ones() {
        if !Isa::Avx512.available() {
            return;
        }
        let mut x: Vec<f32> = (0..64 * GROUP as u32)
            .map(|i| ((i * 7919 % 20_011) as f32 - 10_000.0) * 0.37f32.powi((i / 256) as i32))
            .collect();
        x[40] = f32::NAN;
        x[100] = f32::NEG_INFINITY;
        x[5 * GROUP..6 * GROUP].fill(0.0);
        x[6 * GROUP..7 * GROUP].fill(-1e-36);
        // Codes that end in a half: ties.
        for (i, x) in x[7 * GROUP..8 * GROUP].iter_mut().enumerate() {
            *x = (i as f32 + 0.5) / 127.0;
        }
        x[7 * GROUP] = 1.0;
        let rows = [
            (
                RECORD,
                planes_row as unsafe fn(&[f32], &mut [u8]),
                prepare::row::<prepare::Planes> as fn(&[f32], &mut [u8]),
            ),
            (SHORT_RECORD, short_row, prepare::short_row),
        ];
        for (bytes, ours, plain) in rows {
            let [mut a, mut b] = [0xff, 0].map(|fill| vec![fill; x.len() / GROUP * bytes]);
            // SAFETY: the CPU has the instruction set.
            unsafe { ours(&x, &mut a) };
            plain(&x, &mut b);
            for (g, (a, b)) in a.chunks(bytes).zip(b.chunks(bytes)).enumerate() {
                assert_eq!(a, b, "group {g} of records of {bytes} bytes");
            }
        }
    }
}
