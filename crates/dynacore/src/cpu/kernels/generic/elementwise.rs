//! Ops that treat every element alike. All slices of a call have one length.

use dynair::Activation;

use crate::cpu::kernels::simd::{Simd, math};

/// y = f(x) over vectors, the last one padded.
#[inline(always)]
fn map<S: Simd>(s: S, x: &[f32], y: &mut [f32], f: impl Fn(S::V) -> S::V) {
    assert_eq!(x.len(), y.len(), "element-wise slices have one length");
    for (x, y) in x.chunks(S::LANES).zip(y.chunks_mut(S::LANES)) {
        s.store_part(f(s.load_part(x, 0.0)), y);
    }
}

/// y = f(a, b) over vectors, the last one padded.
#[inline(always)]
fn zip<S: Simd>(s: S, a: &[f32], b: &[f32], y: &mut [f32], f: impl Fn(S::V, S::V) -> S::V) {
    assert!(
        a.len() == y.len() && b.len() == y.len(),
        "element-wise slices have one length"
    );
    for ((a, b), y) in a
        .chunks(S::LANES)
        .zip(b.chunks(S::LANES))
        .zip(y.chunks_mut(S::LANES))
    {
        s.store_part(f(s.load_part(a, 0.0), s.load_part(b, 0.0)), y);
    }
}

/// y = a + b.
#[inline(always)]
pub(crate) fn add<S: Simd>(s: S, a: &[f32], b: &[f32], y: &mut [f32]) {
    zip(s, a, b, y, |a, b| s.add(a, b));
}

/// y = a · b.
#[inline(always)]
pub(crate) fn mul<S: Simd>(s: S, a: &[f32], b: &[f32], y: &mut [f32]) {
    zip(s, a, b, y, |a, b| s.mul(a, b));
}

/// y = c · x.
#[inline(always)]
pub(crate) fn scale<S: Simd>(s: S, c: f32, x: &[f32], y: &mut [f32]) {
    map(s, x, y, |x| s.mul(s.splat(c), x));
}

/// y = c · tanh(x / c).
#[inline(always)]
pub(crate) fn softcap<S: Simd>(s: S, c: f32, x: &[f32], y: &mut [f32]) {
    map(s, x, y, |x| math::softcap(s, c, x));
}

/// y = act(x).
#[inline(always)]
pub(crate) fn act<S: Simd>(s: S, act: Activation, x: &[f32], y: &mut [f32]) {
    match act {
        Activation::Silu => map(s, x, y, |x| math::activate(s, Activation::Silu, x)),
        Activation::GeluTanh => map(s, x, y, |x| math::activate(s, Activation::GeluTanh, x)),
        Activation::Gelu => map(s, x, y, |x| math::activate(s, Activation::Gelu, x)),
        Activation::Relu => map(s, x, y, |x| math::activate(s, Activation::Relu, x)),
    }
}

/// y = act(gate) · up.
#[inline(always)]
pub(crate) fn glu<S: Simd>(s: S, act: Activation, gate: &[f32], up: &[f32], y: &mut [f32]) {
    match act {
        Activation::Silu => zip(s, gate, up, y, |g, u| {
            s.mul(math::activate(s, Activation::Silu, g), u)
        }),
        Activation::GeluTanh => zip(s, gate, up, y, |g, u| {
            s.mul(math::activate(s, Activation::GeluTanh, g), u)
        }),
        Activation::Gelu => zip(s, gate, up, y, |g, u| {
            s.mul(math::activate(s, Activation::Gelu, g), u)
        }),
        Activation::Relu => zip(s, gate, up, y, |g, u| {
            s.mul(math::activate(s, Activation::Relu, g), u)
        }),
    }
}

/// y = y · a + x · b: two parts of an attention row brought to one maximum.
#[inline(always)]
pub(crate) fn blend<S: Simd>(s: S, a: f32, b: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "element-wise slices have one length");
    let (a, b) = (s.splat(a), s.splat(b));
    for (x, y) in x.chunks(S::LANES).zip(y.chunks_mut(S::LANES)) {
        let v = s.fma(s.load_part(x, 0.0), b, s.mul(s.load_part(y, 0.0), a));
        s.store_part(v, y);
    }
}
