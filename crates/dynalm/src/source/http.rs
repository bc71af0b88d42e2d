//! Fetching over HTTP: small texts, and large files that survive cut connections.
//!
//! A transfer writes to a `.part` file and remembers the server's ETag beside it. It goes on from the bytes that are
//! there with `Range` and `If-Range`; a server that ignores the range, or whose file has changed, restarts it. What
//! arrived is held against the expected length and sha256; on a mismatch the part is removed and fetched once more.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use ureq::http::{HeaderMap, Response};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::config::{Proxy, SourceConfig};
use super::{Event, Progress, store};
use crate::error::{Error, Result};

/// Attempts in a row that bring no byte before a transfer is given up.
const MAX_IDLE_ATTEMPTS: u32 = 3;
/// Redirects followed.
const MAX_REDIRECTS: u32 = 10;
const COPY_BYTES: usize = 256 << 10;

/// A client with the configured proxies, certificates and timeouts.
pub(super) struct Http {
    agent: Agent,
    retry_pause: Duration,
}

/// A file to fetch and what it must be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fetch<'a> {
    /// Address.
    pub(super) url: &'a str,
    /// Sent as a bearer token, not across redirects.
    pub(super) token: Option<&'a str>,
    /// Length, where known.
    pub(super) bytes: Option<u64>,
    /// Digest in lower-case hexadecimal, where known.
    pub(super) sha256: Option<&'a str>,
}

/// A file that has arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fetched {
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// Why an attempt ended before the file did.
enum Stop {
    /// Worth going on.
    Cut(String),
    Final(Error),
}

fn source(detail: String) -> Error {
    Error::Source(detail)
}

fn io<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(std::io::Error) -> Error + 'a {
    move |source| Error::Io {
        what: format!("{what} `{}`", path.display()),
        source,
    }
}

