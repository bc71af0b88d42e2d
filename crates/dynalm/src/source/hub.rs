//! Model hubs that speak Hugging Face's protocol, and the cache their own tools keep.
//!
//! `GET /api/models/REPO/tree/REV?recursive=true` lists files; `HEAD /REPO/resolve/REV/FILE` tells commit
//! (`X-Repo-Commit`), length (`X-Linked-Size`) and sha256 (`X-Linked-Etag`) of a file kept in large-file storage.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Progress;
use super::config::SourceConfig;
use super::http::{Fetch, Http, header};
use super::name::HubName;
use super::store::{Folder, StoredFile};
use crate::error::{Error, Result};
use crate::format::gguf::part_paths;

/// Longest file list accepted, bytes.
const MAX_LIST_BYTES: u64 = 32 << 20;

/// Which quantisation to take where the user does not say, best first.
const PREFERENCE: &[&str] = &[
    "Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q8_0", "Q6_K", "Q5_K_S",
    "Q5_0", "Q3_K_M", "BF16", "F16", "F32",
];

#[derive(Deserialize)]
struct TreeEntry {
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

/// Whether `path` is the file `wanted`, or of the quantisation `wanted`: the word must stand alone, so that `Q4_K` is
/// not found in `Q4_K_M`.
pub(super) fn matches(path: &str, wanted: &str) -> bool {
    let base = |p: &str| p.rsplit('/').next().unwrap_or(p).to_owned();
    if wanted.ends_with(".gguf") {
        return path == wanted || base(path) == base(wanted);
    }
    let (path, wanted) = (path.to_ascii_uppercase(), wanted.to_ascii_uppercase());
    path.match_indices(&wanted).any(|(at, _)| {
        let before = path[..at].chars().next_back();
        let after = path[at + wanted.len()..].chars().next();
        before.is_none_or(|c| "-._/".contains(c)) && after.is_none_or(|c| "-./".contains(c))
    })
}

/// The model among a repository's files, as all of its parts.
///
/// # Errors
/// In words: no such file, none at all, or several.
pub(super) fn choose(paths: &[String], wanted: Option<&str>) -> std::result::Result<Vec<String>, String> {
    let is_projector = |p: &str| p.rsplit('/').next().unwrap_or(p).starts_with("mmproj");
    let mut models: Vec<&String> = paths
        .iter()
        .filter(|p| p.ends_with(".gguf") && !is_projector(p))
        .collect();
    models.retain(|p| split_parts(p).is_none_or(|all| all[0] == **p));
    let listed = || {
        models
            .iter()
            .map(|p| format!("`{p}`"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    if models.is_empty() {
        return Err("the repository holds no .gguf file".into());
    }
    let of = |quant: &str| {
        models
            .iter()
            .copied()
            .filter(|p| matches(p, quant))
            .collect::<Vec<_>>()
    };
    let found = match wanted {
        Some(wanted) => {
            let exact: Vec<&String> = models.iter().copied().filter(|p| *p == wanted).collect();
            if exact.is_empty() { of(wanted) } else { exact }
        }
        None if models.len() == 1 => models.clone(),
        None => PREFERENCE
            .iter()
            .map(|q| of(q))
            .find(|f| !f.is_empty())
            .unwrap_or_default(),
    };
    match found[..] {
        [one] => Ok(split_parts(one).unwrap_or_else(|| vec![one.clone()])),
        [] => Err(format!(
            "no file of the repository is meant by `{}`; it has {}",
            wanted.unwrap_or("default"),
            listed()
        )),
        _ => Err(format!(
            "`{}` means several files; name one of {}",
            wanted.unwrap_or("default"),
            listed()
        )),
    }
}

fn split_parts(path: &str) -> Option<Vec<String>> {
    let parts = part_paths(Path::new(path))?;
    Some(
        parts
            .iter()
            .map(|p| p.to_string_lossy().replace('\\', "/"))
            .collect(),
    )
}

/// Percent-encodes what may not stand in a path.
fn encode(path: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    path.bytes()
        .map(|b| {
            if keep(b) {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

/// A file of a repository.
pub(super) struct Located {
    /// Its name without folders.
    pub(super) file: String,
    /// Where it is, by commit.
    pub(super) url: String,
    /// Its length, where the hub says.
    bytes: Option<u64>,
    /// Its digest, where the hub says.
    sha256: Option<String>,
}

/// Finds the files that `name` means.
pub(super) fn locate(name: &HubName, http: &Http, config: &SourceConfig) -> Result<Vec<Located>> {
    let token = config.hub_token.as_deref();
    let (endpoint, repo) = (&config.hub_endpoint, &name.repo);
    let paths = match &name.file {
        Some(file) if file.ends_with(".gguf") => split_parts(file).unwrap_or_else(|| vec![file.clone()]),
        wanted => {
            let url = format!(
                "{endpoint}/api/models/{repo}/tree/{}?recursive=true",
                encode(name.revision())
            );
            let (text, _) = http.text(&url, token, "application/json", MAX_LIST_BYTES)?;
            let tree: Vec<TreeEntry> = serde_json::from_str(&text)
                .map_err(|e| Error::Source(format!("{url}: the answer is not a list of files ({e})")))?;
            let files: Vec<String> = tree
                .into_iter()
                .filter(|e| e.kind == "file")
                .map(|e| e.path)
                .collect();
            choose(&files, wanted.as_deref()).map_err(|why| Error::Source(format!("{name}: {why}")))?
        }
    };
    let mut revision = name.revision().to_owned();
    let mut files = Vec::new();
    for path in &paths {
        let url = format!("{endpoint}/{repo}/resolve/{}/{}", encode(&revision), encode(path));
        let headers = http.head(&url, token)?;
        // All parts come from one commit, whatever is pushed meanwhile.
        if let Some(commit) =
            header(&headers, "x-repo-commit").filter(|c| c.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            revision = commit.to_owned();
        }
        let url = format!("{endpoint}/{repo}/resolve/{}/{}", encode(&revision), encode(path));
        let etag = header(&headers, "x-linked-etag").map(|e| e.trim_matches('"').to_ascii_lowercase());
        let sha256 = etag.filter(|e| e.len() == 64 && e.bytes().all(|b| b.is_ascii_hexdigit()));
        let bytes = header(&headers, "x-linked-size").and_then(|n| n.parse().ok());
        files.push(Located {
            file: path.rsplit('/').next().unwrap_or(path).to_owned(),
            url,
            bytes,
            sha256,
        });
    }
    Ok(files)
}

/// Fetches the files that `name` means.
pub(super) fn fetch(
    name: &HubName,
    folder: &Folder,
    config: &SourceConfig,
    progress: &mut dyn Progress,
) -> Result<Vec<StoredFile>> {
    let http = Http::new(config, None)?;
    let mut files = Vec::new();
    for found in locate(name, &http, config)? {
        let want = Fetch {
            url: &found.url,
            token: config.hub_token.as_deref(),
            bytes: found.bytes,
            sha256: found.sha256.as_deref(),
        };
        files.push(folder.download(&http, &found.file, &want, progress)?);
    }
    Ok(files)
}

/// The files that `name` means in the Hugging Face cache: `models--OWNER--REPO/snapshots/COMMIT/…`.
pub(super) fn cached(name: &HubName, config: &SourceConfig) -> Option<Vec<PathBuf>> {
    let root = config
        .hub_cache
        .as_ref()?
        .join(format!("models--{}", name.repo.replace('/', "--")));
    let commit = std::fs::read_to_string(root.join("refs").join(name.revision()));
    let commit = commit.map_or_else(|_| name.revision().to_owned(), |c| c.trim().to_owned());
    let snapshot = root.join("snapshots").join(commit);
    let mut files = Vec::new();
    list_files(&snapshot, "", 0, &mut files);
    let paths = choose(&files, name.file.as_deref()).ok()?;
    let paths: Vec<PathBuf> = paths.iter().map(|p| snapshot.join(p)).collect();
    paths.iter().all(|p| p.is_file()).then_some(paths)
}

/// Files below `folder`, relative, a few levels deep.
fn list_files(folder: &Path, prefix: &str, depth: usize, files: &mut Vec<String>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let path = entry.path();
        if path.is_file() {
            files.push(format!("{prefix}{name}"));
        } else if path.is_dir() && depth < 3 {
            list_files(&path, &format!("{prefix}{name}/"), depth + 1, files);
        }
    }
    files.sort();
}
