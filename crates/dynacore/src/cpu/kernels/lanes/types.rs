//! How the packed blocks of each quantised type become 16-bit codes and factors.
//!
//! Lanes are rows, so a block is expanded by shifts and masks of whole words, without a shuffle across lanes; codes that
//! index a table are looked up byte by byte. Bit layouts: see
//! [`dynair::quant`]; word numbers below count the words of a block's body (see [`crate::cpu::kernels`]).
//!
//! Sets that multiply 16-bit pairs take the codes as pairs ([`QuantFormat::quad`]), those that multiply bytes as they
//! come out of a word ([`QuantFormat::bytes`]).

use dynair::quant::table::{E2M1, IQ4};
use dynair::{DType, QuantType};

use super::Lanes;
use crate::cpu::kernels::{GROUP, Geometry, LINE};

/// What a group of 32 is multiplied with after its integer sum; see the arithmetic in [`crate::cpu::kernels`].
pub(crate) struct Factors<L: Lanes> {
    /// D.
    pub(crate) d: L::F,
    /// Integer scales of the two sub-blocks of 16, if the type has any.
    pub(crate) subscales: [L::I; 2],
    /// M, of which [`QuantFormat::MINS`] count.
    pub(crate) mins: [L::F; 2],
}

/// A quantised type.
///
/// `head` and `body` point to the first lane of interest of a block's head and body, `j` counts groups of 32 inside
/// the block (`HALF` is `j / 4`), and with `i` in 0..8 `4 * i` counts elements inside the group. `HALF` and `i` are
/// constants where these functions are inlined; `j` may be the counter of a loop.
pub(crate) trait QuantFormat {
    /// The type.
    const DTYPE: DType;
    /// Its geometry.
    const GEOMETRY: Geometry = Geometry::of(Self::DTYPE);
    /// Groups of 32 in a block.
    const GROUPS: usize = Self::GEOMETRY.block / GROUP;
    /// log2 of what is subtracted from codes; 0: nothing is.
    const OFFSET_BITS: u32 = 0;
    /// Whether codes have a sign (and no offset); otherwise they are 0 to `2^CODE_BITS - 1`.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for tiles"))]
    const SIGNED: bool = false;
    /// Bits of a code.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for tiles"))]
    const CODE_BITS: u32 = 8;
    /// What [`QuantFormat::loose_quad`] gives indices into, where [`QuantFormat::quad`] has looked codes up.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for tiles"))]
    const VALUES: Option<[i8; 16]> = None;
    /// Whether a group consists of two sub-blocks of 16 with integer scales.
    const HALVES: bool = false;
    /// Minima of a group: none, one, or one for each half.
    const MINS: usize = 0;

    /// [`QuantFormat::OFFSET_BITS`] for the codes of [`QuantFormat::bytes`].
    #[cfg_attr(
        not(target_arch = "aarch64"),
        expect(dead_code, reason = "for products of bytes in two planes")
    )]
    const BYTE_OFFSET_BITS: u32 = Self::OFFSET_BITS;

    /// Codes (before the offset is subtracted) of elements 4i to 4i + 3 as signed bytes: what a table has is not lifted
    /// by the offset here, or it would not fit.
    ///
    /// # Safety
    /// [`Lanes::WIDTH`] lanes of the block's body can be read.
    unsafe fn bytes<L: Lanes, const HALF: usize>(l: L, body: *const u8, j: usize, i: usize) -> L::I;

    /// Codes (before the offset is subtracted) of elements 4i, 4i + 2 and 4i + 1, 4i + 3, as pairs of 16 bits.
    ///
    /// # Safety
    /// As [`QuantFormat::bytes`].
    #[inline(always)]
    unsafe fn quad<L: Lanes, const HALF: usize>(l: L, body: *const u8, j: usize, i: usize) -> [L::I; 2] {
        // SAFETY: the caller's promise.
        pairs(l, unsafe { Self::bytes::<L, HALF>(l, body, j, i) })
    }

    /// As [`QuantFormat::quad`], but only the lowest [`QuantFormat::CODE_BITS`] of each 16 bits mean something: for
    /// kernels that look codes up and would mask them for nothing.
    ///
    /// # Safety
    /// As [`QuantFormat::quad`].
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for tiles"))]
    #[inline(always)]
    unsafe fn loose_quad<L: Lanes, const HALF: usize>(
        l: L,
        body: *const u8,
        j: usize,
        i: usize,
    ) -> [L::I; 2] {
        // SAFETY: the caller's promise.
        unsafe { Self::quad::<L, HALF>(l, body, j, i) }
    }

    /// Factors of a group.
    ///
    /// # Safety
    /// [`Lanes::WIDTH`] lanes of the block's head and body can be read.
    unsafe fn factors<L: Lanes, const HALF: usize>(
        l: L,
        head: *const u8,
        body: *const u8,
        j: usize,
    ) -> Factors<L>;
}

