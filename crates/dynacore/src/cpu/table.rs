//! Kernel tables: all kernels of one instruction set.
//!
//! A table is a constant; [`KernelTable::of`] hands it out only if the CPU has the instruction set, and that is what
//! makes the calls through it sound: whoever holds a `&'static KernelTable` has passed the detection.

use dynair::{Activation, DType, QuantType};

use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::kernels::amx::TileKernels;
use super::kernels::{GroupFn, portable};
use crate::error::{Error, Result};

/// Quantises one row of activations: `[K]` values into the row's records (see [`crate::cpu::kernels`]).
pub(crate) type PrepareFn = unsafe fn(x: &[f32], records: &mut [u8]);

/// `gate[i] = act(gate[i]) * up[i]`.
pub(crate) type GluFn = unsafe fn(act: Activation, gate: &mut [f32], up: &[f32]);

/// `x[i] = act(x[i])`.
pub(crate) type ActFn = unsafe fn(act: Activation, x: &mut [f32]);

/// The kernels of packed weights: what the tables of SIMD instruction sets have beside the portable one.
pub(crate) struct LaneKernels {
    pub(crate) prepare: PrepareFn,
    /// By [`slot`] of the weight's type.
    pub(crate) groups: [GroupFn; DType::WEIGHTS.len()],
}

/// Kernels of packed weights for short records.
pub(crate) struct ShortKernels {
    pub(crate) lanes: LaneKernels,
    /// By [`slot`]: from how many rows on they are faster than [`KernelTable::lanes`]. 0 for floats, which read x itself.
    pub(crate) from: [usize; DType::WEIGHTS.len()],
}

/// All kernels of one instruction set.
pub struct KernelTable {
    /// The instruction set.
    pub isa: Isa,
    /// Kernels of packed weights; without them weights stay row-major.
    pub(crate) lanes: Option<LaneKernels>,
    /// The same from short records (see [`super::kernels`]), for `auto` mode.
    pub(crate) short: Option<ShortKernels>,
    /// Products of many rows, for `auto` mode.
    #[cfg(target_arch = "x86_64")]
    pub(crate) tiles: Option<TileKernels>,
    pub(crate) glu: GluFn,
    pub(crate) act: ActFn,
}

impl std::fmt::Debug for KernelTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KernelTable({})", self.isa)
    }
}

/// Plain Rust: the meaning of `safe` mode, and what remains on a CPU without a table of its own.
static PORTABLE: KernelTable = KernelTable {
    isa: Isa::Portable,
    lanes: None,
    short: None,
    #[cfg(target_arch = "x86_64")]
    tiles: None,
    glu: portable::glu,
    act: portable::activate,
};

impl KernelTable {
    /// The portable table.
    pub fn portable() -> &'static KernelTable {
        &PORTABLE
    }

    /// The table of an instruction set.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if this CPU lacks it.
    pub fn of(isa: Isa) -> Result<&'static KernelTable> {
        if !isa.available() {
            return Err(Error::Unsupported {
                device: "cpu".into(),
                what: format!("the instruction set `{isa}`"),
            });
        }
        Ok(match isa {
            Isa::Portable => &PORTABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &super::kernels::avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &super::kernels::avx2::vnni::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &super::kernels::avx512::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => &super::kernels::amx::TABLE,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Amx => {
                unreachable!("`{isa}` is not available here")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &super::kernels::neon::TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => &super::kernels::neon::bytes::DOTPROD,
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => &super::kernels::neon::bytes::I8MM,
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::Dotprod | Isa::I8mm => unreachable!("`{isa}` is not available here"),
        })
    }

    /// `gate[i] = act(gate[i]) * up[i]`. The result of an element depends on its own inputs alone.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn glu(&self, act: Activation, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "gate and up have one shape");
        // SAFETY: the CPU has this table's instruction set (see the module's docs); the lengths agree.
        unsafe { (self.glu)(act, gate, up) }
    }

    /// `x[i] = act(x[i])`. The result of an element depends on itself alone.
    pub fn activate(&self, act: Activation, x: &mut [f32]) {
        // SAFETY: the CPU has this table's instruction set (see the module's docs).
        unsafe { (self.act)(act, x) }
    }
}

/// The table of every instruction set this CPU has, the portable one first.
pub fn tables() -> Vec<&'static KernelTable> {
    Isa::ALL
        .into_iter()
        .filter_map(|isa| KernelTable::of(isa).ok())
        .collect()
}

/// A weight type's place in [`LaneKernels::groups`]: its place in [`DType::WEIGHTS`].
///
/// # Panics
/// If `dtype` is no weight type.
pub(crate) const fn slot(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Bf16 => 2,
        DType::Quant(q) => match q {
            QuantType::Q4_0 => 3,
            QuantType::Q4_1 => 4,
            QuantType::Q5_0 => 5,
            QuantType::Q5_1 => 6,
            QuantType::Q8_0 => 7,
            QuantType::Q2K => 8,
            QuantType::Q3K => 9,
            QuantType::Q4K => 10,
            QuantType::Q5K => 11,
            QuantType::Q6K => 12,
            QuantType::Iq4Nl => 13,
            QuantType::Iq4Xs => 14,
            QuantType::Mxfp4 => 15,
        },
        DType::I32 => panic!("a weight has a weight type"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_the_list_of_weight_types() {
        for (i, dtype) in DType::WEIGHTS.into_iter().enumerate() {
            assert_eq!(slot(dtype), i, "{dtype}");
        }
    }

    #[test]
    fn tables_start_with_the_portable_one() {
        let tables = tables();
        assert_eq!(tables[0].isa, Isa::Portable);
        assert!(tables.iter().all(|t| t.isa.available()));
    }
}
