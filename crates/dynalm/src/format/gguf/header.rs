//! The header of one GGUF file: magic, metadata and tensor table, read from untrusted bytes.
//!
//! The idea that keeps it safe: a [`Cursor`] knows how many bytes the file has, and every declared length or count is
//! compared with the bytes left (times the least size of an element) before anything of that length is made. So
//! memory use is bounded by a small multiple of the header's own size, whatever it claims. All sizes are computed
//! with checked arithmetic.
//!
//! The bytes may be the beginning of a longer file (a header asked for by HTTP range): the parser then answers
//! [`Fault::NeedMore`] instead of refusing. Source: the GGUF specification (ggml project, `docs/gguf.md`).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

use dynair::DType;

use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, VERSION, check_alignment, type_of};
use crate::format::value::{Array, KeyValues, Strings, Value};

/// Longest key the format allows, bytes.
const MAX_KEY_BYTES: u64 = 65_535;
/// Arrays in arrays deeper than this are refused; no known file nests at all.
const MAX_ARRAY_DEPTH: usize = 4;
/// Least bytes of a metadata entry: key length, type, one byte of value.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Least bytes of a tensor entry: name length, rank, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// Why a header could not be read.
#[derive(Debug)]
pub enum Fault {
    /// The file is wrong: what was found and expected.
    Refused(String),
    /// The bytes given end before the header does; at least this many are needed from the start of the file.
    NeedMore(u64),
}

type Read<T> = std::result::Result<T, Fault>;

fn refuse<T>(detail: String) -> Read<T> {
    Err(Fault::Refused(detail))
}

/// What one file declares.
#[derive(Debug)]
pub struct Header {
    /// Format version.
    pub version: u32,
    /// Keys in file order.
    pub metadata: KeyValues,
    /// Tensors in file order.
    pub tensors: Vec<TensorEntry>,
}

/// One line of the tensor table; every size is checked against the file's length.
#[derive(Debug)]
pub struct TensorEntry {
    /// Checkpoint name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions in the file's order: length of a row first.
    pub dims: Vec<usize>,
    /// First byte of the data in the file.
    pub start: u64,
    /// Bytes of data.
    pub bytes: u64,
    /// Where the entry itself stands in the file.
    pub entry: u64,
}

/// Reads the header of a file of `file_bytes` bytes of which `bytes` is the beginning (or all).
///
/// # Errors
/// [`Fault`].
pub fn parse(path: &Path, bytes: &[u8], file_bytes: u64) -> Read<Header> {
    let mut c = Cursor {
        bytes,
        at: 0,
        file_bytes,
    };
    if c.take(4, "the magic")? != b"GGUF" {
        return refuse("it does not begin with `GGUF`".into());
    }
    let version = c.u32("the version")?;
    match version {
        2 | VERSION => {}
        1 => {
            return refuse(
                "GGUF version 1 is not supported; convert it again with a current converter".into(),
            );
        }
        v if (2..=VERSION).contains(&v.swap_bytes()) => {
            return refuse(
                "it is a big-endian GGUF file; only little-endian files are supported: get the little-endian file of \
                 this model"
                    .into(),
            );
        }
        v => {
            return refuse(format!(
                "GGUF version {v} is not known; versions 2 and 3 are supported"
            ));
        }
    }
    let tensor_count = c.u64("the tensor count")?;
    let key_count = c.u64("the key count")?;
    c.fits(key_count, MIN_ENTRY_BYTES, || "metadata keys".into())?;
    c.fits(tensor_count, MIN_TENSOR_BYTES, || "tensors".into())?;
    let metadata = read_metadata(&mut c, path, key_count)?;
    let alignment = match metadata.get::<u64>(ALIGNMENT_KEY) {
        Ok(None) => DEFAULT_ALIGNMENT,
        Ok(Some(a)) => check_alignment(a).map_err(Fault::Refused)?,
        Err(_) => return refuse(format!("key `{ALIGNMENT_KEY}` is no unsigned integer")),
    };
    let mut tensors = read_tensors(&mut c, tensor_count, alignment)?;
    place(&mut tensors, c.at.next_multiple_of(alignment), file_bytes)?;
    Ok(Header {
        version,
        metadata,
        tensors,
    })
}

fn read_metadata(c: &mut Cursor<'_>, path: &Path, count: u64) -> Read<KeyValues> {
    let mut metadata = KeyValues::new(path);
    let mut places: HashMap<String, u64> = HashMap::new();
    for i in 0..count {
        let place = c.at;
        let key = c.string(|| format!("the name of key number {i}"))?;
        if key.is_empty() {
            return refuse(format!("key number {i} (at byte {place}) has an empty name"));
        }
        if key.len() as u64 > MAX_KEY_BYTES {
            return refuse(format!(
                "key number {i} (at byte {place}) has a name of {} bytes",
                key.len()
            ));
        }
        match places.entry(key.to_owned()) {
            Entry::Occupied(first) => {
                let first = first.get();
                return refuse(format!(
                    "key `{key}` stands twice, at byte {first} and at byte {place}"
                ));
            }
            Entry::Vacant(v) => v.insert(place),
        };
        let value = c.value(key)?;
        metadata.set(key, value);
    }
    Ok(metadata)
}

