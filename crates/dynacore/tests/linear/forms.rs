//! Products from the forms that are for `auto` mode: tiles and short records.

use dynacore::cpu::ops::linear::{Form, has_form};
use dynacore::cpu::table::{KernelTable, tables};
use dynair::{Activation, DType, QuantType};

use super::support::*;

/// Tables that have short records.
fn short_tables() -> Vec<&'static KernelTable> {
    tables()
        .into_iter()
        .filter(|t| has_form(t, Form::Short))
        .collect()
}

#[test]
fn products_from_short_records_match_f64_and_do_not_depend_on_the_other_rows() {
    let mut random = Random(21);
    for dtype in DType::WEIGHTS {
        let sizes = sizes(dtype)
            .into_iter()
            .filter(|(_, cols)| cols.is_multiple_of(32));
        for (rows, cols) in sizes {
            let bytes = weight_bytes(dtype, rows, cols, &mut random);
            let weights: Vec<_> = short_tables()
                .into_iter()
                .map(|t| (t, packed(t, dtype, rows, cols, &bytes)))
                .collect();
            let decoded = dynair::quant::decode(dtype, &bytes, rows * cols).expect("they were encoded");
            for kind in KINDS {
                // Enough for a panel under every table.
                let x = activations(kind, 50, cols, &mut random);
                let mut first: Option<Vec<f32>> = None;
                for (table, w) in &weights {
                    let what = format!("{dtype} [{rows}, {cols}] {kind} under {}", table.isa);
                    let all = product_from(Form::Short, table, w, None, &x, &[]);
                    check(127.0, &all, &decoded, &x, cols, &what);
                    // The same operations under all of them.
                    same_bits(&all, first.get_or_insert_with(|| all.clone()), &what);
                    for n in [1, 2, 3, 5, 7, 8, 11, 17, 33, 49] {
                        let some = product_from(Form::Short, table, w, None, &x[..n * cols], &[]);
                        same_bits(&some, &all[..n * rows], &format!("{what}, {n} rows"));
                    }
                }
            }
        }
    }
}

