//! Weights, activations and products for the tests, and what an f64 product allows.

use std::sync::Arc;

use dynacore::WeightBytes;
use dynacore::cpu::ops::linear::{Form, Prepared, form_bytes, prepare_all, run, run_glu};
use dynacore::cpu::pack::{PackedLinear, pack};
use dynacore::cpu::table::KernelTable;
use dynair::{Activation, DType, QuantType, WeightDecl};

/// Splitmix64: small, and the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From -1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
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

/// Gives blocks the factors (and, where they have only one byte of exponent, that) of other ones.
pub(crate) fn restore_heads(dtype: DType, bytes: &mut [u8], from: &[u8]) {
    let size = dtype.block().1;
    for (block, from) in bytes.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
        for &at in heads(dtype) {
            block[at..at + 2].copy_from_slice(&from[at..at + 2]);
        }
        if dtype == DType::Quant(QuantType::Mxfp4) {
            block[0] = from[0];
        }
    }
}

/// Bytes of `rows * cols` elements: every code and scale occurs, with factors of ordinary size.
pub(crate) fn weight_bytes(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
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

pub(crate) fn packed(
    table: &KernelTable,
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: &[u8],
) -> PackedLinear {
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

/// The whole product `[n, rows]` from records, in the given splits of columns.
pub(crate) fn product(
    table: &KernelTable,
    w: &PackedLinear,
    bias: Option<&[f32]>,
    x: &[f32],
    splits: &[usize],
) -> Vec<f32> {
    product_from(Form::Records, table, w, bias, x, splits)
}

/// Rows of activations in a form.
pub(crate) fn prepared(form: Form, table: &KernelTable, x: &[f32], cols: usize) -> Vec<u8> {
    let mut scratch = vec![0xff; form_bytes(table, form, x.len() / cols, cols)];
    prepare_all(table, form, x, cols, &mut scratch);
    scratch
}

/// As [`product`], from a form.
pub(crate) fn product_from(
    form: Form,
    table: &KernelTable,
    w: &PackedLinear,
    bias: Option<&[f32]>,
    x: &[f32],
    splits: &[usize],
) -> Vec<f32> {
    let n = x.len() / w.cols();
    let scratch = prepared(form, table, x, w.cols());
    let mut out = vec![f32::NAN; n * w.rows()];
    let mut written = vec![0; out.len()];
    let mut start = 0;
    for &end in splits.iter().chain([&w.rows()]) {
        let prepared = Prepared::of(form, &scratch);
        run(table, w, bias, x, prepared, start..end, |row, column, values| {
            for (i, v) in values.iter().enumerate() {
                out[row * w.rows() + column + i] = *v;
                written[row * w.rows() + column + i] += 1;
            }
        });
        start = end;
    }
    assert!(written.iter().all(|w| *w == 1), "every output is written once");
    out
}

/// Holds a gated pair, in the given splits of columns, against its two products and the activation, bit for bit.
pub(crate) fn check_glu(
    form: Form,
    table: &KernelTable,
    [gate, up]: [&PackedLinear; 2],
    act: Activation,
    x: &[f32],
    splits: &[usize],
    what: &str,
) {
    let (rows, cols) = (gate.rows(), gate.cols());
    let mut expected = product_from(form, table, gate, None, x, &[]);
    table.glu(act, &mut expected, &product_from(form, table, up, None, x, &[]));
    let scratch = prepared(form, table, x, cols);
    let mut out = vec![f32::NAN; expected.len()];
    let mut start = 0;
    for &end in splits.iter().chain([&rows]) {
        let prepared = Prepared::of(form, &scratch);
        run_glu(
            table,
            [gate, up],
            act,
            x,
            prepared,
            start..end,
            |row, column, values| {
                out[row * rows + column..][..values.len()].copy_from_slice(values);
            },
        );
        start = end;
    }
    same_bits(&out, &expected, what);
}

pub(crate) fn same_bits(a: &[f32], b: &[f32], what: &str) {
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
pub(crate) fn activations(kind: &str, n: usize, cols: usize, random: &mut Random) -> Vec<f32> {
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

/// The largest error of an output that the arithmetic may leave with activations whose largest code is `code`.
///
/// Codes of 15 bits, for example: each activation is off by at most half a step, `amax / 16383 / 2`, where `amax` is its group's
/// largest; with f32 kernels that part is absent but stays in the bound. Rounding in f32: a group's terms are at most
/// `32 * amax * max|w|` (twice for a type whose scale and minimum cancel), each of some tens of additions rounds by
/// 6e-8, and they add up to less than 1e-6 of the terms for the sizes here.
fn bound(code: f64, w: &[f32], x: &[f32]) -> f64 {
    let largest = w.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
    w.chunks(32)
        .zip(x.chunks(32))
        .map(|(w, x)| {
            let amax = x.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
            let sum: f64 = w.iter().map(|v| f64::from(v.abs())).sum();
            amax * (sum * 0.501 / code + 1e-6 * 64.0 * largest)
        })
        .sum()
}

pub(crate) const KINDS: [&str; 6] = ["ordinary", "tiny", "huge", "mixed", "outliers", "sparse"];

/// Output rows and columns: one block, a row group and one more, several panels.
pub(crate) fn sizes(dtype: DType) -> Vec<(usize, usize)> {
    match dtype.block().0 {
        1 => vec![(1, 1), (17, 33), (40, 577), (16, 512)],
        32 => vec![(1, 32), (17, 96), (40, 1120), (16, 512)],
        block => vec![(1, block), (17, 3 * block), (40, 5 * block), (16, 2 * block)],
    }
}

/// Holds outputs against an f64 product, within [`bound`].
pub(crate) fn check(code: f64, out: &[f32], decoded: &[f32], x: &[f32], cols: usize, what: &str) {
    let rows = decoded.len() / cols;
    for (i, x) in x.chunks(cols).enumerate() {
        for (r, w) in decoded.chunks(cols).enumerate() {
            let truth: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            let found = f64::from(out[i * rows + r]);
            let bound = bound(code, w, x);
            assert!(
                (found - truth).abs() <= bound,
                "{what}, row {i}, output {r}: {found}, expected {truth} within {bound}"
            );
        }
    }
}
