//! The store: plain files under one folder, a manifest beside each model.
//!
//! `MODELS_DIR/FOLDER/FILE.gguf`, `FILE.gguf.manifest.json` beside it (beside the first part if split), `FILE.part`
//! while it arrives. A model is there when its manifest is and every file has the manifest's length; the manifest is
//! written last. `FOLDER/.lock` keeps two processes from fetching the same model.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::config::SourceConfig;
use super::http::{Fetch, Http, digest, remove_if_there, sidecar};
use super::name::ModelSource;
use super::{Event, LocalModel, Progress, hub};
use crate::error::{Error, Result};
use crate::format::gguf::part_paths;

const MANIFEST: &str = ".manifest.json";
const LOCK: &str = ".lock";
/// Left free on the disk beyond what a download takes.
const SPARE_BYTES: u64 = 64 << 20;

/// A file of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFile {
    /// Name in the folder.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// Digest in hexadecimal.
    pub sha256: String,
    /// Whether the digest was known beforehand and agreed.
    pub verified: bool,
    /// Where exactly it was fetched from.
    pub url: String,
}

/// What the store knows of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Names it was asked for by.
    pub names: Vec<String>,
    /// The origin that delivered it.
    pub origin: String,
    /// When, UTC, RFC 3339.
    pub pulled: String,
    /// Its files, in order.
    pub files: Vec<StoredFile>,
}

fn io(what: &str, path: &Path, source: std::io::Error) -> Error {
    Error::Io {
        what: format!("{what} `{}`", path.display()),
        source,
    }
}

/// The folder of one model, locked.
pub(super) struct Folder {
    path: PathBuf,
    force: bool,
    _lock: File,
}

impl Folder {
    /// Makes and locks the folder; waits for another process that holds it.
    pub(super) fn open(
        source: &ModelSource,
        config: &SourceConfig,
        progress: &mut dyn Progress,
    ) -> Result<Folder> {
        let path = config.models_dir.join(source.folder());
        fs::create_dir_all(&path).map_err(|e| io("making the folder", &path, e))?;
        let lock_path = path.join(LOCK);
        let lock = File::options().create(true).append(true).open(&lock_path);
        let lock = lock.map_err(|e| io("opening", &lock_path, e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.event(Event::Note(format!(
                    "another process is fetching `{source}`; waiting for it"
                )));
                lock.lock().map_err(|e| io("locking", &lock_path, e))?;
            }
            Err(TryLockError::Error(e)) => return Err(io("locking", &lock_path, e)),
        }
        Ok(Folder {
            path,
            force: config.force,
            _lock: lock,
        })
    }

    /// A file in the folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Where a file stands while it arrives.
    pub(super) fn part(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.part"))
    }

    /// Fetches a file into the folder; one that is there with the right digest is kept.
    pub(super) fn download(
        &self,
        http: &Http,
        name: &str,
        want: &Fetch<'_>,
        progress: &mut dyn Progress,
    ) -> Result<StoredFile> {
        if let Some(file) = self.have(name, want.sha256, want.url)? {
            return Ok(file);
        }
        let found = http.fetch(want, &self.part(name), progress)?;
        self.finish(name)?;
        Ok(StoredFile {
            name: name.to_owned(),
            bytes: found.bytes,
            sha256: found.sha256,
            verified: want.sha256.is_some(),
            url: want.url.to_owned(),
        })
    }

    /// The file if it is there with the digest expected.
    pub(super) fn have(&self, name: &str, sha256: Option<&str>, url: &str) -> Result<Option<StoredFile>> {
        let path = self.path(name);
        let Some(sha256) = sha256.filter(|_| !self.force && path.is_file()) else {
            return Ok(None);
        };
        let found = digest(&path)?;
        Ok(found.sha256.eq_ignore_ascii_case(sha256).then(|| StoredFile {
            name: name.to_owned(),
            bytes: found.bytes,
            sha256: found.sha256,
            verified: true,
            url: url.to_owned(),
        }))
    }

    /// Gives a complete part its name.
    pub(super) fn finish(&self, name: &str) -> Result<()> {
        let (part, path) = (self.part(name), self.path(name));
        fs::rename(&part, &path).map_err(|e| io("renaming to", &path, e))
    }

    /// Writes the manifest: from now on the model is there.
    pub(super) fn keep(
        &self,
        source: &ModelSource,
        origin: &str,
        files: Vec<StoredFile>,
    ) -> Result<LocalModel> {
        let path = self.path(&format!("{}{MANIFEST}", files[0].name));
        let mut names = read_manifest(&path).map(|m| m.names).unwrap_or_default();
        let name = source.to_string();
        if !names.contains(&name) {
            names.push(name);
        }
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        let manifest = Manifest {
            names,
            origin: origin.to_owned(),
            pulled: rfc3339(seconds),
            files,
        };
        let text = serde_json::to_string_pretty(&manifest).expect("a manifest is plain data");
        let part = self.part("manifest");
        fs::write(&part, text).map_err(|e| io("writing", &part, e))?;
        fs::rename(&part, &path).map_err(|e| io("renaming to", &path, e))?;
        Ok(model(&source.to_string(), &self.path, manifest))
    }
}