impl Http {
    /// A client; `cert` is a PEM file of the only authorities to trust.
    ///
    /// # Errors
    /// If the certificate file or the proxy cannot be used.
    pub(super) fn new(config: &SourceConfig, cert: Option<&Path>) -> Result<Http> {
        let roots = match cert {
            None => RootCerts::PlatformVerifier,
            Some(path) => {
                let pem = fs::read(path).map_err(io("reading certificates", path))?;
                let certs = parse_pem(&pem).filter_map(|item| match item {
                    Ok(PemItem::Certificate(c)) => Some(c),
                    _ => None,
                });
                let certs: Vec<_> = certs.collect();
                if certs.is_empty() {
                    return Err(source(format!(
                        "`{}` holds no certificate in PEM form",
                        path.display()
                    )));
                }
                RootCerts::Specific(Arc::new(certs))
            }
        };
        let mut builder = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("dynalm/", env!("CARGO_PKG_VERSION")))
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .max_redirects(MAX_REDIRECTS)
            .timeout_resolve(Some(config.connect_timeout))
            .timeout_connect(Some(config.connect_timeout))
            .timeout_recv_response(Some(config.stall_timeout))
            .timeout_per_read(Some(config.stall_timeout));
        match &config.proxy {
            Proxy::Environment => {}
            Proxy::None => builder = builder.proxy(None),
            Proxy::Url(url) => {
                let proxy = ureq::Proxy::new(url).map_err(|e| source(format!("proxy `{url}`: {e}")))?;
                builder = builder.proxy(Some(proxy));
            }
        }
        Ok(Http {
            agent: builder.build().into(),
            retry_pause: config.retry_pause,
        })
    }

    /// A text of at most `limit` bytes, and its content type.
    ///
    /// # Errors
    /// If the server cannot be reached, answers with an error, or sends more.
    pub(super) fn text(
        &self,
        url: &str,
        token: Option<&str>,
        accept: &str,
        limit: u64,
    ) -> Result<(String, String)> {
        let mut request = self.agent.get(url).header("accept", accept);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.config().https_only(url.starts_with("https://")).build();
        let mut response = request.call().map_err(|e| source(unreachable(url, &e)))?;
        check_status(url, &response)?;
        let kind = header(response.headers(), "content-type")
            .unwrap_or_default()
            .to_owned();
        let text = response.body_mut().with_config().limit(limit).read_to_string();
        Ok((text.map_err(|e| source(unreachable(url, &e)))?, kind))
    }

    /// The headers of the first answer that is not a redirect within the host.
    ///
    /// # Errors
    /// If the server cannot be reached or answers with an error.
    pub(super) fn head(&self, url: &str, token: Option<&str>) -> Result<HeaderMap> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.agent.head(&url).header("accept-encoding", "identity");
            if let Some(token) = token {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let request = request.config().max_redirects(0).build();
            let response = request.call().map_err(|e| source(unreachable(&url, &e)))?;
            match header(response.headers(), "location") {
                // A renamed repository; a location elsewhere is where the bytes are.
                Some(place) if response.status().is_redirection() && place.starts_with('/') => {
                    url = store::join_url(&url, place);
                }
                _ => {
                    if !response.status().is_redirection() {
                        check_status(&url, &response)?;
                    }
                    return Ok(response.headers().clone());
                }
            }
        }
        Err(source(format!("{url}: too many redirects")))
    }

    /// Up to `length` bytes from byte `start` on, and the length of the whole file.
    ///
    /// # Errors
    /// If the server cannot be reached, answers with an error, or does not send the range.
    pub(super) fn range(
        &self,
        url: &str,
        token: Option<&str>,
        start: u64,
        length: u64,
    ) -> Result<(Vec<u8>, u64)> {
        let mut request = self.agent.get(url).header("accept-encoding", "identity");
        let last = start.saturating_add(length).saturating_sub(1);
        request = request.header("range", format!("bytes={start}-{last}"));
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.config().https_only(url.starts_with("https://")).build();
        let response = request.call().map_err(|e| source(unreachable(url, &e)))?;
        check_status(url, &response)?;
        let (at, total) = if response.status().as_u16() == 206 {
            content_range(response.headers())
        } else {
            // The whole file is on its way; its beginning is as good as a range.
            let total = header(response.headers(), "content-length").and_then(|n| n.parse().ok());
            (Some(0), total)
        };
        let (Some(total), true) = (total, at == Some(start)) else {
            return Err(source(format!(
                "{url}: the server does not give byte ranges, so only a pull can tell what is in it"
            )));
        };
        let mut bytes = Vec::new();
        let body = response.into_body().into_with_config().limit(u64::MAX).reader();
        body.take(length)
            .read_to_end(&mut bytes)
            .map_err(|e| source(format!("{url}: connection lost ({e})")))?;
        Ok((bytes, total))
    }

    /// Fetches a file into `part`, going on from what is there.
    ///
    /// # Errors
    /// If the server cannot be reached or answers with an error, the connection is cut without progress too often, the
    /// disk is full, or what arrives is twice not what is expected (then nothing is left).
    pub(super) fn fetch(
        &self,
        want: &Fetch<'_>,
        part: &Path,
        progress: &mut dyn Progress,
    ) -> Result<Fetched> {
        let mut problem = String::new();
        for attempt in 0..2 {
            self.transfer(want, part, progress)?;
            progress.event(Event::Verify);
            let found = digest(part)?;
            match mismatch(want, &found) {
                None => {
                    remove_if_there(&sidecar(part))?;
                    return Ok(found);
                }
                Some(why) => problem = why,
            }
            remove_if_there(part)?;
            remove_if_there(&sidecar(part))?;
            if attempt == 0 {
                progress.event(Event::Note(format!(
                    "{}: {problem}; fetching it once more",
                    want.url
                )));
            }
        }
        Err(source(format!(
            "{}: {problem}; the bad copy was removed",
            want.url
        )))
    }

    /// Attempts until the file has ended.
    fn transfer(&self, want: &Fetch<'_>, part: &Path, progress: &mut dyn Progress) -> Result<()> {
        let mut idle = 0;
        let mut started = false;
        loop {
            let before = length(part);
            let why = match self.attempt(want, part, &mut started, progress) {
                Ok(()) => return Ok(()),
                Err(Stop::Final(error)) => return Err(error),
                Err(Stop::Cut(why)) => why,
            };
            let now = length(part);
            if now > before {
                idle = 0;
            } else {
                idle += 1;
                if idle >= MAX_IDLE_ATTEMPTS {
                    return Err(source(format!(
                        "{why} at {now} bytes, {idle} times in a row without progress"
                    )));
                }
                std::thread::sleep(self.retry_pause);
            }
            progress.event(Event::Note(format!("{why}; going on from {now} bytes")));
        }
    }

    /// One request. `started` tells whether the server has answered before: a first failure is final, so that an
    /// unreachable server is passed over quickly.
    fn attempt(
        &self,
        want: &Fetch<'_>,
        part: &Path,
        started: &mut bool,
        progress: &mut dyn Progress,
    ) -> std::result::Result<(), Stop> {
        let validator = read_validator(want.url, part);
        let done = length(part);
        // Without a validator only the digest can tell whether old and new bytes belong together.
        let usable = validator.is_some() || want.sha256.is_some();
        let start = if usable && want.bytes.is_none_or(|n| done <= n) {
            done
        } else {
            0
        };
        if start > 0 && want.bytes == Some(start) {
            return Ok(());
        }
        let response = self.request(want, start, validator.as_deref()).map_err(|e| {
            let detail = unreachable(want.url, &e);
            if *started {
                Stop::Cut(detail)
            } else {
                Stop::Final(source(detail))
            }
        })?;
        *started = true;
        let status = response.status().as_u16();
        let etag = header(response.headers(), "etag").map(str::to_owned);
        let (at, total) = match status {
            200 => (
                0,
                header(response.headers(), "content-length").and_then(|n| n.parse().ok()),
            ),
            206 => {
                let (at, total) = content_range(response.headers());
                let changed = etag.is_some() && validator.is_some() && etag != validator;
                if changed || at != Some(start) {
                    restart(part).map_err(Stop::Final)?;
                    return Err(Stop::Cut(format!(
                        "{}: the file has changed on the server",
                        want.url
                    )));
                }
                (start, total)
            }
            416 if content_range(response.headers()).1 == Some(start) => return Ok(()),
            416 => {
                restart(part).map_err(Stop::Final)?;
                return Err(Stop::Cut(format!(
                    "{}: the server has fewer bytes than we",
                    want.url
                )));
            }
            429 | 500..=599 => return Err(Stop::Cut(format!("{}: the server answers {status}", want.url))),
            _ => {
                return Err(Stop::Final(
                    check_status(want.url, &response).err().unwrap_or_else(|| {
                        source(format!(
                            "{}: the server answers {status} to a plain request",
                            want.url
                        ))
                    }),
                ));
            }
        };
        write_validator(want.url, etag.as_deref(), part).map_err(Stop::Final)?;
        let total = total.or(want.bytes);
        let folder = part.parent().unwrap_or(Path::new("."));
        store::check_space(folder, total.unwrap_or(0).saturating_sub(at)).map_err(Stop::Final)?;
        let file = part.file_name().unwrap_or_default().to_string_lossy();
        let file = file.trim_end_matches(".part").to_owned();
        progress.event(Event::Begin {
            file,
            done: at,
            total,
        });
        receive(response, part, at, total, want, progress)
    }

    fn request(
        &self,
        want: &Fetch<'_>,
        start: u64,
        validator: Option<&str>,
    ) -> std::result::Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(want.url).header("accept-encoding", "identity");
        if let Some(token) = want.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header("range", format!("bytes={start}-"));
            if let Some(validator) = validator {
                request = request.header("if-range", validator);
            }
        }
        request
            .config()
            .https_only(want.url.starts_with("https://"))
            .build()
            .call()
    }
}

