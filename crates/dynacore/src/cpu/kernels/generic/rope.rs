//! Rotation of a head by the angles of its position. Written as plain loops: they hold no reduction, so the compiler
//! may vectorise them and every element keeps its value.

use dynair::RopeStyle;

use crate::cpu::kernels::simd::Simd;

/// y = x with its first `2 · cos.len()` elements turned, the rest copied. One head.
#[inline(always)]
pub(crate) fn rope<S: Simd>(_s: S, style: RopeStyle, x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
    let half = cos.len();
    assert!(
        sin.len() == half && 2 * half <= x.len() && x.len() == y.len(),
        "rope slices fit each other"
    );
    let (x, x_rest) = x.split_at(2 * half);
    let (y, y_rest) = y.split_at_mut(2 * half);
    y_rest.copy_from_slice(x_rest);
    match style {
        RopeStyle::Interleaved => {
            for i in 0..half {
                let (a, b) = (x[2 * i], x[2 * i + 1]);
                y[2 * i] = a * cos[i] - b * sin[i];
                y[2 * i + 1] = a * sin[i] + b * cos[i];
            }
        }
        RopeStyle::Half => {
            let (xa, xb) = x.split_at(half);
            let (ya, yb) = y.split_at_mut(half);
            for i in 0..half {
                ya[i] = xa[i] * cos[i] - xb[i] * sin[i];
                yb[i] = xa[i] * sin[i] + xb[i] * cos[i];
            }
        }
    }
}
