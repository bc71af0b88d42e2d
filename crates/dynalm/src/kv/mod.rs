//! Who holds which block of the paged cache: pools, block tables, prefix tree.
//!
//! This is accounting only: numbers of blocks, never their contents, which live on the device. A model's
//! layers fall into *groups* that keep the same tokens (see [`dynair::BatchMeta`]); each group has a
//! [`KvPool`], each sequence one [`BlockTable`] per group, and the [`RadixTree`] keeps the blocks of computed
//! tokens for whoever comes next. There is no clock, thread or randomness here: the same calls give the same
//! blocks.

pub mod pool;
pub mod radix;
pub mod table;

pub use pool::KvPool;
pub use radix::{Found, NodeId, RadixTree};
pub use table::BlockTable;

use dynair::CacheDecl;

use crate::error::{Error, Result};

/// The first position that a token at position `next`, and so any later one, may read in a group with this
/// window.
///
/// A token at position p of a windowed layer sees positions `p + 1 − window ..= p`.
pub fn first_needed(window: Option<u32>, next: usize) -> usize {
    window.map_or(0, |window| (next + 1).saturating_sub(window as usize))
}

/// The windows of a model's cache groups, in group order; `None` is a group that keeps all tokens.
///
/// # Errors
/// If groups are not numbered `0..n`, if two caches of one group have different windows, or if a layer keeps
/// recurrent state, which this scheduler does not carry yet.
pub fn group_windows(caches: &[CacheDecl]) -> Result<Vec<Option<u32>>> {
    let mut windows: Vec<Option<Option<u32>>> = Vec::new();
    for decl in caches {
        match *decl {
            CacheDecl::Kv { window, group, .. } => {
                if group > caches.len() {
                    return Err(Error::Internal(format!(
                        "cache group {group} of {} caches",
                        caches.len()
                    )));
                }
                if windows.len() <= group {
                    windows.resize(group + 1, None);
                }
                match windows[group] {
                    None => windows[group] = Some(window),
                    Some(known) if known == window => {}
                    Some(known) => {
                        return Err(Error::Internal(format!(
                            "cache group {group} has windows {known:?} and {window:?}, expected one"
                        )));
                    }
                }
            }
            CacheDecl::State { .. } => {
                return Err(Error::Unsupported(
                    "the model keeps recurrent state per sequence, which the scheduler does not support yet"
                        .into(),
                ));
            }
        }
    }
    windows
        .into_iter()
        .enumerate()
        .map(|(group, window)| {
            window.ok_or_else(|| Error::Internal(format!("cache group {group} has no layer")))
        })
        .collect()
}

#[cfg(test)]
mod tests;
