//! GGUF version 3 writer.
//!
//! The layout (metadata and tensor table) is small and known first; the data follows as a stream, so that a
//! checkpoint of many gigabytes is written without being held in memory. Source: the GGUF specification (ggml
//! project, `docs/gguf.md`).

use std::io::Write;
use std::path::Path;

use dynair::DType;

use super::gguf::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, VERSION, check_alignment, type_id};
use super::value::{Array, KeyValues, Value};
use crate::error::{Error, Result};

/// Metadata and tensor table of a file to be written.
#[derive(Debug, Clone)]
pub struct GgufLayout {
    metadata: KeyValues,
    tensors: Vec<Planned>,
}

#[derive(Debug, Clone)]
struct Planned {
    name: String,
    type_id: u32,
    dims: Vec<u64>,
    bytes: u64,
}

impl Default for GgufLayout {
    fn default() -> GgufLayout {
        GgufLayout::new()
    }
}

impl GgufLayout {
    /// An empty layout.
    pub fn new() -> GgufLayout {
        GgufLayout {
            metadata: KeyValues::new(Path::new("(new file)")),
            tensors: Vec::new(),
        }
    }

    /// The metadata so far.
    pub fn metadata(&self) -> &KeyValues {
        &self.metadata
    }

    /// Sets a metadata key. `general.alignment` is honoured.
    pub fn set(&mut self, key: &str, value: Value) -> &mut GgufLayout {
        self.metadata.set(key, value);
        self
    }

    /// Sets a string.
    pub fn set_str(&mut self, key: &str, value: &str) -> &mut GgufLayout {
        self.set(key, Value::Str(value.to_owned()))
    }

    /// Sets an unsigned integer.
    pub fn set_u32(&mut self, key: &str, value: u32) -> &mut GgufLayout {
        self.set(key, Value::U32(value))
    }

    /// Sets a number.
    pub fn set_f32(&mut self, key: &str, value: f32) -> &mut GgufLayout {
        self.set(key, Value::F32(value))
    }

    /// Sets a boolean.
    pub fn set_bool(&mut self, key: &str, value: bool) -> &mut GgufLayout {
        self.set(key, Value::Bool(value))
    }

    /// Adds a tensor; data is written in the order of these calls. `dims` is in the file's order: the length of a row
    /// first, `[cols, rows, …]`.
    ///
    /// # Errors
    /// If the name is empty or taken, a dimension is 0, there are none or more than 4, or a row is no whole number of
    /// blocks of `dtype`.
    pub fn tensor(&mut self, name: &str, dtype: DType, dims: &[usize]) -> Result<&mut GgufLayout> {
        let fail = |what: &str| Err(self.error(format!("tensor `{name}` {dims:?} {dtype}: {what}")));
        if name.is_empty() || self.tensors.iter().any(|t| t.name == name) {
            return fail("the name is empty or taken");
        }
        if dims.is_empty() || dims.len() > 4 || dims.contains(&0) {
            return fail("expected 1 to 4 dimensions, each at least 1");
        }
        let rows = dims[1..].iter().try_fold(1usize, |a, &d| a.checked_mul(d));
        let Some(bytes) = rows.and_then(|r| dtype.row_bytes(dims[0])?.checked_mul(r)) else {
            return fail("a row is no whole number of blocks, or the size overflows");
        };
        self.tensors.push(Planned {
            name: name.to_owned(),
            type_id: type_id(dtype),
            dims: dims.iter().map(|&d| d as u64).collect(),
            bytes: bytes as u64,
        });
        Ok(self)
    }

    fn error(&self, detail: String) -> Error {
        Error::Format {
            path: self.metadata.path().to_owned(),
            detail,
        }
    }
}

/// Writes a file: the header at once, then each tensor's data in the order of the layout.
#[derive(Debug)]
pub struct GgufWriter<W: Write> {
    out: W,
    tensors: Vec<Planned>,
    alignment: u64,
    /// Tensor being written and bytes of it written so far.
    at: (usize, u64),
}

