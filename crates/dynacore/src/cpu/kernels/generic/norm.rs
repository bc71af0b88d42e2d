//! RMS norm. The mean square is summed by four vectors in turn, so its order depends on the row's length alone.

use crate::cpu::kernels::simd::Simd;

/// 1 / √(mean(x²) + eps).
#[inline(always)]
fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let mut groups = x.chunks_exact(4 * S::LANES);
    for group in &mut groups {
        for (i, sum) in sums.iter_mut().enumerate() {
            let v = s.load(&group[i * S::LANES..]);
            *sum = s.fma(v, v, *sum);
        }
    }
    for (part, sum) in groups.remainder().chunks(S::LANES).zip(&mut sums) {
        let v = s.load_part(part, 0.0);
        *sum = s.fma(v, v, *sum);
    }
    let total = s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
    1.0 / (total / x.len() as f32 + eps).sqrt()
}

/// y = x / √(mean(x²) + eps) · weight, for one row.
#[inline(always)]
pub(crate) fn rms_norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    assert!(
        x.len() == weight.len() && x.len() == y.len(),
        "row, weight and result have one length"
    );
    let inverse = s.splat(inverse_rms(s, x, eps));
    for ((x, w), y) in x
        .chunks(S::LANES)
        .zip(weight.chunks(S::LANES))
        .zip(y.chunks_mut(S::LANES))
    {
        let v = s.mul(s.mul(s.load_part(x, 0.0), inverse), s.load_part(w, 0.0));
        s.store_part(v, y);
    }
}
