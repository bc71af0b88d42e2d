//! The statistics of rounds: medians, spread, quantiles, and when a difference counts as confirmed.

use serde::{Deserialize, Serialize};

/// A difference is no smaller than this share of the better value in every round.
const MARGIN: f64 = 0.10;
/// Neither engine may vary by more than this share of its median.
const MOST_SPREAD: f64 = 0.10;
/// Fewer rounds confirm nothing.
const LEAST_ROUNDS: usize = 3;

/// The value at `share` (0 to 1) of sorted values, interpolated between neighbours as NumPy does by default.
pub(super) fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = share.clamp(0.0, 1.0) * last as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    let high = sorted[(low + 1).min(last)];
    Some(sorted[low] + (high - sorted[low]) * part)
}

/// Values in ascending order.
pub(super) fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut all: Vec<f64> = values.into_iter().collect();
    all.sort_by(f64::total_cmp);
    all
}

/// Smallest, middle and largest value of some rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Spread {
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) max: f64,
}

impl Spread {
    /// `None` of no values.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let all = sorted(values);
        Some(Spread {
            min: *all.first()?,
            median: quantile(&all, 0.5)?,
            max: *all.last()?,
        })
    }

    /// How far apart the extremes are, as a share of the median.
    pub(super) fn variation(&self) -> f64 {
        if self.max == self.min {
            return 0.0;
        }
        (self.max - self.min) / self.median.abs()
    }
}

/// What the rounds of two engines say about one figure.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Verdict {
    /// Ours over theirs, of rounds with one number.
    pub(super) ratio: Spread,
    /// Whether the difference is confirmed.
    pub(super) confirmed: bool,
    /// Why not; empty if it is.
    pub(super) reason: String,
}

/// Holds `ours` against `theirs`, round by round (equally many of both, at least one, all above 0).
///
/// A difference is confirmed only if in every round the same one is better by more than [`MARGIN`], whichever of the two
/// is taken as the measure, and neither varies by more than [`MOST_SPREAD`] of its median.
pub(super) fn compare(ours: &[f64], theirs: &[f64]) -> Option<Verdict> {
    if ours.len() != theirs.len() || ours.iter().chain(theirs).any(|v| *v <= 0.0 || !v.is_finite()) {
        return None;
    }
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| a / b).collect();
    let ratio = Spread::of(ratios.iter().copied())?;
    let beyond = |r: f64| r < 1.0 - MARGIN;
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let (a, b) = (
        Spread::of(ours.iter().copied())?.variation(),
        Spread::of(theirs.iter().copied())?.variation(),
    );
    let reason = if ratios.len() < LEAST_ROUNDS {
        format!("{} of at least {LEAST_ROUNDS} rounds", ratios.len())
    } else if !ratios.iter().all(|r| beyond(1.0 / r)) && !ratios.iter().all(|r| beyond(*r)) {
        format!("not every round is beyond {} on the same side", percent(MARGIN))
    } else if a > MOST_SPREAD || b > MOST_SPREAD {
        format!(
            "the rounds vary by {} and {}, more than {}",
            percent(a),
            percent(b),
            percent(MOST_SPREAD)
        )
    } else {
        String::new()
    };
    Some(Verdict {
        ratio,
        confirmed: reason.is_empty(),
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        let values = sorted([4.0, 1.0, 3.0, 2.0]);
        assert_eq!(quantile(&values, 0.5), Some(2.5));
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(quantile(&values, 1.0), Some(4.0));
        assert!((quantile(&values, 0.95).expect("there are values") - 3.85).abs() < 1e-12);
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn a_spread_knows_its_variation() {
        let s = Spread::of([110.0, 100.0, 95.0]).expect("values");
        assert_eq!((s.min, s.median, s.max), (95.0, 100.0, 110.0));
        assert!((s.variation() - 0.15).abs() < 1e-12);
        assert_eq!(Spread::of([0.0, 0.0]).expect("values").variation(), 0.0);
        assert_eq!(Spread::of([]), None);
    }

    fn verdict(ours: &[f64], theirs: &[f64]) -> Verdict {
        compare(ours, theirs).expect("comparable")
    }

    #[test]
    fn a_clear_and_steady_difference_is_confirmed_on_either_side() {
        let (fast, slow) = ([120.0, 122.0, 121.0], [100.0, 101.0, 99.0]);
        for (a, b) in [(&fast, &slow), (&slow, &fast)] {
            let v = verdict(a, b);
            assert!(v.confirmed && v.reason.is_empty(), "{v:?}");
        }
        let v = verdict(&fast, &slow);
        assert!((v.ratio.median - 122.0 / 101.0).abs() < 1e-12, "{v:?}");
    }

    #[test]
    fn what_is_not_confirmed_says_why() {
        // One round within the margin.
        let v = verdict(&[120.0, 108.0, 121.0], &[100.0, 100.0, 100.0]);
        assert!(!v.confirmed && v.reason.contains("not every round"), "{v:?}");
        // All beyond, but on different sides.
        let v = verdict(&[120.0, 80.0, 120.0], &[100.0, 100.0, 100.0]);
        assert!(!v.confirmed && v.reason.contains("same side"), "{v:?}");
        // 1.105 is beyond 10 % of the slower and within 10 % of the faster.
        let v = verdict(&[110.5, 110.5, 110.5], &[100.0, 100.0, 100.0]);
        assert!(!v.confirmed, "{v:?}");
        // Either may be the unsteady one.
        let v = verdict(&[150.0, 170.0, 160.0], &[100.0, 100.0, 100.0]);
        assert!(!v.confirmed && v.reason.contains("12.5 %"), "{v:?}");
        let v = verdict(&[150.0, 150.0, 150.0], &[100.0, 111.0, 100.0]);
        assert!(!v.confirmed && v.reason.contains("11.0 %"), "{v:?}");
        let v = verdict(&[200.0, 200.0], &[100.0, 100.0]);
        assert!(!v.confirmed && v.reason.contains("2 of at least 3"), "{v:?}");
    }

    #[test]
    fn what_cannot_be_compared_is_not() {
        assert_eq!(compare(&[1.0], &[1.0, 2.0]), None);
        assert_eq!(compare(&[], &[]), None);
        assert_eq!(compare(&[0.0], &[1.0]), None);
        assert_eq!(compare(&[1.0], &[f64::NAN]), None);
    }
}
