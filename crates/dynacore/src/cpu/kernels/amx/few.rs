//! Up to 32 rows of activations: weights stream, and groups are multiplied soon after they are expanded.
//!
//! One row group at a time goes from its start to its end, its sums stay in tile registers, and a tile of weights in a
//! ring of [`RING`] from its expansion to its product [`BEHIND`] groups later. A Xeon streamed Q4_K at 8.3 GB/s with two
//! threads and 16 rows from panels of groups that were expanded as a whole and then multiplied, as for many rows, and at 11
//! to 16 in this way; why is not proven, perhaps because memory waits less.
//!
//! On that CPU a tile of Q4_K takes 25 ns to expand in the nearest caches, the product 6 and its operands 5 more, which do
//! not overlap with it; how far behind does not matter. The order of the sums is that of many rows: the bits are the same.

use super::{Line, RowGroup, TILE, TileArgs, rows_bytes};
use crate::cpu::kernels::{GROUP, LINE, ROWS};
use std::arch::asm;

/// Most tiles of activations.
pub(super) const MOST: usize = 2;

/// Groups from a tile's expansion to its product.
const BEHIND: usize = 2;

/// Tiles of weights that are kept.
const RING: usize = 4;

const _: () = assert!(RING.is_power_of_two() && BEHIND < RING);

/// Takes the groups of a row group as they are expanded.
pub(crate) trait Sink {
    /// Where the next group's tile goes.
    fn place(&self) -> *mut u8;
    /// It has been written.
    ///
    /// # Safety
    /// It has been.
    unsafe fn written(&mut self);
}

/// Tiles one after the other.
pub(crate) struct Panel(pub(crate) *mut u8);

impl Sink for Panel {
    #[inline(always)]
    fn place(&self) -> *mut u8 {
        self.0
    }

    #[inline(always)]
    unsafe fn written(&mut self) {
        self.0 = self.0.wrapping_add(TILE);
    }
}

/// Multiplies tiles with `TILES` tiles of activations a while after they are written. There is one only while tiles are
/// configured; each `x` has every group that it takes.
pub(crate) struct Products<const TILES: usize> {
    ring: *mut u8,
    /// The next group's place in each tile of rows.
    x: [*const u8; TILES],
    /// Groups written, and multiplied.
    written: usize,
    multiplied: usize,
}

impl<const TILES: usize> Sink for Products<TILES> {
    #[inline(always)]
    fn place(&self) -> *mut u8 {
        self.ring.wrapping_add(self.written % RING * TILE)
    }

    #[inline(always)]
    unsafe fn written(&mut self) {
        self.written += 1;
        if self.written > BEHIND {
            // SAFETY: tiles are configured and x has the group (see the type); it was written and not yet multiplied.
            unsafe { self.multiply() };
        }
    }
}

impl<const TILES: usize> Products<TILES> {
    /// Multiplies the next group.
    ///
    /// # Safety
    /// Tiles are configured; the group was written, and x has it.
    #[inline(always)]
    unsafe fn multiply(&mut self) {
        let w = self.ring.wrapping_add(self.multiplied % RING * TILE);
        let (x, x2) = (self.x[0], self.x[TILES - 1]);
        // The sums stay in tile registers from one of these blocks to the next. The compiler uses none of them.
        // SAFETY: the caller promises the tiles; the registers that change are declared.
        unsafe {
            if TILES == 1 {
                asm!(
                    "tileloadd tmm4, [{x} + {line}*1]",
                    "tileloadd tmm6, [{w} + {line}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    x = in(reg) x, w = in(reg) w, line = in(reg) LINE,
                    out("tmm0") _, out("tmm4") _, out("tmm6") _,
                    options(readonly, nostack, preserves_flags),
                );
            } else {
                asm!(
                    "tileloadd tmm4, [{x} + {line}*1]",
                    "tileloadd tmm6, [{w} + {line}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{x2} + {line}*1]",
                    "tdpbf16ps tmm1, tmm5, tmm6",
                    x = in(reg) x, x2 = in(reg) x2, w = in(reg) w, line = in(reg) LINE,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                    options(readonly, nostack, preserves_flags),
                );
            }
        }
        self.multiplied += 1;
        for x in &mut self.x {
            *x = x.wrapping_add(TILE);
        }
    }
}

/// Expands all groups of a row group into a sink.
///
/// # Safety
/// The CPU has the table's instruction set; the weight is a row group of the kernel's type that has `groups` groups; the
/// sink takes as many.
pub(crate) type StreamFn<S> = unsafe fn(weight: &[u8], groups: usize, scale: f32, sink: &mut S);

/// As [`super::product`], for up to [`MOST`] tiles of rows: the sums of row group `weight` go to `sums`, `[m][16]`, not
/// yet scaled.
///
/// # Safety
/// As there; tiles are configured; `ring` can be written for [`RING`] tiles.
pub(super) unsafe fn row_group(
    args: &TileArgs<'_>,
    weight: &RowGroup<'_>,
    ring: &mut [Line],
    sums: &mut [[f32; ROWS]],
) {
    let rows_bytes = rows_bytes(args.cols);
    let tiles = args.x.len() / rows_bytes;
    assert!(
        sums.len() * LINE == tiles * TILE && size_of_val(ring) >= ring_bytes(),
        "a sum per output, and room for tiles"
    );
    let x = args.x.as_ptr();
    // SAFETY: the caller's promise; x holds `tiles` tiles of rows.
    unsafe {
        match tiles {
            1 => stream::<1>(args, weight, weight.expand.stream.0, [x], ring, sums),
            MOST => stream::<MOST>(
                args,
                weight,
                weight.expand.stream.1,
                [x, x.add(rows_bytes)],
                ring,
                sums,
            ),
            _ => unreachable!("{tiles} tiles are not few"),
        }
    }
}

/// Bytes of a ring.
pub(super) const fn ring_bytes() -> usize {
    RING * TILE
}

/// # Safety
/// As [`row_group`]; each `x` holds all groups.
unsafe fn stream<const TILES: usize>(
    args: &TileArgs<'_>,
    weight: &RowGroup<'_>,
    expand: StreamFn<Products<TILES>>,
    x: [*const u8; TILES],
    ring: &mut [Line],
    sums: &mut [[f32; ROWS]],
) {
    let mut products = Products::<TILES> {
        ring: ring.as_mut_ptr().cast(),
        x,
        written: 0,
        multiplied: 0,
    };
    let groups = args.cols / GROUP;
    // SAFETY: tiles are configured and the row group has its groups, as the caller promises; the sums were measured.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", out("tmm0") _, out("tmm1") _, options(nomem, nostack, preserves_flags));
        expand(weight.packed, groups, weight.scales.weights, &mut products);
        while products.multiplied < groups {
            products.multiply();
        }
        let sums = sums.as_mut_ptr().cast::<u8>();
        asm!(
            "tilestored [{sums} + {line}*1], tmm0",
            sums = in(reg) sums, line = in(reg) LINE,
            options(nostack, preserves_flags),
        );
        if TILES > 1 {
            let sums = sums.add(TILE);
            asm!(
                "tilestored [{sums} + {line}*1], tmm1",
                sums = in(reg) sums, line = in(reg) LINE,
                options(nostack, preserves_flags),
            );
        }
    }
}
