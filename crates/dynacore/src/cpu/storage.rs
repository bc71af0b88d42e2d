//! What the CPU keeps behind a [`Tensor`](crate::Tensor) and a [`KvStorage`](crate::KvStorage).

use std::sync::Arc;

use dynair::{CacheDecl, WeightDecl};

use super::pack::{self, PackedLinear};
use super::pool::shared::SharedMem;
use super::slab::Slabs;
use super::table::KernelTable;
use crate::buffer::{Buffer, Layout, Tensor, WeightBytes};
use crate::device::WeightUsage;
use crate::error::{Error, Result};
use crate::kv::{KvGeometry, KvType};

/// A weight in the forms its uses need; a tied embedding reads its rows out of the packed matrix.
pub(crate) struct CpuWeight {
    /// For products and embeddings.
    pub(crate) matrix: Option<PackedLinear>,
    /// For element-wise uses.
    pub(crate) vector: Option<Arc<[f32]>>,
}

/// See [`crate::Device::load_weight`].
pub(crate) fn load_weight(
    table: &KernelTable,
    slabs: &Slabs,
    decl: &WeightDecl,
    bytes: &WeightBytes,
    usage: WeightUsage,
) -> Result<Tensor> {
    let matrix = match (usage.linear, usage.embed) {
        (true, _) => Some(pack::pack_into(|len| slabs.take(len), table, decl, bytes)?),
        (false, true) => Some(pack::keep(decl, bytes)?),
        (false, false) => None,
    };
    // Checks type and length for the other uses too.
    let plain = pack::keep(decl, bytes)?;
    let vector: Option<Arc<[f32]>> = if usage.vector {
        let elements = decl.rows.checked_mul(decl.cols).ok_or_else(|| too_long(decl))?;
        let mut values = vec![0.0f32; elements];
        if decl.cols > 0 {
            for (row, out) in values.chunks_exact_mut(decl.cols).enumerate() {
                plain.decode_row(row, out);
            }
        }
        Some(Arc::from(values))
    } else {
        None
    };
    let layout = matrix.as_ref().map_or(Layout::RowMajor, PackedLinear::layout);
    let keeps_map = matrix.is_some() && layout == Layout::RowMajor;
    if let (WeightBytes::Mapped(file, range), false) = (bytes, keeps_map) {
        file.forget(range.clone());
    }
    let taken = matrix.as_ref().map_or(0, PackedLinear::bytes) + vector.as_ref().map_or(0, |v| 4 * v.len());
    let weight = CpuWeight { matrix, vector };
    Ok(Tensor {
        decl: decl.clone(),
        layout,
        buffer: Buffer {
            data: Arc::new(weight),
            bytes: taken,
        },
    })
}

fn too_long(decl: &WeightDecl) -> Error {
    Error::OutOfMemory {
        device: "cpu".into(),
        bytes: usize::MAX,
        what: format!(
            "the weight `{}` of {} × {} elements",
            decl.name, decl.rows, decl.cols
        ),
    }
}

/// The cache of one layer: per block the keys, then the values, each `[num_kv_heads][block_tokens][row bytes]`, so
/// that the tokens of one head lie together.
pub(crate) struct CpuCache {
    pub(crate) mem: SharedMem<u8>,
    pub(crate) kind: KvType,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) block_tokens: usize,
    /// Cache group: which of the step's block tables addresses it.
    pub(crate) group: usize,
    /// Bytes of one head's row.
    pub(crate) row_bytes: usize,
}

impl CpuCache {
    /// Bytes of a block.
    pub(crate) fn block_bytes(&self) -> usize {
        2 * self.num_kv_heads * self.block_tokens * self.row_bytes
    }

    /// Where the key of `head` in `slot` of `block` begins; its value lies [`CpuCache::value_distance`] further.
    pub(crate) fn key_at(&self, block: usize, head: usize, slot: usize) -> usize {
        block * self.block_bytes() + (head * self.block_tokens + slot) * self.row_bytes
    }

    /// Bytes from a key to its value.
    pub(crate) fn value_distance(&self) -> usize {
        self.num_kv_heads * self.block_tokens * self.row_bytes
    }
}

/// The caches of a model, by cache number.
pub(crate) struct CpuKv {
    pub(crate) caches: Vec<CpuCache>,
}

/// See [`crate::Device::alloc_kv`]. Gives the storage and the bytes it takes when all of it is in use.
pub(crate) fn alloc_kv(decls: &[CacheDecl], geometry: &KvGeometry) -> Result<(CpuKv, usize)> {
    let option = |name: &str, found: String, expected: &str| Error::Option {
        name: name.into(),
        found,
        expected: expected.into(),
    };
    if geometry.block_tokens == 0 || !geometry.block_tokens.is_multiple_of(16) {
        return Err(option(
            "block_tokens",
            geometry.block_tokens.to_string(),
            "a positive multiple of 16",
        ));
    }
    let mut caches = Vec::with_capacity(decls.len());
    let mut total = 0usize;
    for decl in decls {
        let CacheDecl::Kv {
            num_kv_heads,
            head_dim,
            group,
            ..
        } = *decl
        else {
            return Err(Error::Unsupported {
                device: "cpu".into(),
                what: "recurrent state".into(),
            });
        };
        let row_bytes = geometry.kind.bytes(head_dim).ok_or_else(|| {
            let found = format!("{} with head size {head_dim}", geometry.kind);
            option("kv", found, "a head size that is a multiple of 32, or f16 or f32")
        })?;
        let blocks = *geometry.blocks.get(group).ok_or_else(|| {
            option(
                "blocks",
                format!("{} pools", geometry.blocks.len()),
                "a pool for every cache group",
            )
        })?;
        let what = || {
            format!(
                "a key and value cache of {blocks} blocks of {} tokens",
                geometry.block_tokens
            )
        };
        let out = |bytes| Error::OutOfMemory {
            device: "cpu".into(),
            bytes,
            what: what(),
        };
        let bytes = [2, num_kv_heads, geometry.block_tokens, row_bytes, blocks]
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
            .filter(|n| *n <= isize::MAX as usize)
            .ok_or_else(|| out(usize::MAX))?;
        total = total.checked_add(bytes).ok_or_else(|| out(usize::MAX))?;
        caches.push(CpuCache {
            mem: SharedMem::zeroed_for_little(bytes).ok_or_else(|| out(bytes))?,
            kind: geometry.kind,
            num_kv_heads,
            head_dim,
            block_tokens: geometry.block_tokens,
            group,
            row_bytes,
        });
    }
    Ok((CpuKv { caches }, total))
}
