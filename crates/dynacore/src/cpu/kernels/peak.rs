//! What the cores can do at most: loops of nothing but multiply-adds, 16-bit products or loads, per instruction set.
//!
//! They compute nothing anybody wants; [`crate::cpu::peak`] times them.

use std::hint::black_box;

use crate::cpu::isa::Isa;

/// Independent accumulators of a loop: more than the latency of an instruction times how many start in a cycle, and few
/// enough for sixteen registers.
const CHAINS: usize = 12;

/// Iterations of the arithmetic loops before a call ends.
pub(crate) const ROUNDS: usize = 1 << 16;

/// Iterations of the loop of tiles before a call ends: each is many instructions.
pub(crate) const TILE_ROUNDS: usize = 1 << 9;

/// The loops of one instruction set.
#[derive(Clone, Copy)]
pub(crate) struct PeakLoops {
    /// Multiply-adds of f32, [`ROUNDS`] times `fma_count`.
    pub(crate) fma: unsafe fn(),
    /// Multiply-adds in one round of `fma`.
    pub(crate) fma_count: usize,
    /// Multiply-adds of 16-bit integers, [`ROUNDS`] times `dot_count`, where the set has them.
    pub(crate) dot: Option<unsafe fn()>,
    /// Multiply-adds in one round of `dot`.
    pub(crate) dot_count: usize,
    /// Multiply-adds of bytes, [`ROUNDS`] times `short_count`, where the set has kernels of short records.
    pub(crate) short: Option<unsafe fn()>,
    /// Multiply-adds in one round of `short`.
    pub(crate) short_count: usize,
    /// Multiply-adds of bf16 tiles, [`TILE_ROUNDS`] times `tile_count`, where the set has them.
    pub(crate) tile: Option<unsafe fn()>,
    /// Multiply-adds in one round of `tile`.
    pub(crate) tile_count: usize,
    /// Loads every whole line of the slice.
    pub(crate) read: unsafe fn(&[u8]),
}

/// Bytes of a cache line.
const LINE: usize = 64;

fn portable_fma() {
    // 64 accumulators: the compiler makes vectors of whatever the target has.
    let (a, b) = (black_box([0.5f32; 64]), black_box([1.0f32; 64]));
    let mut sums = black_box([0.0f32; 64]);
    for _ in 0..ROUNDS {
        for ((s, a), b) in sums.iter_mut().zip(&a).zip(&b) {
            *s = *s * a + b;
        }
    }
    black_box(sums);
}

fn portable_read(bytes: &[u8]) {
    let mut sums = [0u64; LINE / 8];
    for line in bytes.as_chunks::<LINE>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    black_box(sums);
}

const PORTABLE: PeakLoops = PeakLoops {
    fma: portable_fma,
    fma_count: 64,
    dot: None,
    dot_count: 0,
    short: None,
    short_count: 0,
    tile: None,
    tile_count: 0,
    read: portable_read,
};

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod lanes {
    use super::{CHAINS, LINE, ROUNDS};
    #[cfg(target_arch = "x86_64")]
    use crate::cpu::kernels::lanes::dot8::Dot8;
    use crate::cpu::kernels::lanes::{Lanes, Pairs};
    use std::hint::black_box;

    /// Bytes ahead of a load that its line is asked for: about what memory's latency takes to arrive.
    const AHEAD: usize = 2048;

    #[inline(always)]
    pub(super) fn fma<L: Lanes>(l: L) {
        let (a, b) = (black_box(l.zero_f()), black_box(l.zero_f()));
        let mut sums = black_box([l.zero_f(); CHAINS]);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = l.fma(*sum, a, b);
            }
        }
        black_box(sums);
    }

    #[inline(always)]
    pub(super) fn dot<L: Pairs>(l: L) {
        let a = black_box(l.splat(3));
        // SAFETY: a pair of codes is read from four bytes.
        let x = unsafe { l.codes(black_box(&[5, 0, 5, 0]).as_ptr()) };
        // Opaque: equal chains would be merged into one.
        let mut sums = black_box([l.zero(); CHAINS]);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = l.dot(*sum, a, x);
            }
        }
        black_box(sums);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn short<S: Dot8>(s: S) {
        let l = s.lanes();
        let (a, x) = (black_box(l.splat(0x0303_0303)), black_box(l.splat(0x0505_0505)));
        let mut sums = black_box([l.zero(); CHAINS]);
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = s.dot(*sum, a, x);
            }
        }
        black_box(sums);
    }

    #[inline(always)]
    pub(super) fn read<L: Lanes>(l: L, bytes: &[u8]) {
        let mut sums = [l.zero(); 2];
        for line in bytes.as_chunks::<LINE>().0 {
            l.prefetch(line.as_ptr().wrapping_add(AHEAD));
            for (i, part) in line.chunks_exact(4 * L::WIDTH).enumerate() {
                // SAFETY: the part has the `4 * WIDTH` bytes of a vector.
                let words = unsafe { l.load(part.as_ptr()) };
                sums[i % 2] = l.add(sums[i % 2], words);
            }
        }
        black_box(sums);
    }
}