/// Copies the body to the part from byte `at` on.
fn receive(
    response: Response<Body>,
    part: &Path,
    at: u64,
    total: Option<u64>,
    want: &Fetch<'_>,
    progress: &mut dyn Progress,
) -> std::result::Result<(), Stop> {
    let fail = |e| Stop::Final(io("writing", part)(e));
    let mut file = File::options()
        .create(true)
        .append(true)
        .open(part)
        .map_err(fail)?;
    file.set_len(at).map_err(fail)?;
    let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
    let mut buffer = vec![0; COPY_BYTES];
    let mut done = at;
    loop {
        let n = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(Stop::Cut(format!("{}: connection lost ({e})", want.url))),
        };
        file.write_all(&buffer[..n]).map_err(fail)?;
        done += n as u64;
        progress.event(Event::Bytes(done));
        if want.bytes.is_some_and(|w| done > w) {
            // More than the file can be: the length check says so.
            return Ok(());
        }
    }
    match total {
        Some(total) if done < total => Err(Stop::Cut(format!("{}: connection closed early", want.url))),
        _ => Ok(()),
    }
}

/// What is wrong with what arrived.
fn mismatch(want: &Fetch<'_>, found: &Fetched) -> Option<String> {
    if let Some(expected) = want.bytes.filter(|&n| n != found.bytes) {
        return Some(format!("got {} bytes, expected {expected}", found.bytes));
    }
    if found.bytes == 0 {
        return Some("the server sent an empty body".into());
    }
    let expected = want.sha256.filter(|s| !s.eq_ignore_ascii_case(&found.sha256))?;
    Some(format!(
        "digest mismatch: sha256 is {}, expected {expected}",
        found.sha256
    ))
}

