//! Ops whose rows do not meet: embedding, norms, element-wise ops, output rows, cache writes.
//!
//! Each takes the range of items a worker has; [`items`] says how many there are. An item is a few rows, or a run of
//! elements: enough work that splitting it pays, so that at one token most of these ops are one item.

use std::ops::Range;

use dynair::{BatchMeta, RopeStyle};

use super::rope::{Frequencies, rope};
use crate::cpu::kernels::ops::OpTable;
use crate::cpu::pool::shared::SharedMem;
use crate::cpu::program::{MapOp, Size, Val, ZipOp};
use crate::cpu::storage::{CpuCache, CpuWeight};

/// Elements of an item: about a microsecond of work, twice what waiting for a stage costs.
const ITEM_ELEMENTS: usize = 4096;

/// Rows of `width` elements that form an item.
fn rows_per_item(width: usize) -> usize {
    (ITEM_ELEMENTS / width.max(1)).max(1)
}

/// Items `rows` rows of `width` elements form.
pub(crate) fn items(rows: usize, width: usize) -> usize {
    rows.div_ceil(rows_per_item(width))
}

/// The rows some items hold.
pub(crate) fn rows_of(items: Range<usize>, rows: usize, width: usize) -> Range<usize> {
    let each = rows_per_item(width);
    (items.start * each).min(rows)..(items.end * each).min(rows)
}

/// The elements of some rows of `cols` elements.
fn by(x: &Val, cols: usize, rows: &Range<usize>) -> Range<usize> {
    x.at + rows.start * cols..x.at + rows.end * cols
}

/// What all ops of a step read.
pub(crate) struct Rows<'a> {
    pub(crate) table: &'static OpTable,
    pub(crate) arena: &'a SharedMem<f32>,
    pub(crate) size: Size,
    pub(crate) batch: &'a BatchMeta,
    /// The rotations' angles, see [`Rows::angles`].
    pub(crate) angles: &'a [SharedMem<f32>],
}

