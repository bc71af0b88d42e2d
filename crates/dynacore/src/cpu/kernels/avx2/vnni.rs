//! AVX2 with AVX-VNNI (client CPUs since 2021 have it without AVX-512): products of bytes are one instruction with sums of
//! 32 bits. Everything else is AVX2's.

use std::arch::x86_64::*;

use super::{Avx2, KERNELS};
use crate::cpu::isa::Isa;
use crate::cpu::kernels::lanes::dot8::{self, Codes, Dot8, out_of_line_dot8};
use crate::cpu::kernels::lanes::prepare::short_row;
use crate::cpu::kernels::lanes::types::QuantFormat;
use crate::cpu::kernels::lanes::{Lanes, quant, registers, short_kernels};
use crate::cpu::table::{KernelTable, LaneKernels};

/// The table.
pub(crate) static TABLE: KernelTable = KernelTable {
    isa: Isa::AvxVnni,
    short: short_kernels!(AvxVnni, "avx2,fma,f16c,avxvnni", short_row, 8: 3, 3),
    ..KERNELS
};

/// Proof that the CPU has AVX-VNNI and what [`Avx2`] stands for: made by [`Dot8::new`] alone.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni(Avx2);

impl Dot8 for AvxVnni {
    type Lanes = Avx2;
    const TILE: usize = 6;
    const FEW: usize = 4;
    const MANY: usize = 17;
    const FULL: bool = true;
    const LIFT: u32 = 7;

    #[inline(always)]
    unsafe fn new() -> AvxVnni {
        // SAFETY: a CPU with the set has AVX2.
        AvxVnni(unsafe { <Avx2 as Lanes>::new() })
    }

    #[inline(always)]
    fn lanes(self) -> Avx2 {
        self.0
    }

    registers! {
        lift(codes: __m256i) -> __m256i { _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN)) }
        dot(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i { _mm256_dpbusd_avx_epi32(sum, codes, x) }
        dot_signed(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i { _mm256_dpbusd_avx_epi32(sum, codes, x) }
    }

    #[inline(always)]
    fn total(self, sum: __m256i) -> __m256i {
        sum
    }

    out_of_line_dot8!("avx2,fma,f16c,avxvnni");
}
