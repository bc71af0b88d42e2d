//! Activations to records: codes of 15 bits, or of 8 in short records, per group of 32 with an f32 scale, and the sums
//! the kernels need.
//!
//! A group that holds a NaN or an infinity gets codes 0 and the scale NaN, so that its row's outputs are NaN and no
//! other row's are touched. Groups whose largest magnitude is below [`TINY`] count as zero: the inverse of their scale
//! would overflow.

use crate::cpu::kernels::{
    AT_CODE_SUM, AT_HALF_CODE_SUMS, AT_HALF_SUMS, AT_SCALE, AT_SUM, CODE_MAX, GROUP, RECORD,
};
#[cfg(any(target_arch = "x86_64", test))]
use crate::cpu::kernels::{SHORT_CODE_MAX, SHORT_RECORD, short};

/// How the codes of a group stand in its record. The rest of a record is the same in all forms.
pub(crate) trait CodeForm {
    /// Writes the codes, each of them at most [`CODE_MAX`] in magnitude.
    fn place(codes: &[i32; GROUP], out: &mut [u8; 2 * GROUP]);
}

/// 16-bit codes, the middle two of each four changed: see [`crate::cpu::kernels`].
pub(crate) struct Pairs;

impl CodeForm for Pairs {
    #[inline(always)]
    fn place(codes: &[i32; GROUP], out: &mut [u8; 2 * GROUP]) {
        for (quad, out) in codes.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<8>().0) {
            let word = |low: i32, high: i32| u64::from(low as u16) | u64::from(high as u16) << 16;
            *out = (word(quad[0], quad[2]) | word(quad[1], quad[3]) << 32).to_le_bytes();
        }
    }
}

/// Two planes of bytes, for sets that multiply bytes: of each eight codes, in order, the floors of their 128ths (-128 to
/// 127), then the remainders (0 to 127).
#[cfg(any(target_arch = "aarch64", test))]
pub(crate) struct Planes;

#[cfg(any(target_arch = "aarch64", test))]
impl CodeForm for Planes {
    #[inline(always)]
    fn place(codes: &[i32; GROUP], out: &mut [u8; 2 * GROUP]) {
        for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<16>().0) {
            for (i, code) in codes.iter().enumerate() {
                out[i] = (code >> 7) as u8;
                out[8 + i] = (code & 127) as u8;
            }
        }
    }
}

/// See the module's docs.
const TINY: f32 = 1e-34;

/// Prepares one row, group by group. Compiled into each table's own function.
///
/// # Panics
/// If `x` is no whole number of groups or `records` has not one record of `BYTES` for each.
#[inline(always)]
pub(crate) fn row_of<const BYTES: usize>(
    x: &[f32],
    records: &mut [u8],
    group: impl Fn(&[f32; GROUP], &mut [u8; BYTES]),
) {
    let (groups, rest) = x.as_chunks::<GROUP>();
    let (records, rest_bytes) = records.as_chunks_mut::<BYTES>();
    assert!(
        rest.is_empty() && rest_bytes.is_empty() && groups.len() == records.len(),
        "one record per group"
    );
    for (x, record) in groups.iter().zip(records) {
        group(x, record);
    }
}

/// Prepares one row, with its codes in form `C`.
///
/// # Panics
/// As [`row_of`].
#[inline(always)]
pub(crate) fn row<C: CodeForm>(x: &[f32], records: &mut [u8]) {
    row_of(x, records, group::<C>);
}

/// As [`row`], into short records.
///
/// # Panics
/// As [`row_of`].
#[cfg(any(target_arch = "x86_64", test))]
#[inline(always)]
pub(crate) fn short_row(x: &[f32], records: &mut [u8]) {
    row_of(x, records, short_group);
}

/// A group's codes, their scale, and the sums of the first and of the second sixteen.
struct Codes {
    scale: f32,
    codes: [i32; GROUP],
    halves: [i32; 2],
}

/// The scale of a group whose largest magnitude has these bits, for codes of at most `max`, and what its values are
/// multiplied with. With 0 for that all codes are 0.
#[inline(always)]
pub(crate) fn scale_of(largest: i32, max: f32) -> (f32, f32) {
    let amax = f32::from_bits(largest as u32);
    if largest >= f32::INFINITY.to_bits() as i32 {
        (f32::NAN, 0.0)
    } else if amax < TINY {
        (0.0, 0.0)
    } else {
        (amax / max, max / amax)
    }
}

