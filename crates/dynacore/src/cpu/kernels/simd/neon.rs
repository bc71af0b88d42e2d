//! [`Simd`] with NEON: eight lanes in two registers, so that the few accumulators of a kernel are enough chains for the
//! latency of a multiply-add, and sums have the order of AVX2's: results are the same, bit for bit.

use std::arch::aarch64::*;

use super::Simd;

/// Proof that the CPU has NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    /// # Safety
    /// The CPU must have NEON.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Neon {
        Neon(())
    }
}

/// Two vectors of four f32.
type V = float32x4x2_t;

/// Calls intrinsics that read or write no memory.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: the intrinsics touch no memory, and a value of `Neon` proves that the CPU has them.
        unsafe { $e }
    }};
}

/// An expression for both halves of vectors.
macro_rules! both {
    ($($v:ident),* => $e:expr) => {
        op!(float32x4x2_t({ $(let $v = $v.0;)* $e }, { $(let $v = $v.1;)* $e }))
    };
}

impl Simd for Neon {
    type V = V;
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        op!({
            let v = vdupq_n_f32(x);
            float32x4x2_t(v, v)
        })
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> V {
        let x = &x[..8];
        // SAFETY: eight f32 are readable at `x`.
        unsafe { self.load_ptr(x.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_ptr(self, x: *const f32) -> V {
        // SAFETY: the caller's promise; a value of this type proves the features.
        unsafe { float32x4x2_t(vld1q_f32(x), vld1q_f32(x.add(4))) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, x: *const u8) -> V {
        // SAFETY: as above.
        unsafe {
            let h = vreinterpretq_f16_u8(vld1q_u8(x));
            float32x4x2_t(vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h))
        }
    }
    #[inline(always)]
    fn store(self, v: V, y: &mut [f32]) {
        let y = &mut y[..8];
        // SAFETY: eight f32 are writable at `y`; `Neon` proves the features.
        unsafe {
            vst1q_f32(y.as_mut_ptr(), v.0);
            vst1q_f32(y.as_mut_ptr().add(4), v.1);
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8]) -> V {
        let x = &x[..16];
        // SAFETY: 16 bytes are readable at `x`.
        unsafe { self.load_f16_ptr(x.as_ptr()) }
    }
    #[inline(always)]
    fn store_f16(self, v: V, y: &mut [u8]) {
        let y = &mut y[..16];
        // SAFETY: 16 bytes are writable at `y`; `Neon` proves the features. The conversion rounds as the process is set
        // to, which is to nearest even.
        unsafe {
            let h = vcvt_high_f16_f32(vcvt_f16_f32(v.0), v.1);
            vst1q_u8(y.as_mut_ptr(), vreinterpretq_u8_f16(h));
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8]) -> V {
        let x = &x[..8];
        // SAFETY: 8 bytes are readable at `x`; `Neon` proves the features.
        unsafe {
            let h = vmovl_s8(vld1_s8(x.as_ptr().cast()));
            float32x4x2_t(
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(h))),
                vcvtq_f32_s32(vmovl_high_s16(h)),
            )
        }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both!(a, b => vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both!(a, b => vsubq_f32(a, b))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both!(a, b => vmulq_f32(a, b))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both!(a, b => vdivq_f32(a, b))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        both!(a, b, c => vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        // `fmax` would give NaN and `fmaxnm` the number, whichever operand is NaN.
        both!(a, b => vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        both!(a, b => vbslq_f32(vcltq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn abs(self, a: V) -> V {
        both!(a => vabsq_f32(a))
    }
    #[inline(always)]
    fn copysign(self, a: V, s: V) -> V {
        both!(a, s => vbslq_f32(vdupq_n_u32(1 << 31), s, a))
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, yes: V, no: V) -> V {
        both!(a, b, yes, no => vbslq_f32(vcltq_f32(a, b), yes, no))
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        both!(a => vrndnq_f32(a))
    }
    #[inline(always)]
    fn exp2i(self, n: V) -> V {
        both!(n => {
            let biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        })
    }
    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        self.sum4([v, v, v, v])[0]
    }
    #[inline(always)]
    fn sum4(self, v: [V; 4]) -> [f32; 4] {
        let mut out = [0.0; 4];
        // SAFETY: four f32 are writable at `out`; `Neon` proves the features.
        unsafe {
            // Each vector: pairs, then pairs of pairs, then the halves.
            let pairs = |a, b, c, d| vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
            let low = pairs(v[0].0, v[1].0, v[2].0, v[3].0);
            let high = pairs(v[0].1, v[1].1, v[2].1, v[3].1);
            vst1q_f32(out.as_mut_ptr(), vaddq_f32(low, high));
        }
        out
    }
    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        op!(vmaxvq_f32(vmaxq_f32(v.0, v.1)))
    }
}
