//! When a worker offers its core to other threads (DD-015).
//!
//! A core that two threads want goes to one of them for a time slice and then to the other. A worker that loses its core in
//! the middle of an item holds up all others until it has it back; between two items it holds up nobody. So a worker
//! yields by itself, between two items, when its slice is about to end. Nothing is lost by that where nobody waits for the
//! core, and a little where somebody does: the kernel takes what is left of its claim from whoever yields.

use std::time::{Duration, Instant};

/// The slice where the system does not say. What yields too early loses there is not known to matter: before Linux 6.12
/// a thread that yields keeps its claim.
const USUAL_SLICE: Duration = Duration::from_millis(2);

/// Items shorter than this are counted and not timed: the clock costs tens of nanoseconds, an item perhaps one microsecond.
const SHORT: Duration = Duration::from_micros(20);

/// Most items between two looks at the clock.
const MOST_STRIDE: u32 = 16;

/// Items longer than this part of a slice end at no point near its end: their worker never yields.
const LONG_PART: u32 = 8;

/// A worker's stay on its core.
pub(super) struct Turn {
    slice: Duration,
    /// When the slice began, as far as the worker can tell.
    began: Instant,
    looked: Instant,
    /// Items to pass before the next look at the clock.
    left: u32,
    /// How many that was at the last look.
    stride: u32,
}

impl Turn {
    pub(super) fn new(slice: Duration) -> Turn {
        let now = Instant::now();
        Turn {
            slice,
            began: now,
            looked: now,
            left: 0,
            stride: 1,
        }
    }

    /// Called when a worker wakes: it has a slice of its own again.
    pub(super) fn begin(&mut self) {
        *self = Turn::new(self.slice);
    }

    /// Called when a worker comes to a stage, whose items may be of any length.
    pub(super) fn before_stage(&mut self) {
        (self.left, self.stride) = (0, 1);
    }

    /// Called before a worker takes an item.
    pub(super) fn before_item(&mut self) {
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        let now = Instant::now();
        let (spent, since) = (now - self.began, now - self.looked);
        if self.ends(spent, since) {
            std::thread::yield_now();
            return self.begin();
        }
        if spent > self.slice {
            // The core was lost on the way and came back, or items are long.
            self.began = now;
        }
        self.stride = next_stride(self.stride, since);
        self.looked = now;
        self.left = self.stride - 1;
    }

    /// Whether a slice that has lasted `spent` ends before the next look at the clock, the last one being `since` ago.
    fn ends(&self, spent: Duration, since: Duration) -> bool {
        let long = since * LONG_PART > self.slice;
        !long && spent + since >= self.slice && spent <= self.slice + since
    }
}

/// Items to pass before the next look, after `stride` of them took `time`.
fn next_stride(stride: u32, time: Duration) -> u32 {
    if time < SHORT * stride {
        (4 * stride).min(MOST_STRIDE)
    } else {
        1
    }
}

/// The time slice of this thread.
#[cfg(target_os = "linux")]
pub(super) fn time_slice() -> Duration {
    // SAFETY: all zeros are a valid `sched_attr`, which is made of numbers.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>();
    // SAFETY: the kernel writes at most `size` bytes to `attr`, which has as many; 0 is the calling thread.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    // Since Linux 6.12 ordinary threads have their slice there; before, zero.
    match (result, attr.sched_policy as i32, attr.sched_runtime) {
        (0, libc::SCHED_OTHER | libc::SCHED_BATCH, slice) if slice > 0 => Duration::from_nanos(slice),
        _ => USUAL_SLICE,
    }
}

/// The time slice of this thread.
#[cfg(not(target_os = "linux"))]
pub(super) fn time_slice() -> Duration {
    USUAL_SLICE
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: Duration = Duration::from_millis(2);

    fn us(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    #[test]
    fn a_slice_is_given_up_just_before_its_end_and_not_after_it_was_lost() {
        let turn = Turn::new(SLICE);
        assert!(!turn.ends(us(1000), us(50)));
        assert!(!turn.ends(us(1940), us(50)));
        assert!(turn.ends(us(1960), us(50)), "the next items would pass the end");
        assert!(
            turn.ends(us(2010), us(50)),
            "the last ones have, by less than their length"
        );
        assert!(
            !turn.ends(us(6000), us(50)),
            "another thread had the core for a slice"
        );
        assert!(
            !turn.ends(us(1900), us(400)),
            "long items stop nowhere near the end"
        );
    }

    #[test]
    fn short_items_are_counted_and_long_ones_timed() {
        assert_eq!([1, 4, 16].map(|stride| next_stride(stride, us(5))), [4, 16, 16]);
        assert_eq!([1, 4, 16].map(|stride| next_stride(stride, us(5000))), [1; 3]);
        let mut turn = Turn::new(SLICE);
        turn.left = 2;
        turn.before_item();
        assert_eq!(turn.left, 1);
        turn.before_stage();
        assert_eq!(turn.left, 0, "the items of another stage are looked at");
    }

    #[test]
    fn turns_begin_anew_after_a_slice() {
        let mut turn = Turn::new(SLICE);
        for spent in [SLICE, 5 * SLICE] {
            let now = Instant::now();
            (turn.began, turn.looked) = (now - spent, now - us(20));
            turn.before_stage();
            turn.before_item();
            assert!(turn.began >= now, "after {spent:?}");
        }
        assert!(time_slice() > Duration::ZERO);
    }
}