/// Word `i` of the body.
///
/// # Safety
/// The body has that word.
#[inline(always)]
unsafe fn word<L: Lanes>(l: L, body: *const u8, i: usize) -> L::I {
    // SAFETY: the caller's promise.
    unsafe { l.load(body.add(i * LINE)) }
}

/// The bits of `w` moved from position `from` to position `to` and masked there. For constant positions.
#[inline(always)]
fn moved<L: Lanes>(l: L, w: L::I, from: u32, to: u32, mask: i32) -> L::I {
    let moved = if from > to {
        l.shr(w, from - to)
    } else if from < to {
        l.shl(w, to - from)
    } else {
        w
    };
    l.and(moved, l.splat(mask))
}

/// The bits of `w` at `from`, masked, then moved to `to`. For a `from` that a loop changes: without a branch.
#[inline(always)]
fn field<L: Lanes>(l: L, w: L::I, from: u32, to: u32, mask: i32) -> L::I {
    let bits = l.and(l.shr(w, from), l.splat(mask));
    if to == 0 { bits } else { l.shl(bits, to) }
}

/// `BITS` bits at `from` of each byte, moved to `to`.
#[inline(always)]
fn plane<L: Lanes, const BITS: u32>(l: L, w: L::I, from: u32, to: u32) -> L::I {
    field(l, w, from, to, ((1 << BITS) - 1) * 0x0101_0101)
}

/// Four codes in bytes as the two pairs.
#[inline(always)]
fn pairs<L: Lanes>(l: L, codes: L::I) -> [L::I; 2] {
    [l.and(codes, l.splat(0x00ff_00ff)), l.shr16(codes, 8)]
}

#[inline(always)]
fn or<L: Lanes>(l: L, a: [L::I; 2], b: [L::I; 2]) -> [L::I; 2] {
    [l.or(a[0], b[0]), l.or(a[1], b[1])]
}

/// Factors of a type whose head is all there is.
///
/// # Safety
/// One f16 vector at `head`, and another [`LINE`]` / 2` further if `min`, can be read.
#[inline(always)]
unsafe fn plain<L: Lanes>(l: L, head: *const u8, min: bool) -> Factors<L> {
    // SAFETY: the caller's promise.
    unsafe {
        Factors {
            d: l.load_f16(head),
            subscales: [l.zero(); 2],
            mins: [
                if min {
                    l.load_f16(head.add(LINE / 2))
                } else {
                    l.zero_f()
                },
                l.zero_f(),
            ],
        }
    }
}

