//! Leaf kernels, and the two data layouts they share with [`crate::cpu::pack`] and [`crate::cpu::ops::linear`].
//!
//! `lanes` holds the matrix kernels once, over an abstract vector of 8 or 16 rows; `avx2`, `avx512` and `neon` are that
//! vector and the tables. [`portable`] is plain Rust over row-major weights.
//!
//! # Packed weights
//!
//! Sixteen output rows (a *row group*) are interleaved by 4-byte words, so that lane r of a vector is row r and no
//! kernel needs a horizontal sum. The form is a permutation of the checkpoint's bytes and takes as much memory (rows
//! are padded to sixteen with zeros). All of it is counted in *lines* of 64 bytes: one word of each of the 16 rows.
//!
//! A block of a quantised type has a *head* of one or two factors (d, and m or dmin as f16; MXFP4's one byte of
//! exponent; IQ4_XS has the upper bits of its scales for a second factor) and a *body* of words in the checkpoint's
//! order. With a head of four bytes a block is one head line (16 d, then 16 m) and its body lines. Smaller heads share
//! a line: with two bytes two blocks (16 d of the first, 16 d of the second, then both bodies), with one byte four. The
//! fifth bits of Q5_0 and Q5_1 are permuted inside their word, see [`spread_bits`]. F32, F16 and BF16 are `[K][16]`,
//! padded to whole lines.
//!
//! # Prepared activations
//!
//! A row is cut into groups of 32 values along K. Each group becomes one [`RECORD`]: 32 signed 15-bit codes, the scale
//! `a = amax / 16383`, and sums of the codes. 15 bits leave an error of about 4e-5 of a group's rms, and room in 32
//! bits for a group's whole integer sum, `32 * 16383 * 4096` at most, where 4096 bounds code times sub-block scale
//! (Q6_K). In the codes' order each four k, k+1, k+2, k+3 stand as k, k+2, k+1, k+3: masking a word of four bytes with
//! `00ff00ff` gives the first pair, shifting by 8 before gives the second. Sets that multiply bytes have each code as two
//! of them in the same place (`lanes::prepare`).
//!
//! *Short records* have codes of 8 bits, `a = amax / 127`, for kernels that multiply bytes (`lanes::dot8`); the error is
//! about 5e-3 of a group's rms, so they are for `auto` mode alone, where several rows share a weight.
//!
//! # The arithmetic, the same for every number of rows and every instruction set
//!
//! ```text
//! acc = 0
//! for each group of 32 along K:
//!     i   = sum of code_w * subscale * code_x          exact, 32-bit integers
//!     acc = fma(f32(i), D * a, acc)                    D: d, or d * scale where the sub-block is the group
//!     acc = fma(M, s, acc)   per minimum (0, 1 or 2)   s = a * sum of the codes the minimum covers
//! ```
//!
//! Float weights: `acc = fma(w, x, acc)` over k. One accumulator per output element, so an element depends on its own
//! two rows alone: the result is the same bit for bit whatever the number of rows, the tile or the split into workers.

use dynair::{DType, QuantType};

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod lanes;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

pub(crate) mod generic;
pub(crate) mod ops;
pub(crate) mod peak;
pub(crate) mod portable;
pub(crate) mod simd;

/// Output rows of a row group.
pub(crate) const ROWS: usize = 16;

/// Bytes of one 4-byte word of each row of a group.
pub(crate) const LINE: usize = 4 * ROWS;

/// Activations along K that share a scale.
pub(crate) const GROUP: usize = 32;

/// The largest code of an activation.
pub(crate) const CODE_MAX: f32 = 16383.0;

/// Bytes of a prepared group: 32 i16 codes, then the fields below.
pub(crate) const RECORD: usize = 96;
/// f32: the scale a.
pub(crate) const AT_SCALE: usize = 64;
/// f32: a times the sum of all codes.
pub(crate) const AT_SUM: usize = 68;
/// Two f32: a times the sum of the first and of the second 16 codes.
pub(crate) const AT_HALF_SUMS: usize = 72;
/// i32: the sum of all codes.
pub(crate) const AT_CODE_SUM: usize = 80;
/// Two i32: the sums of the first and of the second 16 codes.
pub(crate) const AT_HALF_CODE_SUMS: usize = 84;

