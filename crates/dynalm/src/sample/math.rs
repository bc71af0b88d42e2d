//! Passes over a row of logits: largest element, exponential, the k largest, selection by weight.

use std::cmp::Ordering;

use super::params::TokenId;

/// Elements per pass of an inner loop; small enough for the first-level cache.
const CHUNK: usize = 1024;

/// Number of partial sums; fixed, so that a sum is the same whatever the vector width.
const LANES: usize = 16;

/// The first largest element: its index and value. `None` if there is a NaN or +∞, or nothing above −∞.
pub fn argmax(row: &[f32]) -> Option<(usize, f32)> {
    let mut best = f32::NEG_INFINITY;
    let mut best_chunk = 0;
    let mut nan = false;
    for (c, chunk) in row.chunks(CHUNK).enumerate() {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let mut nans = [false; LANES];
        let (whole, rest) = chunk.as_chunks::<LANES>();
        for values in whole {
            for i in 0..LANES {
                lanes[i] = if values[i] > lanes[i] { values[i] } else { lanes[i] };
                nans[i] |= values[i].is_nan();
            }
        }
        let mut largest = f32::NEG_INFINITY;
        for &value in lanes.iter().chain(rest) {
            largest = if value > largest { value } else { largest };
        }
        nan |= nans.contains(&true) || rest.iter().any(|value| value.is_nan());
        if largest > best {
            best = largest;
            best_chunk = c;
        }
    }
    if nan || !best.is_finite() {
        return None;
    }
    let start = best_chunk * CHUNK;
    let at = row[start..].iter().position(|&value| value == best)?;
    Some((start + at, best))
}

/// e^x for x ≤ 0, relative error below 2e-7; 0 below −87. Uses only operations that IEEE 754 rounds exactly,
/// so it gives the same bits everywhere, unlike the platform's own.
///
/// Cody and Waite: x = n ln 2 + r with |r| ≤ ln 2 / 2, e^r by its Taylor polynomial of degree 7, 2^n by the
/// exponent.
#[inline]
pub fn exp(x: f32) -> f32 {
    // 1.5 × 2^23: adding it leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + coefficient;
    }
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x > -87.0 { p * scale } else { 0.0 }
}

/// Σ e^(x − max) over a row, in a fixed order.
pub fn sum_exp(row: &[f32], max: f32) -> f64 {
    let mut total = 0.0f64;
    for chunk in row.chunks(CHUNK) {
        let mut lanes = [0.0f32; LANES];
        let (whole, rest) = chunk.as_chunks::<LANES>();
        for values in whole {
            for i in 0..LANES {
                lanes[i] += exp(values[i] - max);
            }
        }
        total += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        total += rest.iter().map(|&value| f64::from(exp(value - max))).sum::<f64>();
    }
    total
}

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The token.
    pub id: TokenId,
    /// Its logit.
    pub logit: f32,
    /// Its probability in units of [`ONE`], relative to the most likely token: an integer, so that sums do
    /// not depend on their order.
    pub weight: u64,
}

/// Weight of the most likely token. 2^40 of them fit 2^24 times into a `u64`, more than any vocabulary holds.
pub const ONE: u64 = 1 << 40;

/// The weight of a token whose logit is `below` (≤ 0) from the largest, after temperature.
#[inline]
pub fn weight(below: f32) -> u64 {
    (exp(below) * ONE as f32) as u64
}

/// More likely first; of equals, the lower id.
pub fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// The k largest logits into `out`, in no order, weights 0; of equals, the lower ids. One pass with a buffer
/// of 2k.
pub fn top_k(row: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if k == 0 {
        return;
    }
    let mut threshold = f32::NEG_INFINITY;
    for (c, chunk) in row.chunks(CHUNK).enumerate() {
        // Most chunks have nothing above the threshold once it has settled: one vectorised comparison tells.
        if !chunk.iter().fold(false, |any, &value| any | (value > threshold)) {
            continue;
        }
        for (i, &logit) in chunk.iter().enumerate() {
            if logit > threshold {
                out.push(Candidate {
                    id: (c * CHUNK + i) as TokenId,
                    logit,
                    weight: 0,
                });
                if out.len() >= 2 * k {
                    cut(out, k);
                    threshold = out[k - 1].logit;
                }
            }
        }
    }
    if out.len() > k {
        cut(out, k);
    }
}

/// Keeps the k most likely; the least likely of them stands last.
fn cut(candidates: &mut Vec<Candidate>, k: usize) {
    candidates.select_nth_unstable_by(k - 1, by_logit);
    candidates.truncate(k);
}

/// In the order `compare`, the number of candidates whose weights first reach `target` together (at least 1),
/// these standing first afterwards. All of them if the sum is less. Linear time: halves the range, going
/// where the target is.
pub fn reach(
    candidates: &mut [Candidate],
    target: u64,
    compare: impl Fn(&Candidate, &Candidate) -> Ordering,
) -> usize {
    let (mut low, mut high) = (0, candidates.len());
    let mut missing = target.max(1);
    // Invariant: everything before `low` is part of the answer, and `missing` is still to be reached in
    // low..high.
    while high - low > 1 {
        let middle = (high - low) / 2;
        let range = &mut candidates[low..high];
        range.select_nth_unstable_by(middle - 1, &compare);
        let first: u64 = range[..middle].iter().map(|candidate| candidate.weight).sum();
        if first >= missing {
            high = low + middle;
        } else {
            missing -= first;
            low += middle;
        }
    }
    high
}
