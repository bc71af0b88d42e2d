//! A client of OpenAI-compatible servers: what they serve, and completions streamed with the time of every event.
//!
//! For measuring other servers as a user meets them. Counts of tokens are the server's own; a server that gives none is
//! refused, because a guess would look like a measurement.

mod stream;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::Response;
use ureq::tls::{RootCerts, TlsConfig};

use crate::error::{Error, Result};

pub use stream::Streamed;

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Largest reply that is not a stream, bytes.
const MAX_REPLY: u64 = 4 << 20;
/// Most characters of a server's error message that are passed on.
const MAX_MESSAGE: usize = 500;
/// Connections kept open: one for each user that may ask at the same time.
const MAX_CONNECTIONS: usize = 4096;

/// Which of the two routes continues a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/chat/completions`, the prompt as one user message.
    Chat,
}

impl Route {
    /// Its place under `/v1`.
    pub fn path(self) -> &'static str {
        match self {
            Route::Completions => "completions",
            Route::Chat => "chat/completions",
        }
    }
}

/// A greedy completion to be streamed.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Where to ask.
    pub route: Route,
    /// One of the server's models.
    pub model: &'a str,
    /// The prompt.
    pub prompt: &'a str,
    /// Most tokens.
    pub max_tokens: usize,
    /// Ask to go on past the end of the model's turn (`ignore_eos`, which OpenAI's own servers do not know).
    pub ignore_eos: bool,
}

/// A server.
pub struct Client {
    agent: Agent,
    base: String,
    key: Option<String>,
    timeout: Duration,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key stays out of logs.
        write!(f, "Client({})", self.base)
    }
}

fn remote(detail: String) -> Error {
    Error::Remote(detail)
}

/// The address of the API from what a user writes: with or without `/v1` at its end.
///
/// # Errors
/// If it is no plain `http://` or `https://` address.
pub fn base_url(url: &str) -> Result<String> {
    let bad = |why: &str| {
        Error::Settings(format!(
            "`{url}`: {why}; expected an address such as http://127.0.0.1:8000"
        ))
    };
    let rest = url
        .strip_prefix("http://")
        .or_else(|| url.strip_prefix("https://"))
        .ok_or_else(|| bad("neither http:// nor https://"))?;
    let host = rest.split('/').next().unwrap_or_default();
    if host.is_empty() {
        return Err(bad("no host"));
    }
    if host.contains('@') {
        return Err(bad("a name and password are not sent; use an API key"));
    }
    if rest.contains(['?', '#']) || rest.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(bad("more than a server's address"));
    }
    let base = url.trim_end_matches('/');
    Ok(if base.ends_with("/v1") {
        base.to_owned()
    } else {
        format!("{base}/v1")
    })
}

