//! Typed metadata: the value types of GGUF and the ordered table of keys.
//!
//! Numbers keep the type they have in the file, because a writer must be able to give them back; readers ask through
//! [`KeyValues::get`] and [`KeyValues::need`], which convert where nothing is lost and refuse otherwise.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Many strings in one allocation: a vocabulary has hundreds of thousands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    ends: Vec<usize>,
}

impl Strings {
    /// Appends one string.
    pub fn push(&mut self, s: &str) {
        self.text.push_str(s);
        self.ends.push(self.text.len());
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String number `i`.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        Some(&self.text[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|i| self.get(i).expect("index below the length"))
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(iter: I) -> Strings {
        let mut strings = Strings::default();
        for s in iter {
            strings.push(s.as_ref());
        }
        strings
    }
}

/// An array of values of one type.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the variants are the format's type names")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Strings),
    /// Arrays of arrays; each inner array has its own element type.
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as integers, if they are integers (not booleans).
    fn integers(&self) -> Option<Vec<i128>> {
        fn widen<T: Copy + Into<i128>>(v: &[T]) -> Vec<i128> {
            v.iter().map(|&x| x.into()).collect()
        }
        Some(match self {
            Array::U8(v) => widen(v),
            Array::I8(v) => widen(v),
            Array::U16(v) => widen(v),
            Array::I16(v) => widen(v),
            Array::U32(v) => widen(v),
            Array::I32(v) => widen(v),
            Array::U64(v) => widen(v),
            Array::I64(v) => widen(v),
            _ => return None,
        })
    }
}

/// A metadata value with the type it has in the file.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the variants are the format's type names")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// The type in words, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::F32(_) => "f32",
            Value::Bool(_) => "bool",
            Value::Str(_) => "string",
            Value::Array(_) => "array",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F64(_) => "f64",
        }
    }

    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}

impl From<&Value> for serde_json::Value {
    /// The whole value. A float that JSON cannot write becomes its name.
    fn from(value: &Value) -> serde_json::Value {
        match value {
            Value::U8(v) => (*v).into(),
            Value::I8(v) => (*v).into(),
            Value::U16(v) => (*v).into(),
            Value::I16(v) => (*v).into(),
            Value::U32(v) => (*v).into(),
            Value::I32(v) => (*v).into(),
            Value::F32(v) => json_float(v),
            Value::Bool(v) => (*v).into(),
            Value::Str(v) => v.as_str().into(),
            Value::Array(v) => v.into(),
            Value::U64(v) => (*v).into(),
            Value::I64(v) => (*v).into(),
            Value::F64(v) => json_float(v),
        }
    }
}

impl From<&Array> for serde_json::Value {
    fn from(array: &Array) -> serde_json::Value {
        match array {
            Array::U8(v) => v.as_slice().into(),
            Array::I8(v) => v.as_slice().into(),
            Array::U16(v) => v.as_slice().into(),
            Array::I16(v) => v.as_slice().into(),
            Array::U32(v) => v.as_slice().into(),
            Array::I32(v) => v.as_slice().into(),
            Array::F32(v) => v.iter().map(|x| json_float(x)).collect(),
            Array::Bool(v) => v.as_slice().into(),
            Array::Str(v) => v.iter().collect(),
            Array::Array(v) => v.iter().map(serde_json::Value::from).collect(),
            Array::U64(v) => v.as_slice().into(),
            Array::I64(v) => v.as_slice().into(),
            Array::F64(v) => v.iter().map(|x| json_float(x)).collect(),
        }
    }
}

/// A float with the digits that tell it from its neighbours in its own type: 0.1 of 32 bits stays 0.1.
fn json_float(value: &dyn std::fmt::Display) -> serde_json::Value {
    let text = value.to_string();
    match text.parse().ok().and_then(serde_json::Number::from_f64) {
        Some(number) => serde_json::Value::Number(number),
        None => text.into(),
    }
}

impl std::fmt::Display for Value {
    /// The value for people; long strings and arrays are abbreviated.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Bool(v) => write!(f, "{v}"),
            Value::F32(v) => write!(f, "{v}"),
            Value::F64(v) => write!(f, "{v}"),
            Value::Str(s) => {
                let short: String = s.chars().take(60).collect();
                if short.len() < s.len() {
                    write!(f, "{short:?}…")
                } else {
                    write!(f, "{short:?}")
                }
            }
            Value::Array(a) => write!(f, "[{} elements]", a.len()),
            other => write!(
                f,
                "{}",
                other.integer().expect("every other variant is an integer")
            ),
        }
    }
}

