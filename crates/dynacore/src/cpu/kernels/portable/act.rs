//! The non-linearities, element by element in f32.
//!
//! [`exp`] and [`erf`] are branch-free polynomials, so that the compiler turns the loops of [`activate`] and [`glu`]
//! into vector code under whatever target features their caller was compiled with; the operations are the same, so
//! the results are too. GELU's tanh form is x * sigmoid(2u), which needs the same exponential as SiLU.

use dynair::Activation;

/// e^x within 2 ulp; 0 below -104, infinity above 88.73, NaN for NaN.
///
/// x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series to r^7 (its next term is below 6e-9 of the result), times 2^n in
/// two factors, so that subnormal results come out right.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4; // 9 bits: n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to an integer, whose low bits then stand in the sum.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-110.0, 90.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    let bits = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let half = bits >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    p * power(half) * power(bits - half)
}

/// The error function within 2e-7 (Abramowitz and Stegun, 7.1.26).
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let a = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * a);
    let mut p = 1.061_405_4;
    p = p * t - 1.453_152;
    p = p * t + 1.421_413_7;
    p = p * t - 0.284_496_74;
    p = p * t + 0.254_829_6;
    (1.0 - p * t * exp(-a * a)).copysign(x)
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const TWO_ROOT_2_PI: f32 = 1.595_769;
    x / (1.0 + exp(-TWO_ROOT_2_PI * (x + 0.044_715 * x * x * x)))
}

#[inline(always)]
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    // Not `max`, which would turn NaN into 0.
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn pairs(gate: &mut [f32], up: &[f32], f: impl Fn(f32) -> f32) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = f(*g) * u;
    }
}

/// The loops behind [`glu`], compiled into each table's own function.
#[inline(always)]
pub(crate) fn glu_loop(act: Activation, gate: &mut [f32], up: &[f32]) {
    match act {
        Activation::Silu => pairs(gate, up, silu),
        Activation::GeluTanh => pairs(gate, up, gelu_tanh),
        Activation::Gelu => pairs(gate, up, gelu),
        Activation::Relu => pairs(gate, up, relu),
    }
}

/// The loops behind [`activate`], compiled into each table's own function.
#[inline(always)]
pub(crate) fn activate_loop(act: Activation, x: &mut [f32]) {
    match act {
        Activation::Silu => x.iter_mut().for_each(|x| *x = silu(*x)),
        Activation::GeluTanh => x.iter_mut().for_each(|x| *x = gelu_tanh(*x)),
        Activation::Gelu => x.iter_mut().for_each(|x| *x = gelu(*x)),
        Activation::Relu => x.iter_mut().for_each(|x| *x = relu(*x)),
    }
}

/// See [`crate::cpu::table::GluFn`].
pub(crate) fn glu(act: Activation, gate: &mut [f32], up: &[f32]) {
    glu_loop(act, gate, up);
}

/// See [`crate::cpu::table::ActFn`].
pub(crate) fn activate(act: Activation, x: &mut [f32]) {
    activate_loop(act, x);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        for i in -10_500..8_870 {
            let x = i as f32 * 0.01;
            let truth = f64::from(x).exp();
            let found = f64::from(exp(x));
            // Below 1e-37 results are subnormal: absolute error.
            assert!(
                (found - truth).abs() <= truth * 3e-7 + 2e-45,
                "exp({x}): {found}, expected {truth}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn activations_match_their_formulas_in_f64() {
        // erf at a few points, from tables.
        for (x, truth) in [
            (0.0, 0.0),
            (0.5, 0.520_499_9),
            (1.0, 0.842_700_8),
            (2.0, 0.995_322_3),
            (-1.0, -0.842_700_8),
        ] {
            assert!((erf(x) - truth).abs() < 3e-7, "erf({x})");
        }
        for i in -1000..=1000 {
            let x = i as f32 * 0.02;
            let d = f64::from(x);
            let tanh =
                0.5 * d * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (d + 0.044715 * d.powi(3))).tanh());
            let cases = [
                (Activation::Silu, d / (1.0 + (-d).exp())),
                (Activation::GeluTanh, tanh),
                (Activation::Relu, d.max(0.0)),
            ];
            for (act, truth) in cases {
                let mut y = [x];
                activate(act, &mut y);
                assert!(
                    (f64::from(y[0]) - truth).abs() < 1e-6 * (1.0 + d.abs()),
                    "{act:?}({x})"
                );
                let mut gate = [x];
                glu(act, &mut gate, &[3.0]);
                assert_eq!(gate[0], y[0] * 3.0);
            }
        }
        let mut wild = [f32::NAN, f32::INFINITY];
        activate(Activation::Relu, &mut wild);
        assert!(wild[0].is_nan() && wild[1] == f32::INFINITY);
    }
}
