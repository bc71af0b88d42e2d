//! The matrix kernels, written once over an abstract vector ([`Lanes`]) whose lanes are output rows.
//!
//! [`types`] says how each quantised type is expanded, [`quant`] multiplies them, [`float`] does F32, F16 and BF16,
//! [`prepare`] makes the activation records. Sets that multiply bytes do so in place of [`quant`]: `dot8` on x86-64, also
//! with activations of 8 bits, and `bytes` on AArch64. The instruction sets differ in nothing but the vector and the
//! integer products, which are exact, so from the same records their results are bit-identical.
//!
//! Everything here is `#[inline(always)]` without target features of its own. The out-of-line functions that
//! [`out_of_line`] makes for each instruction set carry the features, and the bodies are compiled into them.

#[cfg(target_arch = "aarch64")]
pub(crate) mod bytes;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dot8;
pub(crate) mod float;
pub(crate) mod prepare;
pub(crate) mod quant;
pub(crate) mod types;

use self::float::FloatType;
use self::types::QuantFormat;
use crate::cpu::kernels::prefetch;

/// A vector of 32-bit lanes, [`Lanes::WIDTH`] of them; its value is the proof that the CPU has the instruction set.
///
/// The methods without `unsafe` work on registers. All pointers may have any alignment.
pub(crate) trait Lanes: Copy {
    /// Integers: 32-bit lanes, or pairs of 16-bit ones.
    type I: Copy;
    /// f32 lanes.
    type F: Copy;
    /// Lanes: 8 or 16.
    const WIDTH: usize;
    /// Rows of activations a tile of the many-row kernels holds in registers.
    const TILE: usize;

    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn new() -> Self;

    fn zero(self) -> Self::I;
    fn splat(self, x: i32) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub(self, a: Self::I, b: Self::I) -> Self::I;
    fn mul(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl(self, a: Self::I, n: u32) -> Self::I;
    fn shr(self, a: Self::I, n: u32) -> Self::I;
    /// Arithmetic shift to the right.
    fn sar(self, a: Self::I, n: u32) -> Self::I;
    fn sub16(self, a: Self::I, b: Self::I) -> Self::I;
    fn mul16(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl16(self, a: Self::I, n: u32) -> Self::I;
    fn shr16(self, a: Self::I, n: u32) -> Self::I;
    fn sar16(self, a: Self::I, n: u32) -> Self::I;
    /// For each byte of `index`, all of them below 16, that byte of `table`.
    fn lookup(self, table: &[u8; 16], index: Self::I) -> Self::I;
    fn to_f(self, a: Self::I) -> Self::F;
    fn zero_f(self) -> Self::F;
    fn mul_f(self, a: Self::F, b: Self::F) -> Self::F;
    fn neg_f(self, a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// # Safety
    /// `4 * WIDTH` bytes at `p` can be read.
    unsafe fn load(self, p: *const u8) -> Self::I;
    /// # Safety
    /// `4 * WIDTH` bytes at `p` can be written.
    unsafe fn store(self, p: *mut u8, a: Self::I);
    /// # Safety
    /// `4 * WIDTH` bytes at `p` can be read.
    unsafe fn load_f(self, p: *const u8) -> Self::F;
    /// # Safety
    /// `4 * WIDTH` bytes at `p` can be written.
    unsafe fn store_f(self, p: *mut u8, a: Self::F);
    /// Widens f16 values.
    /// # Safety
    /// `2 * WIDTH` bytes at `p` can be read.
    unsafe fn load_f16(self, p: *const u8) -> Self::F;
    /// Widens bf16 values.
    /// # Safety
    /// `2 * WIDTH` bytes at `p` can be read.
    unsafe fn load_bf16(self, p: *const u8) -> Self::F;
    /// Widens unsigned 16-bit integers.
    /// # Safety
    /// `2 * WIDTH` bytes at `p` can be read.
    unsafe fn load_u16(self, p: *const u8) -> Self::I;
    /// Widens bytes of exponents: [`dynair::quant::table::half_e8m0`] of each.
    /// # Safety
    /// `WIDTH` bytes at `p` can be read.
    unsafe fn load_half_e8m0(self, p: *const u8) -> Self::F;
    /// The word at `p` in every lane.
    /// # Safety
    /// 4 bytes at `p` can be read.
    unsafe fn each(self, p: *const u8) -> Self::I;
    /// The f32 at `p` in every lane.
    /// # Safety
    /// 4 bytes at `p` can be read.
    unsafe fn each_f(self, p: *const u8) -> Self::F;
    /// [`prefetch`]: asks for the line at `p`, which need not exist.
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        prefetch(p);
    }

    /// [`float::expand`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn float_expand<T: FloatType>(self, weight: *const u8, count: usize, panel: *mut u8);
    /// [`float::tile`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn float_tile<T: FloatType, const N: usize>(self, a: &float::Tile, acc: *mut f32);
}

/// A set that multiplies quantised weights as pairs of 16 bits; a row group is two of its vectors.
pub(crate) trait Pairs: Lanes {
    /// A pair of activation codes as [`Pairs::dot`] takes it.
    type X: Copy;

    /// 16-bit pairs in the order that [`Pairs::dot`] takes them: a permutation inside the vector, so that what is
    /// stored so can be loaded so.
    fn ordered(self, a: Self::I) -> Self::I;
    /// `acc + a.0 * x.0 + a.1 * x.1` over the 16-bit pairs `a` of each lane, which are [`Pairs::ordered`]; exact modulo
    /// 2^32.
    fn dot(self, acc: Self::I, a: Self::I, x: Self::X) -> Self::I;
    /// The pair of codes at `p`.
    /// # Safety
    /// 4 bytes at `p` can be read.
    unsafe fn codes(self, p: *const u8) -> Self::X;

    /// [`quant::gemv`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn gemv<T: QuantFormat, const N: usize>(self, a: &quant::Gemv, acc: *mut f32);
    /// [`quant::expand`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn expand<T: QuantFormat>(self, a: &quant::Expand, panel: *mut u8);
    /// [`quant::tile`], compiled for the instruction set. `# Safety`: as there.
    unsafe fn tile<const MINS: usize, const N: usize>(self, a: &quant::Tile, acc: *mut f32);
}

/// Methods of [`Lanes`] on registers.
macro_rules! registers {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $out:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $ty),*) -> $out {
                // SAFETY: the intrinsics need the instruction set, which `self` proves, and touch no memory.
                unsafe { $body }
            }
        )*
    };
}
pub(crate) use registers;

