//! Weights in the form the linear kernels read: packed at load for SIMD tables, as in the checkpoint otherwise.
//!
//! The packed form is described in [`crate::cpu::kernels`]. Packing moves bytes and loses nothing, so a tied embedding
//! table needs no second copy: [`PackedLinear::decode_row`] reads single rows out of it.

use dynair::{DType, WeightDecl};
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::kernels::amx::expand::{Scales, scales};
use super::kernels::{Geometry, LINE, ROWS, gather_bits, spread_bits};
use super::slab::{self, Part};
use super::table::KernelTable;
use crate::buffer::{Layout, WeightBytes};
use crate::error::{Error, Result};

/// The number in [`Layout::Packed`] of weights interleaved by sixteen rows.
const ROWS16: u16 = 16;

/// A weight `[rows, cols]` as the right operand of a product.
#[derive(Debug)]
pub struct PackedLinear {
    dtype: DType,
    rows: usize,
    cols: usize,
    form: Form,
    /// By row group, under tables with tiles.
    #[cfg(target_arch = "x86_64")]
    tile_scales: Vec<Scales>,
}

#[derive(Debug)]
enum Form {
    RowMajor(WeightBytes),
    Rows16(Part),
}

/// How much of a tensor is packed before its mapped pages are forgotten, bytes: enough work for all threads.
const PORTION_BYTES: usize = 16 << 20;

/// Brings a weight into the form `table` reads, in memory of its own. Uses rayon's threads, and may be called from them.
///
/// Weights of the portable table keep the checkpoint's bytes; the others own a packed copy, and the mapped pages of
/// the original may be forgotten.
///
/// # Errors
/// [`Error::WeightBytes`] if `bytes` has not the length `decl` implies, [`Error::Unsupported`] for types no weight has,
/// [`Error::OutOfMemory`].
pub fn pack(table: &KernelTable, decl: &WeightDecl, bytes: &WeightBytes) -> Result<PackedLinear> {
    pack_into(slab::alone, table, decl, bytes)
}

/// As [`pack`], in memory that `take` gives: zeros, as many as asked for.
pub(crate) fn pack_into(
    take: impl Fn(usize) -> Option<Part>,
    table: &KernelTable,
    decl: &WeightDecl,
    bytes: &WeightBytes,
) -> Result<PackedLinear> {
    let weight = keep(decl, bytes)?;
    if layout_in(table, decl) == Layout::RowMajor {
        return Ok(weight);
    }
    let short = || Error::OutOfMemory {
        device: "cpu".into(),
        bytes: bytes.as_slice().len(),
        what: format!("the packed weight `{}`", decl.name),
    };
    let geometry = Geometry::of(decl.dtype);
    let group_bytes = geometry.group_bytes(decl.cols);
    let total = decl
        .rows
        .div_ceil(ROWS)
        .checked_mul(group_bytes)
        .ok_or_else(short)?;
    let mut packed = take(total).ok_or_else(short)?;
    let row_bytes = bytes.as_slice().len() / decl.rows;
    // Portion by portion, so that of a large tensor the mapped pages and the packed ones are never all resident together.
    let portion = (PORTION_BYTES / (ROWS * row_bytes)).max(1);
    let portions = packed
        .chunks_mut(portion * group_bytes)
        .zip(bytes.as_slice().chunks(portion * ROWS * row_bytes));
    for (i, (packed, rows)) in portions.enumerate() {
        packed
            .par_chunks_mut(group_bytes)
            .zip(rows.par_chunks(ROWS * row_bytes))
            .for_each(|(packed, rows)| match geometry.heads {
                0 => pack_floats(geometry.bytes, rows, row_bytes, packed),
                _ => pack_blocks(&geometry, rows, row_bytes, packed),
            });
        if let WeightBytes::Mapped(file, range) = bytes {
            let start = range.start + i * portion * ROWS * row_bytes;
            file.forget(start..start + rows.len());
        }
    }
    #[cfg(target_arch = "x86_64")]
    let tile_scales = match table.tiles {
        Some(_) => packed
            .par_chunks(group_bytes)
            .map(|packed| scales(decl.dtype, packed, decl.cols))
            .collect(),
        None => Vec::new(),
    };
    Ok(PackedLinear {
        form: Form::Rows16(packed),
        #[cfg(target_arch = "x86_64")]
        tile_scales,
        ..weight
    })
}

/// The layout that [`pack`] gives a weight.
pub(crate) fn layout_in(table: &KernelTable, decl: &WeightDecl) -> Layout {
    if table.lanes.is_none() || decl.rows == 0 || decl.cols == 0 {
        Layout::RowMajor
    } else {
        Layout::Packed(ROWS16)
    }
}

/// A weight in the checkpoint's own form, for tables without packed kernels and for plain lookups.
///
/// # Errors
/// As [`pack`].
pub fn keep(decl: &WeightDecl, bytes: &WeightBytes) -> Result<PackedLinear> {
    if !DType::WEIGHTS.contains(&decl.dtype) {
        return Err(Error::Unsupported {
            device: "cpu".into(),
            what: format!("weight `{}` of type {}", decl.name, decl.dtype),
        });
    }
    let found = bytes.as_slice().len();
    let expected = decl
        .dtype
        .row_bytes(decl.cols)
        .and_then(|row| row.checked_mul(decl.rows));
    if expected != Some(found) {
        return Err(Error::WeightBytes {
            name: decl.name.clone(),
            found,
            expected: expected.unwrap_or(usize::MAX),
        });
    }
    Ok(PackedLinear {
        dtype: decl.dtype,
        rows: decl.rows,
        cols: decl.cols,
        form: Form::RowMajor(bytes.clone()),
        #[cfg(target_arch = "x86_64")]
        tile_scales: Vec::new(),
    })
}