/// Reads the table. `start` of each entry is still relative to the data section.
fn read_tensors(c: &mut Cursor<'_>, count: u64, alignment: u64) -> Read<Vec<TensorEntry>> {
    let mut tensors: Vec<TensorEntry> = Vec::new();
    let mut index: HashMap<String, u64> = HashMap::new();
    for i in 0..count {
        let entry = c.at;
        let name = c.string(|| format!("the name of tensor number {i}"))?;
        if name.is_empty() {
            return refuse(format!("tensor number {i} (at byte {entry}) has an empty name"));
        }
        match index.entry(name.to_owned()) {
            Entry::Occupied(first) => {
                let first = first.get();
                return refuse(format!(
                    "tensor `{name}` stands twice, at byte {first} and at byte {entry}"
                ));
            }
            Entry::Vacant(v) => v.insert(entry),
        };
        let rank = c.u32("a tensor's rank")?;
        if !(1..=4).contains(&rank) {
            return refuse(format!("tensor `{name}` has {rank} dimensions, expected 1 to 4"));
        }
        let mut dims = [0u64; 4];
        for d in &mut dims[..rank as usize] {
            *d = c.u64("a tensor's dimension")?;
        }
        let dims = &dims[..rank as usize];
        if let Some(k) = dims.iter().position(|&d| d == 0) {
            return refuse(format!("tensor `{name}`: dimension {k} of {dims:?} is 0"));
        }
        let dtype = type_of(c.u32("a tensor's type")?)
            .map_err(|what| Fault::Refused(format!("tensor `{name}` has {what}")))?;
        let start = c.u64("a tensor's offset")?;
        let bytes = tensor_bytes(dtype, dims).map_err(|what| {
            Fault::Refused(format!(
                "tensor `{name}` of dimensions {dims:?} and type {dtype} {what}"
            ))
        })?;
        if !start.is_multiple_of(alignment) {
            return refuse(format!(
                "tensor `{name}`: offset {start} is no multiple of the alignment {alignment}"
            ));
        }
        // The size fits isize, so each dimension does.
        let dims = dims.iter().map(|&d| d as usize).collect();
        tensors.push(TensorEntry {
            name: name.to_owned(),
            dtype,
            dims,
            start,
            bytes,
            entry,
        });
    }
    Ok(tensors)
}

/// Bytes of a tensor, with every product checked.
fn tensor_bytes(dtype: DType, dims: &[u64]) -> std::result::Result<u64, String> {
    let too_large = || "is too large".to_owned();
    let elements = dims
        .iter()
        .try_fold(1u64, |a, &d| a.checked_mul(d))
        .ok_or_else(too_large)?;
    let (block, block_bytes) = dtype.block();
    if !dims[0].is_multiple_of(block as u64) {
        return Err(format!("has rows that are no whole number of blocks of {block}"));
    }
    let bytes = (elements / block as u64)
        .checked_mul(block_bytes as u64)
        .ok_or_else(too_large)?;
    if elements > isize::MAX as u64 || bytes > isize::MAX as u64 {
        return Err(too_large());
    }
    Ok(bytes)
}

/// Makes offsets absolute and checks them against the file's length and against each other.
fn place(tensors: &mut [TensorEntry], data: u64, file_bytes: u64) -> Read<()> {
    let mut end_of_all = 0;
    let mut cut: Option<(&str, u64)> = None;
    for t in tensors.iter_mut() {
        let end = data.checked_add(t.start).and_then(|s| s.checked_add(t.bytes));
        let Some(end) = end.filter(|&e| e <= isize::MAX as u64) else {
            return refuse(format!("tensor `{}`: offset {} is too large", t.name, t.start));
        };
        t.start += data;
        end_of_all = end.max(end_of_all);
        if end > file_bytes && cut.is_none() {
            cut = Some((&t.name, end));
        }
    }
    if let Some((name, end)) = cut {
        return refuse(format!(
            "the file is cut short: tensor `{name}` ends at byte {end}, the file has {file_bytes} bytes, {} bytes are \
             missing; fetch it again",
            end_of_all - file_bytes
        ));
    }
    let mut order: Vec<&TensorEntry> = tensors.iter().collect();
    order.sort_by_key(|t| (t.start, t.entry));
    for pair in order.windows(2) {
        if pair[0].start + pair[0].bytes > pair[1].start {
            return refuse(format!(
                "the data of tensor `{}` (bytes {} to {}) overlaps that of `{}` (from byte {})",
                pair[0].name,
                pair[0].start,
                pair[0].start + pair[0].bytes,
                pair[1].name,
                pair[1].start
            ));
        }
    }
    Ok(())
}

