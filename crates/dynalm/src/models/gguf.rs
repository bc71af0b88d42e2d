//! What families ask of metadata, answered by GGUF keys.

use super::Metadata;
use crate::format::{Array, FromValue, KeyValues, Value};

/// The value of `key` as a `T`; other types are not found, as the trait says.
fn find<'a, T: FromValue<'a>>(metadata: &'a KeyValues, key: &str) -> Option<T> {
    T::from_value(metadata.value(key)?)
}

impl Metadata for KeyValues {
    fn arch(&self) -> &str {
        find(self, "general.architecture").unwrap_or_default()
    }

    fn u32(&self, key: &str) -> Option<u32> {
        find(self, key)
    }

    fn f32(&self, key: &str) -> Option<f32> {
        find(self, key)
    }

    fn bool(&self, key: &str) -> Option<bool> {
        find(self, key)
    }

    fn str(&self, key: &str) -> Option<&str> {
        find(self, key)
    }

    fn u32s(&self, key: &str) -> Option<Vec<u32>> {
        match self.value(key)? {
            Value::Array(Array::Bool(flags)) => Some(flags.iter().map(|&b| u32::from(b)).collect()),
            value => Vec::from_value(value),
        }
    }

    fn array_len(&self, key: &str) -> Option<usize> {
        match self.value(key)? {
            Value::Array(a) => Some(a.len()),
            _ => None,
        }
    }
}