impl Rows<'_> {
    fn read(&self, x: &Val, rows: Range<usize>) -> &[f32] {
        self.arena.read(x.row_range(rows))
    }

    fn write(&self, out: &Val, rows: Range<usize>) -> &mut [f32] {
        self.arena.write(out.row_range(rows))
    }

    /// Items of an element-wise op over `x`.
    pub(crate) fn element_items(&self, x: &Val) -> usize {
        (x.bind(self.size) * x.width).div_ceil(ITEM_ELEMENTS)
    }

    /// Items of an op that takes `x` by rows of the leading dimension.
    pub(crate) fn row_items(&self, x: &Val) -> usize {
        items(x.bind(self.size), x.width)
    }

    /// Items of a norm of `x`, whose rows are those of the last dimension.
    pub(crate) fn norm_items(&self, x: &Val) -> usize {
        items(self.size_by(x, x.cols), x.cols)
    }

    /// Fills the angles of a share of the step's rows: per rotation `[T][2 · pairs]`.
    pub(crate) fn make_angles(&self, ropes: &[Frequencies], rows: Range<usize>) {
        for (frequencies, memory) in ropes.iter().zip(self.angles) {
            let width = 2 * frequencies.pairs();
            let out = memory.write(rows.start * width..rows.end * width);
            for (position, out) in self.batch.positions[rows.clone()]
                .iter()
                .zip(out.chunks_exact_mut(width))
            {
                frequencies.angles(*position, out);
            }
        }
    }

    fn angles(&self, table: usize, pairs2: usize, rows: Range<usize>) -> &[f32] {
        self.angles[table].read(rows.start * pairs2..rows.end * pairs2)
    }

    pub(crate) fn embed(&self, weight: &CpuWeight, out: &Val, items: Range<usize>) {
        let matrix = weight
            .matrix
            .as_ref()
            .expect("lowering checked that an embedding is a matrix");
        let rows = rows_of(items, out.bind(self.size), out.width);
        let y = self.write(out, rows.clone());
        for (row, y) in rows.zip(y.chunks_exact_mut(out.width)) {
            matrix.decode_row(self.batch.tokens[row] as usize, y);
        }
    }

    /// The rows of a norm of `x` that some items hold.
    pub(crate) fn norm_rows(&self, x: &Val, items: Range<usize>) -> Range<usize> {
        rows_of(items, self.size_by(x, x.cols), x.cols)
    }

    pub(crate) fn norm(&self, x: &Val, weight: &[f32], eps: f32, out: &Val, rows: Range<usize>) {
        let cols = weight.len();
        let y = self.arena.write(by(out, cols, &rows));
        for (x, y) in self
            .arena
            .read(by(x, cols, &rows))
            .chunks_exact(cols)
            .zip(y.chunks_exact_mut(cols))
        {
            self.table.rms_norm(x, weight, eps, y);
        }
    }

    /// Rows of `cols` elements a value has.
    fn size_by(&self, x: &Val, cols: usize) -> usize {
        x.bind(self.size) * x.width / cols.max(1)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the op has two inputs, two outputs and a weight"
    )]
    pub(crate) fn add_norm(
        &self,
        a: &Val,
        b: &Val,
        weight: &[f32],
        eps: f32,
        sum: &Val,
        out: &Val,
        rows: Range<usize>,
    ) {
        let cols = weight.len();
        let (a, b) = (
            self.arena.read(by(a, cols, &rows)),
            self.arena.read(by(b, cols, &rows)),
        );
        let (s, y) = (
            self.arena.write(by(sum, cols, &rows)),
            self.arena.write(by(out, cols, &rows)),
        );
        self.table.add(a, b, s);
        for (s, y) in s.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
            self.table.rms_norm(s, weight, eps, y);
        }
    }

    pub(crate) fn rope(
        &self,
        x: &Val,
        style: RopeStyle,
        table: usize,
        pairs: usize,
        out: &Val,
        items: Range<usize>,
    ) {
        let rows = rows_of(items, x.bind(self.size), x.width);
        let angles = self.angles(table, 2 * pairs, rows.clone());
        let y = self.write(out, rows.clone());
        for ((x, y), angles) in self
            .read(x, rows)
            .chunks_exact(x.width)
            .zip(y.chunks_exact_mut(x.width))
            .zip(angles.chunks_exact(2 * pairs))
        {
            rope(self.table, style, angles, out.cols, x, y);
        }
    }

    fn elements(&self, x: &Val, items: Range<usize>) -> Range<usize> {
        let total = x.bind(self.size) * x.width;
        (items.start * ITEM_ELEMENTS).min(total)..(items.end * ITEM_ELEMENTS).min(total)
    }

    pub(crate) fn map(&self, op: MapOp, x: &Val, out: &Val, items: Range<usize>) {
        let range = self.elements(x, items);
        let x = self.arena.read(x.at + range.start..x.at + range.end);
        let y = self.arena.write(out.at + range.start..out.at + range.end);
        match op {
            MapOp::Copy => y.copy_from_slice(x),
            MapOp::Scale(c) => self.table.scale(c, x, y),
            MapOp::Softcap(c) => self.table.softcap(c, x, y),
            MapOp::Act(act) => self.table.act(act, x, y),
        }
    }

    pub(crate) fn zip(&self, op: ZipOp, a: &Val, b: &Val, out: &Val, items: Range<usize>) {
        let range = self.elements(a, items);
        let a = self.arena.read(a.at + range.start..a.at + range.end);
        let b = self.arena.read(b.at + range.start..b.at + range.end);
        let y = self.arena.write(out.at + range.start..out.at + range.end);
        match op {
            ZipOp::Add => self.table.add(a, b, y),
            ZipOp::Mul => self.table.mul(a, b, y),
            ZipOp::Glu(act) => self.table.glu(act, a, b, y),
        }
    }

    pub(crate) fn take_outputs(&self, x: &Val, out: &Val, items: Range<usize>) {
        let rows = rows_of(items, out.bind(self.size), out.width);
        let y = self.write(out, rows.clone());
        for (row, y) in rows.zip(y.chunks_exact_mut(out.width)) {
            let from = self.batch.output_rows[row] as usize;
            y.copy_from_slice(self.read(x, from..from + 1));
        }
    }

    /// Writes keys (turned first, where the op is fused with the rotation) and values of some rows. `places` gives
    /// each row's block and slot; `turned` has room for one row of keys.
    #[expect(
        clippy::too_many_arguments,
        reason = "the op has a cache, keys, values, places and a rotation"
    )]
    pub(crate) fn kv_write(
        &self,
        cache: &CpuCache,
        k: &Val,
        v: &Val,
        turn: Option<(RopeStyle, usize, usize)>,
        places: &[(u32, u32)],
        turned: &mut [f32],
        items: Range<usize>,
    ) {
        for row in rows_of(items, k.bind(self.size), k.width) {
            let (block, slot) = (places[row].0 as usize, places[row].1 as usize);
            let mut keys = self.read(k, row..row + 1);
            if let Some((style, table, pairs)) = turn {
                let turned = &mut turned[..k.width];
                let angles = self.angles(table, 2 * pairs, row..row + 1);
                rope(self.table, style, angles, cache.head_dim, keys, turned);
                keys = turned;
            }
            let heads = keys
                .chunks_exact(cache.head_dim)
                .zip(self.read(v, row..row + 1).chunks_exact(cache.head_dim));
            for (head, (key, value)) in heads.enumerate() {
                let at = cache.key_at(block, head, slot);
                self.table
                    .store_row(cache.kind, key, cache.mem.write(at..at + cache.row_bytes));
                let at = at + cache.value_distance();
                self.table
                    .store_row(cache.kind, value, cache.mem.write(at..at + cache.row_bytes));
            }
        }
    }
}
