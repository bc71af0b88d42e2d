//! Kernels in plain Rust: what `safe` mode means, and what runs on a CPU without a table of its own.
//!
//! Weights are decoded a row at a time into f32 and multiplied in f32; nothing is quantised. [`act`] holds the
//! non-linearities.

pub(crate) mod act;

pub(crate) use act::{activate, glu};

/// Accumulators of [`dot`]: enough to hide the latency of an addition whatever the vector width.
const LANES: usize = 16;

/// The inner product, summed in [`LANES`] interleaved partial sums and then over those, whatever the caller's shape.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((s, a), b) in sums.iter_mut().zip(a).zip(b) {
            *s += a * b;
        }
    }
    for ((s, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *s += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_takes_every_element_once() {
        for n in 0..40 {
            let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let b = vec![2.0; n];
            assert_eq!(dot(&a, &b), (n * n.saturating_sub(1)) as f32);
        }
    }
}