/// The largest code of an activation in a short record.
#[cfg(any(target_arch = "x86_64", test))]
pub(crate) const SHORT_CODE_MAX: f32 = 127.0;

/// Bytes of a short record: 32 i8 codes in order, then the fields of [`short`]. A line, so that none crosses two.
pub(crate) const SHORT_RECORD: usize = 64;

/// Where the fields of a short record stand.
#[cfg(any(target_arch = "x86_64", test))]
pub(crate) mod short {
    /// f32: the scale a.
    pub(crate) const AT_SCALE: usize = 32;
    /// f32: a times the sum of all codes.
    pub(crate) const AT_SUM: usize = 36;
    /// Two f32: a times the sum of the first and of the second 16 codes.
    pub(crate) const AT_HALF_SUMS: usize = 40;
    /// i32: the sum of all codes, negated.
    pub(crate) const AT_LESS_SUM: usize = 48;
    /// Two i32: the sums of the first and of the second 16 codes, negated.
    pub(crate) const AT_LESS_HALF_SUMS: usize = 52;
}

/// One row group of a packed weight, and the activations it meets.
pub(crate) struct GroupArgs<'a> {
    /// The group's packed bytes: [`Geometry::group_bytes`].
    pub(crate) weight: &'a [u8],
    /// K.
    pub(crate) cols: usize,
    /// `[n, K]` activations; read by float weights.
    pub(crate) x: &'a [f32],
    /// `[n, K / 32]` records of the kernel's kind; read by quantised weights.
    pub(crate) records: &'a [u8],
}

/// Multiplies a row group with all rows of activations: writes `acc[n]`, the 16 outputs of each row.
///
/// # Safety
/// The CPU has the table's instruction set; `weight` is a row group of `cols` columns of the kernel's type; `x`
/// (float types) holds at least `acc.len() * cols` values, `records` (quantised types) at least
/// `acc.len() * cols / 32` records.
pub(crate) type GroupFn = unsafe fn(args: &GroupArgs<'_>, acc: &mut [[f32; ROWS]]);

/// Asks for the line at `p`, which need not exist.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    // SAFETY: a prefetch of any address is harmless, and every AArch64 has the instruction.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p.addr(), options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// Where the parts of a checkpoint's block lie, and where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Elements of a block; 1 for the float types.
    pub(crate) block: usize,
    /// Bytes of a block.
    pub(crate) bytes: usize,
    /// Factors of a block; 0 for the float types.
    pub(crate) heads: usize,
    /// Bytes of each: 2, or 1 where it is an E8M0 exponent.
    pub(crate) head_width: usize,
    /// Their place in the block.
    pub(crate) head_at: usize,
    /// Words of the body.
    pub(crate) words: usize,
    /// Its place in the block.
    pub(crate) body_at: usize,
    /// Whether the body's first word is permuted by [`spread_bits`].
    pub(crate) spread: bool,
}

impl Geometry {
    /// The geometry of a weight type.
    pub(crate) const fn of(dtype: DType) -> Geometry {
        let (block, bytes) = dtype.block();
        let (heads, head_at, body_at) = match dtype {
            DType::F32 | DType::F16 | DType::Bf16 | DType::I32 => (0, 0, 0),
            DType::Quant(q) => match q {
                QuantType::Q4_0 | QuantType::Q5_0 | QuantType::Q8_0 | QuantType::Iq4Nl => (1, 0, 2),
                QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4K | QuantType::Q5K => (2, 0, 4),
                QuantType::Q2K => (2, 80, 0),
                QuantType::Q3K => (1, 108, 0),
                QuantType::Q6K => (1, 208, 0),
                QuantType::Iq4Xs => (2, 0, 4),
                QuantType::Mxfp4 => (1, 0, 1),
            },
        };
        let head_width = match dtype {
            DType::Quant(QuantType::Mxfp4) => 1,
            _ => 2,
        };
        let spread = matches!(dtype, DType::Quant(QuantType::Q5_0 | QuantType::Q5_1));
        Geometry {
            block,
            bytes,
            heads,
            head_width,
            head_at,
            words: (bytes - head_width * heads) / 4,
            body_at,
            spread,
        }
    }

