//! Products of activations with a weight: `Linear`, and the product part of `LinearGroup` and `LinearGlu`.
//!
//! A product of `x [n, K]` takes two phases with a barrier between them. First the rows of x are *prepared*: any
//! worker may take any share of rows ([`prepare`]; several products of one x share the result). Then each worker
//! computes a range of output columns ([`run`], [`run_glu`]). Results go to a sink, in pieces of up to sixteen
//! neighbouring columns of one row, so that the caller alone decides where outputs lie.
//!
//! Under every table an output element depends on its own row of x and its own row of the weight alone: bit for bit
//! the same whatever `n`, the order of rows, and the split into workers (see [`crate::cpu::kernels`]).

use std::ops::Range;

use dynair::Activation;

use crate::cpu::kernels::{GROUP, GroupArgs, RECORD, ROWS, portable};
use crate::cpu::pack::PackedLinear;
use crate::cpu::table::{KernelTable, slot};

/// Splits of output columns start at multiples of this.
pub const COLUMN_ALIGN: usize = ROWS;

/// Bytes of prepared rows that pass one row group before the next does: they stay in the second-level cache.
const BLOCK_BYTES: usize = 320 << 10;

/// Least number of rows that pass one row group before the next: the cost of expanding the weights is spread over them.
const LEAST_BLOCK: usize = 48;

/// Bytes of scratch that prepared activations take per row of x; 0 under tables that read x itself.
///
/// Row `i` of x is prepared into bytes `i * scratch_bytes..(i + 1) * scratch_bytes`; an alignment of 64 is best.
pub fn scratch_bytes(table: &KernelTable, cols: usize) -> usize {
    match table.lanes {
        Some(_) => cols / GROUP * RECORD,
        None => 0,
    }
}

/// Prepares rows of activations `x [m, K]` into their scratch, `m * scratch_bytes` bytes.
///
/// Where K is no multiple of 32, only float weights can follow; they read x itself, and the scratch is not used.
///
/// # Panics
/// If the lengths do not agree.
pub fn prepare(table: &KernelTable, x: &[f32], cols: usize, scratch: &mut [u8]) {
    let Some(lanes) = &table.lanes else { return };
    let bytes = scratch_bytes(table, cols);
    if bytes == 0 || !cols.is_multiple_of(GROUP) {
        return;
    }
    assert_eq!(
        x.len() / cols * bytes,
        scratch.len(),
        "scratch has as many rows as the activations"
    );
    for (x, records) in x.chunks_exact(cols).zip(scratch.chunks_exact_mut(bytes)) {
        // SAFETY: a table with these kernels is handed out only if the CPU has its instruction set; there is one
        // record per group of x.
        unsafe { (lanes.prepare)(x, records) }
    }
}

/// Output columns `columns` of `x [n, K] * weight^T (+ bias)`; `scratch` holds the n prepared rows.
///
/// `put(row, column, values)` is called with neighbouring columns of one row, every element of the range once.
///
/// # Panics
/// If the lengths do not agree, or `columns` neither starts at a multiple of [`COLUMN_ALIGN`] nor lies in the weight.
pub fn run(
    table: &KernelTable,
    weight: &PackedLinear,
    bias: Option<&[f32]>,
    x: &[f32],
    scratch: &[u8],
    columns: Range<usize>,
    mut put: impl FnMut(usize, usize, &[f32]),
) {
    if let Some(bias) = bias {
        assert_eq!(bias.len(), weight.rows(), "a bias has an element per output");
    }
    let product = Product {
        table,
        weights: [weight],
        x,
        scratch,
    };
    product.for_groups(columns, |first, column, [acc]| {
        for (i, values) in acc.iter_mut().enumerate() {
            let values = &mut values[..ROWS.min(weight.rows() - column)];
            if let Some(bias) = bias {
                values.iter_mut().zip(&bias[column..]).for_each(|(v, b)| *v += b);
            }
            put(first + i, column, values);
        }
    });
}

