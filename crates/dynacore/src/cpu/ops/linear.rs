//! Products of activations with a weight: `Linear`, and the product part of `LinearGroup` and `LinearGlu`.
//!
//! A product of `x [n, K]` takes two phases with a barrier between them. First the rows of x are *prepared*: any
//! worker may take any share of rows ([`prepare`]; several products of one x share the result). Then each worker
//! computes a range of output columns ([`run`], [`run_glu`]). Results go to a sink, in pieces of up to sixteen
//! neighbouring columns of one row, so that the caller alone decides where outputs lie.
//!
//! Rows are prepared in one of three forms. From *records* an output element depends on its own row of x and its own
//! row of the weight alone: bit for bit the same whatever `n`, the order of rows, and the split into workers (see
//! [`crate::cpu::kernels`]). *Short* records and *tiles*, where the table has them, are faster for several and for many
//! rows and less precise (see `lanes::dot8` and [`crate::cpu::kernels::amx`]); as it is the number of rows that decides,
//! they are for `auto` mode alone.

use std::ops::Range;

use dynair::{Activation, DType, QuantType};

#[cfg(target_arch = "x86_64")]
use crate::cpu::kernels::amx;
use crate::cpu::kernels::{GROUP, GroupArgs, RECORD, ROWS, SHORT_RECORD, portable};
use crate::cpu::pack::PackedLinear;
use crate::cpu::table::{KernelTable, LaneKernels, slot};

/// Splits of output columns start at multiples of this.
pub const COLUMN_ALIGN: usize = ROWS;

/// Bytes of prepared rows that pass one row group before the next does: they stay in the second-level cache.
const BLOCK_BYTES: usize = 320 << 10;

/// Least number of rows that pass one row group before the next: the cost of expanding the weights is spread over them.
const LEAST_BLOCK: usize = 48;

/// Up to so many rows, weights that are finished together are read in long runs: [`TOGETHER`] row groups of one, then those
/// of the other. Turn by turn they come at three quarters of the speed of one (Zen 4, one row of gate and up).
const STREAMED: usize = 32;
const TOGETHER: usize = 32;

/// Rows of activations that are prepared together as tiles.
pub const TILE_ROWS: usize = 16;

/// From how many rows on products with a type are faster from tiles than from short records, or, where these are too
/// coarse, from whole ones. Measured with `bench_linear` by two threads.
const fn tiles_from(dtype: DType, whole: bool) -> usize {
    match dtype {
        // They read x itself.
        DType::F32 => 0,
        _ if whole && !matches!(dtype, DType::F16 | DType::Bf16) => 7,
        DType::Quant(QuantType::Q3K) => 13,
        DType::Quant(QuantType::Q6K) => 11,
        _ => 9,
    }
}

/// How rows of activations are prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Codes of 15 bits, row by row, by [`prepare`]. Under tables that read x itself there is nothing to prepare.
    Records,
    /// Codes of 8 bits, row by row, by [`prepare`].
    Short,
    /// bf16, [`TILE_ROWS`] rows together, by [`prepare_tiles`].
    Tiles,
}

/// What prepared rows meet: the types of weights they are multiplied with, and whether that must be as whole records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meets {
    /// A bit for each, by slot.
    types: u16,
    whole: bool,
}

const _: () = assert!(DType::WEIGHTS.len() <= u16::BITS as usize, "a bit for each type");

impl Meets {
    /// Weights of these types; `whole`: [`Form::Short`] would be too coarse.
    pub fn of(whole: bool, types: impl IntoIterator<Item = DType>) -> Meets {
        Meets {
            types: types.into_iter().fold(0, |set, dtype| set | 1 << slot(dtype)),
            whole,
        }
    }

    /// The largest of the types' values.
    fn most(self, value: impl Fn(DType) -> usize) -> usize {
        let of = |dtype: &DType| self.types & 1 << slot(*dtype) != 0;
        let values = DType::WEIGHTS.into_iter().filter(of).map(value);
        values.max().unwrap_or(0)
    }
}

/// The form that products of `n` rows of `cols` values that meet these weights are fastest from, for `auto` mode.
pub fn form(table: &KernelTable, n: usize, cols: usize, meets: Meets) -> Form {
    let groups = cols > 0 && cols.is_multiple_of(GROUP);
    let tiles_from = meets.most(|dtype| tiles_from(dtype, meets.whole));
    // Nothing but f32 weights: nothing is prepared for them.
    if groups && has_tiles(table) && tiles_from > 0 && n >= tiles_from {
        Form::Tiles
    } else {
        row_form(table, n, cols, meets)
    }
}

