//! AMX: products with many rows of activations on bf16 tiles; everything else is the AVX-512 table's.
//!
//! # Data
//!
//! Activations are rounded to bf16 and stand in *tiles* of 16 rows by 32 values of K, `[rows / 16][K / 32][16][32]`, a
//! kibibyte each, in the order of the records' codes (see [`crate::cpu::kernels`]). Rows past the last are zero. Behind
//! the tiles of 16 rows stands what the sums of each are multiplied with ([`expand`] says why). Weights are expanded,
//! for more than 32 rows a chunk of K of one or two row groups at a time, into tiles of 32 values of K by 16 rows
//! of the weight: line p of a tile holds pair p of the group's codes for each row ([`expand`]). A tile product adds 16
//! by 16 results in f32, and its lines are the 16 outputs of one row of activations, as everywhere.
//!
//! # Precision
//!
//! Both operands have 8 significant bits, so a product is off by 2.4e-3 of its rms, where 15-bit codes are off by 4e-5.
//! The order of the sums depends on the table, not on the number of rows; but few rows use the other kernels, so
//! **this path is for `auto` mode alone**: `exact` keeps one arithmetic.
//!
//! # Walk
//!
//! Up to 32 rows of x: see [`few`]; more: see [`many`]. A tile product takes 16 cycles, the loads of its operands 8 from
//! the nearest cache and about 20 from the next.

pub(crate) mod attention;
pub(crate) mod expand;
mod few;
mod many;

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use self::expand::{Expand, Scales};
pub(crate) use self::many::block_rows;
use self::many::{Pace, two_by_two};
use super::{GROUP, ROWS};
use crate::cpu::table::KernelTable;
use dynair::DType;

/// Rows of activations in a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// Bytes of a tile, of either operand or of sums.
pub(crate) const TILE: usize = 1024;

/// Row groups of a matrix that follow each other before those of the next, for few rows.
const RUN: usize = 32;

/// The table: AVX-512 for few rows, tiles for many.
pub(crate) static TABLE: KernelTable = KernelTable {
    isa: crate::cpu::isa::Isa::Amx,
    tiles: Some(expand::KERNELS),
    ..super::avx512::KERNELS
};

/// What the many-row path of a table consists of.
pub(crate) struct TileKernels {
    /// Rounds up to [`TILE_ROWS`] rows of activations into tiles.
    pub(crate) prepare: PrepareTilesFn,
    /// By [`slot`](crate::cpu::table::slot); a type without one takes the other path.
    pub(crate) expand: [Option<Expand>; DType::WEIGHTS.len()],
}

/// `x [m, K]` with m up to [`TILE_ROWS`] into `tiles`, [`TILE`] bytes for each 32 values of K; `sums` are the factors
/// of the rows' sums.
pub(crate) type PrepareTilesFn =
    unsafe fn(x: &[f32], cols: usize, tiles: &mut [u8], sums: &mut [f32; TILE_ROWS]);

/// Bytes of [`TILE_ROWS`] rows of activations: tiles, then the factors of their sums.
pub(crate) const fn rows_bytes(cols: usize) -> usize {
    cols / GROUP * TILE + 4 * TILE_ROWS
}

/// Whether this process may use tiles: the CPU has them and the system grants their state (Linux asks for a request,
/// once per process, because the state makes contexts large).
pub(crate) fn permitted() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        // Leaf 7 of CPUID: AMX-BF16, AMX-TILE.
        let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
        features & (1 << 22) != 0 && features & (1 << 24) != 0 && request()
    })
}

#[cfg(target_os = "linux")]
fn request() -> bool {
    /// `ARCH_REQ_XCOMP_PERM`.
    const REQUEST: libc::c_long = 0x1023;
    /// `XFEATURE_XTILEDATA`.
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two integers and changes nothing but the process's permissions.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn request() -> bool {
    false
}

/// A row group of a weight.
#[derive(Clone, Copy)]
pub(crate) struct RowGroup<'a> {
    /// Its packed bytes.
    pub(crate) packed: &'a [u8],
    pub(crate) scales: Scales,
    /// The kernels of its type.
    pub(crate) expand: Expand,
}

