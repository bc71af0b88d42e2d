//! Zeroed, page-aligned memory that the workers of a step read and write together.
//!
//! It is an anonymous map and not the allocator's: for alignments above its own the standard allocator writes the zeros
//! itself, so that an arena or a cache of which little is used would be resident as a whole from the start.
//!
//! The rule that makes the views sound: **within a stage, a range that one worker takes to write is taken by no
//! other worker and by no reader.** The executor holds it: it refuses plans in which a step's output overlaps its
//! inputs, puts dependent phases into stages of their own, and the ops split a phase's output into one range per item, each
//! item being given to one worker. In this crate's own tests a ledger of the ranges taken of the stage at hand
//! checks the rule on every call.

use std::ops::Range;
use std::ptr::NonNull;

use memmap2::MmapMut;

/// Types any bit pattern is valid for, including all zeros.
///
/// # Safety
/// Implementors have no padding, no invalid bit patterns and no drop glue.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: every bit pattern is a valid f32.
unsafe impl Plain for f32 {}
// SAFETY: every bit pattern is a valid u8.
unsafe impl Plain for u8 {}
// SAFETY: every bit pattern is a valid u32.
unsafe impl Plain for u32 {}

/// Bytes of a huge page of x86-64 and AArch64.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// See the module's docs.
pub(crate) struct SharedMem<T: Plain> {
    start: NonNull<T>,
    /// Owns what `start` points to.
    map: MmapMut,
    len: usize,
    #[cfg(test)]
    ledger: std::sync::Mutex<Vec<Claim>>,
}

#[cfg(test)]
struct Claim {
    range: Range<usize>,
    write: bool,
    thread: std::thread::ThreadId,
}

// SAFETY: the memory is owned, `T` is plain data, and views follow the module's rule.
unsafe impl<T: Plain> Send for SharedMem<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for SharedMem<T> {}

impl<T: Plain> SharedMem<T> {
    /// `len` zeros, or `None` if the system refuses. They take physical memory only when first touched.
    pub(crate) fn zeroed(len: usize) -> Option<SharedMem<T>> {
        let mem = SharedMem::zeroed_for_little(len)?;
        // Rows of activations lie pages apart: with small pages each is a walk of its own. The advice may fail: older
        // kernels have no huge pages.
        #[cfg(target_os = "linux")]
        if mem.map.len() >= HUGE {
            let _ = mem.map.advise(memmap2::Advice::HugePage);
        }
        Some(mem)
    }

    /// As [`SharedMem::zeroed`], where perhaps little of it will be touched: not in huge pages, each of which is touched as
    /// a whole. A cache has a part for each layer, and most requests are short.
    pub(crate) fn zeroed_for_little(len: usize) -> Option<SharedMem<T>> {
        let bytes = len.max(1).checked_mul(size_of::<T>())?;
        let mut map = MmapMut::map_anon(bytes).ok()?;
        let start = NonNull::new(map.as_mut_ptr().cast::<T>())?;
        Some(SharedMem {
            start,
            map,
            len,
            #[cfg(test)]
            ledger: std::sync::Mutex::default(),
        })
    }

    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A range for reading.
    ///
    /// # Panics
    /// If the range lies outside, or (in this crate's tests) breaks the module's rule.
    pub(crate) fn read(&self, range: Range<usize>) -> &[T] {
        self.claim(&range, false);
        // SAFETY: `claim` has checked the bounds; the memory is initialised (zeroed at first, then written through
        // views of `T`); by the module's rule no other worker writes it in this stage.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.end - range.start) }
    }

    /// A range for writing, by this worker alone until the stage is done.
    ///
    /// # Panics
    /// As [`SharedMem::read`].
    #[expect(
        clippy::mut_from_ref,
        reason = "disjointness is the module's rule, checked by the ledger in tests"
    )]
    pub(crate) fn write(&self, range: Range<usize>) -> &mut [T] {
        self.claim(&range, true);
        // SAFETY: `claim` has checked the bounds; by the module's rule nobody else holds a view of the range.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.end - range.start)
        }
    }

    fn claim(&self, range: &Range<usize>, write: bool) {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "a view lies inside its memory: {range:?} of {}",
            self.len
        );
        #[cfg(not(test))]
        let _ = write;
        #[cfg(test)]
        {
            let thread = std::thread::current().id();
            let mut ledger = self
                .ledger
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            if range.is_empty() {
                return;
            }
            for claim in ledger.iter() {
                let overlap = claim.range.start < range.end && range.start < claim.range.end;
                assert!(
                    !(overlap && (write || claim.write) && claim.thread != thread),
                    "ranges of one phase are disjoint: {range:?} (write: {write}) meets {:?} (write: {})",
                    claim.range,
                    claim.write
                );
            }
            let known = ledger.iter().any(|c| {
                c.thread == thread
                    && c.write >= write
                    && c.range.start <= range.start
                    && range.end <= c.range.end
            });
            if !known {
                ledger.push(Claim {
                    range: range.clone(),
                    write,
                    thread,
                });
            }
        }
    }

    /// Forgets the ledger: called when a stage is done and before the next begins.
    pub(crate) fn new_phase(&self) {
        #[cfg(test)]
        self.ledger
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_zeroed_and_aligned_and_refuses_what_cannot_be_had() {
        let mem = SharedMem::<f32>::zeroed(100).expect("a little memory can be had");
        assert_eq!(mem.read(0..100), [0.0; 100]);
        assert_eq!(mem.read(0..1).as_ptr() as usize % 64, 0);
        assert!(SharedMem::<f32>::zeroed(usize::MAX / 2).is_none());
        assert_eq!(SharedMem::<u8>::zeroed(0).expect("nothing can be had").len(), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn takes_physical_memory_only_where_touched() {
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
            statm
                .split(' ')
                .nth(1)
                .and_then(|n| n.parse::<usize>().ok())
                .expect("the second number")
                * 4096
        };
        let before = resident();
        let mem = SharedMem::<f32>::zeroed(256 << 20).expect("a gigabyte of addresses can be had");
        mem.write(0..1)[0] = 1.0;
        // Other tests of this process allocate meanwhile, but no gigabyte.
        assert!(resident() < before + (512 << 20), "{before} -> {}", resident());
    }

    #[test]
    fn the_ledger_finds_two_workers_in_one_range() {
        let mem = SharedMem::<f32>::zeroed(10).expect("a little memory can be had");
        mem.write(0..5).fill(1.0);
        std::thread::scope(|s| {
            assert!(s.spawn(|| mem.write(5..10)[0] = 2.0).join().is_ok());
            assert!(s.spawn(|| mem.read(4..5)[0]).join().is_err());
        });
        mem.new_phase();
        assert_eq!(mem.read(4..6), [1.0, 2.0]);
    }
}