/// As [`form`], of the forms that stand row by row.
pub fn row_form(table: &KernelTable, n: usize, cols: usize, meets: Meets) -> Form {
    let from = match &table.short {
        Some(short) if !meets.whole && cols.is_multiple_of(GROUP) => meets.most(|t| short.from[slot(t)]),
        _ => 0,
    };
    if from > 0 && n >= from {
        Form::Short
    } else {
        Form::Records
    }
}

/// Whether the table has kernels for a form.
pub fn has_form(table: &KernelTable, form: Form) -> bool {
    match form {
        Form::Records => table.lanes.is_some(),
        Form::Short => table.short.is_some(),
        Form::Tiles => has_tiles(table),
    }
}

/// Prepared rows of activations.
#[derive(Debug, Clone, Copy)]
pub enum Prepared<'a> {
    /// [`Form::Records`].
    Records(&'a [u8]),
    /// [`Form::Short`].
    Short(&'a [u8]),
    /// [`Form::Tiles`].
    Tiles(&'a [u8]),
}

impl<'a> Prepared<'a> {
    /// Bytes that hold rows in a form.
    pub fn of(form: Form, bytes: &'a [u8]) -> Prepared<'a> {
        match form {
            Form::Records => Prepared::Records(bytes),
            Form::Short => Prepared::Short(bytes),
            Form::Tiles => Prepared::Tiles(bytes),
        }
    }
}

/// Bytes that `n` prepared rows take.
pub fn form_bytes(table: &KernelTable, form: Form, n: usize, cols: usize) -> usize {
    match form {
        Form::Tiles => n.div_ceil(TILE_ROWS) * tile_bytes(cols),
        _ => n * scratch_bytes(table, form, cols),
    }
}

/// Whether the table has tiles.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_tiles(table: &KernelTable) -> bool {
    table.tiles.is_some()
}

/// Whether the table has tiles.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn has_tiles(_: &KernelTable) -> bool {
    false
}

/// Bytes of scratch that the tiles of [`TILE_ROWS`] rows take.
pub fn tile_bytes(cols: usize) -> usize {
    TILE_ROWS * 2 * cols + 4 * TILE_ROWS
}

/// Prepares up to [`TILE_ROWS`] rows of activations `x [m, K]` as tiles, [`tile_bytes`] of them; an alignment of 64 is
/// best.
///
/// # Panics
/// If the lengths do not agree, K is no multiple of 32, or the table has no tiles.
pub fn prepare_tiles(table: &KernelTable, x: &[f32], cols: usize, scratch: &mut [u8]) {
    assert!(
        cols > 0
            && cols.is_multiple_of(GROUP)
            && x.len() <= TILE_ROWS * cols
            && scratch.len() == tile_bytes(cols),
        "the rows of a tile"
    );
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = &table.tiles {
        let (tiles, sums) = scratch.split_at_mut(tile_bytes(cols) - 4 * TILE_ROWS);
        let mut factors = [0.0; TILE_ROWS];
        // SAFETY: a table with these kernels is handed out only if the CPU has its instruction set.
        unsafe { (kernels.prepare)(x, cols, tiles, &mut factors) }
        for (sum, factor) in sums.as_chunks_mut().0.iter_mut().zip(factors) {
            *sum = factor.to_le_bytes();
        }
        return;
    }
    panic!("{table:?} has no tiles");
}

/// Bytes of scratch that a row of x takes in a form that stands row by row; 0 under tables that read x itself.
///
/// Row `i` of x is prepared into bytes `i * scratch_bytes..(i + 1) * scratch_bytes`; an alignment of 64 is best.
///
/// # Panics
/// If the form is [`Form::Tiles`].
pub fn scratch_bytes(table: &KernelTable, form: Form, cols: usize) -> usize {
    match kernels(table, form) {
        Some((_, record)) => cols / GROUP * record,
        None => 0,
    }
}

/// The kernels of packed weights for a form that stands row by row, and the bytes of its records.
fn kernels(table: &KernelTable, form: Form) -> Option<(&LaneKernels, usize)> {
    match form {
        Form::Records => table.lanes.as_ref().map(|k| (k, RECORD)),
        Form::Short => table.short.as_ref().map(|k| (&k.lanes, SHORT_RECORD)),
        Form::Tiles => panic!("tiles do not stand row by row"),
    }
}

/// Prepares rows of activations `x [m, K]` into their scratch, `m * scratch_bytes` bytes.
///
/// Where K is no multiple of 32, only float weights can follow; they read x itself, and the scratch is not used.
///
/// # Panics
/// If the lengths do not agree, or the form is [`Form::Tiles`].
pub fn prepare(table: &KernelTable, form: Form, x: &[f32], cols: usize, scratch: &mut [u8]) {
    let Some((kernels, record)) = kernels(table, form) else {
        return;
    };
    let bytes = cols / GROUP * record;
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
        unsafe { (kernels.prepare)(x, records) }
    }
}

