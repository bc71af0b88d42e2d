//! `dynalm benchmark --url`: a server measured from outside, ours and such as do not count.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::time::Duration;

use dynalm::client::{Ask, Client, Route};
use dynalm::server::{Keys, ServerConfig};
use serde_json::Value;

use crate::support::{PIECES, TestServer};

const SECONDS: Duration = Duration::from_secs(60);

fn ask(route: Route) -> Ask<'static> {
    Ask {
        route,
        model: "chain",
        prompt: "la la",
        max_tokens: 9,
        ignore_eos: false,
    }
}

/// The program, measuring a server in a few small figures.
fn benchmark(url: &str, more: &[&str]) -> Output {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let small =
        "--prefill 120 --decode 5 --context 0,100 --users 2 --user-context 90 --user-decode 6 --rounds 1";
    Command::new(env!("CARGO_BIN_EXE_dynalm"))
        .args(["benchmark", "--url", url])
        .args(small.split(' '))
        .args(more)
        .env_clear()
        .env("HOME", folder.path())
        .current_dir(folder.path())
        .output()
        .expect("the program starts")
}

fn records(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{output:?}");
    let text = std::str::from_utf8(&output.stdout).expect("UTF-8");
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    text.lines().map(parse).collect()
}

#[test]
fn a_server_is_asked_what_it_serves_and_streams_with_its_own_counts() {
    let server = TestServer::ready();
    let client = Client::new(&format!("http://{}", server.address), None, SECONDS).expect("an address");
    let (models, _) = client.models().expect("a list");
    assert_eq!(models[0]["id"], "chain");
    let raw = client.stream(&ask(Route::Completions)).expect("a stream");
    assert_eq!(
        (raw.completion_tokens, raw.finish_reason.as_deref()),
        (9, Some("length"))
    );
    // A byte a token, but "la" is one.
    assert_eq!((raw.prompt_tokens, raw.cached_tokens), (3, Some(0)));
    assert!(!raw.events.is_empty() && raw.events.len() <= 9, "{raw:?}");
    assert!(raw.events.is_sorted() && raw.sent <= raw.events[0]);
    let chat = client.stream(&ask(Route::Chat)).expect("a stream");
    // The template adds the role and the assistant's turn.
    assert_eq!((chat.prompt_tokens, chat.completion_tokens), (5, 9));
    let long = Ask {
        max_tokens: 40,
        ..ask(Route::Chat)
    };
    let whole = client.stream(&long).expect("a stream");
    assert_eq!(whole.completion_tokens, PIECES.len() + 1, "the reply and its end");
    let on = client
        .stream(&Ask {
            ignore_eos: true,
            ..long
        })
        .expect("a stream");
    assert_eq!(on.completion_tokens, 40);
}

#[test]
fn a_refusal_comes_with_the_servers_words_and_advice() {
    let server = TestServer::start(ServerConfig {
        keys: Keys::new(["key-1"]),
        ..ServerConfig::default()
    });
    let url = format!("http://{}", server.address);
    let with = |key: Option<&str>| Client::new(&url, key.map(str::to_owned), SECONDS).expect("an address");
    let error = with(None).models().expect_err("no key").to_string();
    assert!(
        error.contains("401") && error.contains("give the server's key"),
        "{error}"
    );
    let error = with(Some("key-2")).models().expect_err("a wrong key").to_string();
    assert!(
        error.contains("not accepted") && !error.contains("key-2"),
        "{error}"
    );
    let client = with(Some("key-1"));
    client.models().expect("the right key");
    let unknown = Ask {
        model: "violin",
        ..ask(Route::Chat)
    };
    let error = client.stream(&unknown).expect_err("not served").to_string();
    assert!(error.contains("404") && error.contains("violin"), "{error}");
}