/// Seconds since 1970 as `2026-11-30T22:00:00Z`. Days to civil date: Howard Hinnant, "chrono-compatible low-level date
/// algorithms".
pub(super) fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

fn model(name: &str, folder: &Path, manifest: Manifest) -> LocalModel {
    let paths: Vec<PathBuf> = manifest.files.iter().map(|f| folder.join(&f.name)).collect();
    let there = |f: &StoredFile| {
        folder
            .join(&f.name)
            .metadata()
            .is_ok_and(|m| m.is_file() && m.len() == f.bytes)
    };
    LocalModel {
        name: name.to_owned(),
        paths,
        origin: manifest.origin.clone(),
        bytes: manifest.files.iter().map(|f| f.bytes).sum(),
        complete: manifest.files.iter().all(there),
        manifest: Some(manifest),
    }
}

/// Reads a manifest; one that is damaged or names files outside its folder counts as absent, with a warning.
fn read_manifest(path: &Path) -> Option<Manifest> {
    let text = fs::read_to_string(path).ok()?;
    let plain = |f: &StoredFile| !f.name.is_empty() && !f.name.contains(['/', '\\']) && f.name != "..";
    match serde_json::from_str::<Manifest>(&text) {
        Ok(m) if !m.files.is_empty() && m.files.iter().all(plain) => Some(m),
        Ok(_) => {
            tracing::warn!(
                "`{}` names no files or files elsewhere; it is ignored",
                path.display()
            );
            None
        }
        Err(e) => {
            tracing::warn!("`{}` is damaged ({e}); it is ignored", path.display());
            None
        }
    }
}

/// Paths of all entries of a folder, sorted; none if it does not exist.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = match fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(|e| io("reading the folder", folder, e))?,
    };
    let paths: std::io::Result<Vec<PathBuf>> = read.map(|e| e.map(|e| e.path())).collect();
    let mut paths = paths.map_err(|e| io("reading the folder", folder, e))?;
    paths.sort();
    Ok(paths)
}

fn manifests(folder: &Path) -> Result<Vec<(PathBuf, Manifest)>> {
    let is_manifest = |p: &PathBuf| p.to_string_lossy().ends_with(MANIFEST);
    let paths = entries(folder)?.into_iter().filter(is_manifest);
    Ok(paths.filter_map(|p| read_manifest(&p).map(|m| (p, m))).collect())
}

/// The manifest in the store that answers to `source`.
fn lookup(source: &ModelSource, config: &SourceConfig) -> Result<Option<(PathBuf, Manifest)>> {
    let folder = config.models_dir.join(source.folder());
    let mut all = manifests(&folder)?;
    let name = source.to_string();
    if let Some(i) = all.iter().position(|(_, m)| m.names.contains(&name)) {
        return Ok(Some(all.swap_remove(i)));
    }
    // The same repository under a looser or another name.
    if let ModelSource::Hub(h) = source
        && h.revision.is_none()
    {
        match &h.file {
            None if all.len() == 1 => return Ok(all.pop()),
            None => {}
            Some(file) => {
                let is = |m: &Manifest| hub::matches(&m.files[0].name, file);
                return Ok(all.into_iter().find(|(_, m)| is(m)));
            }
        }
    }
    Ok(None)
}

/// The complete model of the store that answers to `source`.
pub(super) fn find(source: &ModelSource, config: &SourceConfig) -> Result<Option<LocalModel>> {
    let found = lookup(source, config)?;
    let found = found.map(|(path, m)| model(&source.to_string(), path.parent().unwrap_or(Path::new(".")), m));
    Ok(found.filter(|m| m.complete))
}

