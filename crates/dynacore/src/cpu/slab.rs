//! Memory of packed weights: many tensors in one map, so that small ones lie in huge pages too.
//!
//! A matrix of a small model takes less than a huge page. With a map of its own it would lie in pages of 4 KiB, each of
//! which costs a walk and stops the core's own prefetching (SmolLM2-135M: two thirds of the weights).

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::MmapMut;

/// Bytes of a huge page of x86-64 and AArch64.
const HUGE: usize = 2 << 20;

/// Bytes of addresses of a slab; they take physical memory only when touched.
const SLAB: usize = 32 * HUGE;

/// Parts start at multiples of this: lines, of which tiles and vectors are made.
const ALIGN: usize = 128;

/// Where parts are cut from.
#[derive(Debug, Default)]
pub(crate) struct Slabs {
    open: Mutex<Option<(Arc<Slab>, usize)>>,
}

impl Slabs {
    /// `len` zeros, or `None` if the system refuses.
    pub(crate) fn take(&self, len: usize) -> Option<Part> {
        if len > SLAB / 4 {
            return Some(Part {
                slab: Arc::new(Slab::new(len)?),
                at: 0,
                len,
            });
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, at) = match open.take() {
            Some((slab, used)) if used + len <= slab.len => (slab, used),
            // What is left of the old one stays untouched.
            _ => (Arc::new(Slab::new(SLAB)?), 0),
        };
        *open = Some((slab.clone(), (at + len).next_multiple_of(ALIGN)));
        Some(Part { slab, at, len })
    }
}

#[derive(Debug)]
struct Slab {
    /// Of the first huge page.
    start: NonNull<u8>,
    len: usize,
    /// Owns what `start` points to.
    _map: MmapMut,
}

// SAFETY: the memory is owned, and only parts give views of it, each of bytes that no other part has.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    fn new(len: usize) -> Option<Slab> {
        let mut map = MmapMut::map_anon(len.checked_add(HUGE)?).ok()?;
        // The advice may fail: older kernels have no huge pages.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let before = map.as_ptr().align_offset(HUGE).min(HUGE);
        Some(Slab {
            start: NonNull::from(&mut map[before..]).cast(),
            len,
            _map: map,
        })
    }
}

/// Bytes of a slab that nobody else has.
#[derive(Debug)]
pub(crate) struct Part {
    slab: Arc<Slab>,
    at: usize,
    len: usize,
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `take` made the part of bytes inside the slab, zeroed at first, that it gives no other part.
        unsafe { std::slice::from_raw_parts(self.slab.start.as_ptr().add(self.at), self.len) }
    }
}

impl DerefMut for Part {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the part is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.slab.start.as_ptr().add(self.at), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zeroed_aligned_and_apart() {
        let slabs = Slabs::default();
        let lengths = [
            1,
            0,
            4000,
            SLAB / 4,
            SLAB / 4 + 1,
            127,
            128,
            SLAB / 4,
            SLAB / 4,
            SLAB / 4,
            5,
        ];
        let mut parts: Vec<Part> = lengths
            .iter()
            .map(|n| slabs.take(*n).expect("memory can be had"))
            .collect();
        for (i, part) in parts.iter_mut().enumerate() {
            assert_eq!(part.len(), lengths[i]);
            assert_eq!(part.as_ptr().addr() % ALIGN, 0);
            assert!(part.iter().all(|b| *b == 0), "part {i}");
            part.fill(i as u8 + 1);
        }
        for (i, part) in parts.iter().enumerate() {
            assert!(part.iter().all(|b| *b == i as u8 + 1), "part {i}");
        }
    }

    #[test]
    fn slabs_begin_huge_pages_and_go_when_their_last_part_goes() {
        let slabs = Slabs::default();
        let first = slabs.take(100).expect("memory can be had");
        assert_eq!(first.as_ptr().addr() % HUGE, 0);
        let slab = Arc::downgrade(&first.slab);
        let second = slabs.take(100).expect("memory can be had");
        assert!(Arc::ptr_eq(&first.slab, &second.slab), "small parts share one");
        // Fills the rest, so that another one is opened.
        let others: Vec<_> = (0..4).map(|_| slabs.take(SLAB / 4)).collect();
        drop((first, others));
        assert!(slab.upgrade().is_some());
        drop(second);
        assert!(slab.upgrade().is_none());
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        assert!(Slabs::default().take(usize::MAX - 100).is_none());
        assert!(Slabs::default().take(usize::MAX / 2).is_none());
    }
}
