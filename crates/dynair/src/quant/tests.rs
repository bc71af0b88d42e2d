//! The formats against fixtures of the Python package `gguf` (made by `tools/reference/quant_fixtures.py`), and the
//! encoders against bounds that follow from their construction.

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;

const LEGACY: [DType; 5] = [
    DType::Quant(QuantType::Q4_0),
    DType::Quant(QuantType::Q4_1),
    DType::Quant(QuantType::Q5_0),
    DType::Quant(QuantType::Q5_1),
    DType::Quant(QuantType::Q8_0),
];
const K: [DType; 5] = [
    DType::Quant(QuantType::Q2K),
    DType::Quant(QuantType::Q3K),
    DType::Quant(QuantType::Q4K),
    DType::Quant(QuantType::Q5K),
    DType::Quant(QuantType::Q6K),
];
const IQ4_NL: DType = DType::Quant(QuantType::Iq4Nl);
const IQ4_XS: DType = DType::Quant(QuantType::Iq4Xs);
const MXFP4: DType = DType::Quant(QuantType::Mxfp4);

/// The types that the reference does not encode.
fn fitted() -> impl Iterator<Item = DType> {
    K.into_iter().chain([IQ4_NL, IQ4_XS])
}

struct Record {
    name: String,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

fn data_path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(file)
}

/// The records of a fixture; the script's text says how they are laid out.
fn fixture(file: &str) -> Vec<Record> {
    let data = std::fs::read(data_path(file)).expect("the fixture is part of the repository");
    let mut rest = &data[..];
    let mut take = |n: usize| {
        let (head, tail) = rest.split_at(n);
        rest = tail;
        head.to_vec()
    };
    let mut records = Vec::new();
    let mut left = data.len();
    while left > 0 {
        let length = take(1)[0] as usize;
        let name = String::from_utf8(take(length)).expect("names are ASCII");
        let number = |b: Vec<u8>| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize;
        let bytes = number(take(4));
        let bytes = take(bytes);
        let values = number(take(4));
        let values: Vec<f32> = take(4 * values)
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        left -= 9 + length + bytes.len() + 4 * values.len();
        records.push(Record { name, bytes, values });
    }
    records
}

fn find<'a>(records: &'a [Record], name: &str) -> &'a Record {
    records
        .iter()
        .find(|r| r.name == name)
        .unwrap_or_else(|| panic!("the fixture has no record `{name}`"))
}

fn assert_same_values(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let same = f.to_bits() == e.to_bits() || f.is_nan() && e.is_nan();
        assert!(
            same,
            "{what}, element {i}: {f} ({:#x}), expected {e} ({:#x})",
            f.to_bits(),
            e.to_bits()
        );
    }
}

#[test]
fn every_type_decodes_as_the_reference() {
    let records = fixture("quant.bin");
    for dtype in DType::WEIGHTS {
        let r = find(&records, &format!("decode/{dtype}"));
        assert!(!r.values.is_empty());
        let found = decode(dtype, &r.bytes, r.values.len()).unwrap();
        assert_same_values(&format!("decode/{dtype}"), &found, &r.values);
    }
}

#[test]
fn what_the_reference_encodes_is_encoded_alike() {
    let records = fixture("quant.bin");
    for dtype in [DType::F32, DType::F16, DType::Bf16, MXFP4]
        .into_iter()
        .chain(LEGACY)
    {
        let r = find(&records, &format!("encode/{dtype}"));
        let (elements, size) = dtype.block();
        let found = encode(dtype, &r.values).unwrap();
        assert_eq!(found.len(), r.bytes.len());
        for (i, (f, e)) in found
            .chunks_exact(size)
            .zip(r.bytes.chunks_exact(size))
            .enumerate()
        {
            assert_eq!(
                f,
                e,
                "{dtype} block {i} of {:?}",
                &r.values[i * elements..][..elements]
            );
        }
    }
}

/// The bytes of our own encoders are pinned, and what the reference decodes them to is what we do.
#[test]
fn our_encodings_are_pinned() {
    let inputs = fixture("quant.bin");
    let input = &find(&inputs, "input/K").values;
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        let all: Vec<u8> = fitted().flat_map(|t| encode(t, input).unwrap()).collect();
        std::fs::write(data_path("quant_k.bytes"), all).unwrap();
        return;
    }
    let records = fixture("quant_k.bin");
    for dtype in fitted() {
        let r = find(&records, &format!("encode/{dtype}"));
        let encoded = encode(dtype, input).unwrap();
        assert!(
            encoded == r.bytes,
            "{dtype} is encoded differently than when the fixture was made"
        );
        assert_same_values(
            dtype.name(),
            &decode(dtype, &encoded, input.len()).unwrap(),
            &r.values,
        );
    }
}