    /// Packed bytes of a row group of `cols` columns.
    pub(crate) const fn group_bytes(&self, cols: usize) -> usize {
        let blocks = cols / self.block;
        match self.heads {
            0 => (blocks * self.bytes * ROWS).next_multiple_of(LINE),
            _ => (blocks * self.words + blocks.div_ceil(self.sharers())) * LINE,
        }
    }

    /// Blocks that share a head line: 1, 2 or 4. Not for the float types.
    #[inline(always)]
    const fn sharers(&self) -> usize {
        LINE / (self.heads * self.head_width * ROWS)
    }

    /// Bytes from a row group's start to the head line of block `b` and of those it shares it with.
    #[inline(always)]
    const fn head_line(&self, b: usize) -> usize {
        let sharers = self.sharers();
        b / sharers * (sharers * self.words + 1) * LINE
    }

    /// Bytes from a row group's start to the 16 first factors of block `b` (the second ones follow).
    #[inline(always)]
    pub(crate) const fn head(&self, b: usize) -> usize {
        let sharers = self.sharers();
        self.head_line(b) + b % sharers * (LINE / sharers)
    }

    /// Bytes from a row group's start to the body of block `b`.
    #[inline(always)]
    pub(crate) const fn body(&self, b: usize) -> usize {
        self.head_line(b) + (1 + b % self.sharers() * self.words) * LINE
    }
}

/// Moves bit k of a block's fifth bits to where the kernels want it: the pairs (k, k + 2) of elements are numbered
/// p = 0..16 in the order of the activation codes; the bit of the first goes to p, that of the second to 16 + p.
pub(crate) const fn spread_bits(bits: u32) -> u32 {
    let mut out = 0;
    let mut p = 0;
    while p < 16 {
        let k = p / 2 * 4 + p % 2;
        out |= (bits >> k & 1) << p | (bits >> (k + 2) & 1) << (16 + p);
        p += 1;
    }
    out
}

/// The inverse of [`spread_bits`].
pub(crate) const fn gather_bits(bits: u32) -> u32 {
    let mut out = 0;
    let mut p = 0;
    while p < 16 {
        let k = p / 2 * 4 + p % 2;
        out |= (bits >> p & 1) << k | (bits >> (16 + p) & 1) << (k + 2);
        p += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_weights_take_the_memory_of_the_checkpoint() {
        for dtype in DType::WEIGHTS {
            let geometry = Geometry::of(dtype);
            let row = dtype.row_bytes(1536).expect("a whole number of blocks");
            assert_eq!(geometry.group_bytes(1536), ROWS * row, "{dtype}");
            if geometry.heads > 0 {
                let head = geometry.heads * geometry.head_width;
                assert_eq!(geometry.words * 4 + head, geometry.bytes, "{dtype}");
            }
        }
    }

    #[test]
    fn heads_and_bodies_of_a_row_group_cover_it_without_overlap() {
        for dtype in DType::WEIGHTS {
            let geometry = Geometry::of(dtype);
            if geometry.heads == 0 {
                continue;
            }
            for blocks in 1..10 {
                let mut taken = vec![0; geometry.group_bytes(blocks * geometry.block)];
                for b in 0..blocks {
                    let head = geometry.heads * geometry.head_width * ROWS;
                    taken[geometry.head(b)..][..head].fill(1);
                    let body = &mut taken[geometry.body(b)..][..geometry.words * LINE];
                    assert!(body.iter().all(|n| *n == 0), "{dtype}, block {b} of {blocks}");
                    body.fill(1);
                }
                let used = taken.iter().sum::<usize>();
                assert_eq!(used, blocks * geometry.bytes * ROWS, "{dtype}, {blocks} blocks");
                assert!(
                    taken.len() - used < LINE,
                    "only the last head line has empty places: {dtype}, {blocks} blocks"
                );
            }
        }
    }

    #[test]
    fn bits_come_back() {
        for i in 0..32 {
            let bits = 1 << i;
            assert_eq!(spread_bits(bits).count_ones(), 1);
            assert_eq!(gather_bits(spread_bits(bits)), bits);
        }
        assert_eq!(spread_bits(0b1101), 1 | 1 << 16 | 1 << 17);
    }
}