/// Row groups and the tiles they meet.
pub(crate) struct TileArgs<'a> {
    /// Sets of one row group of each matrix.
    pub(crate) weights: &'a [RowGroup<'a>],
    /// K, a multiple of 32.
    pub(crate) cols: usize,
    /// Prepared activations, [`rows_bytes`] for each 16 rows, aligned to 64 bytes for speed.
    pub(crate) x: &'a [u8],
}

/// A worker's own memory.
pub(crate) struct Buffers {
    panel: Vec<Line>,
    sums: Vec<Line>,
    pace: Pace,
}

impl Buffers {
    /// Nothing yet.
    pub(crate) const fn new() -> Buffers {
        Buffers {
            panel: Vec::new(),
            sums: Vec::new(),
            pace: Pace::new(),
        }
    }
}

/// Multiplies sets of row groups, one of each of `W` matrices, with all rows of activations. `done(set, row, products)`
/// takes the products of a set with some rows of x from `row` on as soon as they are there: `[rows][16]` for each
/// matrix, every row of every set once, also those that x was filled up with to whole tiles.
///
/// # Panics
/// If the lengths do not agree.
///
/// # Safety
/// The CPU has the table's instruction set and [`permitted`] was true; each of the weights is a row group of `cols`
/// columns of its kernel's type; `done` uses no tiles.
pub(crate) unsafe fn product<const W: usize>(
    args: &TileArgs<'_>,
    buffers: &mut Buffers,
    mut done: impl FnMut(usize, usize, [&mut [[f32; ROWS]]; W]),
) {
    const { assert!(W == 1 || W == 2, "row groups are taken in pairs") };
    let groups = args.cols / GROUP;
    let rows_bytes = rows_bytes(args.cols);
    let tiles = args.x.len() / rows_bytes;
    assert!(
        args.cols.is_multiple_of(GROUP) && groups > 0 && args.x.len() == tiles * rows_bytes,
        "whole tiles"
    );
    assert!(args.weights.len().is_multiple_of(W), "whole sets");
    let rows = tiles * TILE_ROWS;
    // SAFETY: the caller promises the instruction set and the permission; the configuration is this function's for its
    // whole length, since nothing it calls uses tiles but the products.
    unsafe { configure() };
    // SAFETY: the caller's promise, and tiles are configured.
    unsafe {
        if tiles <= few::MOST {
            few_rows(args, rows, buffers, &mut done);
        } else {
            many::many_rows(args, rows, buffers, &mut done);
        }
    }
    // SAFETY: as for `configure`.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
}

/// At least `len` lines. They are not cleared: whoever takes them writes them first.
fn grow(lines: &mut Vec<Line>, len: usize) {
    if lines.len() < len {
        lines.resize(len, Line::ZERO);
    }
}

/// The next `W` of some parts.
fn set<T, const W: usize>(parts: &mut impl Iterator<Item = T>) -> [T; W] {
    std::array::from_fn(|_| parts.next().expect("a part of each matrix"))
}

/// Takes a good many row groups of each matrix in turn, so that their weights come in long runs.
///
/// # Safety
/// As [`product`]; tiles are configured.
unsafe fn few_rows<const W: usize>(
    args: &TileArgs<'_>,
    rows: usize,
    buffers: &mut Buffers,
    done: &mut impl FnMut(usize, usize, [&mut [[f32; ROWS]]; W]),
) {
    let Buffers { panel, sums, .. } = buffers;
    grow(panel, few::ring_bytes() / size_of::<Line>());
    let together = RUN * W;
    grow(sums, together.min(args.weights.len()) * rows);
    for (run, weights) in args.weights.chunks(together).enumerate() {
        let sums = Line::values(&mut sums[..weights.len() * rows]);
        for matrix in 0..W {
            for i in (matrix..weights.len()).step_by(W) {
                let sums = &mut sums[i * rows..(i + 1) * rows];
                // SAFETY: the caller's promise.
                unsafe {
                    few::row_group(args, &weights[i], panel, sums);
                    scale(args, &weights[i], 0, sums);
                }
            }
        }
        let mut parts = sums.chunks_exact_mut(rows);
        for i in 0..weights.len() / W {
            done(run * RUN + i, 0, set(&mut parts));
        }
    }
}