/// A position in the file, with the bytes at hand and the length of the whole.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: u64,
    file_bytes: u64,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        self.file_bytes - self.at
    }

    /// Refuses a count whose elements of at least `least` bytes cannot all be in the rest of the file.
    fn fits(&self, count: u64, least: u64, what: impl FnOnce() -> String) -> Read<()> {
        if count.checked_mul(least).is_some_and(|n| n <= self.left()) {
            return Ok(());
        }
        refuse(format!(
            "{}: {count} declared at byte {}, but only {} bytes are left in the file; it is damaged or cut short",
            what(),
            self.at,
            self.left()
        ))
    }

    fn take(&mut self, n: u64, what: &str) -> Read<&'a [u8]> {
        if n > self.left() {
            return refuse(format!(
                "the file ends inside {what}: {n} bytes expected at byte {}, {} are left; it is damaged or cut short",
                self.at,
                self.left()
            ));
        }
        let end = self.at + n;
        if end > self.bytes.len() as u64 {
            return Err(Fault::NeedMore(end));
        }
        let slice = &self.bytes[self.at as usize..end as usize];
        self.at = end;
        Ok(slice)
    }

    fn fixed<const N: usize>(&mut self, what: &str) -> Read<[u8; N]> {
        Ok(self
            .take(N as u64, what)?
            .try_into()
            .expect("take gives the length asked for"))
    }

    fn u32(&mut self, what: &str) -> Read<u32> {
        Ok(u32::from_le_bytes(self.fixed(what)?))
    }

    fn u64(&mut self, what: &str) -> Read<u64> {
        Ok(u64::from_le_bytes(self.fixed(what)?))
    }

    fn string(&mut self, what: impl Fn() -> String) -> Read<&'a str> {
        let length = self.u64("a string's length")?;
        self.fits(length, 1, || format!("bytes of {}", what()))?;
        let bytes = self.take(length, "a string")?;
        std::str::from_utf8(bytes).map_err(|e| {
            let at = self.at - length + e.valid_up_to() as u64;
            Fault::Refused(format!("{} is not UTF-8 (at byte {at})", what()))
        })
    }

    fn boolean(&mut self, key: &str) -> Read<bool> {
        match self.fixed::<1>("a boolean")?[0] {
            0 => Ok(false),
            1 => Ok(true),
            v => refuse(format!("key `{key}`: a boolean is {v}, expected 0 or 1")),
        }
    }

    fn value(&mut self, key: &str) -> Read<Value> {
        const W: &str = "a value";
        Ok(match self.u32("a value's type")? {
            0 => Value::U8(u8::from_le_bytes(self.fixed(W)?)),
            1 => Value::I8(i8::from_le_bytes(self.fixed(W)?)),
            2 => Value::U16(u16::from_le_bytes(self.fixed(W)?)),
            3 => Value::I16(i16::from_le_bytes(self.fixed(W)?)),
            4 => Value::U32(self.u32(W)?),
            5 => Value::I32(i32::from_le_bytes(self.fixed(W)?)),
            6 => Value::F32(f32::from_le_bytes(self.fixed(W)?)),
            7 => Value::Bool(self.boolean(key)?),
            8 => Value::Str(self.string(|| format!("the value of key `{key}`"))?.to_owned()),
            9 => Value::Array(self.array(key, 1)?),
            10 => Value::U64(self.u64(W)?),
            11 => Value::I64(i64::from_le_bytes(self.fixed(W)?)),
            12 => Value::F64(f64::from_le_bytes(self.fixed(W)?)),
            id => {
                return refuse(format!(
                    "key `{key}` has value type {id}, which GGUF does not define"
                ));
            }
        })
    }

    fn array(&mut self, key: &str, depth: usize) -> Read<Array> {
        if depth > MAX_ARRAY_DEPTH {
            return refuse(format!(
                "key `{key}`: arrays are nested more than {MAX_ARRAY_DEPTH} deep"
            ));
        }
        let id = self.u32("an array's type")?;
        let count = self.u64("an array's length")?;
        let least = match id {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => {
                return refuse(format!(
                    "key `{key}` is an array of type {id}, which GGUF does not define"
                ));
            }
        };
        self.fits(count, least, || format!("elements of key `{key}`"))?;
        Ok(match id {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => Array::Bool((0..count).map(|_| self.boolean(key)).collect::<Read<_>>()?),
            8 => {
                let mut strings = Strings::default();
                for i in 0..count {
                    strings.push(self.string(|| format!("element {i} of key `{key}`"))?);
                }
                Array::Str(strings)
            }
            9 => Array::Array(
                (0..count)
                    .map(|_| self.array(key, depth + 1))
                    .collect::<Read<_>>()?,
            ),
            10 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            _ => Array::F64(self.numbers(count, f64::from_le_bytes)?),
        })
    }

    /// `count` numbers of `N` bytes; the caller has checked that they fit the file.
    fn numbers<T, const N: usize>(&mut self, count: u64, read: fn([u8; N]) -> T) -> Read<Vec<T>> {
        let bytes = self.take(count * N as u64, "an array")?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|&b| read(b)).collect())
    }
}
