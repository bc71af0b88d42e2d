//! Memory of packed weights: many tensors in one map, so that small ones lie in huge pages too.
//!
//! A matrix of a small model takes less than a huge page. With a map of its own it would lie in pages of 4 KiB, each of
//! which costs a walk and stops the core's own prefetching (SmolLM2-135M: two thirds of the weights).

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{MmapMut, MmapRaw};

/// Bytes of a huge page of x86-64, and of AArch64 with pages of 4 KiB.
const HUGE: usize = 2 << 20;

/// Bytes of addresses of a slab; they take physical memory only when touched.
const SLAB: usize = 32 * HUGE;

/// Parts start at multiples of this: two cache lines, which some cores fetch together.
const ALIGN: usize = 128;

/// Where parts are cut from.
#[derive(Debug, Default)]
pub(crate) struct Slabs {
    open: Mutex<Option<(Weak<Slab>, usize)>>,
}

impl Slabs {
    /// `len` zeros, or `None` if the system refuses.
    pub(crate) fn take(&self, len: usize) -> Option<Part> {
        if len > SLAB / 4 {
            return alone(len);
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = open.take().and_then(|(slab, used)| Some((slab.upgrade()?, used)));
        let (slab, at) = match begun {
            Some((slab, used)) if used + len <= SLAB => (slab, used),
            // What is left of the old one stays untouched.
            _ => match Slab::new(SLAB) {
                Some(slab) => (Arc::new(slab), 0),
                None => return alone(len),
            },
        };
        *open = Some((Arc::downgrade(&slab), (at + len).next_multiple_of(ALIGN)));
        Some(Part { slab, at, len })
    }
}

/// `len` zeros in a map of their own, or `None` if the system refuses.
pub(crate) fn alone(len: usize) -> Option<Part> {
    Some(Part {
        slab: Arc::new(Slab::new(len)?),
        at: 0,
        len,
    })
}

#[derive(Debug)]
struct Slab {
    /// Nobody makes a reference to the whole of it.
    map: MmapRaw,
    /// Bytes before the first huge page.
    before: usize,
}

impl Slab {
    /// From the beginning of a huge page, if there is room for one.
    fn new(len: usize) -> Option<Slab> {
        let room = if len < HUGE { 0 } else { HUGE };
        let map = MmapMut::map_anon(len.max(1).checked_add(room)?).ok()?;
        let before = map.as_ptr().align_offset(HUGE).min(room);
        // Whole ones only: one that reached beyond the end would be touched as a whole. The advice may fail: older kernels
        // have no huge pages.
        #[cfg(target_os = "linux")]
        if room > 0 {
            let _ = map.advise_range(memmap2::Advice::HugePage, before, len / HUGE * HUGE);
        }
        Some(Slab {
            map: MmapRaw::from(map),
            before,
        })
    }

    /// Where byte `at` lies.
    fn at(&self, at: usize) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.before + at)
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
        // SAFETY: the part was made of bytes inside the slab, zeroed at first, that no other part is given.
        unsafe { std::slice::from_raw_parts(self.slab.at(self.at), self.len) }
    }
}

impl DerefMut for Part {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the part is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.slab.at(self.at), self.len) }
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
        let slabs = Slabs::default();
        let only = slabs.take(100).map(|part| Arc::downgrade(&part.slab));
        assert!(
            only.expect("memory can be had").upgrade().is_none(),
            "an open one goes as well"
        );
        assert!(
            slabs
                .take(100)
                .expect("memory can be had")
                .iter()
                .all(|b| *b == 0)
        );
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        assert!(Slabs::default().take(usize::MAX - 100).is_none());
        assert!(Slabs::default().take(usize::MAX / 2).is_none());
    }
}
