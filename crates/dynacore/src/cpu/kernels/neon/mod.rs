//! NEON (Advanced SIMD of AArch64): eight rows to a vector of two registers, two vectors to a row group.
//!
//! Products of 16-bit pairs are `smlal` by an element of the activation's register: the pairs of a vector are parted
//! into eight first and eight second codes ([`Pairs::ordered`], `uzp1` and `uzp2`), once for all rows of activations,
//! and no product needs a broadcast, a second instruction for its sum, or a horizontal addition. A tile of the many-row
//! kernels is 16 rows of the weight by 6 of x: 24 accumulators, 4 registers of codes and 1 of x of the 32 there are.
//!
//! [`bytes`] multiplies bytes instead of 16-bit codes where the CPU has instructions for that. Speed is unmeasured on
//! all of these: they were written and tested without such a machine.

use std::arch::aarch64::*;
use std::arch::asm;

use super::lanes::float::FloatType;
use super::lanes::prepare;
use super::lanes::types::QuantFormat;
use super::lanes::{
    Lanes, Pairs, float, lane_table, memory, out_of_line, out_of_line_pairs, quant, registers,
};
use crate::cpu::isa::Isa;
use crate::cpu::table::{KernelTable, LaneKernels};

pub(crate) mod bytes;

lane_table!(Isa::Neon, Neon, "neon", (prepare::row::<prepare::Pairs> => quant, Neon), None);

/// Proof that the CPU has NEON: made by [`Lanes::new`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Eight 32-bit lanes.
type I = int32x4x2_t;
/// Eight f32 lanes.
type F = float32x4x2_t;

/// An expression for both halves of vectors.
macro_rules! both {
    ($make:ident: $($v:ident),* => $e:expr) => {
        $make({ $(let $v = $v.0;)* $e }, { $(let $v = $v.1;)* $e })
    };
}

macro_rules! both_i {
    ($($v:ident),* => $e:expr) => { both!(int32x4x2_t: $($v),* => $e) };
}

macro_rules! both_f {
    ($($v:ident),* => $e:expr) => { both!(float32x4x2_t: $($v),* => $e) };
}

/// Both halves as 16-bit lanes.
macro_rules! both_16 {
    ($($v:ident),* => $e:expr) => {
        both_i!($($v),* => {
            $(let $v = vreinterpretq_s16_s32($v);)*
            vreinterpretq_s32_s16($e)
        })
    };
}

/// Both halves as unsigned 32-bit lanes.
macro_rules! both_u {
    ($($v:ident),* => $e:expr) => {
        both_i!($($v),* => {
            $(let $v = vreinterpretq_u32_s32($v);)*
            vreinterpretq_s32_u32($e)
        })
    };
}