/// `n` normal numbers by the sum of twelve uniform ones, from a fixed generator.
fn normals(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..n)
        .map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
        .collect()
}

/// Root mean square error of encoding normal numbers, relative to their deviation of one.
///
/// A uniform quantiser of step `s` has rms error `s / sqrt(12)`. The step of a fit that covers the sub-block's range is
/// known from the mean range of `n` normal samples (3.53 for 16, 4.09 for 32) or their mean peak (2.07 for 16, that
/// of a block of 32 without sub-blocks 2.4); least squares must be at least as good, and not be spoilt by the rounding
/// of the scales to integers. The table of the IQ types is made for normal values: it must do better than sixteen codes
/// of equal distance.
#[test]
fn encoding_error_of_normal_values_is_that_of_the_step() {
    let x = normals(256 * 64, 1);
    let bound = |range: f64, steps: f64| range / steps / 12f64.sqrt();
    for (dtype, bound) in [
        ("Q4_0", bound(2.4, 8.0) * 1.1), // the opposite peak is clipped by half a step and more
        ("Q4_1", bound(4.09, 15.0) * 1.02),
        ("Q5_0", bound(2.4, 16.0) * 1.1),
        ("Q5_1", bound(4.09, 31.0) * 1.02),
        ("Q8_0", bound(2.4, 127.0)),
        ("Q2_K", bound(3.53, 3.0)),
        ("Q3_K", bound(2.07, 4.0)),
        ("Q4_K", bound(4.09, 15.0)),
        ("Q5_K", bound(4.09, 31.0)),
        ("Q6_K", bound(2.07, 32.0)),
        ("IQ4_NL", bound(2.4, 8.0) * 0.95),
        ("IQ4_XS", bound(2.4, 8.0) * 0.95),
    ] {
        let dtype = DType::from_name(dtype).unwrap();
        let y = decode(dtype, &encode(dtype, &x).unwrap(), x.len()).unwrap();
        let rms = (x
            .iter()
            .zip(&y)
            .map(|(a, b)| f64::from(a - b).powi(2))
            .sum::<f64>()
            / x.len() as f64)
            .sqrt();
        assert!(rms <= bound, "{dtype}: rms error {rms}, bound {bound}");
    }
}

/// A block of 256 values in which sub-blocks differ in magnitude, and may be zero or constant.
fn block() -> impl Strategy<Value = Vec<f32>> {
    let run = (
        -1.0f32..1.0,
        -3i32..4,
        prop::collection::vec(-1.0f32..1.0, 16),
        0u8..8,
    );
    prop::collection::vec(run, 16).prop_map(|runs| {
        runs.into_iter()
            .flat_map(|(mean, power, values, kind)| {
                values.into_iter().map(move |v| {
                    10f32.powi(power)
                        * match kind {
                            0 => 0.0,
                            1 => mean,
                            2 => v + 4.0 * mean,
                            _ => v,
                        }
                })
            })
            .collect()
    })
}

fn rms(x: &[f32], y: &[f32]) -> f64 {
    (x.iter()
        .zip(y)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
        .sum::<f64>()
        / x.len() as f64)
        .sqrt()
}

/// How far a stored scale may lie from the wanted one: half an integer step of `d`, what the rounding of `d` to f16
/// moves the largest of the `most` integers by, and f16's absolute step where `d` is subnormal.
fn scale_error(d: f64, most: f64) -> f64 {
    d.abs() * (0.5 + most / 2048.0) + most * 2f64.powi(-25)
}

