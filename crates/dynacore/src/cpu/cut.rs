//! How a row of units of equal cost is cut into pieces that workers take one after another.
//!
//! Pieces of one size leave workers idle at the end: either some have one more than others, or whoever fell behind still has
//! a whole piece to do. Here the workers get half of what is left, in equal pieces, again and again until pieces are small
//! (*factoring*, Hummel, Schonberg and Flynn 1992): few pieces, which stream long, and an end at which nobody has much left.
//! The first pieces are smaller than that, because what a piece computes should stay in a core's cache.

use std::ops::Range;

/// The largest piece is this part of a worker's share.
const MOST_PART: usize = 3;

/// The smallest piece is this part of a worker's share.
const LEAST_PART: usize = 16;

/// A cut. Results are positions among the units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    total: usize,
    /// Pieces but the last are multiples of this.
    unit: usize,
    workers: usize,
}

impl Cut {
    /// `total` units for `workers` workers, in multiples of `unit`.
    pub(crate) fn new(total: usize, unit: usize, workers: usize) -> Cut {
        Cut {
            total,
            unit: unit.max(1),
            workers: workers.max(1),
        }
    }

    /// Number of pieces.
    pub(crate) fn count(&self) -> usize {
        self.pieces().count()
    }

    /// The units of piece `piece`.
    ///
    /// # Panics
    /// If there is no such piece.
    pub(crate) fn piece(&self, piece: usize) -> Range<usize> {
        self.pieces().nth(piece).expect("a piece of the cut")
    }

    /// All pieces, in order. There are few: each round of one per worker halves the rest.
    fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        let least = self.total / (LEAST_PART * self.workers);
        let most = self.total.div_ceil(MOST_PART * self.workers);
        let (mut at, mut each, mut round) = (0, 0, 0);
        std::iter::from_fn(move || {
            let left = self.total - at;
            if left == 0 {
                return None;
            }
            if round == 0 {
                let half = left.div_ceil(2 * self.workers).min(most).max(least);
                (each, round) = (half.next_multiple_of(self.unit), self.workers);
            }
            round -= 1;
            let start = at;
            at += each.min(left);
            Some(start..at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(cut: Cut) -> Vec<usize> {
        (0..cut.count()).map(|i| cut.piece(i).len()).collect()
    }

    #[test]
    fn pieces_follow_each_other_and_shrink() {
        for total in 0..400 {
            for unit in [1, 2, 3] {
                for workers in 1..9 {
                    let cut = Cut::new(total, unit, workers);
                    let mut at = 0;
                    for i in 0..cut.count() {
                        let piece = cut.piece(i);
                        assert!(
                            piece.start == at && !piece.is_empty(),
                            "{cut:?}: piece {i} is {piece:?}"
                        );
                        at = piece.end;
                        assert!(at == total || at.is_multiple_of(unit), "{cut:?}: {piece:?}");
                    }
                    assert_eq!(at, total);
                    let lengths = lengths(cut);
                    assert!(lengths.is_sorted_by(|a, b| a >= b), "{cut:?}: {lengths:?}");
                }
            }
        }
    }

    #[test]
    fn nobody_waits_longer_than_for_a_small_piece() {
        for workers in 1..=64 {
            for total in [36, 60, 96, 128, 257, 560, 896, 3072, 16384] {
                // Whoever is free takes the next piece.
                let mut busy = vec![0; workers];
                for length in lengths(Cut::new(total, 1, workers)) {
                    *busy.iter_mut().min().expect("a worker") += length;
                }
                let (first, last) = (busy.iter().min(), busy.iter().max());
                let wait = last.expect("a worker") - first.expect("a worker");
                let share = total.div_ceil(workers);
                assert!(wait <= (share / 8).max(1), "{total} for {workers}: {busy:?}");
            }
        }
    }

    #[test]
    fn pieces_are_few() {
        assert_eq!(lengths(Cut::new(96, 1, 1)), [32, 32, 16, 8, 6, 2]);
        assert_eq!(lengths(Cut::new(96, 2, 2)), [16, 16, 16, 16, 8, 8, 4, 4, 4, 4]);
        assert!(Cut::new(16384, 1, 16).count() < 6 * 16);
        assert_eq!(Cut::new(0, 1, 4).count(), 0);
    }
}