/// Prepares all rows of `x [n, K]` in a form, into [`form_bytes`] bytes.
///
/// # Panics
/// As [`prepare`] and [`prepare_tiles`].
pub fn prepare_all(table: &KernelTable, form: Form, x: &[f32], cols: usize, scratch: &mut [u8]) {
    if form != Form::Tiles {
        return prepare(table, form, x, cols, scratch);
    }
    let rows = x.chunks(TILE_ROWS * cols);
    assert_eq!(
        rows.len() * tile_bytes(cols),
        scratch.len(),
        "scratch has as many tiles as the activations"
    );
    for (x, out) in rows.zip(scratch.chunks_exact_mut(tile_bytes(cols))) {
        prepare_tiles(table, x, cols, out);
    }
}

/// Output columns `columns` of `x [n, K] * weight^T (+ bias)`; `prepared` holds the n prepared rows.
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
    prepared: Prepared<'_>,
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
        prepared,
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
    prepared: Prepared<'_>,
    columns: Range<usize>,
    mut put: impl FnMut(usize, usize, &[f32]),
) {
    assert_eq!(
        (gate.rows(), gate.cols()),
        (up.rows(), up.cols()),
        "gate and up have one shape"
    );
    let mut finish = |first: usize, column: usize, g: &mut [[f32; ROWS]], u: &[[f32; ROWS]]| {
        table.glu(act, g.as_flattened_mut(), u.as_flattened());
        for (i, values) in g.iter().enumerate() {
            put(first + i, column, &values[..ROWS.min(gate.rows() - column)]);
        }
    };
    let product = |weight| Product {
        table,
        weights: [weight],
        x,
        prepared,
    };
    if from_tiles(table, gate) != from_tiles(table, up) {
        // One way of walking for both there is only where both are made in the same way.
        let n = x.len().checked_div(gate.cols()).unwrap_or(0);
        let first_column = columns.start;
        let at = |column: usize| (column - first_column) / ROWS * n;
        let mut gates = vec![[0.0; ROWS]; columns.len().div_ceil(ROWS) * n];
        product(gate).for_groups(columns.clone(), |first, column, [g]| {
            gates[at(column) + first..][..g.len()].copy_from_slice(g);
        });
        product(up).for_groups(columns, |first, column, [u]| {
            finish(first, column, &mut gates[at(column) + first..][..u.len()], u);
        });
        return;
    }
    let product = Product {
        table,
        weights: [gate, up],
        x,
        prepared,
    };
    product.for_groups(columns, |first, column, [g, u]| finish(first, column, g, u));
}

/// Whether products with the weight are made from tiles, where they may be: F32 weights read x itself.
#[cfg(target_arch = "x86_64")]
fn from_tiles(table: &KernelTable, weight: &PackedLinear) -> bool {
    let kernels = table.tiles.as_ref();
    kernels.is_some_and(|k| k.expand[slot(weight.dtype())].is_some()) && weight.group(0).is_some()
}

#[cfg(not(target_arch = "x86_64"))]
fn from_tiles(_: &KernelTable, _: &PackedLinear) -> bool {
    false
}

struct Product<'a, const W: usize> {
    table: &'a KernelTable,
    weights: [&'a PackedLinear; W],
    x: &'a [f32],
    prepared: Prepared<'a>,
}