/// The loops compiled for one instruction set.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! loops {
    ($module:ident, $set:path, $features:literal) => {
        mod $module {
            use super::{CHAINS, PeakLoops, lanes};
            use crate::cpu::kernels::lanes::Lanes;

            type Set = $set;

            #[target_feature(enable = $features)]
            fn fma() {
                // SAFETY: the features the token stands for are those of this function.
                lanes::fma(unsafe { <Set as Lanes>::new() });
            }

            #[target_feature(enable = $features)]
            fn read(bytes: &[u8]) {
                // SAFETY: as in `fma`.
                lanes::read(unsafe { <Set as Lanes>::new() }, bytes);
            }

            pub(super) const LOOPS: PeakLoops = PeakLoops {
                fma,
                fma_count: CHAINS * Set::WIDTH,
                dot: None,
                dot_count: 0,
                short: None,
                short_count: 0,
                tile: None,
                tile_count: 0,
                read,
            };
        }
    };
}

/// The loops of a set, with its products of pairs.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! pair_loops {
    ($module:ident, $others:ident, $set:path, $features:literal) => {
        mod $module {
            use super::{CHAINS, PeakLoops, lanes};
            use crate::cpu::kernels::lanes::Lanes;

            type Set = $set;

            #[target_feature(enable = $features)]
            fn dot() {
                // SAFETY: the features the token stands for are those of this function.
                lanes::dot(unsafe { <Set as Lanes>::new() });
            }

            pub(super) const LOOPS: PeakLoops = PeakLoops {
                dot: Some(dot),
                dot_count: CHAINS * 2 * Set::WIDTH,
                ..super::$others::LOOPS
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
loops!(avx2, crate::cpu::kernels::avx2::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
loops!(
    avx512,
    crate::cpu::kernels::avx512::Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
);

/// The loops of a set, with its products of bytes.
#[cfg(target_arch = "x86_64")]
macro_rules! short_loops {
    ($module:ident, $others:ident, $set:path, $features:literal) => {
        mod $module {
            use super::{CHAINS, PeakLoops, lanes};
            use crate::cpu::kernels::lanes::Lanes;
            use crate::cpu::kernels::lanes::dot8::Dot8;

            type Set = $set;

            #[target_feature(enable = $features)]
            fn short() {
                // SAFETY: the features the token stands for are those of this function.
                lanes::short(unsafe { <Set as Dot8>::new() });
            }

            pub(super) const LOOPS: PeakLoops = PeakLoops {
                short: Some(short),
                short_count: CHAINS * 4 * <Set as Dot8>::Lanes::WIDTH,
                ..super::$others::LOOPS
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
pair_loops!(avx2_pairs, avx2, crate::cpu::kernels::avx2::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
short_loops!(
    avx2_short,
    avx2_pairs,
    crate::cpu::kernels::avx2::Avx2,
    "avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
short_loops!(
    avx_vnni,
    avx2_pairs,
    crate::cpu::kernels::avx2::vnni::AvxVnni,
    "avx2,fma,f16c,avxvnni"
);
#[cfg(target_arch = "x86_64")]
short_loops!(
    avx512_short,
    avx512,
    crate::cpu::kernels::avx512::Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
);

#[cfg(target_arch = "aarch64")]
loops!(neon, crate::cpu::kernels::neon::Neon, "neon");
#[cfg(target_arch = "aarch64")]
pair_loops!(neon_pairs, neon, crate::cpu::kernels::neon::Neon, "neon");

/// The loops of a set that multiplies bytes: those of NEON, and its own products.
#[cfg(target_arch = "aarch64")]
macro_rules! byte_loops {
    ($module:ident, $set:path, $features:literal) => {
        mod $module {
            use super::{PeakLoops, ROUNDS, neon};
            use crate::cpu::kernels::lanes::Lanes;
            use crate::cpu::kernels::lanes::bytes::Bytes;
            use std::hint::black_box;

            type Set = $set;

            /// Octets times eight codes: four registers of sums each.
            const CHAINS: usize = 6;

            #[target_feature(enable = $features)]
            fn dot() {
                // SAFETY: the features the token stands for are those of this function; a vector's codes are read from
                // sixteen bytes.
                let (b, x) = unsafe {
                    let b = Set::new();
                    (b, b.codes(black_box(&[5; 16]).as_ptr()))
                };
                let a = black_box([b.lanes().splat(3); 2]);
                // Opaque: equal chains would be merged into one.
                let mut sums = black_box([b.zero(); CHAINS]);
                for _ in 0..ROUNDS {
                    for sum in &mut sums {
                        *sum = b.dot(*sum, a, x);
                    }
                }
                black_box(sums);
            }

            pub(super) const LOOPS: PeakLoops = PeakLoops {
                dot: Some(dot),
                dot_count: CHAINS * 8 * <Set as Bytes>::Lanes::WIDTH,
                ..neon::LOOPS
            };
        }
    };
}

#[cfg(target_arch = "aarch64")]
byte_loops!(dotprod, crate::cpu::kernels::neon::bytes::Dotprod, "neon,dotprod");
#[cfg(target_arch = "aarch64")]
byte_loops!(i8mm, crate::cpu::kernels::neon::bytes::I8mm, "neon,i8mm");

#[cfg(target_arch = "x86_64")]
mod avx512_planes {
    use super::{PeakLoops, avx512_short};

    /// Codes of 16 bits are two bytes each.
    pub(super) const LOOPS: PeakLoops = PeakLoops {
        dot: avx512_short::LOOPS.short,
        dot_count: avx512_short::LOOPS.short_count / 2,
        ..avx512_short::LOOPS
    };
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use super::{PeakLoops, TILE_ROUNDS, avx512_planes};
    use crate::cpu::kernels::amx::{PEAK_ROUND, peak};

    unsafe fn tile() {
        // SAFETY: the caller promises the instruction set, which is there only where tiles are permitted.
        unsafe { peak(TILE_ROUNDS) }
    }

    pub(super) const LOOPS: PeakLoops = PeakLoops {
        tile: Some(tile),
        tile_count: PEAK_ROUND,
        ..avx512_planes::LOOPS
    };
}

impl PeakLoops {
    /// The loops of an instruction set; `None` if this CPU lacks it.
    pub(crate) fn of(isa: Isa) -> Option<PeakLoops> {
        if !isa.available() {
            return None;
        }
        match isa {
            Isa::Portable => Some(PORTABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(avx2_short::LOOPS),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Some(avx_vnni::LOOPS),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(avx512_planes::LOOPS),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Some(amx::LOOPS),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Amx => None,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Some(neon_pairs::LOOPS),
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => Some(dotprod::LOOPS),
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => Some(i8mm::LOOPS),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon | Isa::Dotprod | Isa::I8mm => None,
        }
    }

    /// Runs the loop of f32 multiply-adds once.
    pub(crate) fn run_fma(&self) {
        // SAFETY: the loop needs nothing but the instruction set, and `of` gives it only if the CPU has that.
        unsafe { (self.fma)() }
    }

    /// Runs the loop of 16-bit products once, if there is one.
    pub(crate) fn run_dot(&self) {
        if let Some(dot) = self.dot {
            // SAFETY: as in `run_fma`.
            unsafe { dot() }
        }
    }

    /// Runs the loop of products of bytes once, if there is one.
    pub(crate) fn run_short(&self) {
        if let Some(short) = self.short {
            // SAFETY: as in `run_fma`.
            unsafe { short() }
        }
    }

    /// Runs the loop of tiles once, if there is one.
    pub(crate) fn run_tile(&self) {
        if let Some(tile) = self.tile {
            // SAFETY: as in `run_fma`.
            unsafe { tile() }
        }
    }

    /// Loads `bytes` once.
    pub(crate) fn run_read(&self, bytes: &[u8]) {
        // SAFETY: as in `run_fma`.
        unsafe { (self.read)(bytes) }
    }
}