/// Codes of at most `max` in magnitude.
#[inline(always)]
fn codes(x: &[f32; GROUP], max: f32) -> Codes {
    // As integers, magnitudes are ordered like the floats, with infinity and NaN above all others.
    let mut largest = 0i32;
    for v in x {
        largest = largest.max((v.to_bits() & 0x7fff_ffff) as i32);
    }
    let (scale, inverse) = scale_of(largest, max);
    // NaN * 0 is NaN, which the conversion makes 0; infinity likewise.
    let mut codes = [0i32; GROUP];
    for (c, v) in codes.iter_mut().zip(x) {
        // Adding 1.5 * 2^23 rounds to the nearest integer (ties to even) and leaves it in the low bits.
        *c = ((v * inverse + 12_582_912.0).to_bits() as i32) - 0x4b40_0000;
    }
    if inverse == 0.0 {
        codes = [0; GROUP];
    }
    let mut halves = [0i32; 2];
    for i in 0..GROUP / 2 {
        halves[0] += codes[i];
        halves[1] += codes[GROUP / 2 + i];
    }
    Codes { scale, codes, halves }
}

#[inline(always)]
fn group<C: CodeForm>(x: &[f32; GROUP], record: &mut [u8; RECORD]) {
    let Codes { scale, codes, halves } = codes(x, CODE_MAX);
    let (out, _) = record
        .split_first_chunk_mut()
        .expect("a record begins with its codes");
    C::place(&codes, out);
    put_sums(record, scale, halves);
}

/// All of a record but its codes, from the sums of its first and of its second sixteen.
#[inline(always)]
pub(crate) fn put_sums(record: &mut [u8; RECORD], scale: f32, halves: [i32; 2]) {
    let mut put = |at: usize, bits: u32| record[at..at + 4].copy_from_slice(&bits.to_le_bytes());
    put(AT_SCALE, scale.to_bits());
    put(AT_SUM, (scale * (halves[0] + halves[1]) as f32).to_bits());
    put(AT_HALF_SUMS, (scale * halves[0] as f32).to_bits());
    put(AT_HALF_SUMS + 4, (scale * halves[1] as f32).to_bits());
    put(AT_CODE_SUM, (halves[0] + halves[1]) as u32);
    put(AT_HALF_CODE_SUMS, halves[0] as u32);
    put(AT_HALF_CODE_SUMS + 4, halves[1] as u32);
    put(RECORD - 4, 0);
}

#[cfg(any(target_arch = "x86_64", test))]
#[inline(always)]
fn short_group(x: &[f32; GROUP], record: &mut [u8; SHORT_RECORD]) {
    let Codes { scale, codes, halves } = codes(x, SHORT_CODE_MAX);
    for (out, code) in record.iter_mut().zip(codes) {
        *out = code as u8;
    }
    put_short_sums(record, scale, halves);
}

