//! Instruction sets: which ones there are, which this CPU has, and the cap a user may set.
//!
//! Owns detection and the meaning of `DYNACORE_ISA`. It does not choose kernels: see [`crate::cpu::table`].

use std::fmt;

use crate::error::{Error, Result};

/// The environment variable that caps the instruction set: a name of [`Isa`].
pub const ISA_VARIABLE: &str = "DYNACORE_ISA";

/// An instruction set that has a kernel table, those of one architecture the slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, whatever the compiler's target has.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// [`Isa::Avx2`] with AVX-VNNI: products of bytes in vectors of 256 bits.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, VL and VNNI (and all of [`Isa::Avx2`]).
    Avx512,
    /// [`Isa::Avx512`] with DQ, BF16 and FP16, and AMX tiles of bf16 that the system lets this process use.
    Amx,
    /// AArch64 with NEON (Advanced SIMD), which all but the smallest have.
    Neon,
    /// [`Isa::Neon`] with products of bytes (the feature `dotprod`).
    Dotprod,
    /// [`Isa::Dotprod`] with products of matrices of bytes (the feature `i8mm`).
    I8mm,
}

impl Isa {
    /// All of them, those of one architecture the slowest first.
    pub const ALL: [Isa; 8] = [
        Isa::Portable,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
        Isa::Amx,
        Isa::Neon,
        Isa::Dotprod,
        Isa::I8mm,
    ];

    /// Its name in [`ISA_VARIABLE`], plans and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
            Isa::Dotprod => "dotprod",
            Isa::I8mm => "i8mm",
        }
    }

    /// Whether this CPU (and the operating system) has it.
    pub fn available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => {
                Isa::Avx512.available()
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512fp16")
                    && super::kernels::amx::permitted()
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Amx => false,
            // Words of packed weights are read as lanes, so their bytes must stand in the order of the file.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => cfg!(target_endian = "little") && std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => Isa::Neon.available() && std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => Isa::Dotprod.available() && std::arch::is_aarch64_feature_detected!("i8mm"),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::Dotprod | Isa::I8mm => false,
        }
    }

    /// The best this CPU has, or what `cap` names.
    ///
    /// # Errors
    /// [`Error::Option`] if `cap` names no instruction set, or one this CPU lacks.
    pub fn detect(cap: Option<&str>) -> Result<Isa> {
        let have: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.available()).collect();
        let names = || {
            have.iter()
                .map(|isa| format!("`{isa}`"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        match cap {
            None => Ok(*have.last().expect("every CPU has the portable kernels")),
            Some(cap) => have
                .iter()
                .copied()
                .find(|isa| isa.name() == cap)
                .ok_or_else(|| Error::Option {
                    name: ISA_VARIABLE.into(),
                    found: cap.into(),
                    expected: format!("an instruction set this CPU has: {}", names()),
                }),
        }
    }

    /// [`Isa::detect`] with the cap from [`ISA_VARIABLE`], if it is set.
    ///
    /// # Errors
    /// As [`Isa::detect`].
    pub fn from_env() -> Result<Isa> {
        match std::env::var_os(ISA_VARIABLE) {
            None => Isa::detect(None),
            Some(cap) => Isa::detect(Some(&cap.to_string_lossy())),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cap_is_honoured_or_refused() {
        assert_eq!(
            Isa::detect(Some("portable")).expect("every CPU has it"),
            Isa::Portable
        );
        let best = Isa::detect(None).expect("every CPU has one");
        assert!(best.available());
        // Whoever runs the tests on a known CPU may say what must be found there.
        if let Some(expected) = std::env::var_os("DYNACORE_TEST_ISA") {
            assert_eq!(best.name(), expected);
        }
        assert_eq!(Isa::detect(Some(best.name())).expect("it was detected"), best);
        let error = Isa::detect(Some("AVX9"))
            .expect_err("there is no such set")
            .to_string();
        assert!(
            error.contains("DYNACORE_ISA: found `AVX9`") && error.contains("`portable`"),
            "{error}"
        );
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.available()) {
            assert!(Isa::detect(Some(isa.name())).is_err());
        }
    }
}
