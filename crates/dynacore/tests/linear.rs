//! Linear kernels: every weight type under every table this CPU has, against an f64 product with decoded weights, and
//! against themselves bit for bit under other numbers of rows and other splits.

use std::sync::Arc;

use dynacore::WeightBytes;
use dynacore::cpu::ops::linear::{
    Prepared, TILE_ROWS, prepare, prepare_tiles, run, run_glu, scratch_bytes, tile_bytes, tiles,
};
use dynacore::cpu::pack::{PackedLinear, pack};
use dynacore::cpu::table::{KernelTable, tables};
use dynair::{Activation, DType, QuantType, WeightDecl};

/// Splitmix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Where a block's f16 factors stand.
fn heads(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Quant(q) => match q {
            QuantType::Q4_0 | QuantType::Q5_0 | QuantType::Q8_0 | QuantType::Iq4Nl | QuantType::Iq4Xs => &[0],
            QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4K | QuantType::Q5K => &[0, 2],
            QuantType::Q2K => &[80, 82],
            QuantType::Q3K => &[108],
            QuantType::Q6K => &[208],
            QuantType::Mxfp4 => &[],
        },
        _ => &[],
    }
}

/// Bytes of `rows * cols` elements: every code and scale occurs, with factors of ordinary size.
fn weight_bytes(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    if !matches!(dtype, DType::Quant(_)) {
        let values: Vec<f32> = (0..rows * cols).map(|_| random.unit()).collect();
        return dynair::quant::encode(dtype, &values).expect("ordinary values have codes");
    }
    let mut bytes: Vec<u8> = (0..dtype.row_bytes(cols).expect("whole blocks") * rows)
        .map(|_| random.bits() as u8)
        .collect();
    for block in bytes.chunks_exact_mut(dtype.block().1) {
        for &at in heads(dtype) {
            let factor = half_bits(random.unit() * 0.01);
            block[at..at + 2].copy_from_slice(&factor);
        }
        if dtype == DType::Quant(QuantType::Mxfp4) {
            // Powers of two from 2^-16 to 2^-9.
            block[0] = 112 + (random.bits() % 8) as u8;
        }
    }
    bytes
}

fn half_bits(x: f32) -> [u8; 2] {
    dynair::quant::encode(DType::F16, &[x])
        .expect("any f32 has an f16")
        .try_into()
        .expect("an f16 has two bytes")
}

