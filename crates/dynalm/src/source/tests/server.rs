//! A loopback HTTP server that serves scripted resources and misbehaves on purpose.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

/// How a resource is served.
#[derive(Clone, Default)]
pub(super) struct Resource {
    pub(super) body: Vec<u8>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) etag: Option<String>,
    /// Close the connection after this many bytes of body.
    pub(super) cut_after: Option<usize>,
    /// Keep the connection open, silent, after this many bytes of body.
    pub(super) stall_after: Option<usize>,
    /// Answer 200 with everything to a range request.
    pub(super) ignores_range: bool,
    /// Flip a byte of the body in the first so many answers.
    pub(super) flips: usize,
    /// Send an empty body in the first so many answers.
    pub(super) empties: usize,
    /// Serve this instead from the second request on.
    pub(super) then: Option<Box<Resource>>,
    /// Status instead of 200.
    pub(super) status: Option<u16>,
}

impl Resource {
    pub(super) fn of(body: &[u8]) -> Resource {
        Resource {
            body: body.to_vec(),
            ..Resource::default()
        }
    }

    pub(super) fn header(mut self, name: &str, value: &str) -> Resource {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub(super) fn etag(mut self, etag: &str) -> Resource {
        self.etag = Some(format!("\"{etag}\""));
        self
    }
}

/// One request as the server saw it.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) headers: HashMap<String, String>,
}

impl Seen {
    pub(super) fn range(&self) -> Option<&str> {
        self.headers.get("range").map(String::as_str)
    }
}

type Shared = Arc<Mutex<(HashMap<String, Resource>, Vec<Seen>)>>;

/// The server; its thread ends with the process.
pub(super) struct Server {
    pub(super) url: String,
    shared: Shared,
}

impl Server {
    pub(super) fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Shared::default();
        let server = Server {
            url,
            shared: shared.clone(),
        };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                std::thread::spawn(move || {
                    // A client that hangs up is none of the server's business.
                    let _ = answer(stream, &shared);
                });
            }
        });
        server
    }

    pub(super) fn put(&self, path: &str, resource: Resource) {
        self.shared.lock().unwrap().0.insert(path.into(), resource);
    }

    /// What is served at a path.
    pub(super) fn resource(&self, path: &str) -> Resource {
        self.shared.lock().unwrap().0[path].clone()
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.shared.lock().unwrap().1.clone()
    }

    /// GET requests of a path.
    pub(super) fn gets(&self, path: &str) -> Vec<Seen> {
        self.seen()
            .into_iter()
            .filter(|s| s.method == "GET" && s.path == path)
            .collect()
    }
}

fn read_request(stream: &TcpStream) -> std::io::Result<Option<Seen>> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let method = words.next().unwrap_or_default().to_owned();
    let path = words.next().unwrap_or_default().to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(':') {
            Some((k, v)) => headers.insert(k.to_ascii_lowercase(), v.trim().to_owned()),
            None => {
                return Ok(Some(Seen {
                    method,
                    path,
                    headers,
                }));
            }
        };
    }
}

/// Takes the resource for this request and moves its script on.
fn next(shared: &Shared, seen: &Seen) -> Option<Resource> {
    let mut shared = shared.lock().unwrap();
    shared.1.push(seen.clone());
    let resource = shared.0.get_mut(&seen.path)?;
    let mut now = resource.clone();
    if seen.method == "GET" {
        if resource.flips > 0 {
            resource.flips -= 1;
            let middle = now.body.len() / 2;
            now.body[middle] ^= 1;
        }
        if resource.empties > 0 {
            resource.empties -= 1;
            now.body.clear();
        }
        if let Some(then) = resource.then.take() {
            *resource = *then;
        }
    }
    Some(now)
}

fn answer(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let Some(seen) = read_request(&stream)? else {
        return Ok(());
    };
    let Some(r) = next(shared, &seen) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    };
    let range = seen
        .range()
        .filter(|_| !r.ignores_range)
        .filter(|_| {
            seen.headers
                .get("if-range")
                .is_none_or(|e| Some(e) == r.etag.as_ref())
        })
        .and_then(|v| v.strip_prefix("bytes=")?.split_once('-'));
    let total = r.body.len();
    let start: usize = range.and_then(|r| r.0.parse().ok()).unwrap_or(0);
    let last: Option<usize> = range.and_then(|r| r.1.parse().ok());
    let end = last.map_or(total, |last| total.min(last + 1));
    let (status, body) = match (r.status, range) {
        (Some(status), _) => (status, &r.body[..]),
        (None, None) => (200, &r.body[..]),
        (None, Some(_)) if start < end => (206, &r.body[start..end]),
        (None, Some(_)) => (416, &[][..]),
    };
    let mut head = format!(
        "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    match status {
        206 => head += &format!("content-range: bytes {start}-{}/{total}\r\n", end - 1),
        416 => head += &format!("content-range: bytes */{total}\r\n"),
        _ => {}
    }
    if let Some(etag) = &r.etag {
        head += &format!("etag: {etag}\r\n");
    }
    for (name, value) in &r.headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if seen.method == "HEAD" {
        return Ok(());
    }
    let sent = r
        .cut_after
        .or(r.stall_after)
        .map_or(body.len(), |n| n.min(body.len()));
    stream.write_all(&body[..sent])?;
    if r.stall_after.is_some() {
        // Until the client gives up.
        let _ = std::io::Read::read(&mut stream, &mut [0]);
    }
    Ok(())
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
