//! Keys, origins, hosts, and bodies that are too much.

use dynalm::server::{Keys, ServerConfig};
use serde_json::json;

use crate::support::TestServer;

const CHAT: &str = "/v1/chat/completions";
const BODY: &[u8] = br#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}"#;
const JSON: (&str, &str) = ("content-type", "application/json");

fn with_keys() -> TestServer {
    TestServer::start(ServerConfig {
        keys: Keys::new(["alpha", "beta"]),
        cors_origins: vec!["https://app.example".into()],
        ..ServerConfig::default()
    })
}

#[test]
fn keys_are_needed_where_they_are_configured() {
    let server = with_keys();
    for header in [
        ("Authorization", "Bearer alpha"),
        ("authorization", "bearer beta"),
        ("X-Api-Key", "beta"),
    ] {
        assert_eq!(
            server.send("POST", CHAT, &[JSON, header], BODY).status,
            200,
            "{header:?}"
        );
        assert_eq!(server.send("GET", "/metrics", &[header], b"").status, 200);
    }
    for headers in [
        &[JSON][..],
        &[JSON, ("authorization", "Bearer gamma")],
        &[JSON, ("x-api-key", "alph")],
    ] {
        let reply = server.send("POST", CHAT, headers, BODY);
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (401, &json!("invalid_api_key"))
        );
        assert!(
            !reply.body.contains("alpha") && !reply.body.contains("gamma"),
            "no key is told"
        );
    }
    for path in ["/v1/models", "/metrics", "/", "/nothing"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    for path in ["/health", "/ready", "/live"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert_eq!(server.send("POST", "/admin/shutdown", &[], b"").status, 401);
}

#[test]
fn browsers_of_allowed_origins_get_what_they_need() {
    let server = with_keys();
    let preflight = |origin: &str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            (
                "access-control-request-headers",
                "authorization,content-type,x-stainless-os",
            ),
        ];
        server.send("OPTIONS", CHAT, &headers, b"")
    };
    let reply = preflight("https://app.example");
    assert!(matches!(reply.status, 200 | 204), "{}", reply.status);
    assert_eq!(
        reply.headers["access-control-allow-origin"],
        "https://app.example"
    );
    assert!(reply.headers["access-control-allow-headers"].contains("x-stainless-os"));
    assert!(reply.headers["access-control-allow-methods"].contains("POST"));
    assert!(!reply.headers.contains_key("access-control-allow-credentials"));
    assert!(
        !preflight("https://evil.example")
            .headers
            .contains_key("access-control-allow-origin")
    );
    // A page can read that its key was wrong.
    let headers = [
        JSON,
        ("origin", "https://app.example"),
        ("authorization", "Bearer wrong"),
    ];
    let reply = server.send("POST", CHAT, &headers, BODY);
    assert_eq!(reply.status, 401);
    assert_eq!(
        reply.headers["access-control-allow-origin"],
        "https://app.example"
    );
    // Nothing of the kind by default.
    let closed = TestServer::ready();
    let reply = closed.send("POST", CHAT, &[JSON, ("origin", "https://app.example")], BODY);
    assert!(
        !reply
            .headers
            .keys()
            .any(|name| name.starts_with("access-control")),
        "{:?}",
        reply.headers
    );
}

#[test]
fn foreign_host_names_are_refused() {
    let server = TestServer::ready();
    for (host, status) in [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("evil.example", 403),
        ("192.168.0.1:80", 403),
    ] {
        let reply = server.send("GET", "/v1/models", &[("host", host)], b"");
        assert_eq!(reply.status, status, "{host}");
    }
}

#[test]
fn only_plain_json_is_read() {
    let server = TestServer::ready();
    let cases: &[(&[(&str, &str)], u16)] = &[
        (&[JSON], 200),
        (&[("content-type", "application/json; charset=utf-8")], 200),
        (&[JSON, ("content-encoding", "identity")], 200),
        (&[], 415),
        (&[("content-type", "text/plain")], 415),
        (&[("content-type", "application/x-www-form-urlencoded")], 415),
        (&[JSON, ("content-encoding", "gzip")], 415),
        (&[JSON, ("content-encoding", "br")], 415),
    ];
    for (headers, status) in cases {
        let reply = server.send("POST", CHAT, headers, BODY);
        assert_eq!(reply.status, *status, "{headers:?}: {}", reply.body);
        if *status != 200 {
            reply.error();
        }
    }
}

#[test]
fn bodies_have_a_limit() {
    let server = TestServer::start(ServerConfig {
        max_body_bytes: 1 << 20,
        ..ServerConfig::default()
    });
    let fits = format!("{{\"messages\": [], \"user\": \"{}\"}}", "x".repeat(900 << 10));
    assert_eq!(server.send("POST", CHAT, &[JSON], fits.as_bytes()).status, 400);
    let large = vec![b' '; 200 << 20];
    let reply = server.send("POST", CHAT, &[JSON], &large);
    assert_eq!(
        (reply.status, &reply.error()["code"]),
        (413, &json!("body_too_large"))
    );
    // Without a declared length.
    let mut chunked = Vec::new();
    for _ in 0..3 {
        chunked.extend_from_slice(b"100000\r\n");
        chunked.extend_from_slice(&large[..1 << 20]);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    let reply = server.send_chunked(CHAT, &chunked);
    assert_eq!(reply.status, 413);
    assert_eq!(server.send("POST", CHAT, &[JSON], BODY).status, 200);
}

#[test]
fn metrics_are_told_in_both_formats() {
    let server = TestServer::ready();
    server.send("POST", CHAT, &[JSON], BODY);
    let classic = server.get("/metrics");
    assert!(classic.headers["content-type"].starts_with("text/plain; version=0.0.4"));
    let open = server.send(
        "GET",
        "/metrics",
        &[("accept", "application/openmetrics-text;version=1.0.0")],
        b"",
    );
    assert!(open.headers["content-type"].starts_with("application/openmetrics-text"));
    assert!(open.body.ends_with("# EOF\n"));
    for text in [&classic.body, &open.body] {
        for sample in [
            "dynalm_requests_finished_total{reason=\"length\"} 1\n",
            "dynalm_generation_tokens_total 1\n",
            "dynalm_prompt_tokens_total 4\n",
            "dynalm_time_to_first_token_seconds_count 1\n",
            "dynalm_queue_time_seconds_count 1\n",
            "dynalm_request_duration_seconds_count 1\n",
            "dynalm_step_duration_seconds_count{phase=\"prefill\"} 1\n",
            "dynalm_http_requests_total{route=\"/v1/chat/completions\",status=\"200\"} 1\n",
            "vllm:num_requests_running 0\n",
            "vllm:num_requests_waiting 0\n",
            "vllm:kv_cache_usage_perc 0",
            "vllm:cache_config_info{block_size=\"16\"",
            "dynalm_model_info{model=\"chain\"",
        ] {
            assert!(text.contains(sample), "`{sample}` in {text}");
        }
    }
}
