//! exp, tanh, erfc and the activations, on vectors.
//!
//! `exp` reduces by ln 2 in two parts (Cody and Waite) and evaluates a polynomial of degree 7 on ±ln 2 / 2; error at
//! most 2 ulp over the range of normal results, 0 below. `tanh` uses an odd polynomial near 0 and 1 − 2/(e²ˣ + 1)
//! beyond; at most 4 ulp. `erfc` is the Chebyshev fit of Press et al., *Numerical Recipes* (erfcc), fractional error
//! 1.2e-7 everywhere. The tests of this module hold them to these figures.

use dynair::Activation;

use super::Simd;

/// eˣ. Results below the smallest normal number are 0, above the largest are infinite.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.722_83;
    // NaN must come through: `min`/`max` return their second argument then.
    let clamped = s.max(s.splat(LOWEST), s.min(s.splat(HIGHEST), x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    // At the upper end n is 128, one more than an exponent holds: 2ⁿ is made of two factors.
    let n1 = s.min(n, s.splat(127.0));
    let n2 = s.sub(n, n1);
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let p = s.add(s.fma(s.mul(r, r), p, r), s.splat(1.0));
    let y = s.mul(s.mul(p, s.exp2i(n1)), s.exp2i(n2));
    let y = s.select_lt(x, s.splat(LOWEST), s.splat(0.0), y);
    s.select_lt(s.splat(HIGHEST), x, s.splat(f32::INFINITY), y)
}

/// Hyperbolic tangent.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    const NEAR: f32 = 0.625;
    let a = s.abs(x);
    // Minimax for (tanh x − x)/x³ in x², |x| < 0.625 (Cephes, tanhf).
    let z = s.mul(a, a);
    let mut p = s.splat(-0.005_704_988_7);
    for c in [0.020_639_09, -0.053_739_715, 0.133_314_42, -0.333_332_8] {
        p = s.fma(p, z, s.splat(c));
    }
    let near = s.fma(s.mul(p, z), a, a);
    let e = exp(s, s.add(a, a));
    let far = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(e, s.splat(1.0))));
    s.copysign(s.select_lt(a, s.splat(NEAR), near, far), x)
}

/// 1 − erf(x).
#[inline(always)]
fn erfc<S: Simd>(s: S, x: S::V) -> S::V {
    let z = s.abs(x);
    let t = s.div(s.splat(1.0), s.fma(z, s.splat(0.5), s.splat(1.0)));
    let mut p = s.splat(0.170_872_77);
    for c in [
        -0.822_152_23,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ] {
        p = s.fma(p, t, s.splat(c));
    }
    let y = s.mul(t, exp(s, s.sub(p, s.mul(z, z))));
    s.select_lt(x, s.splat(0.0), s.sub(s.splat(2.0), y), y)
}

/// An activation of [`dynair::Activation`].
#[inline(always)]
pub(crate) fn activate<S: Simd>(s: S, act: Activation, x: S::V) -> S::V {
    match act {
        Activation::Silu => s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), x)))),
        Activation::GeluTanh => {
            // 0.5·(1 + tanh u) is the logistic function of 2u, which keeps small results of negative x exact.
            let x3 = s.mul(s.mul(x, x), x);
            let u = s.mul(s.splat(-2.0 * 0.797_884_6), s.fma(s.splat(0.044_715), x3, x));
            s.div(x, s.add(s.splat(1.0), exp(s, u)))
        }
        Activation::Gelu => {
            let half = s.mul(s.splat(0.5), x);
            s.mul(half, erfc(s, s.mul(x, s.splat(-std::f32::consts::FRAC_1_SQRT_2))))
        }
        // `max` gives its second argument for NaN.
        Activation::Relu => s.max(s.splat(0.0), x),
    }
}