/// As [`put_sums`], of a short record.
#[cfg(any(target_arch = "x86_64", test))]
#[inline(always)]
pub(crate) fn put_short_sums(record: &mut [u8; SHORT_RECORD], scale: f32, halves: [i32; 2]) {
    let mut put = |at: usize, bits: u32| record[at..at + 4].copy_from_slice(&bits.to_le_bytes());
    put(short::AT_SCALE, scale.to_bits());
    put(short::AT_SUM, (scale * (halves[0] + halves[1]) as f32).to_bits());
    put(short::AT_HALF_SUMS, (scale * halves[0] as f32).to_bits());
    put(short::AT_HALF_SUMS + 4, (scale * halves[1] as f32).to_bits());
    put(short::AT_LESS_SUM, -(halves[0] + halves[1]) as u32);
    put(short::AT_LESS_HALF_SUMS, -halves[0] as u32);
    put(short::AT_LESS_HALF_SUMS + 4, -halves[1] as u32);
    put(SHORT_RECORD - 4, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(record: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(*record[at..].first_chunk().expect("four bytes"))
    }

    #[test]
    fn codes_stand_in_kernel_order_and_sums_agree() {
        let x: Vec<f32> = (0..GROUP).map(|i| (i as f32 - 11.0) * 0.25).collect();
        let mut record = [0; RECORD];
        row::<Pairs>(&x, &mut record);
        let scale = f32::from_bits(read(&record, AT_SCALE));
        assert_eq!(scale, 5.0 / CODE_MAX);
        let mut sums = [0; 2];
        for (place, pair) in record[..64].as_chunks::<2>().0.iter().enumerate() {
            let code = i16::from_le_bytes(*pair);
            let k = place / 4 * 4 + [0, 2, 1, 3][place % 4];
            assert!(
                (f32::from(code) * scale - x[k]).abs() <= 0.51 * scale,
                "element {k}"
            );
            sums[k / 16] += i32::from(code);
        }
        assert_eq!(read(&record, AT_HALF_CODE_SUMS) as i32, sums[0]);
        assert_eq!(read(&record, AT_HALF_CODE_SUMS + 4) as i32, sums[1]);
        assert_eq!(read(&record, AT_CODE_SUM) as i32, sums[0] + sums[1]);
        assert_eq!(
            f32::from_bits(read(&record, AT_SUM)),
            scale * (sums[0] + sums[1]) as f32
        );
    }

    #[test]
    fn planes_hold_the_same_codes_and_sums() {
        let x: Vec<f32> = (0..2 * GROUP)
            .map(|i| ((i * 7919 % 201) as f32 - 100.0) * 0.01)
            .collect();
        let (mut pairs, mut planes) = ([0; 2 * RECORD], [0; 2 * RECORD]);
        row::<Pairs>(&x, &mut pairs);
        row::<Planes>(&x, &mut planes);
        let records = |bytes: &[u8]| [0, RECORD].map(|at| bytes[at..at + RECORD].to_vec());
        for (pairs, planes) in records(&pairs).into_iter().zip(records(&planes)) {
            for k in 0..GROUP {
                let place = k / 4 * 4 + [0, 2, 1, 3][k % 4];
                let code = i16::from_le_bytes([pairs[2 * place], pairs[2 * place + 1]]);
                let at = k / 8 * 16 + k % 8;
                let (high, low) = (planes[at] as i8, planes[at + 8]);
                assert!(low < 128);
                assert_eq!(i16::from(high) * 128 + i16::from(low), code, "element {k}");
            }
            assert_eq!(pairs[2 * GROUP..], planes[2 * GROUP..]);
        }
    }

    #[test]
    fn short_codes_and_their_sums_agree() {
        let x: Vec<f32> = (0..2 * GROUP)
            .map(|i| ((i * 7919 % 201) as f32 - 90.0) * 0.01)
            .collect();
        let mut records = [0xff; 2 * SHORT_RECORD];
        short_row(&x, &mut records);
        for (x, record) in x.as_chunks::<GROUP>().0.iter().zip(records.chunks(SHORT_RECORD)) {
            let scale = f32::from_bits(read(record, short::AT_SCALE));
            let largest = x.iter().fold(0.0, |a: f32, v| a.max(v.abs()));
            assert_eq!(scale, largest / SHORT_CODE_MAX);
            let mut sums = [0; 2];
            for (k, x) in x.iter().enumerate() {
                let code = record[k] as i8;
                assert!((f32::from(code) * scale - x).abs() <= 0.51 * scale, "element {k}");
                sums[k / 16] += i32::from(code);
            }
            let int = |at| read(record, at) as i32;
            let float = |at| f32::from_bits(read(record, at));
            assert_eq!(int(short::AT_LESS_SUM), -sums[0] - sums[1]);
            assert_eq!(
                [0, 4].map(|i| int(short::AT_LESS_HALF_SUMS + i)),
                sums.map(|s| -s)
            );
            assert_eq!(float(short::AT_SUM), scale * (sums[0] + sums[1]) as f32);
            assert_eq!(
                [0, 4].map(|i| float(short::AT_HALF_SUMS + i)),
                sums.map(|s| scale * s as f32)
            );
        }
        short_row(&[f32::NAN; GROUP], &mut records[..SHORT_RECORD]);
        assert!(f32::from_bits(read(&records, short::AT_SCALE)).is_nan());
        assert!(records[..GROUP].iter().all(|b| *b == 0));
    }

    #[test]
    fn the_largest_magnitude_never_exceeds_the_code_range() {
        for i in 0..2000u32 {
            let amax = f32::from_bits(0x0800_0000 + i * 1_000_003);
            let mut x = [0.0; GROUP];
            x[7] = -amax;
            let mut record = [0; RECORD];
            row::<Pairs>(&x, &mut record);
            assert_eq!(read(&record, AT_CODE_SUM) as i32, -16383, "amax {amax}");
        }
    }

    #[test]
    fn what_has_no_code_poisons_its_group_alone() {
        for wild in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1.0; 2 * GROUP];
            x[5] = wild;
            let mut records = [0xff; 2 * RECORD];
            row::<Pairs>(&x, &mut records);
            assert!(f32::from_bits(read(&records, AT_SCALE)).is_nan());
            assert_eq!(read(&records, AT_CODE_SUM), 0);
            assert!(records[..64].iter().all(|b| *b == 0));
            assert_eq!(read(&records[RECORD..], AT_CODE_SUM), 32 * 16383);
        }
        let mut record = [0xff; RECORD];
        row::<Pairs>(&[1e-40; GROUP], &mut record);
        assert_eq!(record, [0; RECORD]);
    }
}
