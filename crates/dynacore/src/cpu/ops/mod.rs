//! Drivers of the ops: safe code that splits work and calls the kernel tables.
//!
//! [`rows`] are the ops whose rows (or elements) do not meet; [`linear`] products; [`attention`] the cache's readers;
//! [`rope`] rotations; [`experts`] products by expert.

pub mod linear;

pub(crate) mod attention;
pub(crate) mod experts;
pub(crate) mod rope;
pub(crate) mod rows;
