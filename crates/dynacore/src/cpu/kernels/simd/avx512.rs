//! [`Simd`] with AVX-512 F, BW and VL.

use std::arch::x86_64::*;

use super::Simd;

/// Proof that the CPU has AVX-512 F, BW and VL, and what [`super::avx2::Avx2`] needs.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU must have AVX-512 F, BW and VL, AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

/// Calls intrinsics that read or write no memory.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: the intrinsics touch no memory, and a value of `Avx512` proves that the CPU has them.
        unsafe { $e }
    }};
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> __m512 {
        let x = &x[..16];
        // SAFETY: sixteen f32 are readable at `x`; `Avx512` proves the features.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, x: *const f32) -> __m512 {
        // SAFETY: the caller's promise; a value of this type proves the features.
        unsafe { _mm512_loadu_ps(x) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, x: *const u8) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.cast())) }
    }
    #[inline(always)]
    fn store(self, v: __m512, y: &mut [f32]) {
        let y = &mut y[..16];
        // SAFETY: sixteen f32 are writable at `y`; `Avx512` proves the features.
        unsafe { _mm512_storeu_ps(y.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> __m512 {
        let x = &x[..32];
        // SAFETY: 32 bytes are readable at `x`; `Avx512` proves the features.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn store_f16(self, v: __m512, y: &mut [u8]) {
        let y = &mut y[..32];
        // SAFETY: 32 bytes are writable at `y`; `Avx512` proves the features.
        unsafe {
            let h = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v);
            _mm256_storeu_si256(y.as_mut_ptr().cast(), h);
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> __m512 {
        let x = &x[..16];
        // SAFETY: 16 bytes are readable at `x`; `Avx512` proves the features.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        op!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn copysign(self, a: __m512, s: __m512) -> __m512 {
        op!({
            let sign = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(sign, a), _mm512_and_ps(sign, s))
        })
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        op!(_mm512_mask_blend_ps(
            _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b),
            no,
            yes
        ))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        op!(_mm512_roundscale_ps::<
            { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
        >(a))
    }
    #[inline(always)]
    fn exp2i(self, n: __m512) -> __m512 {
        op!({
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        self.sum4([v, v, v, v])[0]
    }
    #[inline(always)]
    fn sum4(self, v: [__m512; 4]) -> [f32; 4] {
        let mut out = [0.0; 4];
        // SAFETY: four f32 are writable at `out`; `Avx512` proves the features.
        unsafe {
            let upper = |v| _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            let half = |v: __m512| _mm256_add_ps(_mm512_castps512_ps256(v), upper(v));
            let ab = _mm256_hadd_ps(half(v[0]), half(v[1]));
            let cd = _mm256_hadd_ps(half(v[2]), half(v[3]));
            let abcd = _mm256_hadd_ps(ab, cd);
            let sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd));
            _mm_storeu_ps(out.as_mut_ptr(), sums);
        }
        out
    }
    #[inline(always)]
    fn largest(self, v: __m512) -> f32 {
        op!(_mm512_reduce_max_ps(v))
    }
    #[inline(always)]
    fn transpose(self, x: &[f32], y: &mut [f32], strides: [usize; 2]) {
        let mut rows = [op!(_mm512_setzero_si512()); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = op!(_mm512_castps_si512(self.load(&x[i * strides[0]..])));
        }
        for (i, row) in op!(transposed(rows)).into_iter().enumerate() {
            self.store(op!(_mm512_castsi512_ps(row)), &mut y[i * strides[1]..]);
        }
    }
}

/// A matrix of 16 by 16 words, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transposed(mut x: [__m512i; 16]) -> [__m512i; 16] {
    // Words, pairs of words, then quarters of vectors change places.
    for i in (0..16).step_by(2) {
        (x[i], x[i + 1]) = (
            _mm512_unpacklo_epi32(x[i], x[i + 1]),
            _mm512_unpackhi_epi32(x[i], x[i + 1]),
        );
    }
    for i in (0..16).step_by(4) {
        let [a, b, c, d] = [x[i], x[i + 1], x[i + 2], x[i + 3]];
        x[i] = _mm512_unpacklo_epi64(a, c);
        x[i + 1] = _mm512_unpackhi_epi64(a, c);
        x[i + 2] = _mm512_unpacklo_epi64(b, d);
        x[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    // Now word `4 q + j` of the four rows `4 i..` stands in quarter q of `x[4 i + j]`.
    let mut out = x;
    for j in 0..4 {
        let [a, b, c, d] = [x[j], x[4 + j], x[8 + j], x[12 + j]];
        let low = [
            _mm512_shuffle_i32x4::<0x88>(a, b),
            _mm512_shuffle_i32x4::<0x88>(c, d),
        ];
        let high = [
            _mm512_shuffle_i32x4::<0xdd>(a, b),
            _mm512_shuffle_i32x4::<0xdd>(c, d),
        ];
        out[j] = _mm512_shuffle_i32x4::<0x88>(low[0], low[1]);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(high[0], high[1]);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low[0], low[1]);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high[0], high[1]);
    }
    out
}