/// `acc + a.0 * x.0 + a.1 * x.1`, where `a` is eight first codes and eight second ones and `x` a pair of codes. In
/// assembly, so that the compiler can not reorder the sums of an unrolled loop into trees that need more registers than
/// there are, which it did on AVX2.
///
/// # Safety
/// The CPU has NEON.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn dot(acc: I, a: I, x: f32) -> I {
    let I {
        0: mut low,
        1: mut high,
    } = acc;
    // SAFETY: the instructions touch nothing but their operands; `low` and `high` share no register with others, as they
    // are written while the others are still to be read.
    unsafe {
        asm!(
            "smlal {low:v}.4s, {first:v}.4h, {x:v}.h[0]",
            "smlal2 {high:v}.4s, {first:v}.8h, {x:v}.h[0]",
            "smlal {low:v}.4s, {second:v}.4h, {x:v}.h[1]",
            "smlal2 {high:v}.4s, {second:v}.8h, {x:v}.h[1]",
            low = inout(vreg) low,
            high = inout(vreg) high,
            first = in(vreg) a.0,
            second = in(vreg) a.1,
            // An element of 16 bits can be named in the first sixteen registers only.
            x = in(vreg_low16) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    int32x4x2_t(low, high)
}

impl Lanes for Neon {
    type I = I;
    type F = F;
    const WIDTH: usize = 8;
    const TILE: usize = 6;

    #[inline(always)]
    unsafe fn new() -> Neon {
        Neon(())
    }

    registers! {
        zero() -> I {{ let z = vdupq_n_s32(0); int32x4x2_t(z, z) }}
        splat(x: i32) -> I {{ let v = vdupq_n_s32(x); int32x4x2_t(v, v) }}
        and(a: I, b: I) -> I { both_i!(a, b => vandq_s32(a, b)) }
        or(a: I, b: I) -> I { both_i!(a, b => vorrq_s32(a, b)) }
        add(a: I, b: I) -> I { both_i!(a, b => vaddq_s32(a, b)) }
        sub(a: I, b: I) -> I { both_i!(a, b => vsubq_s32(a, b)) }
        mul(a: I, b: I) -> I { both_i!(a, b => vmulq_s32(a, b)) }
        shl(a: I, n: u32) -> I { both_i!(a => vshlq_s32(a, vdupq_n_s32(n as i32))) }
        // A shift by a negative number of places is one to the right.
        shr(a: I, n: u32) -> I { both_u!(a => vshlq_u32(a, vdupq_n_s32(-(n as i32)))) }
        sar(a: I, n: u32) -> I { both_i!(a => vshlq_s32(a, vdupq_n_s32(-(n as i32)))) }
        sub16(a: I, b: I) -> I { both_16!(a, b => vsubq_s16(a, b)) }
        mul16(a: I, b: I) -> I { both_16!(a, b => vmulq_s16(a, b)) }
        shl16(a: I, n: u32) -> I { both_16!(a => vshlq_s16(a, vdupq_n_s16(n as i16))) }
        shr16(a: I, n: u32) -> I {
            both_16!(a => vreinterpretq_s16_u16(vshlq_u16(vreinterpretq_u16_s16(a), vdupq_n_s16(-(n as i16)))))
        }
        sar16(a: I, n: u32) -> I { both_16!(a => vshlq_s16(a, vdupq_n_s16(-(n as i16)))) }
        to_f(a: I) -> F { both_f!(a => vcvtq_f32_s32(a)) }
        zero_f() -> F {{ let z = vdupq_n_f32(0.0); float32x4x2_t(z, z) }}
        mul_f(a: F, b: F) -> F { both_f!(a, b => vmulq_f32(a, b)) }
        neg_f(a: F) -> F { both_f!(a => vnegq_f32(a)) }
        fma(a: F, b: F, c: F) -> F { both_f!(a, b, c => vfmaq_f32(c, a, b)) }
    }

    memory! {
        load(p: *const u8) -> I { int32x4x2_t(vld1q_s32(p.cast()), vld1q_s32(p.add(16).cast())) }
        store(p: *mut u8, a: I) -> () {{ vst1q_s32(p.cast(), a.0); vst1q_s32(p.add(16).cast(), a.1) }}
        load_f(p: *const u8) -> F { float32x4x2_t(vld1q_f32(p.cast()), vld1q_f32(p.add(16).cast())) }
        store_f(p: *mut u8, a: F) -> () {{ vst1q_f32(p.cast(), a.0); vst1q_f32(p.add(16).cast(), a.1) }}
        load_f16(p: *const u8) -> F {{
            let h = vreinterpretq_f16_u16(vld1q_u16(p.cast()));
            float32x4x2_t(vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h))
        }}
        load_bf16(p: *const u8) -> F {{
            let h = vld1q_u16(p.cast());
            float32x4x2_t(
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(h))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(h)),
            )
        }}
        load_u16(p: *const u8) -> I {{
            let h = vld1q_u16(p.cast());
            int32x4x2_t(
                vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(h))),
                vreinterpretq_s32_u32(vmovl_high_u16(h)),
            )
        }}
        load_half_e8m0(p: *const u8) -> F {{
            // e - 1 in the exponent's place; for the two subnormal results e + 1 in the mantissa's, which is larger there.
            let h = vmovl_u8(vld1_u8(p));
            let one = vdupq_n_s32(1);
            let widened = int32x4x2_t(
                vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(h))),
                vreinterpretq_s32_u32(vmovl_high_u16(h)),
            );
            both_f!(widened => {
                let normal = vshlq_n_s32::<23>(vsubq_s32(widened, one));
                let subnormal = vshlq_n_s32::<21>(vaddq_s32(widened, one));
                vreinterpretq_f32_s32(vmaxq_s32(normal, subnormal))
            })
        }}
        each(p: *const u8) -> I {{ let v = vld1q_dup_s32(p.cast()); int32x4x2_t(v, v) }}
        each_f(p: *const u8) -> F {{ let v = vld1q_dup_f32(p.cast()); float32x4x2_t(v, v) }}
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: I) -> I {
        // SAFETY: `self` proves the instruction set; the sixteen bytes read are the table's.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            both_i!(index => vreinterpretq_s32_u8(vqtbl1q_u8(table, vreinterpretq_u8_s32(index))))
        }
    }

    out_of_line!("neon");
}

impl Pairs for Neon {
    // The bits of two codes: an f32 is loaded into the vector register that the product reads.
    type X = f32;

    registers! {
        ordered(a: I) -> I {{
            let (low, high) = (vreinterpretq_s16_s32(a.0), vreinterpretq_s16_s32(a.1));
            let (first, second) = (vuzp1q_s16(low, high), vuzp2q_s16(low, high));
            int32x4x2_t(vreinterpretq_s32_s16(first), vreinterpretq_s32_s16(second))
        }}
        dot(acc: I, a: I, x: f32) -> I { dot(acc, a, x) }
    }

    memory! {
        codes(p: *const u8) -> f32 { p.cast::<f32>().read_unaligned() }
    }

    out_of_line_pairs!("neon");
}
