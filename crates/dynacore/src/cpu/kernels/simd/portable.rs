//! [`Simd`] in plain Rust, for every CPU. Products and sums are rounded separately: a fused multiply-add without the
//! instruction is a slow library call.

use super::Simd;
use half::f16;

/// Lanes of the portable vector.
const N: usize = 8;

/// The instructions every CPU has.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// An array by lanes, as a loop: closures of iterators and `from_fn` are not always inlined.
macro_rules! lanes {
    ($i:ident => $e:expr) => {{
        let mut out = [0.0f32; N];
        let mut $i = 0;
        while $i < N {
            out[$i] = $e;
            $i += 1;
        }
        out
    }};
}

impl Simd for Portable {
    type V = [f32; N];
    const LANES: usize = N;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; N] {
        [x; N]
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> [f32; N] {
        lanes!(i => x[i])
    }
    #[inline(always)]
    unsafe fn load_ptr(self, x: *const f32) -> [f32; N] {
        // SAFETY: the caller's promise; an array of f32 needs no more alignment than one of them.
        unsafe { x.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, x: *const u8) -> [f32; N] {
        // SAFETY: the caller's promise.
        self.load_f16(&unsafe { x.cast::<[u8; 2 * N]>().read_unaligned() })
    }
    #[inline(always)]
    fn store(self, v: [f32; N], y: &mut [f32]) {
        y[..N].copy_from_slice(&v);
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> [f32; N] {
        lanes!(i => f16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    fn store_f16(self, v: [f32; N], y: &mut [u8]) {
        for (i, x) in v.iter().enumerate() {
            y[2 * i..2 * i + 2].copy_from_slice(&f16::from_f32(*x).to_le_bytes());
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> [f32; N] {
        lanes!(i => f32::from(x[i] as i8))
    }
    #[inline(always)]
    fn add(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; N], b: [f32; N], c: [f32; N]) -> [f32; N] {
        lanes!(i => a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: [f32; N], b: [f32; N]) -> [f32; N] {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn abs(self, a: [f32; N]) -> [f32; N] {
        lanes!(i => a[i].abs())
    }
    #[inline(always)]
    fn copysign(self, a: [f32; N], s: [f32; N]) -> [f32; N] {
        lanes!(i => a[i].copysign(s[i]))
    }
    #[inline(always)]
    fn select_lt(self, a: [f32; N], b: [f32; N], yes: [f32; N], no: [f32; N]) -> [f32; N] {
        lanes!(i => if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn round(self, a: [f32; N]) -> [f32; N] {
        // Adding and taking away 1.5·2²³ leaves the nearest integer, ties to even.
        const MAGIC: f32 = 12_582_912.0;
        lanes!(i => (a[i] + MAGIC) - MAGIC)
    }
    #[inline(always)]
    fn exp2i(self, n: [f32; N]) -> [f32; N] {
        lanes!(i => f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn sum(self, v: [f32; N]) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
    #[inline(always)]
    fn sum4(self, v: [[f32; N]; 4]) -> [f32; 4] {
        [self.sum(v[0]), self.sum(v[1]), self.sum(v[2]), self.sum(v[3])]
    }
    #[inline(always)]
    fn largest(self, v: [f32; N]) -> f32 {
        v.into_iter()
            .fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }
}
