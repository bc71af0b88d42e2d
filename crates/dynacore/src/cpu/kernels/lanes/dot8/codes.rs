//! What the walk of [`super`] multiplies with: codes of 8 bits or of 15, and how a group's products become part of an
//! output.

use std::marker::PhantomData;

use super::{Dot8, F, I, SIGNED, is_signed};
use crate::cpu::kernels::lanes::Lanes;
use crate::cpu::kernels::lanes::quant::combine;
use crate::cpu::kernels::lanes::types::{Factors, QuantFormat};
use crate::cpu::kernels::{AT_CODE_SUM, AT_HALF_CODE_SUMS, LINE, RECORD, SHORT_RECORD, short};

/// A form of records.
pub(crate) trait Codes<S: Dot8> {
    /// Bytes of a record.
    const RECORD: usize;
    /// What a group's integers are multiplied with.
    type Scales: Copy;

    /// Of a group.
    fn scales<T: QuantFormat>(s: S, f: &Factors<S::Lanes>) -> Self::Scales;
    /// Puts scales into [`SCALES`] lines of a panel.
    ///
    /// # Safety
    /// They can be written.
    unsafe fn store(s: S, scales: Self::Scales, halves: bool, to: *mut u8);
    /// Takes them back.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load(s: S, halves: bool, from: *const u8) -> Self::Scales;

    /// Adds a group's products with N rows to their outputs.
    ///
    /// # Safety
    /// `x` are records of this form; `quads` can be read.
    unsafe fn add_group<
        Q: Quads<S>,
        const HALVES: bool,
        const MINS: usize,
        const RUN: usize,
        const N: usize,
    >(
        s: S,
        quads: (Q, u32),
        x: [*const u8; N],
        factors: (Self::Scales, [F<S>; 2]),
        outputs: &mut [F<S>; N],
    );
}

/// Lines of scales in a group of a panel.
pub(super) const SCALES: usize = 3;

/// `$body` with `$q` equal to each of the numbers: written out, so that its arrays live in registers.
macro_rules! each {
    ($q:ident of $($n:literal)* => $body:block) => {
        $({
            let $q: usize = $n;
            $body
        })*
    };
}
pub(super) use each;

/// Where the quads of a group's codes come from. Not a closure: one that is called in several places is not always
/// inlined, and a call empties the vector registers.
pub(crate) trait Quads<S: Dot8>: Copy {
    /// Codes of elements 4q to 4q + 3 as they are stored in a panel.
    ///
    /// # Safety
    /// The group can be read.
    unsafe fn quad(self, s: S, q: usize) -> I<S>;
}

/// A group of a panel.
#[derive(Clone, Copy)]
pub(super) struct InPanel(pub(super) *const u8);

impl<S: Dot8> Quads<S> for InPanel {
    #[inline(always)]
    unsafe fn quad(self, s: S, q: usize) -> I<S> {
        // SAFETY: the caller's promise.
        unsafe { s.lanes().load(self.0.add(q * LINE)) }
    }
}

/// Group `j` of a block of packed lines.
pub(super) struct Packed<T, const HALF: usize> {
    body: *const u8,
    j: usize,
    of: PhantomData<T>,
}

impl<T, const HALF: usize> Packed<T, HALF> {
    #[inline(always)]
    pub(super) fn new(body: *const u8, j: usize) -> Packed<T, HALF> {
        Packed {
            body,
            j,
            of: PhantomData,
        }
    }
}

impl<T, const HALF: usize> Clone for Packed<T, HALF> {
    fn clone(&self) -> Packed<T, HALF> {
        *self
    }
}

impl<T, const HALF: usize> Copy for Packed<T, HALF> {}

impl<S: Dot8, T: QuantFormat, const HALF: usize> Quads<S> for Packed<T, HALF> {
    #[inline(always)]
    unsafe fn quad(self, s: S, q: usize) -> I<S> {
        // SAFETY: the caller's promise.
        let codes = unsafe { T::bytes::<S::Lanes, HALF>(s.lanes(), self.body, self.j, q) };
        if is_signed::<T>() { s.lift(codes) } else { codes }
    }
}

/// Short records: codes of 8 bits.
pub(crate) struct Short;

impl<S: Dot8> Codes<S> for Short {
    const RECORD: usize = SHORT_RECORD;
    /// D, of both halves if the type has them.
    type Scales = [F<S>; 2];