proptest! {
    /// Each element of a legacy type lies within half a step, a whole one where the highest code clips, plus what the
    /// rounding of scale and minimum to f16 (2^-11, or 2^-25 below its normal range) does to it.
    #[test]
    fn legacy_errors_are_bounded(x in block()) {
        for dtype in LEGACY {
            let y = decode(dtype, &encode(dtype, &x).unwrap(), x.len()).unwrap();
            for (x, y) in x.chunks_exact(32).zip(y.chunks_exact(32)) {
                let peak = x.iter().fold(0f32, |m, v| m.max(v.abs()));
                let range = x.iter().fold(f32::MIN, |m, &v| m.max(v)) - x.iter().fold(f32::MAX, |m, &v| m.min(v));
                let (step, codes, clip) = match dtype.name() {
                    "Q4_0" => (peak / 8.0, 8.0, 1.0),
                    "Q5_0" => (peak / 16.0, 16.0, 1.0),
                    "Q4_1" => (range / 15.0, 15.0, 0.5),
                    "Q5_1" => (range / 31.0, 31.0, 0.5),
                    _ => (peak / 127.0, 127.0, 0.5),
                };
                let rounding = |v: f32| v / 2048.0 + 2f32.powi(-25);
                let bound = 1.0001 * (step * clip + codes * rounding(step) + rounding(peak));
                for (a, b) in x.iter().zip(y) {
                    prop_assert!((a - b).abs() <= bound, "{dtype}: {a} became {b}, bound {bound}");
                }
            }
        }
    }

    /// The table of the IQ types reaches 113 on one side where it reaches -127 on the other: an element of a fit that
    /// covers the range is off by 14 of 127 parts at most (half a gap is 12), and least squares is no worse. What the
    /// storing of the scale adds is that of the K types, but that the largest scale of the other sign may be a whole
    /// integer off.
    #[test]
    fn iq4_errors_are_bounded(x in block()) {
        for (dtype, most) in [(IQ4_NL, 0.0), (IQ4_XS, 32.0)] {
            let bytes = encode(dtype, &x).unwrap();
            let y = decode(dtype, &bytes, x.len()).unwrap();
            let (elements, size) = dtype.block();
            for (i, (x, y)) in x.chunks_exact(32).zip(y.chunks_exact(32)).enumerate() {
                let d = f64::from(get_f16(&bytes, i * 32 / elements * size)).abs();
                let scale = if most == 0.0 { d / 2048.0 + 2f64.powi(-25) } else { scale_error(d, most) + d / 2.0 };
                let peak = x.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
                let bound = 1.0001 * (peak * 14.0 / 127.0 + 127.0 * scale);
                prop_assert!(rms(x, y) <= bound, "{dtype}: rms {} over bound {bound}: {x:?} -> {y:?}", rms(x, y));
            }
        }
    }

    /// With the peak in 8 to 16 halved steps, the largest code is 12 and the widest gap 4: no element is off by more
    /// than a quarter of the peak, or half of the smallest scale's step. The peak keeps its power of two, so what is
    /// decoded is encoded to the same bytes.
    #[test]
    fn mxfp4_errors_are_bounded_and_its_encoding_is_stable(x in block(), power in -120i32..120) {
        let x: Vec<f32> = x.iter().map(|v| v * 2f32.powi(power)).filter(|v| v.is_finite()).collect();
        let x = &x[..x.len() / 32 * 32];
        let bytes = encode(MXFP4, x).unwrap();
        let y = decode(MXFP4, &bytes, x.len()).unwrap();
        for (x, y) in x.chunks_exact(32).zip(y.chunks_exact(32)) {
            let peak = x.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
            let bound = (peak / 4.0 * 1.0001).max(2f64.powi(-129));
            for (a, b) in x.iter().zip(y) {
                let e = (f64::from(*a) - f64::from(*b)).abs();
                prop_assert!(e <= bound, "{a} became {b}, bound {bound}");
            }
        }
        prop_assert_eq!(encode(MXFP4, &y).unwrap(), bytes);
    }

    /// What a legacy type has decoded, it encodes to the same bytes, as long as its scale is no subnormal f16 and not
    /// lost against the minimum.
    #[test]
    fn legacy_encoding_is_stable(x in prop::collection::vec(-1f32..1.0, 32), power in -2i32..5) {
        let mut x: Vec<f32> = x.iter().map(|v| v * 10f32.powi(power)).collect();
        x[3] = 10f32.powi(power);
        for dtype in LEGACY {
            let once = encode(dtype, &x).unwrap();
            let twice = encode(dtype, &decode(dtype, &once, 32).unwrap()).unwrap();
            prop_assert_eq!(&once, &twice, "{}", dtype);
        }
    }

    /// The least-squares fit of a sub-block is no worse than covering its range, whose rms error is at most half a
    /// step (a whole one where the highest code of a symmetric type clips); storing the scale and minimum as
    /// integers moves each value by at most their errors, times the largest code for the scale.
    #[test]
    fn k_errors_are_bounded(x in block()) {
        for (dtype, sub, codes, most, at, affine) in [
            (K[0], 16, 3.0, 15.0, 80, true),
            (K[1], 16, 4.0, 32.0, 108, false),
            (K[2], 32, 15.0, 63.0, 0, true),
            (K[3], 32, 31.0, 63.0, 0, true),
            (K[4], 16, 32.0, 128.0, 208, false),
        ] {
            let bytes = encode(dtype, &x).unwrap();
            let y = decode(dtype, &bytes, x.len()).unwrap();
            let scale = scale_error(get_f16(&bytes, at).into(), most);
            let min = if affine { scale_error(get_f16(&bytes, at + 2).into(), most) } else { 0.0 };
            for (x, y) in x.chunks_exact(sub).zip(y.chunks_exact(sub)) {
                let high = x.iter().fold(0f64, |m, &v| m.max(v.into()));
                let low = x.iter().fold(0f64, |m, &v| m.min(v.into()));
                let cover = if affine { (high - low) / codes / 2.0 } else { high.max(-low) / codes };
                let bound = 1.0001 * (cover + codes * scale + min);
                prop_assert!(rms(x, y) <= bound, "{dtype}: rms {} over bound {bound}: {x:?} -> {y:?}", rms(x, y));
            }
        }
    }

    /// Any bytes decode, in every type.
    #[test]
    fn any_bytes_decode(bytes in prop::collection::vec(any::<u8>(), 420)) {
        for dtype in DType::WEIGHTS {
            let (elements, size) = dtype.block();
            let n = bytes.len() / size;
            decode(dtype, &bytes[..n * size], n * elements).unwrap();
        }
    }
}

