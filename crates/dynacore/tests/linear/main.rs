//! Linear kernels: every weight type under every table this CPU has, against an f64 product with decoded weights, and
//! against themselves bit for bit under other numbers of rows and other splits.

use std::sync::Arc;

use dynacore::WeightBytes;
use dynacore::cpu::ops::linear::{Form, has_form};
use dynacore::cpu::pack::pack;
use dynacore::cpu::table::tables;
use dynair::{Activation, DType, QuantType, WeightDecl};
use support::*;

mod forms;
mod support;

const ROWS: [usize; 10] = [1, 2, 3, 4, 5, 7, 8, 16, 17, 33];

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
                    check(16383.0, &all, &decoded, &x, cols, &what);
                    for n in ROWS {
                        let some = product(table, w, None, &x[..n * cols], &[]);
                        same_bits(&some, &all[..n * rows], &format!("{what}, {n} rows"));
                    }
                }
            }
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
    let types = [DType::Quant(QuantType::Q4K), DType::Quant(QuantType::Q6K)];
    let acts = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::Gelu,
        Activation::Relu,
    ];
    // The second is longer than the runs of row groups that few rows of x are multiplied with together.
    for (form, rows) in [
        (Form::Records, 50),
        (Form::Records, 33 * 16 + 5),
        (Form::Short, 33 * 16 + 5),
    ] {
        let cols = 256;
        for table in tables()
            .into_iter()
            .filter(|t| form == Form::Records || has_form(t, form))
        {
            let [gate, up] =
                types.map(|t| packed(table, t, rows, cols, &weight_bytes(t, rows, cols, &mut random)));
            for n in [1, 3, 20, 40] {
                let x = activations("ordinary", n, cols, &mut random);
                let act = acts[n % acts.len()];
                let what = format!("{form:?}, {act:?}, {n} rows under {}", table.isa);
                let splits = [32, rows / 16 * 16];
                check_glu(form, table, [&gate, &up], act, &x, &splits, &what);
            }
            let x = activations("ordinary", 2, cols, &mut random);
            for act in acts {
                let what = format!("{form:?}, {act:?} under {}", table.isa);
                check_glu(form, table, [&gate, &up], act, &x, &[32], &what);
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