    #[inline(always)]
    fn scales<T: QuantFormat>(s: S, f: &Factors<S::Lanes>) -> [F<S>; 2] {
        let l = s.lanes();
        if T::HALVES {
            f.subscales.map(|scale| l.mul_f(f.d, l.to_f(scale)))
        } else {
            [f.d, l.zero_f()]
        }
    }

    #[inline(always)]
    unsafe fn store(s: S, scales: [F<S>; 2], halves: bool, to: *mut u8) {
        for (i, d) in scales.into_iter().enumerate().take(1 + usize::from(halves)) {
            // SAFETY: the caller's promise.
            unsafe { s.lanes().store_f(to.add(i * LINE), d) };
        }
    }

    #[inline(always)]
    unsafe fn load(s: S, halves: bool, from: *const u8) -> [F<S>; 2] {
        let l = s.lanes();
        let mut scales = [l.zero_f(); 2];
        for (i, d) in scales.iter_mut().enumerate().take(1 + usize::from(halves)) {
            // SAFETY: the caller's promise.
            *d = unsafe { l.load_f(from.add(i * LINE)) };
        }
        scales
    }

    #[inline(always)]
    unsafe fn add_group<
        Q: Quads<S>,
        const HALVES: bool,
        const MINS: usize,
        const RUN: usize,
        const N: usize,
    >(
        s: S,
        (quads, offset_bits): (Q, u32),
        x: [*const u8; N],
        (d, mins): ([F<S>; 2], [F<S>; 2]),
        outputs: &mut [F<S>; N],
    ) {
        let l = s.lanes();
        // SAFETY: all reads are of the records and quads, as the caller promises.
        unsafe {
            let mut t = [l.zero_f(); N];
            let mut acc = [l.zero(); N];
            let mut run = [l.zero(); N];
            each!(q of 0 1 2 3 4 5 6 7 => {
                if q == 0 || HALVES && q == 4 {
                    let at = if HALVES { short::AT_LESS_HALF_SUMS + q } else { short::AT_LESS_SUM };
                    for n in 0..N {
                        acc[n] = if offset_bits > 0 {
                            l.shl(l.each(x[n].add(at)), offset_bits)
                        } else {
                            l.zero()
                        };
                    }
                }
                let codes = quads.quad(s, q);
                for n in 0..N {
                    let x = l.each(x[n].add(4 * q));
                    if RUN == SIGNED {
                        acc[n] = s.dot_signed(acc[n], codes, x);
                    } else if S::FULL {
                        acc[n] = s.dot(acc[n], codes, x);
                    } else {
                        run[n] = s.dot(run[n], codes, x);
                    }
                }
                let ends = q == 7 || HALVES && q == 3;
                if RUN != SIGNED && !S::FULL && (ends || (q + 1).is_multiple_of(RUN)) {
                    for n in 0..N {
                        acc[n] = l.add(acc[n], s.total(run[n]));
                        run[n] = l.zero();
                    }
                }
                if ends {
                    for n in 0..N {
                        let i = l.to_f(acc[n]);
                        t[n] = if q == 7 && HALVES {
                            l.fma(i, d[1], t[n])
                        } else {
                            l.mul_f(i, d[0])
                        };
                    }
                }
            });
            for n in 0..N {
                outputs[n] = l.fma(t[n], l.each_f(x[n].add(short::AT_SCALE)), outputs[n]);
                if MINS == 1 {
                    outputs[n] = l.fma(mins[0], l.each_f(x[n].add(short::AT_SUM)), outputs[n]);
                }
                if MINS == 2 {
                    outputs[n] = l.fma(mins[0], l.each_f(x[n].add(short::AT_HALF_SUMS)), outputs[n]);
                    outputs[n] = l.fma(mins[1], l.each_f(x[n].add(short::AT_HALF_SUMS + 4)), outputs[n]);
                }
            }
        }
    }
}

/// Whole records: codes of 15 bits in two planes of bytes ([`super::super::prepare::Planes`]), for sets whose sums are
/// [`Dot8::FULL`]. The integers and the rest are those of [`super::super::quant`], bit for bit.
///
/// They fit 32 bits. Before the offset is taken away a sum is at most `32 * 255 * 16383`, 1.4e8 (codes lifted to a byte).
/// With halves (Q6_K: 32 from zero, scales to 128; Q3_K, Q2_K: less) both come to `2 * 16 * 32 * 16383 * 128`, 131,072
/// below 2^31.
pub(crate) struct Whole;

