//! NEON with `sdot` (the feature `dotprod`, of nearly every AArch64 CPU since 2018) and with `smmla` (`i8mm`, since 2020).
//!
//! Both see an octet as eight bytes of each of eight rows. `sdot` adds four products into each 32-bit lane, so an octet
//! is two vectors of four elements, and each plane of the activations is an element of the other operand. `smmla`
//! multiplies two rows of eight bytes with two others: two rows of the weight with the two planes of the activations,
//! which gives both sums of both rows. For it neighbouring rows' words are brought together by `zip`.
//!
//! For 8 rows, 8 elements and one row of activations that is 16 instructions of `smlal` (with the codes' widening and
//! parting besides), 8 of `sdot`, 4 of `smmla`. A tile is 8 rows by 6: 24 sums, 4 registers of codes, 1 of activations.
//!
//! The instructions stand in assembly: their intrinsics are not stable in Rust 1.95.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{I, KERNELS, Neon};
use crate::cpu::isa::Isa;
use crate::cpu::kernels::lanes::bytes::{self, Bytes, out_of_line_bytes};
use crate::cpu::kernels::lanes::types::QuantFormat;
use crate::cpu::kernels::lanes::{Lanes, prepare, quant, weight_groups};
use crate::cpu::table::{KernelTable, LaneKernels};

/// The table of a set that multiplies bytes.
macro_rules! table {
    ($isa:expr, $set:ty) => {
        KernelTable {
            isa: $isa,
            lanes: Some(LaneKernels {
                prepare: planes,
                groups: weight_groups!(Neon, bytes, $set),
            }),
            ..KERNELS
        }
    };
}

pub(crate) static DOTPROD: KernelTable = table!(Isa::Dotprod, Dotprod);
pub(crate) static I8MM: KernelTable = table!(Isa::I8mm, I8mm);

#[target_feature(enable = "neon")]
fn planes(x: &[f32], records: &mut [u8]) {
    prepare::row::<prepare::Planes>(x, records);
}

/// Proof that the CPU has NEON and `dotprod`: made by [`Bytes::new`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Dotprod(Neon);

/// Proof that the CPU has NEON and `i8mm`: made by [`Bytes::new`] alone.
#[derive(Clone, Copy)]
pub(crate) struct I8mm(Neon);

/// `sum + a * x` over the four bytes of each lane, with the four bytes number `WORD` of `x` for all lanes.
///
/// # Safety
/// The CPU has `dotprod`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sdot<const WORD: usize>(sum: int32x4_t, a: int32x4_t, x: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the instruction touches nothing but its operands.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {x:v}.4b[{word}]",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            x = in(vreg) x,
            word = const WORD,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// `sum + a * x` of matrices: `a` has two rows of eight bytes, `x` two columns of eight, `sum` two rows of two.
///
/// # Safety
/// The CPU has `i8mm`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
unsafe fn smmla(sum: int32x4_t, a: int32x4_t, x: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the instruction touches nothing but its operands.
    unsafe {
        asm!(
            "smmla {sum:v}.4s, {a:v}.16b, {x:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Methods that are the same for both.
macro_rules! common {
    ($set:ident) => {
        type Lanes = Neon;
        type X = int8x16_t;
        const TILE: usize = 6;

        #[inline(always)]
        unsafe fn new() -> $set {
            // SAFETY: a CPU with the set has NEON.
            $set(unsafe { Neon::new() })
        }

        #[inline(always)]
        fn lanes(self) -> Neon {
            self.0
        }

        #[inline(always)]
        unsafe fn codes(self, p: *const u8) -> int8x16_t {
            // SAFETY: `self` proves NEON; the caller promises the memory, and no alignment is needed.
            unsafe { vld1q_s8(p.cast()) }
        }

        #[inline(always)]
        fn sub8(self, a: I, b: I) -> I {
            // SAFETY: `self` proves NEON; no memory is touched.
            unsafe {
                let sub =
                    |a, b| vreinterpretq_s32_s8(vsubq_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)));
                int32x4x2_t(sub(a.0, b.0), sub(a.1, b.1))
            }
        }
    };
}

/// `128 * high + low`.
///
/// # Safety
/// The CPU has NEON.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn planes_total(high: int32x4_t, low: int32x4_t) -> int32x4_t {
    vaddq_s32(vshlq_n_s32::<7>(high), low)
}

impl Bytes for Dotprod {
    /// Sums with the first plane, then those with the second.
    type Sum = [I; 2];

    common!(Dotprod);

    #[inline(always)]
    fn octet(self, a: I, b: I) -> [I; 2] {
        [a, b]
    }

    #[inline(always)]
    fn zero(self) -> [I; 2] {
        [self.0.zero(); 2]
    }

    #[inline(always)]
    fn dot(self, [high, low]: [I; 2], [a, b]: [I; 2], x: int8x16_t) -> [I; 2] {
        // SAFETY: `self` proves the instruction set.
        unsafe {
            let high = int32x4x2_t(sdot::<0>(high.0, a.0, x), sdot::<0>(high.1, a.1, x));
            let low = int32x4x2_t(sdot::<2>(low.0, a.0, x), sdot::<2>(low.1, a.1, x));
            [
                int32x4x2_t(sdot::<1>(high.0, b.0, x), sdot::<1>(high.1, b.1, x)),
                int32x4x2_t(sdot::<3>(low.0, b.0, x), sdot::<3>(low.1, b.1, x)),
            ]
        }
    }

    #[inline(always)]
    fn total(self, [high, low]: [I; 2]) -> I {
        // SAFETY: `self` proves the instruction set.
        unsafe { int32x4x2_t(planes_total(high.0, low.0), planes_total(high.1, low.1)) }
    }

    out_of_line_bytes!("neon,dotprod");
}

impl Bytes for I8mm {
    /// For rows 2i and 2i + 1 both planes' sums of the first, then of the second.
    type Sum = [int32x4_t; 4];

    common!(I8mm);

    /// For rows 2i and 2i + 1 the eight bytes of the first, then those of the second.
    #[inline(always)]
    fn octet(self, a: I, b: I) -> [I; 2] {
        // SAFETY: `self` proves NEON; no memory is touched.
        unsafe {
            [
                int32x4x2_t(vzip1q_s32(a.0, b.0), vzip2q_s32(a.0, b.0)),
                int32x4x2_t(vzip1q_s32(a.1, b.1), vzip2q_s32(a.1, b.1)),
            ]
        }
    }

    #[inline(always)]
    fn zero(self) -> [int32x4_t; 4] {
        [self.0.zero().0; 4]
    }

    #[inline(always)]
    fn dot(self, sum: [int32x4_t; 4], [a, b]: [I; 2], x: int8x16_t) -> [int32x4_t; 4] {
        // SAFETY: `self` proves the instruction set.
        unsafe {
            [
                smmla(sum[0], a.0, x),
                smmla(sum[1], a.1, x),
                smmla(sum[2], b.0, x),
                smmla(sum[3], b.1, x),
            ]
        }
    }

    #[inline(always)]
    fn total(self, sum: [int32x4_t; 4]) -> I {
        // SAFETY: `self` proves the instruction set.
        unsafe {
            let rows = |a, b| planes_total(vuzp1q_s32(a, b), vuzp2q_s32(a, b));
            int32x4x2_t(rows(sum[0], sum[1]), rows(sum[2], sum[3]))
        }
    }

    out_of_line_bytes!("neon,i8mm");
}
