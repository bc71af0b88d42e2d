//! AVX2, FMA and F16C: eight rows to a vector, two vectors to a row group.
//!
//! Products of 16-bit pairs are `vpmaddwd` and an addition. A tile of the many-row kernels is 16 rows of the weight by
//! 6 of x: 12 accumulators, 2 vectors of codes, 1 of x and 1 product fill the sixteen registers.

use std::arch::asm;
use std::arch::x86_64::*;

use super::lanes::dot8::{self, Codes, Dot8, out_of_line_dot8};
use super::lanes::float::FloatType;
use super::lanes::prepare::{self, short_row};
use super::lanes::types::QuantFormat;
use super::lanes::{
    Lanes, Pairs, float, lane_table, memory, out_of_line, out_of_line_pairs, quant, registers, short_kernels,
};
use crate::cpu::isa::Isa;
use crate::cpu::table::{KernelTable, LaneKernels};

pub(crate) mod vnni;

lane_table!(
    Isa::Avx2,
    Avx2,
    "avx2,fma,f16c",
    (prepare::row::<prepare::Pairs> => quant, Avx2),
    short_kernels!(Avx2, "avx2,fma,f16c", short_row, 5: 12, usize::MAX)
);

/// Proof that the CPU has AVX2, FMA and F16C: made by [`Lanes::new`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

#[inline(always)]
fn count(n: u32) -> __m128i {
    // SAFETY: SSE2 is part of x86-64.
    unsafe { _mm_cvtsi32_si128(n as i32) }
}

/// A product and an addition, in assembly: given the intrinsics, the compiler reorders the sums of an unrolled loop into
/// trees that need more registers than there are, and spills them (a third of the speed at 2 to 4 rows).
macro_rules! product_and_sum {
    ($(#[$doc:meta])* $name:ident, $product:literal, $add:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The CPU has AVX2.
        #[inline]
        #[target_feature(enable = "avx2")]
        unsafe fn $name(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
            let mut sum = sum;
            // SAFETY: the two instructions touch nothing but their operands. `product` may share a register with `a` or
            // `b`, which are read before it is written.
            unsafe {
                asm!(
                    concat!($product, " {product}, {a}, {b}"),
                    concat!($add, " {sum}, {sum}, {product}"),
                    a = in(ymm_reg) a,
                    b = in(ymm_reg) b,
                    sum = inout(ymm_reg) sum,
                    product = lateout(ymm_reg) _,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            sum
        }
    };
}

product_and_sum!(
    /// `sum + a.0 * b.0 + a.1 * b.1` in 32 bits, for pairs of 16 bits.
    dot, "vpmaddwd", "vpaddd"
);
product_and_sum!(
    /// `sum + a.0 * b.0 + a.1 * b.1` in 16 bits, for unsigned bytes `a` and signed ones `b`.
    dot_bytes, "vpmaddubsw", "vpaddw"
);

impl Lanes for Avx2 {
    type I = __m256i;
    type F = __m256;
    const WIDTH: usize = 8;
    const TILE: usize = 6;

    #[inline(always)]
    unsafe fn new() -> Avx2 {
        Avx2(())
    }

    registers! {
        zero() -> __m256i { _mm256_setzero_si256() }
        splat(x: i32) -> __m256i { _mm256_set1_epi32(x) }
        and(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        or(a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        add(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        sub(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        mul(a: __m256i, b: __m256i) -> __m256i { _mm256_mullo_epi32(a, b) }
        shl(a: __m256i, n: u32) -> __m256i { _mm256_sll_epi32(a, count(n)) }
        shr(a: __m256i, n: u32) -> __m256i { _mm256_srl_epi32(a, count(n)) }
        sar(a: __m256i, n: u32) -> __m256i { _mm256_sra_epi32(a, count(n)) }
        sub16(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi16(a, b) }
        mul16(a: __m256i, b: __m256i) -> __m256i { _mm256_mullo_epi16(a, b) }
        shl16(a: __m256i, n: u32) -> __m256i { _mm256_sll_epi16(a, count(n)) }
        shr16(a: __m256i, n: u32) -> __m256i { _mm256_srl_epi16(a, count(n)) }
        sar16(a: __m256i, n: u32) -> __m256i { _mm256_sra_epi16(a, count(n)) }
        to_f(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        zero_f() -> __m256 { _mm256_setzero_ps() }
        mul_f(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        neg_f(a: __m256) -> __m256 { _mm256_xor_ps(a, _mm256_set1_ps(-0.0)) }
        fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
    }

    memory! {
        load(p: *const u8) -> __m256i { _mm256_loadu_si256(p.cast()) }
        store(p: *mut u8, a: __m256i) -> () { _mm256_storeu_si256(p.cast(), a) }
        load_f(p: *const u8) -> __m256 { _mm256_loadu_ps(p.cast()) }
        store_f(p: *mut u8, a: __m256) -> () { _mm256_storeu_ps(p.cast(), a) }
        load_f16(p: *const u8) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
        load_bf16(p: *const u8) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
        }
        load_u16(p: *const u8) -> __m256i { _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())) }
        load_half_e8m0(p: *const u8) -> __m256 {{
            // e - 1 in the exponent's place; for the two subnormal results e + 1 in the mantissa's, which is larger there.
            let (e, one) = (_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())), _mm256_set1_epi32(1));
            let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, one));
            let subnormal = _mm256_slli_epi32::<21>(_mm256_add_epi32(e, one));
            _mm256_castsi256_ps(_mm256_max_epi32(normal, subnormal))
        }}
        each(p: *const u8) -> __m256i { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
        each_f(p: *const u8) -> __m256 { _mm256_set1_ps(p.cast::<f32>().read_unaligned()) }
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: __m256i) -> __m256i {
        // SAFETY: `self` proves the instruction set; the sixteen bytes read are the table's.
        unsafe {
            _mm256_shuffle_epi8(
                _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())),
                index,
            )
        }
    }

    out_of_line!("avx2,fma,f16c");
}

impl Pairs for Avx2 {
    type X = __m256i;

    #[inline(always)]
    fn ordered(self, a: __m256i) -> __m256i {
        a
    }

    registers! {
        dot(acc: __m256i, a: __m256i, b: __m256i) -> __m256i { dot(acc, a, b) }
    }

    memory! {
        codes(p: *const u8) -> __m256i { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }

    out_of_line_pairs!("avx2,fma,f16c");
}

impl Dot8 for Avx2 {
    type Lanes = Avx2;
    const TILE: usize = 6;
    const FEW: usize = 4;
    const MANY: usize = 9;
    const FULL: bool = false;
    // A product of bytes of eight bits each would not fit 16.
    const LIFT: u32 = 0;

    #[inline(always)]
    unsafe fn new() -> Avx2 {
        Avx2(())
    }

    #[inline(always)]
    fn lanes(self) -> Avx2 {
        self
    }

    #[inline(always)]
    fn lift(self, codes: __m256i) -> __m256i {
        codes
    }

    registers! {
        dot(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i { dot_bytes(sum, codes, x) }
        // Magnitudes of the codes, at most 128, and x with their signs: two products are at most 32,512.
        dot_signed(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
            dot(sum, _mm256_set1_epi16(1), _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes)))
        }
        total(sum: __m256i) -> __m256i { _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) }
    }

    out_of_line_dot8!("avx2,fma,f16c");
}
