//! Leaf kernels written once over [`super::simd::Simd`] and compiled per instruction set by [`super::ops`].

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod kv;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod wide;