/// Output columns `columns` of `act(x * gate^T) * (x * up^T)`; otherwise as [`run`].
///
/// # Panics
/// As [`run`], and if the weights' shapes differ.
pub fn run_glu(
    table: &KernelTable,
    [gate, up]: [&PackedLinear; 2],
    act: Activation,
    x: &[f32],
    scratch: &[u8],
    columns: Range<usize>,
    mut put: impl FnMut(usize, usize, &[f32]),
) {
    assert_eq!(
        (gate.rows(), gate.cols()),
        (up.rows(), up.cols()),
        "gate and up have one shape"
    );
    let product = Product {
        table,
        weights: [gate, up],
        x,
        scratch,
    };
    product.for_groups(columns, |first, column, [g, u]| {
        table.glu(act, g.as_flattened_mut(), u.as_flattened());
        for (i, values) in g.iter().enumerate() {
            put(first + i, column, &values[..ROWS.min(gate.rows() - column)]);
        }
    });
}

struct Product<'a, const W: usize> {
    table: &'a KernelTable,
    weights: [&'a PackedLinear; W],
    x: &'a [f32],
    scratch: &'a [u8],
}

impl<const W: usize> Product<'_, W> {
    /// Computes row group by row group and row block by row block; `done(first row, first column, outputs)` takes
    /// each tile.
    fn for_groups(
        &self,
        columns: Range<usize>,
        mut done: impl FnMut(usize, usize, &mut [Vec<[f32; ROWS]>; W]),
    ) {
        let (rows, cols) = (self.weights[0].rows(), self.weights[0].cols());
        assert!(
            columns.start.is_multiple_of(ROWS) && columns.start <= columns.end && columns.end <= rows,
            "columns {columns:?} of {rows} start at a multiple of {ROWS}"
        );
        assert!(
            columns.end == rows || columns.end.is_multiple_of(ROWS),
            "columns {columns:?} of {rows} end at a multiple of {ROWS} or at the end"
        );
        let n = self.x.len().checked_div(cols).unwrap_or(0);
        assert_eq!(n * cols, self.x.len(), "activations are whole rows of {cols}");
        // Whole tiles of every table: 24 is a multiple of 6 and 8.
        let block = (BLOCK_BYTES / scratch_bytes(self.table, cols).max(1) / 24 * 24).max(LEAST_BLOCK);
        let mut acc: [Vec<[f32; ROWS]>; W] = std::array::from_fn(|_| vec![[0.0; ROWS]; n.min(block)]);
        let mut decoded = Vec::new();
        for first in (0..n).step_by(block) {
            let m = block.min(n - first);
            for column in columns.clone().step_by(ROWS) {
                for (weight, acc) in self.weights.iter().zip(&mut acc) {
                    acc.truncate(m);
                    self.group(weight, column / ROWS, first, acc, &mut decoded);
                }
                done(first, column, &mut acc);
            }
        }
    }

    fn group(
        &self,
        weight: &PackedLinear,
        group: usize,
        first: usize,
        acc: &mut [[f32; ROWS]],
        decoded: &mut Vec<f32>,
    ) {
        let cols = weight.cols();
        let x = &self.x[first * cols..(first + acc.len()) * cols];
        let (Some(lanes), Some(packed)) = (&self.table.lanes, weight.group(group)) else {
            decoded.resize(cols, 0.0);
            for r in 0..ROWS.min(weight.rows() - group * ROWS) {
                weight.decode_row(group * ROWS + r, decoded);
                for (x, acc) in x.chunks_exact(cols).zip(acc.iter_mut()) {
                    acc[r] = portable::dot(decoded, x);
                }
            }
            return;
        };
        let records = match weight.dtype() {
            dynair::DType::Quant(_) => {
                let bytes = scratch_bytes(self.table, cols);
                &self.scratch[first * bytes..(first + acc.len()) * bytes]
            }
            _ => &[],
        };
        let args = GroupArgs {
            weight: packed,
            cols,
            x,
            records,
        };
        // SAFETY: a table with these kernels is handed out only if the CPU has its instruction set; the group was
        // packed for this type and width, and `x` and `records` were cut to `acc.len()` rows.
        unsafe { lanes.groups[slot(weight.dtype())](&args, acc) }
    }
}
