//! Least-squares fits of one sub-block, the core of the K encoders; [`super::table`] has the same search over its codes.
//!
//! A sub-block of values `x` is to be written as `scale * q` or `scale * q - min` with small integers `q`. For given
//! integers the best real `scale` (and `min`) follow from the normal equations; for given `scale` the best integers
//! are the rounded ones. Neither is known, and the error has many local minima, so a fan of starting scales around
//! the one that just covers the range is tried: each gives integers, these give the least-squares parameters, these
//! give integers again, and the parameters with the smallest squared error of their own integers win. The covering
//! fit itself is among the candidates, so the result is never worse than it.
//!
//! Sums run in `f64`: they cannot overflow for finite `f32` and need no care about their order.

/// Relative steps of the starting scales: from a range a fifth wider than the values' to one a third narrower, which
/// clips the outermost. With few codes clipping pays (three codes each side: the best range of a normal sample is
/// about 0.8 of its own).
pub(super) fn fan() -> impl Iterator<Item = f64> {
    (-6i32..=16).map(|k| 1.0 + f64::from(k) / 32.0)
}

/// Nearest code within `low..=high`, of two halves the even one; as a float, so that the searches stay in vector
/// registers.
pub(super) fn code(value: f64, low: f64, high: f64) -> f64 {
    // Adding and subtracting 1.5 * 2^52 leaves no room for a fraction: the sum is rounded to an integer, ties to even.
    // (`round_ties_even` is a call into the C library where the target has no instruction for it.)
    const NO_FRACTION: f64 = 6_755_399_441_055_744.0;
    let value = if value > low { value } else { low };
    let value = if value < high { value } else { high };
    (value + NO_FRACTION) - NO_FRACTION
}

/// Sum of squares of `x - (scale * q - min)` with the best codes in `low..=high`; `x` is a multiple of four long.
pub(super) fn error(x: &[f32], scale: f64, min: f64, low: f64, high: f64) -> f64 {
    let inverse = inverse(scale);
    // Four sums, so that additions need not wait for each other.
    let mut sums = [0.0; 4];
    for x in x.as_chunks::<4>().0 {
        for (sum, &v) in sums.iter_mut().zip(x) {
            let v = f64::from(v);
            let e = v + min - scale * code((v + min) * inverse, low, high);
            *sum += e * e;
        }
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// `1 / scale`, or zero for a zero scale.
pub(super) fn inverse(scale: f64) -> f64 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The `scale` (of either sign) with which `scale * q`, `q` in `low..=-low - 1`, is nearest to `x`.
pub(super) fn symmetric(x: &[f32], low: f64) -> f64 {
    let high = -low - 1.0;
    let peak = x.iter().fold(0.0f64, |best, &v| {
        if f64::from(v).abs() > best.abs() {
            v.into()
        } else {
            best
        }
    });
    if peak == 0.0 {
        return 0.0;
    }
    // The element of largest magnitude gets the lowest code: there is one more below zero than above.
    let cover = peak / low;
    let mut best = (error(x, cover, 0.0, low, high), cover);
    for factor in fan() {
        let inverse = factor / cover;
        let (mut xq, mut qq) = (0.0, 0.0);
        for &v in x {
            let q = code(f64::from(v) * inverse, low, high);
            xq += f64::from(v) * q;
            qq += q * q;
        }
        if qq == 0.0 {
            continue;
        }
        let scale = xq / qq;
        let e = error(x, scale, 0.0, low, high);
        if e < best.0 {
            best = (e, scale);
        }
    }
    best.1
}

/// The `(scale, min)`, both at least zero, with which `scale * q - min`, `q` in `0..=high`, is nearest to `x`.
pub(super) fn affine(x: &[f32], high: f64) -> (f64, f64) {
    // The format subtracts a minimum that is not negative: a sub-block above zero starts at zero.
    let lowest = x.iter().fold(0.0f64, |best, &v| best.min(v.into()));
    let highest = x.iter().fold(f64::from(x[0]), |best, &v| best.max(v.into()));
    let cover = (highest - lowest) / high;
    if cover == 0.0 {
        return (0.0, -lowest);
    }
    let mut best = (error(x, cover, -lowest, 0.0, high), cover, -lowest);
    let n = x.len() as f64;
    for factor in fan() {
        let inverse = factor / cover;
        let (mut sx, mut sq, mut sxq, mut sqq) = (0.0, 0.0, 0.0, 0.0);
        for &v in x {
            let v = f64::from(v);
            // Clip both ends alike.
            let centre = (lowest + highest) / 2.0;
            let q = code((v - centre) * inverse + high / 2.0, 0.0, high);
            sx += v;
            sq += q;
            sxq += v * q;
            sqq += q * q;
        }
        let determinant = n * sqq - sq * sq;
        if determinant <= 0.0 {
            continue;
        }
        let mut scale = (n * sxq - sx * sq) / determinant;
        let mut min = (scale * sq - sx) / n;
        if min < 0.0 {
            (scale, min) = (sxq / sqq, 0.0);
        }
        if scale < 0.0 {
            continue;
        }
        let e = error(x, scale, min, 0.0, high);
        if e < best.0 {
            best = (e, scale, min);
        }
    }
    (best.1, best.2)
}
