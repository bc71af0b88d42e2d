//! AVX-512 F, BW, VL and VNNI: sixteen rows to a vector, one vector to a row group.
//!
//! Quantised weights meet activations by products of bytes, `vpdpbusd`, whether their codes have 8 bits or 15, in two planes
//! ([`dot8`]), eight rows at a time.

mod prepare;

use std::arch::x86_64::*;

use super::lanes::dot8::{self, Codes, Dot8, out_of_line_dot8};
use super::lanes::float::FloatType;
use super::lanes::types::QuantFormat;
use super::lanes::{Lanes, float, lane_table, memory, out_of_line, quant, registers, short_kernels};
use crate::cpu::isa::Isa;
use crate::cpu::table::{KernelTable, LaneKernels};

lane_table!(
    Isa::Avx512,
    Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni",
    (prepare::planes_row => dot8, Avx512, dot8::Whole),
    short_kernels!(Avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni", prepare::short_row, 8: 3, 3)
);

/// Proof that the CPU has the instruction set: made by [`Lanes::new`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

#[inline(always)]
fn count(n: u32) -> __m128i {
    // SAFETY: SSE2 is part of x86-64.
    unsafe { _mm_cvtsi32_si128(n as i32) }
}

impl Lanes for Avx512 {
    type I = __m512i;
    type F = __m512;
    const WIDTH: usize = 16;
    const TILE: usize = 8;

    #[inline(always)]
    unsafe fn new() -> Avx512 {
        Avx512(())
    }

    registers! {
        zero() -> __m512i { _mm512_setzero_si512() }
        splat(x: i32) -> __m512i { _mm512_set1_epi32(x) }
        and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        add(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        sub(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        mul(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        shl(a: __m512i, n: u32) -> __m512i { _mm512_sll_epi32(a, count(n)) }
        shr(a: __m512i, n: u32) -> __m512i { _mm512_srl_epi32(a, count(n)) }
        sar(a: __m512i, n: u32) -> __m512i { _mm512_sra_epi32(a, count(n)) }
        sub16(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi16(a, b) }
        mul16(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi16(a, b) }
        shl16(a: __m512i, n: u32) -> __m512i { _mm512_sll_epi16(a, count(n)) }
        shr16(a: __m512i, n: u32) -> __m512i { _mm512_srl_epi16(a, count(n)) }
        sar16(a: __m512i, n: u32) -> __m512i { _mm512_sra_epi16(a, count(n)) }
        to_f(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        zero_f() -> __m512 { _mm512_setzero_ps() }
        mul_f(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        neg_f(a: __m512) -> __m512 { _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(i32::MIN))) }
        fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
    }

    memory! {
        load(p: *const u8) -> __m512i { _mm512_loadu_si512(p.cast()) }
        store(p: *mut u8, a: __m512i) -> () { _mm512_storeu_si512(p.cast(), a) }
        load_f(p: *const u8) -> __m512 { _mm512_loadu_ps(p.cast()) }
        store_f(p: *mut u8, a: __m512) -> () { _mm512_storeu_ps(p.cast(), a) }
        load_f16(p: *const u8) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        load_bf16(p: *const u8) -> __m512 {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
        }
        load_u16(p: *const u8) -> __m512i { _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())) }
        load_half_e8m0(p: *const u8) -> __m512 {{
            // e - 1 in the exponent's place; for the two subnormal results e + 1 in the mantissa's, which is larger there.
            let (e, one) = (_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())), _mm512_set1_epi32(1));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, one));
            let subnormal = _mm512_slli_epi32::<21>(_mm512_add_epi32(e, one));
            _mm512_castsi512_ps(_mm512_max_epi32(normal, subnormal))
        }}
        each(p: *const u8) -> __m512i { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
        each_f(p: *const u8) -> __m512 { _mm512_set1_ps(p.cast::<f32>().read_unaligned()) }
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: __m512i) -> __m512i {
        // SAFETY: `self` proves the instruction set; the sixteen bytes read are the table's.
        unsafe {
            _mm512_shuffle_epi8(
                _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())),
                index,
            )
        }
    }

    out_of_line!("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
}

impl Dot8 for Avx512 {
    type Lanes = Avx512;
    const TILE: usize = 8;
    const FEW: usize = 8;
    const MANY: usize = 33;
    const FULL: bool = true;
    const LIFT: u32 = 7;

    #[inline(always)]
    unsafe fn new() -> Avx512 {
        Avx512(())
    }

    #[inline(always)]
    fn lanes(self) -> Avx512 {
        self
    }

    registers! {
        lift(codes: __m512i) -> __m512i { _mm512_xor_si512(codes, _mm512_set1_epi8(i8::MIN)) }
        dot(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i { _mm512_dpbusd_epi32(sum, codes, x) }
        dot_signed(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i { _mm512_dpbusd_epi32(sum, codes, x) }
    }

    #[inline(always)]
    fn total(self, sum: __m512i) -> __m512i {
        sum
    }

    out_of_line_dot8!("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
}