/// Methods of [`Lanes`] on memory.
macro_rules! memory {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $out:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            unsafe fn $name(self, $($arg: $ty),*) -> $out {
                // SAFETY: `self` proves the instruction set; the caller promises the memory, and no alignment is
                // needed.
                unsafe { $body }
            }
        )*
    };
}
pub(crate) use memory;

/// The last two methods of [`Lanes`], with the target features of the instruction set.
macro_rules! out_of_line {
    ($features:tt) => {
        unsafe fn float_expand<T: FloatType>(self, weight: *const u8, count: usize, panel: *mut u8) {
            #[target_feature(enable = $features)]
            unsafe fn inner<L: Lanes, T: FloatType>(l: L, weight: *const u8, count: usize, panel: *mut u8) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { float::expand::<L, T>(l, weight, count, panel) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, T>(self, weight, count, panel) }
        }

        unsafe fn float_tile<T: FloatType, const N: usize>(self, a: &float::Tile, acc: *mut f32) {
            #[target_feature(enable = $features)]
            unsafe fn inner<L: Lanes, T: FloatType, const N: usize>(l: L, a: &float::Tile, acc: *mut f32) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { float::tile::<L, T, N>(l, a, acc) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, T, N>(self, a, acc) }
        }
    };
}
pub(crate) use out_of_line;

/// The last three methods of [`Pairs`], with the target features of the instruction set.
macro_rules! out_of_line_pairs {
    ($features:tt) => {
        unsafe fn gemv<T: QuantFormat, const N: usize>(self, a: &quant::Gemv, acc: *mut f32) {
            #[target_feature(enable = $features)]
            unsafe fn inner<L: Pairs, T: QuantFormat, const N: usize>(l: L, a: &quant::Gemv, acc: *mut f32) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { quant::gemv::<L, T, N>(l, a, acc) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, T, N>(self, a, acc) }
        }

        unsafe fn expand<T: QuantFormat>(self, a: &quant::Expand, panel: *mut u8) {
            #[target_feature(enable = $features)]
            unsafe fn inner<L: Pairs, T: QuantFormat>(l: L, a: &quant::Expand, panel: *mut u8) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { quant::expand::<L, T>(l, a, panel) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, T>(self, a, panel) }
        }

        unsafe fn tile<const MINS: usize, const N: usize>(self, a: &quant::Tile, acc: *mut f32) {
            #[target_feature(enable = $features)]
            unsafe fn inner<L: Pairs, const MINS: usize, const N: usize>(
                l: L,
                a: &quant::Tile,
                acc: *mut f32,
            ) {
                // SAFETY: the caller's promise is the callee's.
                unsafe { quant::tile::<L, MINS, N>(l, a, acc) }
            }
            // SAFETY: `self` proves the instruction set; the rest is the caller's promise.
            unsafe { inner::<Self, MINS, N>(self, a, acc) }
        }
    };
}
pub(crate) use out_of_line_pairs;

