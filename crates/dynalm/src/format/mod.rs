//! Checkpoint readers and writers: what a model's file says, before anybody knows what it means.
//!
//! Owns the byte formats. It does not know architectures, tokenizers or devices: those ask for keys and tensors by
//! name. Every file is hostile input: nothing here panics, and nothing is allocated before the bytes it would hold
//! are known to be in the file.

pub mod gguf;
pub mod gguf_write;
pub mod value;

pub use gguf::{Gguf, Tensor};
pub use gguf_write::{GgufLayout, GgufWriter};
pub use value::{Array, FromValue, KeyValues, Strings, Value};