/// Every model of the store.
pub(super) fn list(config: &SourceConfig) -> Result<Vec<LocalModel>> {
    let mut models = Vec::new();
    for folder in entries(&config.models_dir)?.into_iter().filter(|p| p.is_dir()) {
        for (_, manifest) in manifests(&folder)? {
            let name = manifest
                .names
                .first()
                .cloned()
                .unwrap_or_else(|| manifest.files[0].name.clone());
            models.push(model(&name, &folder, manifest));
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// Deletes a model and what is left of unfinished pulls of it.
pub(super) fn remove(name: &str, config: &SourceConfig) -> Result<u64> {
    let source = ModelSource::parse(name)?;
    if let ModelSource::Path(path) = &source {
        return Err(Error::Source(format!(
            "`{}` is not in the store; delete the file yourself",
            path.display()
        )));
    }
    let folder = config.models_dir.join(source.folder());
    let found = lookup(&source, config)?;
    let partial: Vec<PathBuf> = entries(&folder)?
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "part"))
        .collect();
    if found.is_none() && partial.is_empty() {
        return Err(Error::Source(format!(
            "`{source}` is not in the store `{}`; `dynalm list` shows what is",
            config.models_dir.display()
        )));
    }
    let mut freed = 0;
    let mut delete = |path: &Path| {
        freed += path.metadata().map_or(0, |m| m.len());
        remove_if_there(path)
    };
    for part in &partial {
        delete(part)?;
        delete(&sidecar(part))?;
    }
    if let Some((path, manifest)) = found {
        for file in &manifest.files {
            delete(&folder.join(&file.name))?;
        }
        delete(&path)?;
    }
    if manifests(&folder)?.is_empty() {
        remove_if_there(&folder.join(LOCK))?;
        // Fails if a user keeps something of theirs there, which is fine.
        let _ = fs::remove_dir(&folder);
    }
    Ok(freed)
}

/// The files of the model at `path`: a file, all parts of a split one, or the only model of a folder.
pub(super) fn model_files(path: &Path) -> Result<Vec<PathBuf>> {
    let fail = |detail: String| {
        Err(Error::Format {
            path: path.to_owned(),
            detail,
        })
    };
    if path.is_dir() {
        let is_gguf = |p: &PathBuf| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        let mut models: Vec<PathBuf> = entries(path)?.into_iter().filter(is_gguf).collect();
        // Of a split model only the first part counts.
        models.retain(|p| part_paths(p).is_none_or(|all| all[0] == *p || !all[0].exists()));
        return match &models[..] {
            [] => fail("the folder holds no .gguf file".into()),
            [one] => model_files(one),
            several => {
                let names: Vec<_> = several
                    .iter()
                    .filter_map(|p| p.file_name())
                    .map(|n| n.to_string_lossy())
                    .collect();
                fail(format!(
                    "the folder holds {} models, name one of them: {}",
                    several.len(),
                    names.join(", ")
                ))
            }
        };
    }
    if !path.exists() {
        return fail("there is no such file".into());
    }
    let all = part_paths(path).filter(|all| all.iter().all(|p| p.exists()));
    Ok(all.unwrap_or_else(|| vec![path.to_owned()]))
}

/// Refuses to begin what the disk cannot hold.
pub(super) fn check_space(folder: &Path, bytes: u64) -> Result<()> {
    // A file system that cannot tell is no reason to refuse.
    let Ok(free) = fs4::available_space(folder) else {
        return Ok(());
    };
    if free >= bytes.saturating_add(SPARE_BYTES) || bytes == 0 {
        return Ok(());
    }
    Err(Error::Source(format!(
        "not enough disk space in `{}`: {bytes} bytes are needed, {free} are free; free some or set DYNALM_MODELS_DIR",
        folder.display()
    )))
}

/// The last path segment of a link.
pub(super) fn url_file(url: &str) -> String {
    let path = url.split(['?', '#']).next().unwrap_or(url);
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

/// Resolves `link` found on the page `base`.
pub(super) fn join_url(base: &str, link: &str) -> String {
    if link.contains("://") {
        return link.to_owned();
    }
    let base = base.split(['?', '#']).next().unwrap_or(base);
    let (scheme, rest) = base.split_once("://").unwrap_or(("https", base));
    if let Some(rest) = link.strip_prefix("//") {
        return format!("{scheme}://{rest}");
    }
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (link, query) = link.split_at(link.find(['?', '#']).unwrap_or(link.len()));
    let mut parts: Vec<&str> = Vec::new();
    if !link.starts_with('/') {
        parts.extend(path.split('/'));
        parts.pop();
    }
    for part in link.trim_start_matches('/').split('/') {
        match part {
            "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("{scheme}://{host}/{}{query}", parts.join("/"))
}

/// Name and address of the file a link leads to, or of all parts of the split model it is a part of.
pub(super) fn links(url: &str) -> Vec<(String, String)> {
    let file = url_file(url);
    let names = match part_paths(Path::new(&file)) {
        Some(all) => all.iter().map(|p| p.to_string_lossy().into_owned()).collect(),
        None => vec![file.clone()],
    };
    let link = |name: String| {
        let url = url.replacen(&file, &name, 1);
        (name, url)
    };
    names.into_iter().map(link).collect()
}

/// Fetches the file a link leads to, or all parts of the split model it is a part of.
pub(super) fn fetch_url(
    url: &str,
    sha256: Option<&str>,
    folder: &Folder,
    config: &SourceConfig,
    progress: &mut dyn Progress,
) -> Result<Vec<StoredFile>> {
    let http = Http::new(config, None)?;
    let file = url_file(url);
    let links = links(url);
    let mut files = Vec::new();
    for (name, url) in &links {
        let sha256 = sha256.filter(|_| links.len() == 1 || *name == file);
        let want = Fetch {
            url,
            token: None,
            bytes: None,
            sha256,
        };
        files.push(folder.download(&http, name, &want, progress)?);
    }
    Ok(files)
}
