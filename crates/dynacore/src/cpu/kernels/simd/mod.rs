//! Vectors of f32 behind one trait, so that each leaf kernel that is not a matrix product is written once.
//!
//! A kernel is a generic function over [`Simd`] marked `#[inline(always)]`; per instruction set a thin
//! `#[target_feature]` function (made in [`super::ops`]) makes the set's token and calls it, so that the whole kernel
//! is compiled for that set. A token can only be made where its features are known to be there, which is what makes
//! the trait's methods safe to call.
//!
//! Slices shorter than a vector are loaded and stored through a zero-padded copy and then take the same path, so an
//! element's result never depends on its place in the vector.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod math;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;

/// Most lanes of any instruction set.
pub(crate) const MAX_LANES: usize = 16;

/// A set of vector instructions; a value of it is the proof that the CPU has them.
pub(crate) trait Simd: Copy {
    /// A vector of `LANES` f32.
    type V: Copy;
    /// Lanes, at most [`MAX_LANES`].
    const LANES: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// The first `LANES` elements.
    fn load(self, x: &[f32]) -> Self::V;
    /// `LANES` elements from `x`.
    ///
    /// # Safety
    /// `x` must be readable for `LANES` f32.
    unsafe fn load_ptr(self, x: *const f32) -> Self::V;
    /// `LANES` binary16 numbers from `x`.
    ///
    /// # Safety
    /// `x` must be readable for `2 · LANES` bytes.
    unsafe fn load_f16_ptr(self, x: *const u8) -> Self::V;
    /// Into the first `LANES` elements.
    fn store(self, v: Self::V, y: &mut [f32]);
    /// The first `LANES` elements, given as the bits of binary16 in little-endian byte pairs.
    fn load_f16(self, x: &[u8]) -> Self::V;
    /// As binary16, rounded to nearest even, into the first `2 · LANES` bytes.
    fn store_f16(self, v: Self::V, y: &mut [u8]);
    /// The first `LANES` bytes as signed integers.
    fn load_i8(self, x: &[u8]) -> Self::V;
    /// a + b.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a − b.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c, rounded once where the set has it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger, `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller, `b` if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// |a|.
    fn abs(self, a: Self::V) -> Self::V;
    /// The magnitude of `a` with the sign of `s`.
    fn copysign(self, a: Self::V, s: Self::V) -> Self::V;
    /// Lane-wise `a < b ? yes : no`; `no` for NaN.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Nearest integer, ties to even; |a| < 2²².
    fn round(self, a: Self::V) -> Self::V;
    /// 2ⁿ for integer-valued `n` in −126..=127.
    fn exp2i(self, n: Self::V) -> Self::V;
    /// Sum of the lanes, in a fixed order.
    fn sum(self, v: Self::V) -> f32;
    /// Sums of four vectors, each in the order of [`Simd::sum`].
    fn sum4(self, v: [Self::V; 4]) -> [f32; 4];
    /// Largest lane.
    fn largest(self, v: Self::V) -> f32;

    /// A square of `LANES` rows of `LANES` elements, its rows made columns; `strides` are the distances of the rows of `x`
    /// and of those of `y`.
    #[inline(always)]
    fn transpose(self, x: &[f32], y: &mut [f32], strides: [usize; 2]) {
        for (i, x) in x.chunks(strides[0]).take(Self::LANES).enumerate() {
            for (j, x) in x[..Self::LANES].iter().enumerate() {
                y[j * strides[1] + i] = *x;
            }
        }
    }

    /// Up to `LANES` elements, the missing ones `fill`.
    #[inline(always)]
    fn load_part(self, x: &[f32], fill: f32) -> Self::V {
        if x.len() >= Self::LANES {
            return self.load(x);
        }
        let mut padded = [fill; MAX_LANES];
        padded[..x.len()].copy_from_slice(x);
        self.load(&padded)
    }

    /// As many lanes as `y` holds.
    #[inline(always)]
    fn store_part(self, v: Self::V, y: &mut [f32]) {
        if y.len() >= Self::LANES {
            return self.store(v, y);
        }
        let mut all = [0.0; MAX_LANES];
        self.store(v, &mut all);
        let n = y.len();
        y.copy_from_slice(&all[..n]);
    }
}
