//! Read-only memory maps of checkpoint files.
//!
//! The one hazard of a map is that another process truncates the file while we read it. The loader checks the length
//! against the tensor table before anything is read; a file cut after that is outside what a reader can defend
//! against, and the process then ends by a signal.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A file mapped read-only.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
    path: PathBuf,
}

impl MappedFile {
    /// Maps all of `path`.
    ///
    /// # Errors
    /// If the file cannot be opened or mapped, or is empty.
    pub fn open(path: &Path) -> Result<MappedFile> {
        let fail = |source| Error::Map {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(fail)?;
        if file.metadata().map_err(fail)?.len() == 0 {
            return Err(fail(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                "the file is empty",
            )));
        }
        // SAFETY: the map is private to this process and read-only; see the module's docs on truncation by others.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(fail)?;
        Ok(MappedFile {
            map,
            path: path.to_owned(),
        })
    }

    /// The mapped file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells the kernel that the pages of `range` are not needed soon, so that they stop counting as resident. The
    /// contents stay readable.
    pub fn forget(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            let page = 4096;
            let start = range.start.next_multiple_of(page);
            let end = range.end.min(self.map.len()) / page * page;
            if start < end {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                // SAFETY: the range lies inside the map, and dropping clean pages of a read-only file map only makes
                // the next read fault them in again.
                let _ = unsafe { self.map.unchecked_advise_range(advice, start, end - start) };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl Deref for MappedFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map
    }
}