#[test]
fn the_largest_codes_fit_the_sums() {
    // Weights with all bits set or none, under activations of the largest magnitude: what sums of 16 bits hold at most, and
    // with whole codes those of 32.
    let forms = [(Form::Short, 127.0), (Form::Records, 16383.0)];
    let cases = tables().into_iter().flat_map(|t| forms.map(|f| (t, f)));
    for (table, (form, code)) in cases.filter(|(table, (form, _))| has_form(table, *form)) {
        for dtype in DType::WEIGHTS
            .into_iter()
            .filter(|t| matches!(t, DType::Quant(_)))
        {
            let (rows, cols) = (16, 512);
            for fill in [0x00, 0x88, 0xff] {
                let mut bytes = weight_bytes(dtype, rows, cols, &mut Random(22));
                let ordinary = bytes.clone();
                bytes.fill(fill);
                // Factors stay what they were.
                restore_heads(dtype, &mut bytes, &ordinary);
                let w = packed(table, dtype, rows, cols, &bytes);
                let decoded = dynair::quant::decode(dtype, &bytes, rows * cols).expect("whole blocks");
                for (n, sign) in [(3, 1.0), (3, -1.0), (50, 1.0), (50, -1.0)] {
                    let x = vec![sign; n * cols];
                    let out = product_from(form, table, &w, None, &x, &[]);
                    check(
                        code,
                        &out,
                        &decoded,
                        &x,
                        cols,
                        &format!("{dtype} {fill:#x} from {form:?} under {}", table.isa),
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_no_number_stays_in_its_row_of_short_records() {
    let mut random = Random(23);
    for table in short_tables() {
        for dtype in DType::WEIGHTS
            .into_iter()
            .filter(|t| matches!(t, DType::Quant(_)))
        {
            let (rows, cols) = (20, 512);
            let w = packed(
                table,
                dtype,
                rows,
                cols,
                &weight_bytes(dtype, rows, cols, &mut random),
            );
            for n in [3, 8, 50] {
                let x = activations("ordinary", n, cols, &mut random);
                let clean = product_from(Form::Short, table, &w, None, &x, &[]);
                for wild in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = x.clone();
                    x[cols + 300] = wild;
                    let out = product_from(Form::Short, table, &w, None, &x, &[]);
                    let what = format!("{dtype}, {n} rows, {wild} under {}", table.isa);
                    assert!(out[rows..2 * rows].iter().all(|v| !v.is_finite()), "{what}");
                    same_bits(&out[..rows], &clean[..rows], &what);
                    same_bits(&out[2 * rows..], &clean[2 * rows..], &what);
                }
            }
        }
    }
}

/// Both operands have 8 significant bits: a weight is cut after its scale was raised to make up for that (up to 2^-7
/// either way), an activation rounded (2^-9); sums are f32. Scales and minima are rounded to f16 (2^-11 each): where they
/// cancel, that is more of the weight, and [`check_tiles`] adds it.
const TILE_BOUND: f64 = 1.0 / 128.0 + 1.0 / 512.0 + 1e-4;

/// Tables that have tiles.
fn tile_tables() -> Vec<&'static KernelTable> {
    tables()
        .into_iter()
        .filter(|t| has_form(t, Form::Tiles))
        .collect()
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
                    ("ordinary", 401),
                    ("huge", 33),
                    ("outliers", 16),
                    ("mixed", 9),
                    ("sparse", 49),
                ] {
                    let x = activations(kind, n, cols, &mut random);
                    let out = product_from(Form::Tiles, table, &w, None, &x, &[]);
                    check_tiles(
                        &out,
                        &decoded,
                        &x,
                        cols,
                        &format!("{dtype} [{rows}, {cols}] {kind}"),
                    );
                    let last = product_from(Form::Tiles, table, &w, None, &x[(n - 1) * cols..], &[]);
                    same_bits(
                        &out[(n - 1) * rows..],
                        &last,
                        &format!("{dtype} [{rows}, {cols}] alone"),
                    );
                    if rows > 32 {
                        let split = product_from(Form::Tiles, table, &w, None, &x, &[16, 32]);
                        same_bits(&out, &split, &format!("{dtype} [{rows}, {cols}] split"));
                    }
                }
            }
        }
    }
}

#[test]
fn products_from_tiles_do_not_depend_on_how_much_is_made_at_once() {
    let mut random = Random(13);
    for table in tile_tables() {
        // Several chunks of K, blocks of rows, and runs of row groups whose sums wait together.
        let (rows, cols, n) = (1200, 1792, 401);
        let dtype = DType::Quant(QuantType::Q4K);
        let bytes = weight_bytes(dtype, rows, cols, &mut random);
        let w = packed(table, dtype, rows, cols, &bytes);
        let x = activations("ordinary", n, cols, &mut random);
        let out = product_from(Form::Tiles, table, &w, None, &x, &[]);
        let split = product_from(Form::Tiles, table, &w, None, &x, &[16, 608]);
        same_bits(&out, &split, "split");
        for row in [0, 40, 223, 224, 400] {
            let alone = product_from(Form::Tiles, table, &w, None, &x[row * cols..][..cols], &[]);
            same_bits(&out[row * rows..][..rows], &alone, &format!("row {row} alone"));
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
        let clean = product_from(Form::Tiles, table, &w, None, &x, &[]);
        x[3 * cols + 7] = f32::NAN;
        x[17 * cols] = f32::INFINITY;
        let out = product_from(Form::Tiles, table, &w, None, &x, &[]);
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
        // Few rows take runs of 32 row groups of each weight; more than 32 rows take pairs of row groups.
        for (rows, n) in [(48, 21), (33 * 16 + 5, 9), (33 * 16 + 5, 21), (48, 40)] {
            let cols = 512;
            let [gate, up] = types.map(|dtype| {
                let bytes = weight_bytes(dtype, rows, cols, &mut random);
                packed(table, dtype, rows, cols, &bytes)
            });
            let x = activations("ordinary", n, cols, &mut random);
            check_glu(
                Form::Tiles,
                table,
                [&gate, &up],
                Activation::Silu,
                &x,
                &[32],
                "tiles",
            );
        }
    }
}
