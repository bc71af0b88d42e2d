//! Drivers of the ops: safe code that splits work and calls the kernel table.

pub mod linear;
