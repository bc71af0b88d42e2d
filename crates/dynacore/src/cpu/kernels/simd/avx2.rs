//! [`Simd`] with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use super::Simd;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU must have AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

/// Calls intrinsics that read or write no memory.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: the intrinsics touch no memory, and a value of `Avx2` proves that the CPU has them.
        unsafe { $e }
    }};
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> __m256 {
        let x = &x[..8];
        // SAFETY: eight f32 are readable at `x`; `Avx2` proves the features.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, x: *const f32) -> __m256 {
        // SAFETY: the caller's promise; a value of this type proves the features.
        unsafe { _mm256_loadu_ps(x) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, x: *const u8) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.cast())) }
    }
    #[inline(always)]
    fn store(self, v: __m256, y: &mut [f32]) {
        let y = &mut y[..8];
        // SAFETY: eight f32 are writable at `y`; `Avx2` proves the features.
        unsafe { _mm256_storeu_ps(y.as_mut_ptr(), v) }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> __m256 {
        let x = &x[..16];
        // SAFETY: 16 bytes are readable at `x`; `Avx2` proves the features.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn store_f16(self, v: __m256, y: &mut [u8]) {
        let y = &mut y[..16];
        // SAFETY: 16 bytes are writable at `y`; `Avx2` proves the features.
        unsafe {
            let h = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v);
            _mm_storeu_si128(y.as_mut_ptr().cast(), h);
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> __m256 {
        let x = &x[..8];
        // SAFETY: 8 bytes are readable at `x`; `Avx2` proves the features.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        op!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }
    #[inline(always)]
    fn copysign(self, a: __m256, s: __m256) -> __m256 {
        op!({
            let sign = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(sign, a), _mm256_and_ps(sign, s))
        })
    }
    #[inline(always)]
    fn select_lt(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        op!(_mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)))
    }
    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        op!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn exp2i(self, n: __m256) -> __m256 {
        op!({
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }
    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        self.sum4([v, v, v, v])[0]
    }
    #[inline(always)]
    fn sum4(self, v: [__m256; 4]) -> [f32; 4] {
        let mut out = [0.0; 4];
        // SAFETY: four f32 are writable at `out`; `Avx2` proves the features.
        unsafe {
            // Each vector: pairs, then pairs of pairs, then the halves.
            let ab = _mm256_hadd_ps(v[0], v[1]);
            let cd = _mm256_hadd_ps(v[2], v[3]);
            let abcd = _mm256_hadd_ps(ab, cd);
            let sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd));
            _mm_storeu_ps(out.as_mut_ptr(), sums);
        }
        out
    }
    #[inline(always)]
    fn largest(self, v: __m256) -> f32 {
        op!({
            let m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
            _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)))
        })
    }
    #[inline(always)]
    fn transpose(self, x: &[f32], y: &mut [f32], strides: [usize; 2]) {
        let mut rows = [self.splat(0.0); 8];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = self.load(&x[i * strides[0]..]);
        }
        for (i, row) in op!(transposed(rows)).into_iter().enumerate() {
            self.store(row, &mut y[i * strides[1]..]);
        }
    }
}

/// A matrix of 8 by 8, transposed.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(mut x: [__m256; 8]) -> [__m256; 8] {
    // Numbers, pairs of them, then halves of vectors change places.
    for i in (0..8).step_by(2) {
        (x[i], x[i + 1]) = (
            _mm256_unpacklo_ps(x[i], x[i + 1]),
            _mm256_unpackhi_ps(x[i], x[i + 1]),
        );
    }
    for i in (0..8).step_by(4) {
        let [a, b, c, d] = [x[i], x[i + 1], x[i + 2], x[i + 3]];
        x[i] = _mm256_shuffle_ps::<0x44>(a, c);
        x[i + 1] = _mm256_shuffle_ps::<0xee>(a, c);
        x[i + 2] = _mm256_shuffle_ps::<0x44>(b, d);
        x[i + 3] = _mm256_shuffle_ps::<0xee>(b, d);
    }
    // Now number `4 q + j` of the four rows `4 i..` stands in half q of `x[4 i + j]`.
    for j in 0..4 {
        (x[j], x[4 + j]) = (
            _mm256_permute2f128_ps::<0x20>(x[j], x[4 + j]),
            _mm256_permute2f128_ps::<0x31>(x[j], x[4 + j]),
        );
    }
    x
}
