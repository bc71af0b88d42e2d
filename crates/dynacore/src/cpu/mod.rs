//! The CPU device.

pub mod isa;
pub(crate) mod kernels;
pub mod ops;
pub mod pack;
pub mod table;