/// Length and sha256 of a file.
///
/// # Errors
/// If it cannot be read.
pub(super) fn digest(path: &Path) -> Result<Fetched> {
    let fail = |e| io("reading", path)(e);
    let mut file = File::open(path).map_err(fail)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let n = file.read(&mut buffer).map_err(fail)?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
        bytes += n as u64;
    }
    let sha256 = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    Ok(Fetched { bytes, sha256 })
}

fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |m| m.len())
}

/// Where the validator of a part is kept.
pub(super) fn sidecar(part: &Path) -> PathBuf {
    let mut name = part.as_os_str().to_owned();
    name.push(".etag");
    PathBuf::from(name)
}

fn read_validator(url: &str, part: &Path) -> Option<String> {
    let text = fs::read_to_string(sidecar(part)).ok()?;
    let (of, etag) = text.split_once('\n')?;
    (of == url && !etag.is_empty()).then(|| etag.to_owned())
}

/// Keeps the ETag if it is a strong one: only those promise equal bytes.
fn write_validator(url: &str, etag: Option<&str>, part: &Path) -> Result<()> {
    let path = sidecar(part);
    match etag.filter(|e| e.starts_with('"')) {
        Some(etag) => fs::write(&path, format!("{url}\n{etag}")).map_err(io("writing", &path)),
        None => remove_if_there(&path),
    }
}

fn restart(part: &Path) -> Result<()> {
    remove_if_there(part)?;
    remove_if_there(&sidecar(part))
}

/// Removes a file; one that is not there is fine.
///
/// # Errors
/// If it is there and cannot be removed.
pub(super) fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io("removing", path)(e)),
        _ => Ok(()),
    }
}

/// A header as text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// First byte and length of the whole from `bytes 5-9/10` or `bytes */10`.
fn content_range(headers: &HeaderMap) -> (Option<u64>, Option<u64>) {
    let parsed = header(headers, "content-range").and_then(|v| v.strip_prefix("bytes ")?.split_once('/'));
    let Some((range, total)) = parsed else {
        return (None, None);
    };
    (
        range.split_once('-').and_then(|r| r.0.trim().parse().ok()),
        total.trim().parse().ok(),
    )
}

fn host(url: &str) -> &str {
    url.split("://")
        .nth(1)
        .unwrap_or(url)
        .split('/')
        .next()
        .unwrap_or(url)
}

fn unreachable(url: &str, error: &ureq::Error) -> String {
    format!("{}: {error}", host(url))
}

fn check_status(url: &str, response: &Response<Body>) -> Result<()> {
    let status = response.status();
    let advice = match status.as_u16() {
        200..=299 => return Ok(()),
        401 | 403 => ": access is refused; a gated or private model needs HF_TOKEN and accepted terms",
        404 => ": there is no such file",
        _ => "",
    };
    Err(source(format!("{url}: the server answers {status}{advice}")))
}
