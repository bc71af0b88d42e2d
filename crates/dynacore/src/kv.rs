//! The device side of the paged key and value cache.

use std::any::Any;
use std::fmt;

use dynair::CacheDecl;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    /// IEEE binary16: the default.
    F16,
    /// IEEE binary32: for `safe` mode and debugging.
    F32,
    /// Blocks of 32 signed bytes with one f16 scale along the head dimension: half the memory of `F16`.
    Q8_0,
}

impl KvType {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
            KvType::Q8_0 => "q8_0",
        }
    }

    /// Elements of a block, and its bytes.
    pub const fn block(self) -> (usize, usize) {
        match self {
            KvType::F16 => (1, 2),
            KvType::F32 => (1, 4),
            KvType::Q8_0 => (32, 34),
        }
    }

    /// Bytes of `elements` values; `None` if they are no whole number of blocks.
    pub const fn bytes(self, elements: usize) -> Option<usize> {
        let (block, bytes) = self.block();
        if elements.is_multiple_of(block) {
            Some(elements / block * bytes)
        } else {
            None
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Size of the paged cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGeometry {
    /// Element type.
    pub kind: KvType,
    /// Tokens per block, a multiple of 16.
    pub block_tokens: usize,
    /// Blocks in the pool of each cache group (see [`dynair::BatchMeta`]).
    pub blocks: Vec<usize>,
}

impl KvGeometry {
    /// Bytes one block of cache `decl` takes (keys and values), or `None` if `kind` cannot hold its head size.
    pub fn block_bytes(&self, decl: &CacheDecl) -> Option<usize> {
        match decl {
            CacheDecl::Kv {
                num_kv_heads,
                head_dim,
                ..
            } => Some(2 * num_kv_heads * self.block_tokens * self.kind.bytes(*head_dim)?),
            CacheDecl::State { .. } => None,
        }
    }
}

/// A device's cache memory for all layers of a model.
pub struct KvStorage {
    /// Its size.
    pub geometry: KvGeometry,
    /// What the device keeps behind it.
    pub data: Box<dyn Any + Send>,
    /// Bytes it takes.
    pub bytes: usize,
}

impl fmt::Debug for KvStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvStorage({:?}, {} bytes)", self.geometry, self.bytes)
    }
}