/// Whether the address is on this machine: no network lies between, and no proxy belongs there.
pub fn is_local(base: &str) -> bool {
    let host = base.split("://").nth(1).unwrap_or_default();
    let host = host.split('/').next().unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl Client {
    /// A client of the server at `url`; `key` is sent as a bearer token, `timeout` ends a request.
    ///
    /// # Errors
    /// If `url` is no address of a server.
    pub fn new(url: &str, key: Option<String>, timeout: Duration) -> Result<Client> {
        let base = base_url(url)?;
        let mut builder = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("dynalm/", env!("CARGO_PKG_VERSION")))
            .tls_config(
                TlsConfig::builder()
                    .root_certs(RootCerts::PlatformVerifier)
                    .build(),
            )
            // A key must not follow a redirect to somebody else.
            .max_redirects(0)
            .max_idle_connections(MAX_CONNECTIONS)
            .max_idle_connections_per_host(MAX_CONNECTIONS)
            .timeout_connect(Some(CONNECT));
        if is_local(&base) {
            builder = builder.proxy(None);
        }
        Ok(Client {
            agent: builder.build().into(),
            base,
            key,
            timeout,
        })
    }

    /// The address of the API.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// What `GET /v1/models` lists, and the name the server gives itself (`Server` header).
    ///
    /// # Errors
    /// If the server cannot be reached or its list has another form than OpenAI's.
    pub fn models(&self) -> Result<(Vec<Value>, Option<String>)> {
        let url = format!("{}/models", self.base);
        let mut request = self.agent.get(&url).header("accept", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.config().timeout_global(Some(self.timeout)).build();
        let mut response = request.call().map_err(|e| remote(format!("{url}: {e}")))?;
        self.check(&url, &mut response)?;
        let server = response.headers().get("server");
        let server = server.and_then(|v| v.to_str().ok()).map(str::to_owned);
        let text = response
            .body_mut()
            .with_config()
            .limit(MAX_REPLY)
            .read_to_string();
        let text = text.map_err(|e| remote(format!("{url}: {e}")))?;
        let list: Value = serde_json::from_str(&text)
            .map_err(|e| remote(format!("{url}: the list of models is no JSON: {e}")))?;
        let models = list.get("data").and_then(Value::as_array).cloned();
        let models =
            models.ok_or_else(|| remote(format!("{url}: expected `data` with the models, found none")))?;
        if models
            .iter()
            .any(|m| m.get("id").and_then(Value::as_str).is_none())
        {
            return Err(remote(format!("{url}: a model without `id`")));
        }
        Ok((models, server))
    }

    /// Streams a completion to its end.
    ///
    /// # Errors
    /// If the server refuses, breaks off, does not stream, or gives no token counts.
    pub fn stream(&self, ask: &Ask<'_>) -> Result<Streamed> {
        let url = format!("{}/{}", self.base, ask.route.path());
        let mut body = json!({
            "model": ask.model, "max_tokens": ask.max_tokens, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true},
        });
        match ask.route {
            Route::Completions => body["prompt"] = ask.prompt.into(),
            Route::Chat => body["messages"] = json!([{"role": "user", "content": ask.prompt}]),
        }
        if ask.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        let mut request = self
            .agent
            .post(&url)
            .header("content-type", "application/json")
            .header("accept", "text/event-stream")
            .header("accept-encoding", "identity");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.config().timeout_global(Some(self.timeout)).build();
        let body = body.to_string();
        let sent = Instant::now();
        let mut response = request.send(body).map_err(|e| remote(format!("{url}: {e}")))?;
        self.check(&url, &mut response)?;
        let kind = response.headers().get("content-type");
        let kind = kind.and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
        if !kind.starts_with("text/event-stream") {
            return Err(remote(format!(
                "{url}: asked for a stream, the server answers `{kind}`; expected text/event-stream"
            )));
        }
        let reader = response.into_body().into_with_config().limit(u64::MAX).reader();
        stream::read(reader, sent).map_err(|why| remote(format!("{url}: {why}")))
    }

    /// An error for any status but success, with the server's own words.
    fn check(&self, url: &str, response: &mut Response<ureq::Body>) -> Result<()> {
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let text = response
            .body_mut()
            .with_config()
            .limit(MAX_REPLY)
            .read_to_string();
        let text = text.unwrap_or_default();
        let message = serde_json::from_str::<Value>(&text)
            .ok()
            .and_then(|v| stream::error_message(&v))
            .unwrap_or(text);
        let message = printable(&message);
        let advice = match status.as_u16() {
            401 | 403 if self.key.is_none() => "; give the server's key",
            401 | 403 => "; the key is not accepted",
            404 => "; the server has no such route or model",
            300..=399 => "; redirects are not followed, name the server itself",
            _ => "",
        };
        let colon = if message.is_empty() { "" } else { ": " };
        Err(remote(format!(
            "{url}: the server answers {status}{colon}{message}{advice}"
        )))
    }
}

/// Foreign text for a message: bounded, on one line, without control characters.
fn printable(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_MESSAGE)
        .collect();
    clean.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_have_the_version_or_not() {
        assert_eq!(base_url("http://h:1").expect("fine"), "http://h:1/v1");
        assert_eq!(base_url("http://h:1/").expect("fine"), "http://h:1/v1");
        assert_eq!(base_url("https://h/api/v1/").expect("fine"), "https://h/api/v1");
        for (bad, why) in [
            ("h:1", "neither"),
            ("http://", "no host"),
            ("http://u:p@h", "password"),
            ("http://h?x=1", "more than"),
            ("http://h /", "more than"),
        ] {
            let error = base_url(bad).expect_err(bad).to_string();
            assert!(error.contains(why) && error.contains(bad), "{error}");
        }
    }

    #[test]
    fn loopback_needs_no_proxy() {
        for local in [
            "http://127.0.0.1:80/v1",
            "http://localhost/v1",
            "http://[::1]:80/v1",
        ] {
            assert!(is_local(local), "{local}");
        }
        assert!(!is_local("http://127.0.0.1.example/v1") && !is_local("https://example.org/v1"));
    }

    #[test]
    fn foreign_text_stays_on_one_line() {
        assert_eq!(printable("a\nb\x1b[0m"), "a b [0m");
        assert_eq!(printable(&"x".repeat(9999)).len(), MAX_MESSAGE);
    }
}
