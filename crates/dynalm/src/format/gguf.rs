//! GGUF checkpoints, versions 2 and 3, in one file or split into parts.
//!
//! [`Gguf::open`] reads and checks everything a file declares before any tensor is touched; after that
//! [`Gguf::bytes`] is a range of a memory map and cannot fail. What a key or tensor means is not known here.
//! Source: the GGUF specification (ggml project, `docs/gguf.md`).

pub mod header;
mod recognise;
mod split;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dynacore::{MappedFile, WeightBytes};
use dynair::{DType, TensorIndex};

use self::header::{Fault, Header};
use super::value::KeyValues;
use crate::error::{Error, Result};

/// The version written; versions 2 and 3 are read.
pub(super) const VERSION: u32 = 3;
/// Key that overrides [`DEFAULT_ALIGNMENT`].
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
/// Alignment of tensor data where the file does not say, bytes.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
/// The format asks for a multiple of 8; larger values than this would only be there to waste address space.
const ALIGNMENTS: Range<u64> = 8..(1 << 20) + 1;

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Checkpoint name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions in the file's order: length of a row first, `[cols, rows, …]`; 1 to 4 of them, each at least 1.
    pub dims: Vec<usize>,
    /// Index of the file it lies in (0 unless the checkpoint is split).
    pub part: usize,
    /// Where its bytes lie in that file.
    pub range: Range<usize>,
}

impl Tensor {
    /// Length of a row.
    pub fn cols(&self) -> usize {
        self.dims[0]
    }

    /// Number of rows, over all further dimensions.
    pub fn rows(&self) -> usize {
        self.dims[1..].iter().product()
    }

    /// Bytes of its data.
    pub fn bytes(&self) -> usize {
        self.range.len()
    }
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Gguf {
    parts: Vec<Arc<MappedFile>>,
    version: u32,
    metadata: KeyValues,
    tensors: Vec<Tensor>,
    index: HashMap<String, usize>,
}

impl Gguf {
    /// Opens the checkpoint at `path`; any part of a split checkpoint opens all of it.
    ///
    /// # Errors
    /// If a file is missing, is not GGUF, or declares anything that is not so; the message names the file, what was
    /// found, what was expected and what to do.
    pub fn open(path: &Path) -> Result<Gguf> {
        let first = open_part(path)?;
        let parts = match split::siblings(path, &first.1.metadata)? {
            None => vec![first],
            Some(paths) => {
                let parts = paths.iter().map(|p| open_part(p)).collect::<Result<Vec<_>>>()?;
                split::check(&paths, &parts.iter().map(|p| &p.1).collect::<Vec<_>>())?;
                parts
            }
        };
        Ok(Gguf::join(parts))
    }

    /// Joins parts that have passed all checks.
    fn join(parts: Vec<(Arc<MappedFile>, Header)>) -> Gguf {
        let mut gguf = Gguf {
            parts: Vec::new(),
            version: parts[0].1.version,
            metadata: KeyValues::default(),
            tensors: Vec::new(),
            index: HashMap::new(),
        };
        for (part, (file, header)) in parts.into_iter().enumerate() {
            for t in header.tensors {
                // The end of every tensor has been checked to lie in the mapped file.
                let range = t.start as usize..(t.start + t.bytes) as usize;
                gguf.index.insert(t.name.clone(), gguf.tensors.len());
                gguf.tensors.push(Tensor {
                    name: t.name,
                    dtype: t.dtype,
                    dims: t.dims,
                    part,
                    range,
                });
            }
            if part == 0 {
                gguf.metadata = header.metadata;
            }
            gguf.parts.push(file);
        }
        gguf
    }

    /// Format version of the (first) file.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The files, in order.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.parts.iter().map(|p| p.path())
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.len() as u64).sum()
    }

    /// The metadata (of the first part, if split).
    pub fn metadata(&self) -> &KeyValues {
        &self.metadata
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// The bytes of the tensor called `name`: a range of the mapped file, nothing is copied.
    pub fn bytes(&self, name: &str) -> Option<WeightBytes> {
        self.tensor(name)
            .map(|t| WeightBytes::Mapped(self.parts[t.part].clone(), t.range.clone()))
    }
}

impl TensorIndex for Gguf {
    /// Dimensions above the second count as rows.
    fn find(&self, name: &str) -> Option<(DType, usize, usize)> {
        self.tensor(name).map(|t| (t.dtype, t.rows(), t.cols()))
    }

    /// The third dimension, and the fourth.
    fn experts(&self, name: &str) -> usize {
        let above = self.tensor(name).and_then(|t| t.dims.get(2..));
        above.map_or(1, |dims| dims.iter().product())
    }
}

/// Maps one file and reads its header.
fn open_part(path: &Path) -> Result<(Arc<MappedFile>, Header)> {
    let fail = |detail: String| Error::Format {
        path: path.to_owned(),
        detail,
    };
    let io = |source| Error::Io {
        what: format!("opening `{}`", path.display()),
        source,
    };
    let meta = std::fs::metadata(path).map_err(io)?;
    if meta.is_dir() {
        return Err(fail("it is a folder: name the .gguf file inside".into()));
    }
    if !meta.is_file() {
        return Err(fail(
            "it is not a regular file: a model is mapped into memory and must be one".into(),
        ));
    }
    if meta.len() == 0 {
        return Err(fail(
            "it is empty (0 bytes): the download did not complete; fetch it again".into(),
        ));
    }
    let mut head = Vec::new();
    std::fs::File::open(path)
        .map_err(io)?
        .take(512)
        .read_to_end(&mut head)
        .map_err(io)?;
    if let Some(what) = recognise::not_gguf(&head) {
        return Err(fail(what));
    }
    let file = MappedFile::open(path)?;
    match header::parse(path, &file, file.len() as u64) {
        Ok(header) => Ok((Arc::new(file), header)),
        Err(Fault::Refused(detail)) => Err(fail(detail)),
        Err(Fault::NeedMore(n)) => Err(fail(format!("the file ends before byte {n}; it is cut short"))),
    }
}

/// Checks an alignment; gives it back or says what is wrong.
pub(super) fn check_alignment(alignment: u64) -> std::result::Result<u64, String> {
    if alignment.is_power_of_two() && ALIGNMENTS.contains(&alignment) {
        return Ok(alignment);
    }
    Err(format!(
        "key `{ALIGNMENT_KEY}` is {alignment}, expected a power of two from {} to {}",
        ALIGNMENTS.start,
        ALIGNMENTS.end - 1
    ))
}

/// The tensor types of GGML by number; those without a [`DType`] of the same name are known but not supported.
const TYPES: [(u32, &str); 41] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (4, "Q4_2"),
    (5, "Q4_3"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// The type of number `id`, or what to say about it.
fn type_of(id: u32) -> std::result::Result<DType, String> {
    let Some((_, name)) = TYPES.iter().find(|t| t.0 == id) else {
        return Err(format!(
            "type {id}, which is not a known GGML type; the file may be damaged or too new"
        ));
    };
    DType::from_name(name).ok_or_else(|| {
        format!("type {id} ({name}), which is not supported; get the model in another quantisation, such as Q4_K_M")
    })
}

/// The number of a type.
pub(super) fn type_id(dtype: DType) -> u32 {
    TYPES
        .iter()
        .find(|t| t.1 == dtype.name())
        .expect("every DType is a GGML type")
        .0
}

/// Paths of all parts of the split checkpoint `path` belongs to, in order; `None` if its name is not that of a part.
pub fn part_paths(path: &Path) -> Option<Vec<PathBuf>> {
    split::paths(path).map(|(_, all)| all)
}
