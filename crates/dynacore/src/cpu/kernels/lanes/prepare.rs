//! Activations to records: 15-bit codes per group of 32 with an f32 scale, and the sums the kernels need.
//!
//! A group that holds a NaN or an infinity gets codes 0 and the scale NaN, so that its row's outputs are NaN and no
//! other row's are touched. Groups whose largest magnitude is below [`TINY`] count as zero: the inverse of their scale
//! would overflow.

use crate::cpu::kernels::{
    AT_CODE_SUM, AT_HALF_CODE_SUMS, AT_HALF_SUMS, AT_SCALE, AT_SUM, CODE_MAX, GROUP, RECORD,
};

/// See the module's docs.
const TINY: f32 = 1e-34;

/// Prepares one row. Compiled into each table's own function.
///
/// # Panics
/// If `x` is no whole number of groups or `records` has not one record for each.
#[inline(always)]
pub(crate) fn row(x: &[f32], records: &mut [u8]) {
    let (groups, rest) = x.as_chunks::<GROUP>();
    let (records, rest_bytes) = records.as_chunks_mut::<RECORD>();
    assert!(
        rest.is_empty() && rest_bytes.is_empty() && groups.len() == records.len(),
        "one record per group"
    );
    for (x, record) in groups.iter().zip(records) {
        group(x, record);
    }
}

#[inline(always)]
fn group(x: &[f32; GROUP], record: &mut [u8; RECORD]) {
    // As integers, magnitudes are ordered like the floats, with infinity and NaN above all others.
    let mut largest = 0i32;
    for v in x {
        largest = largest.max((v.to_bits() & 0x7fff_ffff) as i32);
    }
    let amax = f32::from_bits(largest as u32);
    let (scale, inverse) = if largest >= f32::INFINITY.to_bits() as i32 {
        (f32::NAN, 0.0)
    } else if amax < TINY {
        (0.0, 0.0)
    } else {
        (amax / CODE_MAX, CODE_MAX / amax)
    };
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
    for (quad, out) in codes.as_chunks::<4>().0.iter().zip(record.as_chunks_mut::<8>().0) {
        let word = |low: i32, high: i32| u64::from(low as u16) | u64::from(high as u16) << 16;
        *out = (word(quad[0], quad[2]) | word(quad[1], quad[3]) << 32).to_le_bytes();
    }
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
        row(&x, &mut record);
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
    fn the_largest_magnitude_never_exceeds_the_code_range() {
        for i in 0..2000u32 {
            let amax = f32::from_bits(0x0800_0000 + i * 1_000_003);
            let mut x = [0.0; GROUP];
            x[7] = -amax;
            let mut record = [0; RECORD];
            row(&x, &mut record);
            assert_eq!(read(&record, AT_CODE_SUM) as i32, -16383, "amax {amax}");
        }
    }

    #[test]
    fn what_has_no_code_poisons_its_group_alone() {
        for wild in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1.0; 2 * GROUP];
            x[5] = wild;
            let mut records = [0xff; 2 * RECORD];
            row(&x, &mut records);
            assert!(f32::from_bits(read(&records, AT_SCALE)).is_nan());
            assert_eq!(read(&records, AT_CODE_SUM), 0);
            assert!(records[..64].iter().all(|b| *b == 0));
            assert_eq!(read(&records[RECORD..], AT_CODE_SUM), 32 * 16383);
        }
        let mut record = [0xff; RECORD];
        row(&[1e-40; GROUP], &mut record);
        assert_eq!(record, [0; RECORD]);
    }
}