impl<const W: usize> Product<'_, W> {
    /// Computes row group by row group and row block by row block; `done(first row, first column, outputs)` takes
    /// each tile.
    fn for_groups(&self, columns: Range<usize>, mut done: impl FnMut(usize, usize, [&mut [[f32; ROWS]]; W])) {
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
        #[cfg(target_arch = "x86_64")]
        if let Some((kernels, tiles)) = self.tiles() {
            return self.for_tiles(kernels, tiles, n, columns, done);
        }
        // Whole tiles of every table: 24 is a multiple of 6 and 8.
        let row = scratch_bytes(self.table, self.rows_form(), cols);
        let block = (BLOCK_BYTES / row.max(1) / 24 * 24).max(LEAST_BLOCK);
        let groups = columns.start / ROWS..columns.end.div_ceil(ROWS);
        let together = if W > 1 && n <= STREAMED {
            TOGETHER.min(groups.len().max(1))
        } else {
            1
        };
        let mut acc: [Vec<[f32; ROWS]>; W] =
            std::array::from_fn(|_| vec![[0.0; ROWS]; together * n.min(block)]);
        let mut decoded = Vec::new();
        for first in (0..n).step_by(block) {
            let m = block.min(n - first);
            for start in groups.clone().step_by(together) {
                let some = start..groups.end.min(start + together);
                for (weight, acc) in self.weights.iter().zip(&mut acc) {
                    for (group, acc) in some.clone().zip(acc.chunks_exact_mut(m)) {
                        self.group(weight, group, first, acc, &mut decoded);
                    }
                }
                let mut accs = acc.each_mut().map(|acc| acc.chunks_exact_mut(m));
                for group in some {
                    let parts = accs.each_mut().map(|a| a.next().expect("a part for each group"));
                    done(first, group * ROWS, parts);
                }
            }
        }
    }

    /// The form of the kernels that take row by row: float weights, which read x itself, are in those of all forms.
    fn rows_form(&self) -> Form {
        match self.prepared {
            Prepared::Short(_) => Form::Short,
            Prepared::Records(_) | Prepared::Tiles(_) => Form::Records,
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
        let form = self.rows_form();
        let (Some((lanes, _)), Some(packed)) = (kernels(self.table, form), weight.group(group)) else {
            decoded.resize(cols, 0.0);
            for r in 0..ROWS.min(weight.rows() - group * ROWS) {
                weight.decode_row(group * ROWS + r, decoded);
                for (x, acc) in x.chunks_exact(cols).zip(acc.iter_mut()) {
                    acc[r] = portable::dot(decoded, x);
                }
            }
            return;
        };
        let records = match (weight.dtype(), self.prepared) {
            (DType::Quant(_), Prepared::Records(records) | Prepared::Short(records)) => {
                let bytes = scratch_bytes(self.table, form, cols);
                &records[first * bytes..(first + acc.len()) * bytes]
            }
            (DType::Quant(_), Prepared::Tiles(_)) => {
                unreachable!("every quantised type has tiles where the table has any")
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

#[cfg(target_arch = "x86_64")]
impl<const W: usize> Product<'_, W> {
    /// The prepared tiles, if the product is made from them.
    fn tiles(&self) -> Option<(&amx::TileKernels, &[u8])> {
        let (Prepared::Tiles(tiles), Some(kernels)) = (self.prepared, &self.table.tiles) else {
            return None;
        };
        let all = self.weights.iter().all(|w| from_tiles(self.table, w));
        all.then_some((kernels, tiles))
    }

    /// As [`Product::for_groups`], from tiles.
    fn for_tiles(
        &self,
        kernels: &amx::TileKernels,
        tiles: &[u8],
        n: usize,
        columns: Range<usize>,
        mut done: impl FnMut(usize, usize, [&mut [[f32; ROWS]]; W]),
    ) {
        let cols = self.weights[0].cols();
        let groups = columns.start / ROWS..columns.end.div_ceil(ROWS);
        // Those that are finished together follow each other.
        let weights: Vec<_> = groups
            .clone()
            .flat_map(|g| self.weights.map(|weight| row_group(kernels, weight, g)))
            .collect();
        let block = amx::block_rows(cols, n);
        TILE_BUFFERS.with_borrow_mut(|buffers| {
            for first in (0..n).step_by(block) {
                let m = block.min(n - first);
                let padded = m.next_multiple_of(TILE_ROWS);
                let at = |row: usize| row / TILE_ROWS * tile_bytes(cols);
                let args = amx::TileArgs {
                    weights: &weights,
                    cols,
                    x: &tiles[at(first)..at(first + padded)],
                };
                let finish = |set: usize, row: usize, sums: [&mut [[f32; ROWS]]; W]| {
                    let acc = sums.map(|s| {
                        let rows = s.len().min(m.saturating_sub(row));
                        &mut s[..rows]
                    });
                    done(first + row, (groups.start + set) * ROWS, acc);
                };
                // SAFETY: a table with these kernels is handed out only if the CPU has its instruction set and the
                // system permits tiles; the groups were packed for their types and this width; `done` finishes outputs
                // and makes no products.
                unsafe { amx::product(&args, buffers, finish) };
            }
        });
    }
}

/// A row group of a weight that [`Product::tiles`] has seen.
#[cfg(target_arch = "x86_64")]
fn row_group<'a>(kernels: &amx::TileKernels, weight: &'a PackedLinear, group: usize) -> amx::RowGroup<'a> {
    amx::RowGroup {
        packed: weight.group(group).expect("the weight is packed"),
        scales: weight.tile_scales()[group],
        expand: kernels.expand[slot(weight.dtype())].expect("the type has tiles"),
    }
}

#[cfg(target_arch = "x86_64")]
thread_local! {
    /// A worker's panel and sums: they are large, and every product needs them.
    static TILE_BUFFERS: std::cell::RefCell<amx::Buffers> = const { std::cell::RefCell::new(amx::Buffers::new()) };
}