/// A Rust type a metadata value can be read as without loss.
pub trait FromValue<'a>: Sized {
    /// What is expected, in words.
    const EXPECTED: &'static str;
    /// The conversion; `None` where the value has another type or does not fit.
    fn from_value(value: &'a Value) -> Option<Self>;
}

macro_rules! integer_from_value {
    ($($t:ty => $what:literal),*) => {$(
        impl FromValue<'_> for $t {
            const EXPECTED: &'static str = $what;
            fn from_value(value: &Value) -> Option<$t> {
                value.integer()?.try_into().ok()
            }
        }
        impl FromValue<'_> for Vec<$t> {
            const EXPECTED: &'static str = concat!("an array, each element ", $what);
            fn from_value(value: &Value) -> Option<Vec<$t>> {
                let Value::Array(a) = value else { return None };
                a.integers()?.into_iter().map(|v| v.try_into().ok()).collect()
            }
        }
    )*};
}
integer_from_value! {
    u32 => "an integer from 0 to 4294967295",
    u64 => "an integer of at least 0",
    usize => "an integer of at least 0",
    i32 => "an integer of 32 bits",
    i64 => "an integer of 64 bits"
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a finite number";
    fn from_value(value: &Value) -> Option<f32> {
        let x = match *value {
            Value::F32(v) => v,
            Value::F64(v) => v as f32,
            _ => value.integer()? as f32,
        };
        x.is_finite().then_some(x)
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "true or false";
    fn from_value(value: &Value) -> Option<bool> {
        if let Value::Bool(v) = *value {
            Some(v)
        } else {
            None
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &'a Value) -> Option<&'a str> {
        if let Value::Str(v) = value { Some(v) } else { None }
    }
}

macro_rules! array_from_value {
    ($($t:ty, $variant:ident => $what:literal),*) => {$(
        impl<'a> FromValue<'a> for &'a $t {
            const EXPECTED: &'static str = $what;
            fn from_value(value: &'a Value) -> Option<&'a $t> {
                if let Value::Array(Array::$variant(v)) = value { Some(v) } else { None }
            }
        }
    )*};
}
array_from_value! {
    Strings, Str => "an array of strings",
    [f32], F32 => "an array of f32",
    [i32], I32 => "an array of i32",
    [bool], Bool => "an array of booleans"
}

/// The metadata of a checkpoint: keys in file order, each once.
#[derive(Debug, Clone, Default)]
pub struct KeyValues {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl KeyValues {
    /// An empty table; `path` is named in errors.
    pub fn new(path: &Path) -> KeyValues {
        KeyValues {
            path: path.to_owned(),
            ..KeyValues::default()
        }
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a key, or gives the value back if the key is there already.
    pub fn insert(&mut self, key: &str, value: Value) -> Result<(), Value> {
        if self.index.contains_key(key) {
            return Err(value);
        }
        self.index.insert(key.to_owned(), self.entries.len());
        self.entries.push((key.to_owned(), value));
        Ok(())
    }

    /// Sets a key, replacing its value.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.index.get(key) {
            Some(&i) => self.entries[i].1 = value,
            None => {
                self.index.insert(key.to_owned(), self.entries.len());
                self.entries.push((key.to_owned(), value));
            }
        }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value of `key` as stored.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// The value of `key` as a `T`; `None` if the key is absent.
    ///
    /// # Errors
    /// If the value has another type or does not fit; the key, the value and what was expected are named.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        match T::from_value(value) {
            Some(v) => Ok(Some(v)),
            None => Err(self.error(format!(
                "key `{key}` is {value} ({}), expected {}",
                value.type_name(),
                T::EXPECTED
            ))),
        }
    }

    /// Like [`KeyValues::get`], but the key must be there.
    ///
    /// # Errors
    /// If the key is absent, has another type or does not fit.
    pub fn need<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.get(key)?
            .ok_or_else(|| self.error(format!("key `{key}` is missing, expected {}", T::EXPECTED)))
    }

    fn error(&self, detail: String) -> Error {
        Error::Format {
            path: self.path.clone(),
            detail,
        }
    }
}
