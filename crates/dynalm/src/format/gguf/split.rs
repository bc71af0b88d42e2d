//! Checkpoints split into `NAME-00001-of-0000N.gguf` parts.
//!
//! The first part holds the metadata, every part holds `split.no` (from 0), `split.count` and `split.tensors.count`
//! (over all parts). Names and keys must tell the same story.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::header::Header;
use crate::error::{Error, Result};
use crate::format::value::KeyValues;

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// More parts than any checkpoint has; the name's five digits would allow 99,999.
const MAX_PARTS: usize = 9_999;

/// Index of `path` among the parts its name speaks of, and the paths of all of them.
pub(super) fn paths(path: &Path) -> Option<(usize, Vec<PathBuf>)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse().ok())?;
    let (number, count): (usize, usize) = (digits(number)?, digits(count)?);
    if number == 0 || number > count || count > MAX_PARTS {
        return None;
    }
    let name = |i: usize| path.with_file_name(format!("{base}-{i:05}-of-{count:05}.gguf"));
    Some((number - 1, (1..=count).map(name).collect()))
}

fn fail<T>(path: &Path, detail: String) -> Result<T> {
    Err(Error::Format {
        path: path.to_owned(),
        detail,
    })
}

/// The paths of all parts if `path`, whose metadata is given, is one of several.
pub(super) fn siblings(path: &Path, metadata: &KeyValues) -> Result<Option<Vec<PathBuf>>> {
    let count = metadata.get::<usize>(COUNT)?.filter(|&n| n > 1);
    match (count, paths(path)) {
        (None, None) => Ok(None),
        (None, Some((_, all))) if all.len() == 1 => Ok(None),
        (None, Some((i, all))) => fail(
            path,
            format!(
                "its name says part {} of {}, but it has no key `{COUNT}` that says so",
                i + 1,
                all.len()
            ),
        ),
        (Some(n), None) => fail(
            path,
            format!(
                "it is one of {n} parts, but its name does not end in `-00001-of-{n:05}.gguf`: keep the parts' original \
                 names, in one folder"
            ),
        ),
        (Some(n), Some((_, all))) if n != all.len() => fail(
            path,
            format!("its name says {} parts, its key `{COUNT}` says {n}", all.len()),
        ),
        (Some(_), Some((_, all))) => match all.iter().find(|p| !p.exists()) {
            Some(missing) => fail(
                path,
                format!(
                    "part `{}` is missing: all {} parts must be in one folder",
                    missing.display(),
                    all.len()
                ),
            ),
            None => Ok(Some(all)),
        },
    }
}

/// Checks that the parts belong together.
pub(super) fn check(paths: &[PathBuf], parts: &[&Header]) -> Result<()> {
    let total: usize = parts.iter().map(|h| h.tensors.len()).sum();
    let mut seen: HashMap<&str, (usize, u64)> = HashMap::new();
    for (i, header) in parts.iter().enumerate() {
        let path = &paths[i];
        for (key, expected) in [(NO, i), (COUNT, parts.len()), (TENSORS, total)] {
            let found = header.metadata.need::<usize>(key)?;
            if found != expected {
                return fail(
                    path,
                    format!("key `{key}` is {found}, expected {expected}: the parts do not belong together"),
                );
            }
        }
        for (key, value) in header.metadata.iter() {
            if key != NO && parts[0].metadata.value(key) != Some(value) {
                return fail(
                    path,
                    format!("key `{key}` differs from part 1: the parts do not belong together"),
                );
            }
        }
        for t in &header.tensors {
            if let Some((other, entry)) = seen.insert(&t.name, (i, t.entry)) {
                return fail(
                    path,
                    format!(
                        "tensor `{}` stands twice, at byte {entry} of `{}` and at byte {} of `{}`",
                        t.name,
                        paths[other].display(),
                        t.entry,
                        path.display()
                    ),
                );
            }
        }
    }
    Ok(())
}
