//! Weights on a device: bytes with a logical type and a private layout.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use dynair::WeightDecl;

use crate::mmap::MappedFile;

/// Device memory. Cheap to clone; freed with its last clone.
#[derive(Clone)]
pub struct Buffer {
    /// What the device keeps behind it.
    pub data: Arc<dyn Any + Send + Sync>,
    /// Bytes it takes on the device.
    pub bytes: usize,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}

/// How a weight's bytes are arranged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// As in the checkpoint.
    RowMajor,
    /// A form private to the device that made it; the number names it in `doctor --plan`.
    Packed(u16),
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layout::RowMajor => f.write_str("row-major"),
            Layout::Packed(number) => write!(f, "packed-{number}"),
        }
    }
}

/// A weight on a device.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// What it is.
    pub decl: WeightDecl,
    /// How it lies in the buffer.
    pub layout: Layout,
    /// Where.
    pub buffer: Buffer,
}

/// The bytes of a weight as the checkpoint holds them: `decl.rows` rows of `decl.cols` elements.
#[derive(Debug, Clone)]
pub enum WeightBytes {
    /// A range of a mapped file.
    Mapped(Arc<MappedFile>, Range<usize>),
    /// Bytes made in memory (converted or generated).
    Owned(Arc<[u8]>),
}

impl WeightBytes {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            WeightBytes::Mapped(file, range) => &file[range.clone()],
            WeightBytes::Owned(bytes) => bytes,
        }
    }
}