/// Adds products of four or eight quads with all rows to `acc`, which is zero. One sum a row takes the planes one after the
/// other; one or two rows have registers for four, so that no product waits for the one before.
macro_rules! both_planes {
    ($s:ident, $l:ident, $quads:ident, $x:ident, $acc:ident, $offset:expr, $first:literal: $($q:literal)*) => {
        let codes = [$($quads.quad($s, $q)),*];
        let mut others = [[$l.zero(); N]; 3];
        each!(q of $($q)* => {
            for n in 0..N {
                let sum = if N <= FEW_ROWS && q % 2 == 1 { &mut others[0][n] } else { &mut $acc[n] };
                *sum = $s.dot(*sum, codes[q - $first], $l.each($x[n].add(high(q))));
            }
        });
        let (bits, sum) = $offset;
        for n in 0..N {
            if N <= FEW_ROWS {
                $acc[n] = $l.add($acc[n], others[0][n]);
            }
            $acc[n] = $l.shl($acc[n], 7);
            if bits > 0 {
                $acc[n] = $l.sub($acc[n], $l.shl($l.each($x[n].add(sum)), bits));
            }
        }
        each!(q of $($q)* => {
            for n in 0..N {
                let sum = if N <= FEW_ROWS { &mut others[1 + q % 2][n] } else { &mut $acc[n] };
                *sum = $s.dot(*sum, codes[q - $first], $l.each($x[n].add(high(q) + 8)));
            }
        });
        if N <= FEW_ROWS {
            for n in 0..N {
                $acc[n] = $l.add($acc[n], $l.add(others[1][n], others[2][n]));
            }
        }
    };
}

/// Rows that have several sums each; see [`both_planes`].
const FEW_ROWS: usize = 2;

/// Where a quad's first plane stands in a record; the second stands 8 bytes further.
const fn high(q: usize) -> usize {
    q / 2 * 16 + q % 2 * 4
}

impl<S: Dot8> Codes<S> for Whole {
    const RECORD: usize = RECORD;
    /// D, and the integer scales of both halves if the type has them.
    type Scales = (F<S>, [I<S>; 2]);

    #[inline(always)]
    fn scales<T: QuantFormat>(_: S, f: &Factors<S::Lanes>) -> (F<S>, [I<S>; 2]) {
        (f.d, f.subscales)
    }

    #[inline(always)]
    unsafe fn store(s: S, (d, subscales): (F<S>, [I<S>; 2]), halves: bool, to: *mut u8) {
        let l = s.lanes();
        // SAFETY: the caller's promise.
        unsafe {
            l.store_f(to, d);
            if halves {
                l.store(to.add(LINE), subscales[0]);
                l.store(to.add(2 * LINE), subscales[1]);
            }
        }
    }

    #[inline(always)]
    unsafe fn load(s: S, halves: bool, from: *const u8) -> (F<S>, [I<S>; 2]) {
        let l = s.lanes();
        // SAFETY: the caller's promise.
        unsafe {
            let subscales = if halves {
                [l.load(from.add(LINE)), l.load(from.add(2 * LINE))]
            } else {
                [l.zero(); 2]
            };
            (l.load_f(from), subscales)
        }
    }

    #[inline(always)]
    unsafe fn add_group<
        Q: Quads<S>,
        const HALVES: bool,
        const MINS: usize,
        const RUN: usize,
        const N: usize,
    >(
        s: S,
        (quads, offset_bits): (Q, u32),
        x: [*const u8; N],
        ((d, subscales), mins): ((F<S>, [I<S>; 2]), [F<S>; 2]),
        outputs: &mut [F<S>; N],
    ) {
        const { assert!(S::FULL, "products of 15 bits need sums of 32") };
        let l = s.lanes();
        // SAFETY: all reads are of the records and quads, as the caller promises.
        unsafe {
            let mut acc = [l.zero(); N];
            if HALVES {
                let mut first = [l.zero(); N];
                both_planes!(s, l, quads, x, first, (offset_bits, AT_HALF_CODE_SUMS), 0: 0 1 2 3);
                for first in &mut first {
                    *first = l.mul(*first, subscales[0]);
                }
                both_planes!(s, l, quads, x, acc, (offset_bits, AT_HALF_CODE_SUMS + 4), 4: 4 5 6 7);
                for n in 0..N {
                    acc[n] = l.add(first[n], l.mul(acc[n], subscales[1]));
                }
            } else {
                both_planes!(s, l, quads, x, acc, (offset_bits, AT_CODE_SUM), 0: 0 1 2 3 4 5 6 7);
            }
            for n in 0..N {
                outputs[n] = combine(l, MINS, acc[n], (d, mins), x[n], outputs[n]);
            }
        }
    }
}