impl<W: Write> GgufWriter<W> {
    /// Writes magic, metadata and tensor table of `layout` to `out`.
    ///
    /// # Errors
    /// If `general.alignment` is not usable or writing fails.
    pub fn new(out: W, layout: &GgufLayout) -> Result<GgufWriter<W>> {
        let alignment = match layout.metadata.get::<u64>(ALIGNMENT_KEY)? {
            None => DEFAULT_ALIGNMENT,
            Some(a) => check_alignment(a).map_err(|detail| layout.error(detail))?,
        };
        let mut head = Vec::new();
        head.extend_from_slice(b"GGUF");
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(layout.tensors.len() as u64).to_le_bytes());
        head.extend_from_slice(&(layout.metadata.len() as u64).to_le_bytes());
        for (key, value) in layout.metadata.iter() {
            put_str(&mut head, key);
            put_value(&mut head, value);
        }
        let mut offset = 0u64;
        for t in &layout.tensors {
            put_str(&mut head, &t.name);
            head.extend_from_slice(&(t.dims.len() as u32).to_le_bytes());
            for d in &t.dims {
                head.extend_from_slice(&d.to_le_bytes());
            }
            head.extend_from_slice(&t.type_id.to_le_bytes());
            head.extend_from_slice(&offset.to_le_bytes());
            offset = (offset + t.bytes).next_multiple_of(alignment);
        }
        head.resize(head.len().next_multiple_of(alignment as usize), 0);
        let mut writer = GgufWriter {
            out,
            tensors: layout.tensors.clone(),
            alignment,
            at: (0, 0),
        };
        writer.put(&head)?;
        Ok(writer)
    }

    /// Appends to the data of the current tensor; the next tensor begins when it is complete.
    ///
    /// # Errors
    /// If `bytes` reaches past the end of the current tensor, all tensors are complete, or writing fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(t) = self.tensors.get(self.at.0) else {
            return Err(Error::Internal(format!(
                "{} bytes after the last tensor of a GGUF file",
                bytes.len()
            )));
        };
        let left = t.bytes - self.at.1;
        if bytes.len() as u64 > left {
            let detail = format!(
                "tensor `{}` has {left} bytes left, {} were given",
                t.name,
                bytes.len()
            );
            return Err(Error::Internal(detail));
        }
        let complete = bytes.len() as u64 == left;
        let padding = (t.bytes.next_multiple_of(self.alignment) - t.bytes) as usize;
        self.put(bytes)?;
        self.at.1 += bytes.len() as u64;
        if complete {
            self.put(&vec![0; padding])?;
            self.at = (self.at.0 + 1, 0);
        }
        Ok(())
    }

    /// Ends the file and gives the output back, flushed.
    ///
    /// # Errors
    /// If a tensor is incomplete or writing fails.
    pub fn finish(mut self) -> Result<W> {
        if let Some(t) = self.tensors.get(self.at.0) {
            let detail = format!("tensor `{}` got {} of {} bytes", t.name, self.at.1, t.bytes);
            return Err(Error::Internal(detail));
        }
        self.out.flush().map_err(|source| Error::Io {
            what: "writing a GGUF file".into(),
            source,
        })?;
        Ok(self.out)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|source| Error::Io {
            what: "writing a GGUF file".into(),
            source,
        })
    }
}

fn put_str(out: &mut Vec<u8>, s: &str) {
    out.extend_from_slice(&(s.len() as u64).to_le_bytes());
    out.extend_from_slice(s.as_bytes());
}

/// Type number, then the value.
fn put_value(out: &mut Vec<u8>, value: &Value) {
    macro_rules! number {
        ($id:literal, $v:expr) => {{
            out.extend_from_slice(&u32::to_le_bytes($id));
            out.extend_from_slice(&$v.to_le_bytes());
        }};
    }
    match value {
        Value::U8(v) => number!(0, v),
        Value::I8(v) => number!(1, v),
        Value::U16(v) => number!(2, v),
        Value::I16(v) => number!(3, v),
        Value::U32(v) => number!(4, v),
        Value::I32(v) => number!(5, v),
        Value::F32(v) => number!(6, v),
        Value::Bool(v) => number!(7, u8::from(*v)),
        Value::Str(v) => {
            out.extend_from_slice(&8u32.to_le_bytes());
            put_str(out, v);
        }
        Value::Array(v) => {
            out.extend_from_slice(&9u32.to_le_bytes());
            put_array(out, v);
        }
        Value::U64(v) => number!(10, v),
        Value::I64(v) => number!(11, v),
        Value::F64(v) => number!(12, v),
    }
}

/// Element type number, count, then the elements.
fn put_array(out: &mut Vec<u8>, array: &Array) {
    macro_rules! numbers {
        ($id:literal, $v:expr) => {{
            put_array_head(out, $id, $v.len());
            for x in $v {
                out.extend_from_slice(&x.to_le_bytes());
            }
        }};
    }
    match array {
        Array::U8(v) => numbers!(0, v),
        Array::I8(v) => numbers!(1, v),
        Array::U16(v) => numbers!(2, v),
        Array::I16(v) => numbers!(3, v),
        Array::U32(v) => numbers!(4, v),
        Array::I32(v) => numbers!(5, v),
        Array::F32(v) => numbers!(6, v),
        Array::Bool(v) => {
            put_array_head(out, 7, v.len());
            out.extend(v.iter().map(|&b| u8::from(b)));
        }
        Array::Str(v) => {
            put_array_head(out, 8, v.len());
            v.iter().for_each(|s| put_str(out, s));
        }
        Array::Array(v) => {
            put_array_head(out, 9, v.len());
            v.iter().for_each(|a| put_array(out, a));
        }
        Array::U64(v) => numbers!(10, v),
        Array::I64(v) => numbers!(11, v),
        Array::F64(v) => numbers!(12, v),
    }
}

fn put_array_head(out: &mut Vec<u8>, id: u32, count: usize) {
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&(count as u64).to_le_bytes());
}
