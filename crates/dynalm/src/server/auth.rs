//! Who may ask: API keys, and the Host check that keeps web pages from reaching a server on this machine by a name
//! they control (DNS rebinding).

use std::net::IpAddr;

use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, HOST};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::error::ApiError;

/// The accepted API keys. Only their digests are kept: equal lengths, so that comparing takes the same time whatever
/// was sent, and no key can show up in a log.
#[derive(Debug, Clone, Default)]
pub struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// Keys from their texts; empty ones are left out.
    pub fn new<S: AsRef<str>>(keys: impl IntoIterator<Item = S>) -> Keys {
        let digests = keys.into_iter().filter_map(|key| {
            let key = key.as_ref().trim();
            (!key.is_empty()).then(|| Sha256::digest(key).into())
        });
        Keys(digests.collect())
    }

    /// Whether no key is needed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the headers carry an accepted key.
    ///
    /// # Errors
    /// 401 if keys are configured and none was sent or none matches.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_empty() {
            return Ok(());
        }
        let sent = bearer(headers).or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()));
        let digest: [u8; 32] = Sha256::digest(sent.unwrap_or_default()).into();
        // No early exit: the time tells nothing about which key came near.
        let known = self
            .0
            .iter()
            .fold(0_u8, |found, key| found | key.ct_eq(&digest).unwrap_u8());
        if sent.is_some() && known == 1 {
            Ok(())
        } else {
            Err(ApiError::unauthorized())
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Checks the `Host` header of a server bound to a loopback address.
///
/// # Errors
/// 403 if it names anything but this machine or one of `allowed`.
pub(super) fn check_host(headers: &HeaderMap, allowed: &[String]) -> Result<(), ApiError> {
    // A client that sends none (HTTP/1.0) is no browser.
    let Some(value) = headers.get(HOST) else {
        return Ok(());
    };
    let text = value.to_str().unwrap_or("");
    let name = host_name(text);
    let ours = name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
        || allowed.iter().any(|host| host.eq_ignore_ascii_case(name));
    if ours {
        return Ok(());
    }
    let short: String = name.chars().take(64).collect();
    Err(ApiError::forbidden(format!(
        "`Host: {short}` is not a name of this machine; use `localhost`, or allow the name with `--allowed-host`"
    )))
}

/// The name in `name:port`, `[v6]:port` or `name`.
fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split(']').next().unwrap_or(rest);
    }
    host.rsplit_once(':').map_or(host, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn keys_are_taken_from_both_headers() {
        let keys = Keys::new(["alpha", " beta\n", ""]);
        for good in [
            headers(&[("authorization", "Bearer alpha")]),
            headers(&[("authorization", "bearer  beta")]),
            headers(&[("x-api-key", "beta")]),
        ] {
            assert!(keys.check(&good).is_ok(), "{good:?}");
        }
        for bad in [
            headers(&[]),
            headers(&[("authorization", "alpha")]),
            headers(&[("authorization", "Basic alpha")]),
            headers(&[("authorization", "Bearer ")]),
            headers(&[("x-api-key", "")]),
            headers(&[("x-api-key", "alph")]),
            headers(&[("x-api-key", "alphabeta")]),
        ] {
            assert!(keys.check(&bad).is_err(), "{bad:?}");
        }
        assert!(Keys::new([""]).check(&headers(&[])).is_ok());
    }

    #[test]
    fn only_names_of_this_machine_pass() {
        let allowed = ["box.lan".to_owned()];
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:80",
            "[::1]",
            "box.lan:1",
        ] {
            assert!(
                check_host(&headers(&[("host", host)]), &allowed).is_ok(),
                "{host}"
            );
        }
        for host in [
            "evil.example",
            "localhost.evil.example:8000",
            "10.0.0.1",
            "",
            "[fe80::1]:2",
            "::1",
        ] {
            assert!(
                check_host(&headers(&[("host", host)]), &allowed).is_err(),
                "{host}"
            );
        }
    }
}