macro_rules! format_of {
    ($(#[$doc:meta])* $name:ident, $quant:expr, { $($consts:tt)* },
     |$l:ident, $body:ident, $j:ident, $i:ident| $bytes:expr,
     |$l2:ident, $head:ident, $body2:ident, $j2:ident| $factors:expr) => {
        $(#[$doc])*
        pub(crate) struct $name;

        impl QuantFormat for $name {
            const DTYPE: DType = DType::Quant($quant);
            $($consts)*

            #[inline(always)]
            unsafe fn bytes<L: Lanes, const HALF: usize>($l: L, $body: *const u8, $j: usize, $i: usize) -> L::I {
                // SAFETY: the words named are words of the type's body; the caller promises that they can be read.
                unsafe { $bytes }
            }

            #[inline(always)]
            unsafe fn factors<L: Lanes, const HALF: usize>($l2: L, $head: *const u8, $body2: *const u8, $j2: usize) -> Factors<L> {
                // SAFETY: as above, and for the head.
                unsafe { $factors }
            }
        }
    };
}

/// [`QuantFormat::loose_quad`] of a type whose codes are nibbles, of the word `$w` from bit `$from` of each byte on.
macro_rules! loose_nibbles {
    (|$l:ident, $body:ident, $j:ident, $i:ident| $w:expr, $from:expr) => {
        const CODE_BITS: u32 = 4;

        #[inline(always)]
        unsafe fn loose_quad<L: Lanes, const HALF: usize>(
            $l: L,
            $body: *const u8,
            $j: usize,
            $i: usize,
        ) -> [L::I; 2] {
            // SAFETY: the word is one of the type's body; the caller promises that it can be read.
            let w = unsafe { $w };
            let from = $from;
            [
                if from == 0 { w } else { $l.shr16(w, from) },
                $l.shr16(w, from + 8),
            ]
        }
    };
}

/// [`QuantFormat::quad`] where the pairs come cheaper, or are other codes, than from [`QuantFormat::bytes`].
macro_rules! own_quad {
    (|$l:ident, $body:ident, $j:ident, $i:ident| $quad:expr) => {
        #[inline(always)]
        unsafe fn quad<L: Lanes, const HALF: usize>(
            $l: L,
            $body: *const u8,
            $j: usize,
            $i: usize,
        ) -> [L::I; 2] {
            // SAFETY: the words named are words of the type's body; the caller promises that they can be read.
            unsafe { $quad }
        }
    };
}

/// Nibbles of a block of 32, as bytes: the low ones are elements 0 to 15, the high ones 16 to 31; `first` is their first
/// word.
///
/// # Safety
/// The body has words `first..first + 4`.
#[inline(always)]
unsafe fn nibbles<L: Lanes>(l: L, body: *const u8, first: usize, i: usize) -> L::I {
    // SAFETY: the caller's promise.
    let w = unsafe { word(l, body, first + i % 4) };
    moved(l, w, if i < 4 { 0 } else { 4 }, 0, 0x0f0f_0f0f)
}

/// The fifth bits of a block of 32 at position 4 of bytes: word 0, permuted by [`crate::cpu::kernels::spread_bits`].
///
/// # Safety
/// The body has word 0.
#[inline(always)]
unsafe fn fifth<L: Lanes>(l: L, body: *const u8, i: usize) -> L::I {
    // SAFETY: the caller's promise.
    let w = unsafe { word(l, body, 0) };
    let pair = 2 * i as u32;
    l.or(
        moved(l, w, pair, 4, 0x0010_0010),
        moved(l, w, pair + 1, 12, 0x1000_1000),
    )
}

/// [`nibbles`] as pairs.
///
/// # Safety
/// The body has words `first..first + 4`.
#[inline(always)]
unsafe fn legacy_nibbles<L: Lanes>(l: L, body: *const u8, first: usize, i: usize) -> [L::I; 2] {
    // SAFETY: the caller's promise.
    let w = unsafe { word(l, body, first + i % 4) };
    let from = if i < 4 { 0 } else { 4 };
    [
        moved(l, w, from, 0, 0x000f_000f),
        moved(l, w, from + 8, 0, 0x000f_000f),
    ]
}

/// [`fifth`] as pairs.
///
/// # Safety
/// The body has word 0.
#[inline(always)]
unsafe fn legacy_fifth<L: Lanes>(l: L, body: *const u8, i: usize) -> [L::I; 2] {
    // SAFETY: the caller's promise.
    let w = unsafe { word(l, body, 0) };
    let pair = 2 * i as u32;
    [
        moved(l, w, pair, 4, 0x0010_0010),
        moved(l, w, pair + 1, 4, 0x0010_0010),
    ]
}

format_of!(
    /// 32 nibbles, d.
    Q4_0, QuantType::Q4_0, {
        const OFFSET_BITS: u32 = 3;
        loose_nibbles!(|l, body, _j, i| word(l, body, i % 4), if i < 4 { 0 } else { 4 });
        own_quad!(|l, body, _j, i| legacy_nibbles(l, body, 0, i));
    },
    |l, body, _j, i| nibbles(l, body, 0, i),
    |l, head, _body, _j| plain(l, head, false)
);
format_of!(
    /// 32 nibbles, d and m.
    Q4_1, QuantType::Q4_1, {
        const MINS: usize = 1;
        loose_nibbles!(|l, body, _j, i| word(l, body, i % 4), if i < 4 { 0 } else { 4 });
        own_quad!(|l, body, _j, i| legacy_nibbles(l, body, 0, i));
    },
    |l, body, _j, i| nibbles(l, body, 0, i),
    |l, head, _body, _j| plain(l, head, true)
);
format_of!(
    /// 32 times 5 bits, d.
    Q5_0, QuantType::Q5_0, {
        const OFFSET_BITS: u32 = 4;
        const CODE_BITS: u32 = 5;
        own_quad!(|l, body, _j, i| or(l, legacy_nibbles(l, body, 1, i), legacy_fifth(l, body, i)));
    },
    |l, body, _j, i| l.or(nibbles(l, body, 1, i), fifth(l, body, i)),
    |l, head, _body, _j| plain(l, head, false)
);
format_of!(
    /// 32 times 5 bits, d and m.
    Q5_1, QuantType::Q5_1, {
        const MINS: usize = 1;
        const CODE_BITS: u32 = 5;
        own_quad!(|l, body, _j, i| or(l, legacy_nibbles(l, body, 1, i), legacy_fifth(l, body, i)));
    },
    |l, body, _j, i| l.or(nibbles(l, body, 1, i), fifth(l, body, i)),
    |l, head, _body, _j| plain(l, head, true)
);
format_of!(
    /// 32 signed bytes, d.
    Q8_0, QuantType::Q8_0, {
        const SIGNED: bool = true;
        own_quad!(|l, body, _j, i| {
            let w = word(l, body, i);
            [l.sar16(l.shl16(w, 8), 8), l.sar16(w, 8)]
        });
    },
    |l, body, _j, i| word(l, body, i),
    |l, head, _body, _j| plain(l, head, false)
);

/// Byte `i` of the packed scales that start at word `first`: the bits `mask` at `from` of it, moved to `to`.
///
/// # Safety
/// The body has the word.
#[inline(always)]
unsafe fn scale_bits<L: Lanes>(
    l: L,
    body: *const u8,
    (first, i): (usize, usize),
    from: u32,
    mask: i32,
    to: u32,
) -> L::I {
    // SAFETY: the caller's promise.
    let w = unsafe { word(l, body, first + i / 4) };
    field(l, w, 8 * (i as u32 % 4) + from, to, mask)
}

/// Factors of Q4_K and Q5_K: eight scales and minima of 6 bits in words 0 to 2 (see `scales_mins_q4_k` of
/// [`dynair::quant::k`]), under d and dmin. Four of each are unpacked into bytes at once; the loop over a half block
/// hoists that.
///
/// # Safety
/// The head's two f16 vectors and the body's first three words can be read.
#[inline(always)]
unsafe fn k_factors<L: Lanes, const HALF: usize>(
    l: L,
    head: *const u8,
    body: *const u8,
    j: usize,
) -> Factors<L> {
    // SAFETY: the caller's promise.
    let (words, d, dmin) = unsafe {
        (
            [word(l, body, 0), word(l, body, 1), word(l, body, 2)],
            l.load_f16(head),
            l.load_f16(head.add(LINE / 2)),
        )
    };
    let bytes = |w, from, mask| moved(l, w, from, 0, mask);
    let (scales, mins) = if HALF == 0 {
        (bytes(words[0], 0, 0x3f3f_3f3f), bytes(words[1], 0, 0x3f3f_3f3f))
    } else {
        (
            l.or(bytes(words[2], 0, 0x0f0f_0f0f), bytes(words[0], 2, 0x3030_3030)),
            l.or(bytes(words[2], 4, 0x0f0f_0f0f), bytes(words[1], 2, 0x3030_3030)),
        )
    };
    let byte = |w| field(l, w, 8 * (j as u32 % 4), 0, 0xff);
    Factors {
        d: l.mul_f(d, l.to_f(byte(scales))),
        subscales: [l.zero(); 2],
        mins: [l.mul_f(l.neg_f(dmin), l.to_f(byte(mins))), l.zero_f()],
    }
}

format_of!(
    /// 256 nibbles, 8 scales and minima. Words: 3 of scales, 32 of nibbles.
    Q4K, QuantType::Q4K, {
        const MINS: usize = 1;
        loose_nibbles!(|l, body, j, i| word(l, body, 3 + j / 2 * 8 + i), 4 * (j as u32 % 2));
    },
    |l, body, j, i| plane::<L, 4>(l, word(l, body, 3 + j / 2 * 8 + i), 4 * (j as u32 % 2), 0),
    |l, head, body, j| k_factors::<L, HALF>(l, head, body, j)
);
format_of!(
    /// 256 times 5 bits, 8 scales and minima. Words: 3 of scales, 8 of fifth bits, 32 of nibbles.
    Q5K, QuantType::Q5K, { const MINS: usize = 1; const CODE_BITS: u32 = 5; },
    |l, body, j, i| l.or(
        plane::<L, 4>(l, word(l, body, 11 + j / 2 * 8 + i), 4 * (j as u32 % 2), 0),
        plane::<L, 1>(l, word(l, body, 3 + i), j as u32, 4)),
    |l, head, body, j| k_factors::<L, HALF>(l, head, body, j)
);
format_of!(
    /// 256 times 6 bits, 16 signed scales. Words: 32 of low nibbles, 16 of upper pairs of bits, 4 of scales.
    Q6K, QuantType::Q6K, { const OFFSET_BITS: u32 = 5; const CODE_BITS: u32 = 6; const HALVES: bool = true; },
    |l, body, j, i| l.or(
        plane::<L, 4>(l, word(l, body, HALF * 16 + j % 2 * 8 + i), 4 * (j as u32 / 2 % 2), 0),
        plane::<L, 2>(l, word(l, body, 32 + HALF * 8 + i), 2 * (j as u32 % 4), 4)),
    |l, head, body, j| {
        let scales = word(l, body, 48 + j / 2);
        let at = 16 * (j as u32 % 2);
        let signed = |byte| l.sar(l.shl(scales, 24 - byte), 24);
        Factors { d: l.load_f16(head), subscales: [signed(at), signed(at + 8)], mins: [l.zero_f(); 2] }
    }
);
format_of!(
    /// 256 times 3 bits, 16 scales of 6 bits. Words: 8 of third bits, 16 of low pairs of bits, 3 of scales.
    Q3K, QuantType::Q3K, { const OFFSET_BITS: u32 = 2; const CODE_BITS: u32 = 3; const HALVES: bool = true; },
    |l, body, j, i| l.or(
        plane::<L, 2>(l, word(l, body, 8 + HALF * 8 + i), 2 * (j as u32 % 4), 0),
        plane::<L, 1>(l, word(l, body, i), j as u32, 2)),
    |l, head, body, j| {
        let scale = |s: usize| {
            let low = scale_bits(l, body, (24, s % 8), 4 * (s as u32 / 8), 15, 0);
            let high = scale_bits(l, body, (24, 8 + s % 4), 2 * (s as u32 / 4), 3, 4);
            l.sub(l.or(low, high), l.splat(32))
        };
        Factors { d: l.load_f16(head), subscales: [scale(2 * j), scale(2 * j + 1)], mins: [l.zero_f(); 2] }
    }
);
format_of!(
    /// 256 times 2 bits, 16 scales and minima of 4 bits. Words: 4 of scales, 16 of pairs of bits.
    Q2K, QuantType::Q2K, { const CODE_BITS: u32 = 2; const HALVES: bool = true; const MINS: usize = 2; },
    |l, body, j, i| plane::<L, 2>(l, word(l, body, 4 + HALF * 8 + i), 2 * (j as u32 % 4), 0),
    |l, head, body, j| {
        let dmin = l.neg_f(l.load_f16(head.add(LINE / 2)));
        let scale = |s| scale_bits(l, body, (0, s), 0, 15, 0);
        let min = |s| l.mul_f(dmin, l.to_f(scale_bits(l, body, (0, s), 4, 15, 0)));
        Factors {
            d: l.load_f16(head),
            subscales: [scale(2 * j), scale(2 * j + 1)],
            mins: [min(2 * j), min(2 * j + 1)],
        }
    }
);

/// A table of signed values with `offset` added to each, so that they are codes from which it is subtracted.
const fn lifted(values: [i8; 16], offset: i16) -> [u8; 16] {
    let mut lifted = [0; 16];
    let mut i = 0;
    while i < lifted.len() {
        let value = values[i] as i16 + offset;
        assert!(0 <= value && value <= 255, "the offset makes every value a byte");
        lifted[i] = value as u8;
        i += 1;
    }
    lifted
}

const IQ4_CODES: [u8; 16] = lifted(IQ4, 1 << 7);
const E2M1_CODES: [u8; 16] = lifted(E2M1, 1 << 4);

/// Signed values as the bytes they are.
const fn signed(values: [i8; 16]) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut i = 0;
    while i < bytes.len() {
        bytes[i] = values[i] as u8;
        i += 1;
    }
    bytes
}

const IQ4_BYTES: [u8; 16] = signed(IQ4);
const E2M1_BYTES: [u8; 16] = signed(E2M1);

/// What `table` has for a run of 32 nibbles, in the places of [`nibbles`]; `first` is their first word.
///
/// # Safety
/// The body has words `first..first + 4`.
#[inline(always)]
unsafe fn looked_up<L: Lanes>(l: L, body: *const u8, first: usize, i: usize, table: &[u8; 16]) -> L::I {
    // SAFETY: the caller's promise.
    l.lookup(table, unsafe { nibbles(l, body, first, i) })
}

format_of!(
    /// 32 nibbles that index a table, d.
    Iq4Nl, QuantType::Iq4Nl, {
        const OFFSET_BITS: u32 = 7;
        const VALUES: Option<[i8; 16]> = Some(IQ4);
        const BYTE_OFFSET_BITS: u32 = 0;
        loose_nibbles!(|l, body, _j, i| word(l, body, i % 4), if i < 4 { 0 } else { 4 });
        own_quad!(|l, body, _j, i| pairs(l, looked_up(l, body, 0, i, &IQ4_CODES)));
    },
    |l, body, _j, i| looked_up(l, body, 0, i, &IQ4_BYTES),
    |l, head, _body, _j| plain(l, head, false)
);
format_of!(
    /// 256 nibbles that index a table, 8 scales of 6 bits: their upper two stand with d in the head. Words: 1 of the
    /// scales' low bits, 32 of nibbles.
    Iq4Xs, QuantType::Iq4Xs, {
        const OFFSET_BITS: u32 = 7;
        const VALUES: Option<[i8; 16]> = Some(IQ4);
        const BYTE_OFFSET_BITS: u32 = 0;
        loose_nibbles!(|l, body, j, i| word(l, body, 1 + 4 * j + i % 4), if i < 4 { 0 } else { 4 });
        own_quad!(|l, body, j, i| pairs(l, looked_up(l, body, 1 + 4 * j, i, &IQ4_CODES)));
    },
    |l, body, j, i| looked_up(l, body, 1 + 4 * j, i, &IQ4_BYTES),
    |l, head, body, j| {
        let low = field(l, word(l, body, 0), 4 * j as u32, 0, 15);
        let high = field(l, l.load_u16(head.add(LINE / 2)), 2 * j as u32, 4, 3);
        let scale = l.to_f(l.sub(l.or(low, high), l.splat(32)));
        Factors { d: l.mul_f(l.load_f16(head), scale), subscales: [l.zero(); 2], mins: [l.zero_f(); 2] }
    }
);
format_of!(
    /// 32 floats of 4 bits by table, doubled; a power of two, halved.
    Mxfp4, QuantType::Mxfp4, {
        const OFFSET_BITS: u32 = 4;
        const VALUES: Option<[i8; 16]> = Some(E2M1);
        const BYTE_OFFSET_BITS: u32 = 0;
        loose_nibbles!(|l, body, _j, i| word(l, body, i % 4), if i < 4 { 0 } else { 4 });
        own_quad!(|l, body, _j, i| pairs(l, looked_up(l, body, 0, i, &E2M1_CODES)));
    },
    |l, body, _j, i| looked_up(l, body, 0, i, &E2M1_BYTES),
    |l, head, _body, _j| Factors { d: l.load_half_e8m0(head), subscales: [l.zero(); 2], mins: [l.zero_f(); 2] }
);