fn packed(table: &KernelTable, dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> PackedLinear {
    let decl = WeightDecl {
        name: "w".into(),
        dtype,
        first_row: 0,
        rows,
        cols,
        experts: 1,
    };
    pack(table, &decl, &WeightBytes::Owned(Arc::from(bytes))).expect("the bytes fit the declaration")
}

/// The whole product `[n, rows]`, in the given splits of columns.
fn product(
    table: &KernelTable,
    w: &PackedLinear,
    bias: Option<&[f32]>,
    x: &[f32],
    splits: &[usize],
) -> Vec<f32> {
    let n = x.len() / w.cols();
    let mut scratch = vec![0; n * scratch_bytes(table, w.cols())];
    prepare(table, x, w.cols(), &mut scratch);
    let mut out = vec![f32::NAN; n * w.rows()];
    let mut written = vec![0; out.len()];
    let mut start = 0;
    for &end in splits.iter().chain([&w.rows()]) {
        run(
            table,
            w,
            bias,
            x,
            scratch.as_slice().into(),
            start..end,
            |row, column, values| {
                for (i, v) in values.iter().enumerate() {
                    out[row * w.rows() + column + i] = *v;
                    written[row * w.rows() + column + i] += 1;
                }
            },
        );
        start = end;
    }
    assert!(written.iter().all(|w| *w == 1), "every output is written once");
    out
}

/// Rows of activations as tiles.
fn as_tiles(table: &KernelTable, x: &[f32], cols: usize) -> Vec<u8> {
    let mut scratch = vec![0xff; (x.len() / cols).div_ceil(TILE_ROWS) * tile_bytes(cols)];
    let blocks = x.chunks(TILE_ROWS * cols);
    for (x, out) in blocks.zip(scratch.chunks_exact_mut(tile_bytes(cols))) {
        prepare_tiles(table, x, cols, out);
    }
    scratch
}

/// As [`product`], from tiles.
fn tile_product(table: &KernelTable, w: &PackedLinear, x: &[f32], splits: &[usize]) -> Vec<f32> {
    let n = x.len() / w.cols();
    let scratch = as_tiles(table, x, w.cols());
    let mut out = vec![f32::NAN; n * w.rows()];
    let mut start = 0;
    for &end in splits.iter().chain([&w.rows()]) {
        let prepared = Prepared::Tiles(&scratch);
        run(table, w, None, x, prepared, start..end, |row, column, values| {
            out[row * w.rows() + column..][..values.len()].copy_from_slice(values);
        });
        start = end;
    }
    out
}

fn same_bits(a: &[f32], b: &[f32], what: &str) {
    let differ = a
        .iter()
        .zip(b)
        .position(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
    assert_eq!(
        (a.len(), differ),
        (b.len(), None),
        "{what}: the first element that differs"
    );
}

/// Activations of one kind.
fn activations(kind: &str, n: usize, cols: usize, random: &mut Random) -> Vec<f32> {
    (0..n * cols)
        .map(|i| {
            let x = random.unit();
            match kind {
                "ordinary" => x,
                "tiny" => x * 1e-20,
                "huge" => x * 1e15,
                "mixed" => x * 10f32.powi((random.bits() % 12) as i32 - 6),
                "outliers" => x * if i % cols == cols / 3 { 1000.0 } else { 1.0 },
                "sparse" => {
                    if random.bits().is_multiple_of(16) {
                        x
                    } else {
                        0.0
                    }
                }
                _ => unreachable!("a kind of the list"),
            }
        })
        .collect()
}

/// The largest error of an output that the arithmetic may leave.
///
/// Codes of 15 bits: each activation is off by at most half a step, `amax / 16383 / 2`, where `amax` is its group's
/// largest; with f32 kernels that part is absent but stays in the bound. Rounding in f32: a group's terms are at most
/// `32 * amax * max|w|` (twice for a type whose scale and minimum cancel), each of some tens of additions rounds by
/// 6e-8, and they add up to less than 1e-6 of the terms for the sizes here.
fn bound(w: &[f32], x: &[f32]) -> f64 {
    let largest = w.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
    w.chunks(32)
        .zip(x.chunks(32))
        .map(|(w, x)| {
            let amax = x.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
            let sum: f64 = w.iter().map(|v| f64::from(v.abs())).sum();
            amax * (sum * 0.501 / 16383.0 + 1e-6 * 64.0 * largest)
        })
        .sum()
}

const KINDS: [&str; 6] = ["ordinary", "tiny", "huge", "mixed", "outliers", "sparse"];
const ROWS: [usize; 10] = [1, 2, 3, 4, 5, 7, 8, 16, 17, 33];

/// Output rows and columns: one block, a row group and one more, several panels.
fn sizes(dtype: DType) -> Vec<(usize, usize)> {
    match dtype.block().0 {
        1 => vec![(1, 1), (17, 33), (40, 577), (16, 512)],
        32 => vec![(1, 32), (17, 96), (40, 1120), (16, 512)],
        block => vec![(1, block), (17, 3 * block), (40, 5 * block), (16, 2 * block)],
    }
}

#[test]
fn products_match_f64_and_do_not_depend_on_the_other_rows() {
    let mut random = Random(1);
    for dtype in DType::WEIGHTS {
        for (rows, cols) in sizes(dtype) {
            let bytes = weight_bytes(dtype, rows, cols, &mut random);
            let weights: Vec<_> = tables()
                .iter()
                .map(|t| (*t, packed(t, dtype, rows, cols, &bytes)))
                .collect();
            let decoded = dynair::quant::decode(dtype, &bytes, rows * cols).expect("they were encoded");
            for kind in KINDS {
                let x = activations(kind, 33, cols, &mut random);
                for (table, w) in &weights {
                    let what = format!("{dtype} [{rows}, {cols}] {kind} under {}", table.isa);
                    let all = product(table, w, None, &x, &[]);
                    check(&all, &decoded, &x, cols, &what);
                    for n in ROWS {
                        let some = product(table, w, None, &x[..n * cols], &[]);
                        same_bits(&some, &all[..n * rows], &format!("{what}, {n} rows"));
                    }
                }
            }
        }
    }
}

fn check(out: &[f32], decoded: &[f32], x: &[f32], cols: usize, what: &str) {
    let rows = decoded.len() / cols;
    for (i, x) in x.chunks(cols).enumerate() {
        for (r, w) in decoded.chunks(cols).enumerate() {
            let truth: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            let found = f64::from(out[i * rows + r]);
            let bound = bound(w, x);
            assert!(
                (found - truth).abs() <= bound,
                "{what}, row {i}, output {r}: {found}, expected {truth} within {bound}"
            );
        }
    }
}

#[test]
fn tables_of_packed_weights_agree_bit_for_bit() {
    let packing: Vec<_> = tables().into_iter().skip(1).collect();
    let mut random = Random(2);
    for dtype in DType::WEIGHTS {
        let (rows, cols) = (33, 768);
        let bytes = weight_bytes(dtype, rows, cols, &mut random);
        let x = activations("mixed", 21, cols, &mut random);
        let mut first = None;
        for table in &packing {
            let out = product(table, &packed(table, dtype, rows, cols, &bytes), None, &x, &[]);
            let first = first.get_or_insert_with(|| out.clone());
            same_bits(&out, first, &format!("{dtype} under {}", table.isa));
        }
    }
}

/// Of the bits of the outputs, by weight type in the order of `DType::WEIGHTS`; recorded under AVX2.
const FINGERPRINTS: [u64; DType::WEIGHTS.len()] = [
    0x3f63_70db_b52d_0370,
    0xde6f_5e07_12d6_8bbe,
    0x08ae_5d38_dd08_9c18,
    0x3f81_3f42_6e65_b17d,
    0x0d97_8111_5e7d_1e3a,
    0xd481_762d_bcd5_ae66,
    0xb716_17df_14fe_c466,
    0x5c35_f068_8d75_185d,
    0x7396_eecb_ecf3_99f9,
    0x76ce_1f65_6944_eafc,
    0x07b0_515e_18d3_0c8d,
    0x8d3e_7723_ea1d_4cc5,
    0x6412_2141_bd75_242c,
    0x9675_3bfc_cf3b_2c61,
    0x3a07_6cd1_39ac_fac7,
    0xbc6f_8f8b_0f6d_1d4e,
];

/// The first 64 bits that FNV-1a makes of the numbers' bits.
fn fingerprint(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|v| v.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// [`tables_of_packed_weights_agree_bit_for_bit`] across machines. A change of the arithmetic that is meant changes the
/// figures: take those that the failure prints.
#[test]
fn products_have_the_same_bits_on_every_architecture() {
    for table in tables().into_iter().skip(1) {
        let mut random = Random(21);
        let found = DType::WEIGHTS.map(|dtype| {
            let (rows, cols) = (33, 768);
            let w = packed(
                table,
                dtype,
                rows,
                cols,
                &weight_bytes(dtype, rows, cols, &mut random),
            );
            let x = activations("outliers", 13, cols, &mut random);
            fingerprint(&product(table, &w, None, &x, &[]))
        });
        assert_eq!(found, FINGERPRINTS, "under {}: {found:#018x?}", table.isa);
    }
}

#[test]
fn splits_of_columns_do_not_change_bits_and_the_bias_is_added() {
    let mut random = Random(3);
    for table in tables() {
        for dtype in DType::WEIGHTS {
            let (rows, cols) = (71, 512);
            let bytes = weight_bytes(dtype, rows, cols, &mut random);
            let w = packed(table, dtype, rows, cols, &bytes);
            let x = activations("ordinary", 9, cols, &mut random);
            let bias: Vec<f32> = (0..rows).map(|_| random.unit()).collect();
            let whole = product(table, &w, None, &x, &[]);
            let split = product(table, &w, None, &x, &[16, 16, 48, 64]);
            same_bits(&whole, &split, &format!("{dtype} under {}", table.isa));
            let biased = product(table, &w, Some(&bias), &x, &[32]);
            let sums: Vec<f32> = whole
                .iter()
                .enumerate()
                .map(|(i, v)| v + bias[i % rows])
                .collect();
            same_bits(
                &biased,
                &sums,
                &format!("{dtype} with a bias under {}", table.isa),
            );
        }
    }
}

#[test]
fn a_gated_pair_is_its_two_products_and_the_activation() {
    let mut random = Random(4);
    for table in tables() {
        let (rows, cols) = (50, 256);
        let make = |dtype, random: &mut Random| {
            packed(table, dtype, rows, cols, &weight_bytes(dtype, rows, cols, random))
        };
        let gate = make(DType::Quant(QuantType::Q4K), &mut random);
        let up = make(DType::Quant(QuantType::Q6K), &mut random);
        for n in [1, 3, 20] {
            let x = activations("ordinary", n, cols, &mut random);
            for act in [
                Activation::Silu,
                Activation::GeluTanh,
                Activation::Gelu,
                Activation::Relu,
            ] {
                let mut expected = product(table, &gate, None, &x, &[]);
                table.glu(act, &mut expected, &product(table, &up, None, &x, &[]));
                let mut scratch = vec![0; n * scratch_bytes(table, cols)];
                prepare(table, &x, cols, &mut scratch);
                let mut out = vec![f32::NAN; n * rows];
                for columns in [0..32, 32..rows] {
                    run_glu(
                        table,
                        [&gate, &up],
                        act,
                        &x,
                        scratch.as_slice().into(),
                        columns,
                        |row, column, values| {
                            out[row * rows + column..][..values.len()].copy_from_slice(values);
                        },
                    );
                }
                same_bits(&out, &expected, &format!("{act:?}, {n} rows under {}", table.isa));
            }
        }
    }
}

#[test]
fn packing_is_reversible() {
    let mut random = Random(5);
    for table in tables() {
        for dtype in DType::WEIGHTS {
            for (rows, cols) in sizes(dtype) {
                let bytes = weight_bytes(dtype, rows, cols, &mut random);
                let w = packed(table, dtype, rows, cols, &bytes);
                let expected = dynair::quant::decode(dtype, &bytes, rows * cols).expect("they were encoded");
                let mut row = vec![0.0; cols];
                for (r, expected) in expected.chunks(cols).enumerate() {
                    w.decode_row(r, &mut row);
                    same_bits(
                        &row,
                        expected,
                        &format!("{dtype} [{rows}, {cols}] row {r} under {}", table.isa),
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_affects_itself_alone() {
    let mut random = Random(6);
    for table in tables() {
        for dtype in DType::WEIGHTS {
            let (rows, cols) = (20, 512);
            let w = packed(
                table,
                dtype,
                rows,
                cols,
                &weight_bytes(dtype, rows, cols, &mut random),
            );
            for n in [3, 8, 19] {
                let x = activations("ordinary", n, cols, &mut random);
                let clean = product(table, &w, None, &x, &[]);
                for wild in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = x.clone();
                    x[cols + 300] = wild;
                    let out = product(table, &w, None, &x, &[]);
                    let what = format!("{dtype}, {n} rows, {wild} under {}", table.isa);
                    assert!(out[rows..2 * rows].iter().all(|v| !v.is_finite()), "{what}");
                    same_bits(&out[..rows], &clean[..rows], &what);
                    same_bits(&out[2 * rows..], &clean[2 * rows..], &what);
                }
            }
        }
    }
}

#[test]
fn zeros_give_zeros_and_no_rows_give_nothing() {
    let mut random = Random(7);
    for table in tables() {
        for dtype in DType::WEIGHTS {
            let (rows, cols) = (18, 256);
            let w = packed(
                table,
                dtype,
                rows,
                cols,
                &weight_bytes(dtype, rows, cols, &mut random),
            );
            for n in [1, 6] {
                assert!(
                    product(table, &w, None, &vec![0.0; n * cols], &[])
                        .iter()
                        .all(|v| *v == 0.0)
                );
            }
            assert!(product(table, &w, None, &[], &[]).is_empty());
            let zero = packed(
                table,
                dtype,
                rows,
                cols,
                &vec![0; dtype.row_bytes(cols).expect("whole blocks") * rows],
            );
            let x = activations("huge", 6, cols, &mut random);
            assert!(
                product(table, &zero, None, &x, &[]).iter().all(|v| *v == 0.0),
                "{dtype} under {}",
                table.isa
            );
        }
    }
}

/// Every scale of MXFP4, the two subnormal ones and the largest too. The activation's code is the largest and its scale
/// a power of two, so nothing rounds.
#[test]
fn every_exponent_of_mxfp4_is_met_exactly() {
    let dtype = DType::Quant(QuantType::Mxfp4);
    let mut bytes = vec![0; 256 * 17];
    for (e, block) in bytes.chunks_exact_mut(17).enumerate() {
        // Element 0 has code 1, which is one halved step.
        (block[0], block[1]) = (e as u8, 1);
    }
    for table in tables() {
        let w = packed(table, dtype, 256, 32, &bytes);
        for n in [1, 16] {
            for (exponents, power) in [(0..128, 20), (128..256, -20)] {
                let mut x = vec![0.0; n * 32];
                x.iter_mut()
                    .step_by(32)
                    .for_each(|x| *x = 16383.0 * 2f32.powi(power));
                let out = product(table, &w, None, &x, &[]);
                for e in exponents {
                    let expected = 2f32.powi(e - 128 + power) * 16383.0;
                    for row in out.chunks_exact(256) {
                        let found = row[e as usize];
                        assert_eq!(found, expected, "exponent {e}, {n} rows under {}", table.isa);
                    }
                }
            }
        }
    }
}

#[test]
fn bytes_that_do_not_fit_the_declaration_are_refused() {
    for table in tables() {
        let decl = WeightDecl {
            name: "blk.0.attn_q.weight".into(),
            dtype: DType::Quant(QuantType::Q4K),
            first_row: 0,
            rows: 3,
            cols: 256,
            experts: 1,
        };
        let error = pack(table, &decl, &WeightBytes::Owned(Arc::from(vec![0; 100]))).expect_err("too short");
        assert_eq!(
            error.to_string(),
            "weight `blk.0.attn_q.weight`: 100 bytes, expected 432"
        );
        let ids = WeightDecl {
            dtype: DType::I32,
            ..decl
        };
        assert!(pack(table, &ids, &WeightBytes::Owned(Arc::from(vec![0; 3072]))).is_err());
    }
}

/// Both operands have 8 significant bits: a weight is cut after its scale was raised to make up for that (up to 2^-7
/// either way), an activation rounded (2^-9); sums are f32. Scales and minima are rounded to f16 (2^-11 each): where they
/// cancel, that is more of the weight, and [`check_tiles`] adds it.
const TILE_BOUND: f64 = 1.0 / 128.0 + 1.0 / 512.0 + 1e-4;

/// Tables that have tiles.
fn tile_tables() -> Vec<&'static KernelTable> {
    tables().into_iter().filter(|t| tiles(t, 1000, 32)).collect()
}

#[test]
fn products_from_tiles_match_f64() {
    let mut random = Random(11);
    for table in tile_tables() {
        for dtype in DType::WEIGHTS {
            let sizes = sizes(dtype)
                .into_iter()
                .filter(|(_, cols)| cols.is_multiple_of(32));
            // More columns than a chunk of K, and than a block of rows lets stay in the cache.
            for (rows, cols) in sizes.chain([(33, 1792)]) {
                let bytes = weight_bytes(dtype, rows, cols, &mut random);
                let w = packed(table, dtype, rows, cols, &bytes);
                let decoded = dynair::quant::decode(dtype, &bytes, rows * cols).expect("they were encoded");
                for (kind, n) in [
                    ("ordinary", 300),
                    ("huge", 33),
                    ("outliers", 16),
                    ("mixed", 9),
                    ("sparse", 49),
                ] {
                    let x = activations(kind, n, cols, &mut random);
                    let out = tile_product(table, &w, &x, &[]);
                    check_tiles(
                        &out,
                        &decoded,
                        &x,
                        cols,
                        &format!("{dtype} [{rows}, {cols}] {kind}"),
                    );
                    let last = tile_product(table, &w, &x[(n - 1) * cols..], &[]);
                    same_bits(
                        &out[(n - 1) * rows..],
                        &last,
                        &format!("{dtype} [{rows}, {cols}] alone"),
                    );
                    if rows > 32 {
                        let split = tile_product(table, &w, &x, &[16, 32]);
                        same_bits(&out, &split, &format!("{dtype} [{rows}, {cols}] split"));
                    }
                }
            }
        }
    }
}

fn check_tiles(out: &[f32], decoded: &[f32], x: &[f32], cols: usize, what: &str) {
    let rows = decoded.len() / cols;
    let (mut errors, mut terms) = (0.0, 0.0);
    for (i, x) in x.chunks(cols).enumerate() {
        for (r, w) in decoded.chunks(cols).enumerate() {
            let products = || w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let (truth, sum): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
            let largest = w.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
            let all: f64 = x.iter().map(|v| f64::from(v.abs()) * largest).sum();
            let bound = TILE_BOUND * sum + all / 1024.0;
            let error = (f64::from(out[i * rows + r]) - truth).abs();
            assert!(
                error <= bound + 1e-30,
                "{what}, row {i}, output {r}: off by {error}, expected at most {bound}"
            );
            errors += error * error;
            terms += products().map(|p| p * p).sum::<f64>();
        }
    }
    // Independent roundings add as squares: 2^-7 and 2^-8 / sqrt(12), times 0.7 for values between powers of two, make
    // 1.8e-3. Outliers leave few terms that matter, so that the two may double.
    assert!(
        errors.sqrt() <= 4e-3 * terms.sqrt() + 1e-30,
        "{what}: spread {}",
        (errors / terms).sqrt()
    );
}

#[test]
fn what_is_no_number_stays_in_its_row_of_a_tile() {
    let mut random = Random(12);
    for table in tile_tables() {
        let (rows, cols) = (32, 256);
        let bytes = weight_bytes(DType::Quant(QuantType::Q4K), rows, cols, &mut random);
        let w = packed(table, DType::Quant(QuantType::Q4K), rows, cols, &bytes);
        let mut x = activations("ordinary", 20, cols, &mut random);
        let clean = tile_product(table, &w, &x, &[]);
        x[3 * cols + 7] = f32::NAN;
        x[17 * cols] = f32::INFINITY;
        let out = tile_product(table, &w, &x, &[]);
        for (i, (out, clean)) in out.chunks(rows).zip(clean.chunks(rows)).enumerate() {
            match i {
                3 | 17 => assert!(out.iter().all(|v| !v.is_finite()), "row {i}"),
                _ => same_bits(out, clean, &format!("row {i}")),
            }
        }
    }
}

#[test]
fn a_gated_pair_from_tiles_is_its_two_products_and_the_activation() {
    let mut random = Random(13);
    let (q6_k, q8_0) = (DType::Quant(QuantType::Q6K), DType::Quant(QuantType::Q8_0));
    // F32 weights have no tiles; beside them the other of the pair has.
    let types = [[q6_k, q6_k], [q6_k, q8_0], [DType::F32, q6_k], [q8_0, DType::F32]];
    for (table, types) in tile_tables()
        .into_iter()
        .flat_map(|t| types.map(|types| (t, types)))
    {
        let (rows, cols, n) = (48, 512, 21);
        let [gate, up] = types.map(|dtype| {
            let bytes = weight_bytes(dtype, rows, cols, &mut random);
            packed(table, dtype, rows, cols, &bytes)
        });
        let x = activations("ordinary", n, cols, &mut random);
        let mut expected = tile_product(table, &gate, &x, &[]);
        table.glu(
            Activation::Silu,
            &mut expected,
            &tile_product(table, &up, &x, &[]),
        );
        let scratch = as_tiles(table, &x, cols);
        let mut out = vec![f32::NAN; n * rows];
        for columns in [0..32, 32..rows] {
            let prepared = Prepared::Tiles(&scratch);
            run_glu(
                table,
                [&gate, &up],
                Activation::Silu,
                &x,
                prepared,
                columns,
                |row, column, values| {
                    out[row * rows + column..][..values.len()].copy_from_slice(values);
                },
            );
        }
        same_bits(&out, &expected, "a gated pair");
    }
}
