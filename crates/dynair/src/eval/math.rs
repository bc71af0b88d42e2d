//! Scalar mathematics of the ops, in f64.

use crate::op::{Activation, RopeScaling, RopeSpec, RopeStyle};

/// Dot product of two rows, products exact and summed in f64.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0f64; LANES];
    let (ca, cb) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f64 = ca
        .remainder()
        .iter()
        .zip(cb.remainder())
        .map(|(x, y)| f64::from(*x) * f64::from(*y))
        .sum();
    for (x, y) in ca.zip(cb) {
        for i in 0..LANES {
            sums[i] += f64::from(x[i]) * f64::from(y[i]);
        }
    }
    sums.iter().sum::<f64>() + tail
}

/// act(x).
pub fn activate(act: Activation, x: f64) -> f64 {
    match act {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Activation::Relu => x.max(0.0),
    }
}

/// The error function by the series 2/√π·exp(−x²)·Σ 2ⁿ·x²ⁿ⁺¹/(2n+1)!!, whose terms all have one sign.
fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    // Beyond 6 the result rounds to ±1 in f64.
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

/// Cosine and sine of each pair's rotation at a position, times the attention factor: `dims/2` of them.
///
/// `factors` divide the frequencies. YaRN: frequencies that turn more than `beta_fast` times over the original context
/// stay, those that turn less than `beta_slow` times are divided by `factor`, those between are blended linearly in
/// the pair's number.
pub fn rope_angles(spec: &RopeSpec, factors: Option<&[f32]>, position: u32) -> Vec<(f64, f64)> {
    let dims = spec.dims as f64;
    let theta = f64::from(spec.theta);
    let ramp = match spec.scaling {
        RopeScaling::Yarn {
            original_context,
            beta_fast,
            beta_slow,
            ..
        } => {
            let pair_of = |rotations: f32| {
                let turns = f64::from(original_context) / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
                dims * turns.ln() / (2.0 * theta.ln())
            };
            let low = pair_of(beta_fast).floor().max(0.0);
            let high = pair_of(beta_slow).ceil().min(dims - 1.0);
            Some((low, high))
        }
        RopeScaling::None | RopeScaling::Linear { .. } => None,
    };
    (0..spec.dims / 2)
        .map(|i| {
            let own = theta.powf(-2.0 * i as f64 / dims) / factors.map_or(1.0, |f| f64::from(f[i]));
            let (frequency, magnitude) = match spec.scaling {
                RopeScaling::None => (own, 1.0),
                RopeScaling::Linear { factor } => (own / f64::from(factor), 1.0),
                RopeScaling::Yarn {
                    factor,
                    attention_factor,
                    ..
                } => {
                    let (low, high) = ramp.unwrap_or((0.0, 0.0));
                    let stretch = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    let blended = own / f64::from(factor) * stretch + own * (1.0 - stretch);
                    (blended, f64::from(attention_factor))
                }
            };
            let angle = f64::from(position) * frequency;
            (angle.cos() * magnitude, angle.sin() * magnitude)
        })
        .collect()
}

/// Turns one head in place.
pub(super) fn turn(spec: &RopeSpec, angles: &[(f64, f64)], head: &mut [f32]) {
    let half = spec.dims / 2;
    for (i, (cos, sin)) in angles.iter().enumerate() {
        let (a, b) = match spec.style {
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            RopeStyle::Half => (i, i + half),
        };
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        head[a] = (x * cos - y * sin) as f32;
        head[b] = (x * sin + y * cos) as f32;
    }
}