impl PackedLinear {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Output size M.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input size K.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The layout, for plans and reports.
    pub fn layout(&self) -> Layout {
        match self.form {
            Form::RowMajor(_) => Layout::RowMajor,
            Form::Rows16(_) => Layout::Packed(ROWS16),
        }
    }

    /// Bytes of memory it owns or keeps mapped.
    pub fn bytes(&self) -> usize {
        match &self.form {
            Form::RowMajor(bytes) => bytes.as_slice().len(),
            Form::Rows16(packed) => packed.len(),
        }
    }

    /// The packed bytes of row group `group`, if the weight is packed.
    pub(crate) fn group(&self, group: usize) -> Option<&[u8]> {
        match &self.form {
            Form::RowMajor(_) => None,
            Form::Rows16(packed) => {
                let bytes = Geometry::of(self.dtype).group_bytes(self.cols);
                Some(&packed[group * bytes..(group + 1) * bytes])
            }
        }
    }

    /// The scales of all row groups; none if the table has no tiles.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn tile_scales(&self) -> &[Scales] {
        &self.tile_scales
    }

    /// Decodes row `row`: what [`dynair::quant::decode_row`] gives for the checkpoint's bytes.
    ///
    /// # Panics
    /// If there is no such row or `out` has not [`PackedLinear::cols`] elements.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a weight with {} rows", self.rows);
        assert_eq!(
            out.len(),
            self.cols,
            "a decoded row has as many elements as the weight has columns"
        );
        let decode = |bytes: &[u8], out: &mut [f32]| {
            dynair::quant::decode_row(self.dtype, bytes, out)
                .expect("lengths were checked when the weight was made");
        };
        let Some(group) = self.group(row / ROWS) else {
            let Form::RowMajor(bytes) = &self.form else {
                unreachable!("only row-major weights have no groups")
            };
            let row_bytes = bytes.as_slice().len() / self.rows;
            return decode(&bytes.as_slice()[row * row_bytes..(row + 1) * row_bytes], out);
        };
        let geometry = Geometry::of(self.dtype);
        let mut block = [0u8; 256];
        let block = &mut block[..geometry.bytes];
        for (b, out) in out.chunks_exact_mut(geometry.block).enumerate() {
            match geometry.heads {
                0 => block
                    .copy_from_slice(&group[(b * ROWS + row % ROWS) * geometry.bytes..][..geometry.bytes]),
                _ => unpack_block(&geometry, group, b, row % ROWS, block),
            }
            decode(block, out);
        }
    }
}

/// Float types: `[rows][K]` to `[K][16]`.
fn pack_floats(width: usize, rows: &[u8], row_bytes: usize, packed: &mut [u8]) {
    // Tiles of 64 columns keep the 64 lines being filled in the first-level cache.
    let tile = 64;
    for (t, packed) in packed.chunks_mut(tile * ROWS * width).enumerate() {
        for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
            let row = &row[t * tile * width..row_bytes.min((t + 1) * tile * width)];
            match width {
                2 => scatter::<2>(row, &mut packed[r * width..]),
                _ => scatter::<4>(row, &mut packed[r * width..]),
            }
        }
    }
}

/// Writes word i of `words` to `out[i * 16 * W..]`.
fn scatter<const W: usize>(words: &[u8], out: &mut [u8]) {
    for (out, word) in out.chunks_mut(ROWS * W).zip(words.as_chunks::<W>().0) {
        out[..W].copy_from_slice(word);
    }
}

/// Quantised types. `rows` may hold fewer than sixteen rows; the others stay zero.
fn pack_blocks(geometry: &Geometry, rows: &[u8], row_bytes: usize, packed: &mut [u8]) {
    let width = geometry.head_width;
    for b in 0..row_bytes / geometry.bytes {
        for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
            let block = &row[b * geometry.bytes..(b + 1) * geometry.bytes];
            for h in 0..geometry.heads {
                let at = geometry.head(b) + (h * ROWS + r) * width;
                packed[at..at + width].copy_from_slice(&block[geometry.head_at + width * h..][..width]);
            }
            let body = geometry.body(b) + 4 * r;
            scatter::<4>(
                &block[geometry.body_at..][..4 * geometry.words],
                &mut packed[body..geometry.body(b) + geometry.words * LINE],
            );
            if geometry.spread {
                let first = packed[body..]
                    .first_chunk_mut::<4>()
                    .expect("a body has a first word");
                *first = spread_bits(u32::from_le_bytes(*first)).to_le_bytes();
            }
        }
    }
}

/// Puts block `b` of lane `r` together again.
fn unpack_block(geometry: &Geometry, group: &[u8], b: usize, r: usize, block: &mut [u8]) {
    let width = geometry.head_width;
    for h in 0..geometry.heads {
        let at = geometry.head(b) + (h * ROWS + r) * width;
        block[geometry.head_at + width * h..][..width].copy_from_slice(&group[at..at + width]);
    }
    for i in 0..geometry.words {
        let at = geometry.body(b) + i * LINE + 4 * r;
        let mut word = *group[at..].first_chunk::<4>().expect("a word of a body");
        if geometry.spread && i == 0 {
            word = gather_bits(u32::from_le_bytes(word)).to_le_bytes();
        }
        block[geometry.body_at + 4 * i..][..4].copy_from_slice(&word);
    }
}
