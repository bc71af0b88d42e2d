//! Made checkpoints as GGUF files: the meeting point of `testkit`, which describes them and must not know the runtime,
//! and DynaLM's GGUF writer and reader. For tests and developer commands, never a dependency of shipped code.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use dynalm::format::{Array, Gguf, GgufLayout, GgufWriter, Value};
use dynalm::{Error, Result};
use testkit::checkpoint::{Checkpoint, Meta, Mix, tiny};
use testkit::vocab::Vocab;

/// Writes a checkpoint to `path`. A failed attempt leaves no file of that name.
///
/// # Errors
/// If the file cannot be written.
pub fn write_gguf(checkpoint: &Checkpoint, path: &Path) -> Result<()> {
    let mut layout = GgufLayout::new();
    for (key, value) in &checkpoint.metadata {
        layout.set(key, to_value(value));
    }
    for t in &checkpoint.tensors {
        layout.tensor(&t.name, t.dtype, &t.dims)?;
    }
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let io = |what: &str, path: &Path| {
        let what = format!("{what} `{}`", path.display());
        move |source| Error::Io { what, source }
    };
    let written = (|| {
        let file = File::create(&part).map_err(io("creating", &part))?;
        let mut writer = GgufWriter::new(BufWriter::with_capacity(1 << 20, file), &layout)?;
        checkpoint.write(|bytes| writer.write(bytes))?;
        writer.finish()?;
        fs::rename(&part, path).map_err(io("renaming to", path))
    })();
    if written.is_err() {
        // The error that matters is the first; a file that cannot be removed now was perhaps never made.
        let _ = fs::remove_file(&part);
    }
    written
}

/// The tokenizer of a GGUF file, for a checkpoint to be made.
///
/// # Errors
/// If the file is no GGUF, has no vocabulary, or a `tokenizer.*` key of a type that vocabularies do not use.
pub fn read_vocab(path: &Path) -> Result<Vocab> {
    let format = |detail| Error::Format {
        path: path.to_owned(),
        detail,
    };
    let file = Gguf::open(path)?;
    let keys = file
        .metadata()
        .iter()
        .filter(|(k, _)| k.starts_with("tokenizer."));
    let metadata: Vec<(String, Meta)> = keys
        .map(|(key, value)| match to_meta(value) {
            Some(meta) => Ok((key.to_owned(), meta)),
            None => Err(format(format!(
                "key `{key}` is a {}, which no vocabulary has",
                value.type_name()
            ))),
        })
        .collect::<Result<_>>()?;
    Vocab::from_metadata(metadata).map_err(format)
}

/// Makes the tiny checkpoint of `family` (see [`tiny`]) in `folder` and returns the file's path.
///
/// # Panics
/// If there is no such family or type, or the file cannot be written: for tests.
pub fn tiny_gguf(folder: &Path, family: &str, type_name: &str, seed: u64) -> PathBuf {
    let mix = Mix::named(type_name).unwrap_or_else(|| panic!("there is no type `{type_name}`"));
    let path = folder.join(format!("tiny-{family}-{type_name}-{seed}.gguf"));
    write_gguf(&tiny(family, mix, seed), &path).expect("a test's folder takes a small file");
    path
}

fn to_value(meta: &Meta) -> Value {
    match meta {
        Meta::U32(v) => Value::U32(*v),
        Meta::F32(v) => Value::F32(*v),
        Meta::Bool(v) => Value::Bool(*v),
        Meta::Str(v) => Value::Str(v.clone()),
        Meta::Strings(v) => Value::Array(Array::Str(v.iter().collect())),
        Meta::I32s(v) => Value::Array(Array::I32(v.clone())),
        Meta::F32s(v) => Value::Array(Array::F32(v.clone())),
    }
}

fn to_meta(value: &Value) -> Option<Meta> {
    Some(match value {
        Value::U32(v) => Meta::U32(*v),
        Value::F32(v) => Meta::F32(*v),
        Value::Bool(v) => Meta::Bool(*v),
        Value::Str(v) => Meta::Str(v.clone()),
        Value::Array(Array::Str(v)) => Meta::Strings(v.iter().map(str::to_owned).collect()),
        Value::Array(Array::I32(v)) => Meta::I32s(v.clone()),
        Value::Array(Array::F32(v)) => Meta::F32s(v.clone()),
        _ => return None,
    })
}