#[test]
fn simple_blocks_have_the_obvious_codes() {
    let x: Vec<f32> = (0..256).map(|i| (i % 16) as f32 - 8.0).collect();
    for dtype in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"] {
        let dtype = DType::from_name(dtype).unwrap();
        let y = decode(dtype, &encode(dtype, &x).unwrap(), 256).unwrap();
        let worst = x.iter().zip(&y).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 0.3, "{dtype} is off by {worst}");
    }
    for dtype in DType::WEIGHTS {
        let zeros = decode(dtype, &encode(dtype, &[0.0; 256]).unwrap(), 256).unwrap();
        assert!(zeros.iter().all(|&v| v == 0.0), "{dtype}");
    }
}

#[test]
fn iq4_codes_are_the_nearest() {
    for n in -1400..=1400 {
        let v = f64::from(n) / 10.0 + 0.01;
        let off = |code: usize| (v - f64::from(table::IQ4[code])).abs();
        let best = (0..16).map(off).fold(f64::INFINITY, f64::min);
        assert_eq!(off(table::nearest(v)), best, "{v}");
    }
}

#[test]
fn extremes_are_encoded_or_refused_by_name() {
    for dtype in LEGACY.into_iter().chain(fitted()).chain([MXFP4]) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1.0; 512];
            x[300] = bad;
            let mut out = vec![7];
            let error = encode_row(dtype, &x, &mut out).unwrap_err().to_string();
            assert!(
                error.contains(dtype.name()) && error.contains("element 300"),
                "{error}"
            );
            assert_eq!(out, [7], "an error leaves the output as it was");
        }
        let mut x = vec![1.0; 512];
        x[256] = f32::MAX;
        x[257] = f32::MIN;
        if dtype == MXFP4 {
            // The largest power of two that six halved steps do not carry beyond f32.
            let y = decode(dtype, &encode(dtype, &x).unwrap(), 512).unwrap();
            assert_eq!((y[256], y[257]), (1.5 * 2f32.powi(127), -1.5 * 2f32.powi(127)));
            continue;
        }
        let error = encode(dtype, &x).unwrap_err().to_string();
        assert!(
            error.contains("elements 256 to") && error.contains("f16"),
            "{error}"
        );
        let tiny = encode(dtype, &[f32::MIN_POSITIVE / 8.0; 256]).unwrap();
        assert!(
            decode(dtype, &tiny, 256).unwrap().iter().all(|&v| v == 0.0),
            "{dtype}"
        );
    }
    assert_eq!(
        encode(DType::F16, &[1e30, f32::NEG_INFINITY]).unwrap(),
        [0x00, 0x7C, 0x00, 0xFC]
    );
}

#[test]
fn wrong_lengths_and_types_are_refused() {
    let q4 = DType::Quant(QuantType::Q4K);
    assert_eq!(
        decode(q4, &[0; 143], 256).unwrap_err(),
        Error::ByteLength {
            dtype: "Q4_K",
            elements: 256,
            expected: 144,
            found: 143
        }
    );
    let error = decode(q4, &[0; 144], 255).unwrap_err().to_string();
    assert!(
        error.contains("255") && error.contains("a multiple of 256"),
        "{error}"
    );
    assert!(encode(q4, &[0.0; 32]).is_err());
    assert!(
        decode(DType::I32, &[0; 4], 1)
            .unwrap_err()
            .to_string()
            .contains("I32")
    );
    assert!(decode(DType::F32, &[], usize::MAX).is_err());
    assert_eq!(decode(q4, &[], 0).unwrap(), []);
}
