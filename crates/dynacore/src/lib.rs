//! DynaCore: devices, memory and kernels that execute DynaIR plans.
//!
//! A [`Device`](device::Device) loads weights into the layout it likes best, allocates the paged cache and compiles a
//! [`Plan`](dynair::Plan) into an [`Executor`](device::Executor), which then executes one step per
//! [`BatchMeta`](dynair::BatchMeta). Nothing above this crate knows layouts, instruction sets or kernels.

pub mod buffer;
pub mod cpu;
pub mod device;
pub mod error;
pub mod kv;
pub mod mmap;
pub mod self_test;

pub use buffer::{Buffer, Layout, Tensor, WeightBytes};
pub use device::{
    Device, DeviceInfo, Executor, Logits, PhaseTime, StepNote, TakeRow, Ticket, WeightUsage, weight_usage,
};
pub use error::{Error, Result};
pub use kv::{KvGeometry, KvStorage, KvType};
pub use mmap::MappedFile;