#[test]
fn our_own_server_is_measured_like_any_other() {
    let server = TestServer::start(ServerConfig {
        keys: Keys::new(["key-1"]),
        ..ServerConfig::default()
    });
    let url = format!("ours=http://{}/v1", server.address);
    for endpoint in ["completions", "chat"] {
        let output = benchmark(
            &url,
            &[
                "--api-key",
                "key-1",
                "--json",
                "--seed",
                "7",
                "--endpoint",
                endpoint,
            ],
        );
        let all = records(&output);
        let rounds: Vec<&Value> = all.iter().filter(|r| r["record"] == "round").collect();
        assert_eq!(rounds.len(), 4, "{output:?}");
        for r in &rounds {
            let (requests, prompt, reply) = match (r["figure"].as_str(), r["context"].as_u64()) {
                (Some("prefill"), _) => (1, 120.0, 1),
                (Some("decode"), Some(context)) => (1, context as f64, 6),
                _ => (2, 90.0, 6),
            };
            assert_eq!(r["engine"], "ours");
            assert_eq!(r["output_tokens"], requests * reply, "{r}");
            assert_eq!(
                r["cached_tokens"].as_u64().expect("our server says") / 16,
                0,
                "{r}"
            );
            // Words are a few tokens each here, so lengths are near what was asked for, and the counts are the server's.
            let found = r["prompt_tokens"].as_f64().expect("a count") / f64::from(requests);
            assert!(found > 0.0 && (found - prompt).abs() <= 40.0, "{r}");
        }
        let summary = all.iter().find(|r| r["record"] == "summary").expect("a summary");
        assert_eq!(summary["about"]["kind"], "server");
        assert_eq!(summary["about"]["model"]["entry"]["quantization"], "F32");
        let command = summary["command"].as_str().expect("text");
        assert!(
            command.contains("--api-key KEY") && !command.contains("key-1"),
            "{command}"
        );
        assert!(!String::from_utf8_lossy(&output.stderr).contains("key-1"));
    }
}

/// A server of canned answers: the list of one model, then what `reply` makes of the body of every other request.
fn canned(kind: &'static str, reply: impl Fn(&str) -> String + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { break };
            let (mut head, mut byte) = (Vec::new(), [0]);
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n > 0) {
                head.push(byte[0]);
            }
            let head = String::from_utf8_lossy(&head).to_lowercase();
            let length = head
                .split("content-length: ")
                .nth(1)
                .and_then(|t| t.split_whitespace().next());
            let mut body = vec![0; length.and_then(|n| n.parse().ok()).unwrap_or(0)];
            let _ = stream.read_exact(&mut body);
            let (kind, text) = if head.starts_with("get") {
                ("application/json", "{\"data\":[{\"id\":\"m\"}]}".to_owned())
            } else {
                (kind, reply(&String::from_utf8_lossy(&body)))
            };
            // A client that has gone is no fault of this server.
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
                text.len()
            );
        }
    });
    format!("http://{address}")
}

/// A reply of `parts` parts, all sent at once, to a prompt of as many tokens as it has words.
fn at_once(body: &str, parts: usize) -> String {
    let ask: Value = serde_json::from_str(body).expect("JSON");
    let prompt = ask["prompt"].as_str().expect("a prompt").split(' ').count();
    let part = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n".repeat(parts);
    format!(
        "{part}data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{}}}}}\n\n\
         data: [DONE]\n\n",
        ask["max_tokens"]
    )
}

#[test]
fn tokens_that_arrive_together_have_no_rate() {
    for parts in [1, 6] {
        let server = || canned("text/event-stream", move |body| at_once(body, parts));
        let all = records(&benchmark(&server(), &["--json"]));
        let rounds: Vec<&Value> = all.iter().filter(|r| r["record"] == "round").collect();
        assert_eq!(rounds.len(), 4);
        for r in rounds {
            assert_eq!(r["tokens_per_s"].is_null(), r["figure"] == "decode", "{r}");
            assert!(r["steady_tokens_per_s"].is_null(), "{r}");
        }
        let output = benchmark(&server(), &[]);
        assert!(output.status.success(), "{output:?}");
        let table = String::from_utf8(output.stdout).expect("UTF-8");
        let row = table
            .lines()
            .find(|l| l.starts_with("decode 5 at 100"))
            .expect("a row");
        assert_eq!(row.split_whitespace().nth(5), Some("-"), "{row}");
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(said.contains("decode 5 at 100: no rate"), "{said}");
    }
}

#[test]
fn servers_that_cannot_be_measured_honestly_are_refused() {
    let token = "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}]}\n\ndata: [DONE]\n\n";
    let same = "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":5,\
                \"completion_tokens\":1}}\n\ndata: [DONE]\n\n";
    for (kind, reply, part) in [
        ("text/event-stream", token, "include_usage"),
        ("application/json", "{}", "expected text/event-stream"),
        ("text/event-stream", "data: {\"choices\":[]}\n\n", "ended early"),
        (
            "text/event-stream",
            same,
            "count of prompt tokens cannot be trusted",
        ),
    ] {
        let output = benchmark(&canned(kind, |_| reply.to_owned()), &[]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(message.contains(part), "`{part}` is missing in: {message}");
        assert!(
            output.stdout.is_empty() && !message.contains("panicked"),
            "{output:?}"
        );
    }
}