/// c·tanh(x/c).
#[inline(always)]
pub(crate) fn softcap<S: Simd>(s: S, c: f32, x: S::V) -> S::V {
    s.mul(s.splat(c), tanh(s, s.div(x, s.splat(c))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use crate::cpu::kernels::ops::OpTable;

    fn tables() -> impl Iterator<Item = &'static OpTable> {
        Isa::ALL.into_iter().filter_map(OpTable::of)
    }

    /// Distance in units of the last place of `truth`.
    fn ulps(found: f32, truth: f64) -> f64 {
        let size = (truth.abs() as f32).max(f32::MIN_POSITIVE);
        let ulp = f64::from(f32::from_bits(size.to_bits() + 1)) - f64::from(size);
        (f64::from(found) - truth).abs() / ulp
    }

    fn worst(f: impl Fn(&[f32], &mut [f32]), truth: impl Fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let n = 40_000;
        let x: Vec<f32> = (0..n).map(|i| from + (to - from) * i as f32 / n as f32).collect();
        let mut y = vec![0.0; n];
        f(&x, &mut y);
        x.iter()
            .zip(&y)
            .map(|(x, y)| ulps(*y, truth(f64::from(*x))))
            .fold(0.0, f64::max)
    }

    /// erf by its series, exact enough for arguments up to 4.
    fn erf(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..120 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn functions_stay_within_their_figures() {
        for t in tables() {
            let exp = worst(|x, y| exp_of(t, x, y), f64::exp, -87.0, 88.7);
            assert!(exp <= 2.0, "exp: {exp} ulp");
            let tanh = worst(|x, y| t.softcap(1.0, x, y), f64::tanh, -12.0, 12.0);
            assert!(tanh <= 4.0, "tanh: {tanh} ulp");
            let silu = worst(
                |x, y| t.act(Activation::Silu, x, y),
                |x| x / (1.0 + (-x).exp()),
                -80.0,
                80.0,
            );
            assert!(silu <= 5.0, "silu: {silu} ulp");
            let truth = |x: f64| {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                x / (1.0 + (-2.0 * u).exp())
            };
            // Left of −2 the exponent's own rounding is magnified by its size: relative error grows as |2u| ulp.
            let gelu = worst(|x, y| t.act(Activation::GeluTanh, x, y), truth, -2.0, 10.0);
            assert!(gelu <= 12.0, "gelu_tanh: {gelu} ulp");
            let gelu = worst(
                |x, y| t.act(Activation::Gelu, x, y),
                |x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
                -2.0,
                5.0,
            );
            assert!(gelu <= 12.0, "gelu: {gelu} ulp");
        }
    }

    /// eˣ through the one op that shows it: silu(−x)/(−x) = 1/(1 + eˣ) would hide it, a blend of scores does not.
    fn exp_of(_: &OpTable, x: &[f32], y: &mut [f32]) {
        use crate::cpu::kernels::simd::portable::Portable;
        for (x, y) in x.chunks(8).zip(y.chunks_mut(8)) {
            let s = Portable;
            s.store_part(exp(s, s.load_part(x, 0.0)), y);
        }
    }

    #[test]
    fn the_ends_of_the_range_are_kept() {
        let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1000.0, -1000.0, 0.0];
        let mut y = [0.0; 6];
        for t in tables() {
            exp_of(t, &x, &mut y);
            assert!(
                y[0].is_nan() && y[1..] == [f32::INFINITY, 0.0, f32::INFINITY, 0.0, 1.0],
                "exp: {y:?}"
            );
            t.softcap(1.0, &x, &mut y);
            assert!(
                y[0].is_nan() && y[1..] == [1.0, -1.0, 1.0, -1.0, 0.0],
                "tanh: {y:?}"
            );
            for act in [
                Activation::Silu,
                Activation::GeluTanh,
                Activation::Gelu,
                Activation::Relu,
            ] {
                t.act(act, &x[3..], &mut y[3..]);
                assert_eq!(y[3..], [1000.0, 0.0, 0.0], "{act:?}");
                t.act(act, &x[..1], &mut y[..1]);
                assert!(y[0].is_nan(), "{act:?}");
            }
        }
    }

    #[test]
    fn an_elements_place_in_the_vector_never_changes_its_bits() {
        let x: Vec<f32> = (0..67).map(|i| (i as f32 - 33.0) * 0.37).collect();
        for t in tables() {
            let mut all = vec![0.0; x.len()];
            t.act(Activation::GeluTanh, &x, &mut all);
            for i in 0..x.len() {
                let mut one = [0.0];
                t.act(Activation::GeluTanh, &x[i..i + 1], &mut one);
                assert_eq!(one[0].to_bits(), all[i].to_bits());
            }
        }
    }
}