/// Multiplies the sums of a row group and rows `row..` of x, whole tiles, by their factors.
///
/// # Safety
/// The CPU has the table's instruction set.
unsafe fn scale(args: &TileArgs<'_>, weight: &RowGroup<'_>, row: usize, sums: &mut [[f32; ROWS]]) {
    let tiles = args.x.chunks_exact(rows_bytes(args.cols)).skip(row / TILE_ROWS);
    for (x, sums) in tiles.zip(sums.as_chunks_mut().0) {
        let factors = x.last_chunk().expect("the factors of 16 rows");
        // SAFETY: the caller's promise.
        unsafe { scale_sums(weight.scales.sums, factors, sums) };
    }
}

/// Multiplies the sums of a tile by the row group's factor and by those of the rows.
#[target_feature(enable = "avx512f")]
fn scale_sums(weight: f32, rows: &[u8; 4 * TILE_ROWS], sums: &mut [[f32; ROWS]; TILE_ROWS]) {
    let weight = _mm512_set1_ps(weight);
    for (row, sums) in rows.as_chunks().0.iter().zip(sums) {
        let row = _mm512_set1_ps(f32::from_le_bytes(*row));
        // In this order: each of the factors may be out of the other's reach. With intrinsics, as the compiler would
        // gather the values of sixteen rows.
        // SAFETY: sixteen values.
        unsafe {
            let scaled = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(sums.as_ptr()), weight), row);
            _mm512_storeu_ps(sums.as_mut_ptr(), scaled);
        }
    }
}

/// A cache line of f32 values, or of whatever tiles are written and read through pointers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([f32; ROWS]);

impl Line {
    const ZERO: Line = Line([0.0; ROWS]);

    /// The values of some lines.
    fn values(lines: &mut [Line]) -> &mut [[f32; ROWS]] {
        // SAFETY: a line is as long as its sixteen values and better aligned.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len()) }
    }
}

/// All eight tiles are 16 lines of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    line_bytes: [u16; 16],
    lines: [u8; 16],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    line_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    lines: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// # Safety
/// [`permitted`] was true.
unsafe fn configure() {
    // SAFETY: the configuration is a valid one of palette 1, and a static, so that no store to it can be lost.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(readonly, nostack, preserves_flags)) };
}

/// Groups of K of a product of [`peak`].
const PEAK_GROUPS: usize = 8;

/// Multiply-adds of one round of [`peak`].
pub(crate) const PEAK_ROUND: usize = 4 * PEAK_GROUPS * TILE_ROWS * ROWS * GROUP;

/// Products of tiles that stay in the nearest cache, [`PEAK_ROUND`] multiply-adds a round: what tiles can do at most.
///
/// # Safety
/// The CPU has the table's instruction set and [`permitted`] was true.
pub(crate) unsafe fn peak(rounds: usize) {
    let lines = TILE / size_of::<Line>();
    let zero = Line::ZERO;
    let (x, panel) = (
        vec![zero; 2 * PEAK_GROUPS * lines],
        vec![zero; 2 * PEAK_GROUPS * lines],
    );
    let mut sums = vec![zero; 4 * lines];
    let x: *const u8 = x.as_ptr().cast();
    // SAFETY: the caller promises the permission; `x` holds `PEAK_GROUPS` tiles at both places, `panel` twice as many, `sums`
    // two of each row group, `2 * TILE` apart; nothing else uses tiles before they are released.
    unsafe {
        configure();
        let x = [x, x.add(PEAK_GROUPS * TILE)];
        for _ in 0..rounds {
            two_by_two(
                x,
                panel.as_ptr().cast(),
                PEAK_GROUPS,
                sums.as_mut_ptr().cast(),
                2 * TILE,
            );
        }
        asm!("tilerelease", options(nomem, nostack, preserves_flags));
    }
}