/// The kernels of every weight type in the order of `DType::WEIGHTS`: floats by `$lanes`, the quantised types by the
/// functions `group` of `$module` for the types `$arg`.
macro_rules! weight_groups {
    ($lanes:ty, $module:ident, $($arg:ty),+) => {{
        use $crate::cpu::kernels::lanes::{float, types};
        [
            float::group::<$lanes, float::F32>,
            float::group::<$lanes, float::F16>,
            float::group::<$lanes, float::Bf16>,
            $module::group::<$($arg),+, types::Q4_0>,
            $module::group::<$($arg),+, types::Q4_1>,
            $module::group::<$($arg),+, types::Q5_0>,
            $module::group::<$($arg),+, types::Q5_1>,
            $module::group::<$($arg),+, types::Q8_0>,
            $module::group::<$($arg),+, types::Q2K>,
            $module::group::<$($arg),+, types::Q3K>,
            $module::group::<$($arg),+, types::Q4K>,
            $module::group::<$($arg),+, types::Q5K>,
            $module::group::<$($arg),+, types::Q6K>,
            $module::group::<$($arg),+, types::Iq4Nl>,
            $module::group::<$($arg),+, types::Iq4Xs>,
            $module::group::<$($arg),+, types::Mxfp4>,
        ]
    }};
}
pub(crate) use weight_groups;

/// The table of an instruction set: the kernels of every weight type for the vector `$lanes`. `KERNELS` is what tables
/// of instruction sets that contain this one start from. Rows become whole records by `$prepare`, which meet quantised
/// weights in the functions `group` of `$module` for the types `$arg`; `$short` are the kernels of short records, if any.
macro_rules! lane_table {
    ($isa:expr, $lanes:ty, $features:tt, ($prepare:expr => $module:ident, $($arg:ty),+), $short:expr) => {
        pub(crate) static TABLE: KernelTable = KERNELS;
        pub(crate) const KERNELS: KernelTable = {
            use $crate::cpu::kernels::lanes::weight_groups;
            #[target_feature(enable = $features)]
            fn prepare(x: &[f32], records: &mut [u8]) {
                $prepare(x, records);
            }
            #[target_feature(enable = $features)]
            fn glu(act: dynair::Activation, gate: &mut [f32], up: &[f32]) {
                $crate::cpu::kernels::portable::act::glu_loop(act, gate, up);
            }
            #[target_feature(enable = $features)]
            fn activate(act: dynair::Activation, x: &mut [f32]) {
                $crate::cpu::kernels::portable::act::activate_loop(act, x);
            }
            KernelTable {
                isa: $isa,
                lanes: Some(LaneKernels {
                    prepare,
                    groups: weight_groups!($lanes, $module, $($arg),+),
                }),
                short: $short,
                #[cfg(target_arch = "x86_64")]
                tiles: None,
                glu,
                act: activate,
            }
        };
    };
}
pub(crate) use lane_table;

/// The kernels of short records of a set, which `$prepare` makes of a row: from `$few` rows on for unsigned codes of
/// up to `$bits` bits, from `$many` on for others.
#[cfg(target_arch = "x86_64")]
macro_rules! short_kernels {
    ($set:ty, $features:tt, $prepare:expr, $bits:literal: $few:expr, $many:expr) => {{
        use $crate::cpu::kernels::lanes::{dot8, weight_groups};
        #[target_feature(enable = $features)]
        fn prepare(x: &[f32], records: &mut [u8]) {
            $prepare(x, records);
        }
        Some($crate::cpu::table::ShortKernels {
            lanes: LaneKernels {
                prepare,
                groups: weight_groups!(<$set as dot8::Dot8>::Lanes, dot8, $set, dot8::Short),
            },
            from: dot8::from_rows($bits, $few, $many),
        })
    }};
}
#[cfg(target_arch = "x86_64")]
pub(crate) use short_kernels;

/// Calls `$call` with the constant `$n` equal to `$value`, 1 to `$most` (at most 8).
macro_rules! with_rows {
    ($value:expr, $most:expr, $n:ident => $call:expr) => {
        match $value {
            1 if const { $most >= 1 } => {
                const $n: usize = 1;
                $call
            }
            2 if const { $most >= 2 } => {
                const $n: usize = 2;
                $call
            }
            3 if const { $most >= 3 } => {
                const $n: usize = 3;
                $call
            }
            4 if const { $most >= 4 } => {
                const $n: usize = 4;
                $call
            }
            5 if const { $most >= 5 } => {
                const $n: usize = 5;
                $call
            }
            6 if const { $most >= 6 } => {
                const $n: usize = 6;
                $call
            }
            7 if const { $most >= 7 } => {
                const $n: usize = 7;
                $call
            }
            8 if const { $most >= 8 } => {
                const $n: usize = 8;
                $call
            }
            n => unreachable!("a tile has 1 to {} rows, not {n}", $most),
        }
    };
}
pub(crate) use with_rows;

/// Splits `n` rows into the fewest tiles of at most `most` rows, as even as possible: (first, rows) of each.
pub(crate) fn split(n: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let tiles = n.div_ceil(most);
    (0..tiles).map(move |i| {
        let (each, more) = (n / tiles, n % tiles);
        (i * each + i.min(more), each + usize::from(i < more))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_cover_all_rows_evenly() {
        for n in 0..40 {
            for most in [4, 6, 8] {
                let tiles: Vec<_> = split(n, most).collect();
                assert_eq!(tiles.len(), n.div_ceil(most));
                let mut next = 0;
                for (first, rows) in tiles {
                    assert_eq!(first, next);
                    assert!((1..=most).contains(&rows));
                    next += rows;
                }
                assert_eq!(next, n);
            }
        }
    }
}
