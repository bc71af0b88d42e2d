//! Loading, leaving, overload, failure, shutting down.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use dynalm::engine::EngineConfig;
use dynalm::error::Error;
use dynalm::server::{ServerConfig, Stopped};
use serde_json::{Value, json};

use crate::support::{Gate, Open, TestServer, control, model};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
/// A reply that goes on until the window is full.
const LOOP: &str = r#"{"prompt": "<|loop|>"}"#;
const LOOP_STREAM: &str = r#"{"prompt": "<|loop|>", "stream": true}"#;

#[test]
fn the_server_answers_while_the_model_loads() {
    let (go, wait) = mpsc::channel::<()>();
    let gate = Arc::new(Gate::default());
    let for_model = Arc::clone(&gate);
    let server = TestServer::start_with(ServerConfig::default(), gate, move || {
        wait.recv().expect("the test lets the load go on");
        model(for_model)
    });
    for path in ["/health", "/ready"] {
        let reply = server.get(path);
        assert_eq!((reply.status, &reply.json()["status"]), (503, &json!("loading")));
        assert!(reply.headers.contains_key("retry-after"));
    }
    assert_eq!(server.get("/live").status, 200);
    assert_eq!(server.get("/metrics").status, 200);
    assert_eq!(server.get("/v1/models").json()["data"], json!([]));
    for (path, body) in [
        (CHAT, r#"{"messages": []}"#),
        (TEXT, LOOP_STREAM),
        ("/tokenize", "{}"),
    ] {
        let reply = server.post(path, body);
        assert_eq!(reply.status, 503, "{path}");
        assert!(reply.headers.contains_key("retry-after"));
        reply.error();
    }
    go.send(()).unwrap();
    server.eventually("the model is there", |server| server.get("/health").status == 200);
    assert_eq!(server.get("/health").json()["status"], "ok");
    assert_eq!(
        server.post(TEXT, r#"{"prompt": "x", "max_tokens": 1}"#).status,
        200
    );
}

#[test]
fn a_model_that_cannot_be_loaded_ends_the_server() {
    let load = || Err(Error::Unsupported("this model needs something else".into()));
    let server = TestServer::start_with(ServerConfig::default(), Arc::default(), load);
    let error = server.join().expect_err("the load's own error");
    assert_eq!(error.to_string(), "this model needs something else");
    let server = TestServer::start_with(ServerConfig::default(), Arc::default(), || {
        panic!("a broken loader")
    });
    assert!(server.join().is_err());
}

#[test]
fn health_answers_while_the_engine_is_busy() {
    let server = TestServer::ready();
    server.gate.close_after(0);
    let _running = server.post_open(TEXT, LOOP);
    server.gate.wait_held();
    for _ in 0..20 {
        assert_eq!(server.get("/health").status, 200);
    }
    server.gate.open();
}

/// Starts what is to be left, in the state named, and gives it back.
fn leave_in(server: &TestServer, state: &str, body: &str) -> Open {
    let open = |body: &str| server.post_open(TEXT, body);
    match state {
        "decode" => {
            server.gate.close_after(3);
            let open = open(body);
            server.gate.wait_held();
            open
        }
        "prefill" => {
            // 200 tokens are several chunks of at most 64.
            server.gate.close_after(1);
            let mut long: Value = serde_json::from_str(body).unwrap();
            long["prompt"] = "x".repeat(200).into();
            let open = open(&long.to_string());
            server.gate.wait_held();
            open
        }
        other => panic!("no state {other}"),
    }
}

#[test]
fn who_leaves_is_cancelled() {
    for body in [LOOP, LOOP_STREAM] {
        for state in ["decode", "prefill"] {
            let server = TestServer::ready();
            let open = leave_in(&server, state, body);
            assert_eq!(server.metric("dynalm_requests_waiting"), 0.0);
            drop(open);
            server.eventually("the request is no longer in flight", |server| {
                server.app.in_flight() == 0
            });
            // The engine is held in a step; the next one does not happen.
            let drawn = server.metric("dynalm_generation_tokens_total");
            server.gate.open();
            server.wait_idle();
            let after = server.metric("dynalm_generation_tokens_total");
            assert!(
                after <= drawn + 1.0,
                "{state} {body}: {drawn} tokens, then {after}"
            );
            assert!(
                server
                    .get("/metrics")
                    .body
                    .contains("finished_total{reason=\"cancelled\"} 1\n"),
                "{state} {body}"
            );
        }
    }
}

#[test]
fn who_leaves_the_queue_is_cancelled() {
    let server = TestServer::ready();
    server.gate.close_after(0);
    let first = server.post_open(TEXT, LOOP);
    server.gate.wait_held();
    let queued = server.post_open(TEXT, LOOP_STREAM);
    server.eventually("both are in flight", |server| server.app.in_flight() == 2);
    drop(queued);
    server.eventually("the queued one has gone", |server| server.app.in_flight() == 1);
    drop(first);
    server.eventually("both have gone", |server| server.app.in_flight() == 0);
    server.gate.open();
    server.wait_idle();
    assert!(server.metric("dynalm_generation_tokens_total") <= 1.0);
}

#[test]
fn a_full_queue_refuses() {
    let engine = EngineConfig {
        max_waiting: 2,
        ..EngineConfig::default()
    };
    let server = TestServer::start(ServerConfig {
        engine,
        ..ServerConfig::default()
    });
    server.gate.close_after(0);
    let first = server.post_open(TEXT, LOOP_STREAM);
    server.gate.wait_held();
    let others = [server.post_open(TEXT, LOOP_STREAM), server.post_open(TEXT, LOOP)];
    server.eventually("all are in flight", |server| server.app.in_flight() == 3);
    for body in [LOOP, LOOP_STREAM] {
        let reply = server.post(TEXT, body);
        assert_eq!(
            (reply.status, &reply.error()["code"]),
            (429, &json!("queue_full"))
        );
        assert!(reply.headers.contains_key("retry-after"));
    }
    assert_eq!(server.metric("dynalm_requests_rejected_total"), 2.0);
    drop((first, others));
    server.eventually("all have gone", |server| server.app.in_flight() == 0);
    server.gate.open();
    // The engine, once it goes on, takes those who have gone off the queue before it comes to this one.
    server.eventually("there is room again", |server| {
        server.post(TEXT, r#"{"prompt": "x", "max_tokens": 1}"#).status == 200
    });
    // A request of several replies is refused as a whole, and those of its replies that had room are taken back.
    server.gate.close_after(0);
    let first = server.post_open(TEXT, LOOP);
    server.gate.wait_held();
    assert_eq!(
        server
            .post(TEXT, r#"{"prompt": "x", "n": 3, "max_tokens": 1}"#)
            .status,
        429
    );
    server.eventually("nothing of it is left", |server| server.app.in_flight() == 1);
    drop(first);
    server.eventually("all have gone", |server| server.app.in_flight() == 0);
    server.gate.open();
    // The gauges say what was so after the last step, and none may have ended yet: only the queue knows its room.
    server.eventually("there is room for two", |server| {
        let reply = server.post(TEXT, r#"{"prompt": "x", "n": 2, "max_tokens": 1}"#);
        assert!(matches!(reply.status, 200 | 429), "{}", reply.status);
        reply.status == 200
    });
}

#[test]
fn a_deadline_that_passes() {
    let server = TestServer::ready();
    server.gate.close_after(0);
    let mut held = server.post_open(TEXT, LOOP_STREAM);
    server.gate.wait_held();
    let queued = server.post_open(TEXT, r#"{"prompt": "x", "timeout": 0.001}"#);
    server.eventually("both are in flight", |server| server.app.in_flight() == 2);
    // Its deadline has passed by the time the server has answered these.
    server.eventually("a while", {
        let begin = std::time::Instant::now();
        move |server| {
            server.get("/health");
            begin.elapsed() > Duration::from_millis(5)
        }
    });
    server.gate.open();
    let late = queued.reply();
    assert_eq!(late.status, 504);
    let error = late.error();
    assert_eq!(
        (error["param"].as_str(), error["code"].as_str()),
        (Some("timeout"), Some("deadline_exceeded"))
    );
    // The limit as it was asked for, not what was left of it when the engine heard of it.
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("time limit of 0.001 s passed while it waited in the queue"),
        "{message}"
    );
    assert_eq!(held.head().0, 200);
    assert!(held.rest().ends_with("data: [DONE]\n\n"));
    server.wait_idle();
}

#[test]
fn a_broken_row_fails_its_request_alone() {
    let server = TestServer::ready();
    server.gate.close_after(0);
    let mut first = server.post_open(TEXT, LOOP_STREAM);
    server.gate.wait_held();
    let mut broken = server.post_open(TEXT, r#"{"prompt": "x<|nan|>"}"#);
    let mut scored = server.post_open(
        TEXT,
        r#"{"prompt": "x<|nan|>x", "echo": true, "logprobs": 1, "max_tokens": 0}"#,
    );
    let mut streamed = server.post_open(TEXT, r#"{"prompt": "x<|nan|>", "stream": true}"#);
    server.eventually("all are in flight", |server| server.app.in_flight() == 4);
    server.gate.open();
    assert_eq!(broken.head().0, 500);
    assert_eq!(scored.head().0, 500);
    assert_eq!(streamed.head().0, 200);
    let events = streamed.rest();
    let data = events
        .strip_prefix("event: error\ndata: ")
        .unwrap_or_else(|| panic!("{events}"));
    let error: Value = serde_json::from_str(data.trim_end()).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
    assert!(!events.contains("[DONE]"));
    assert_eq!(first.head().0, 200);
    assert!(
        first.rest().ends_with("data: [DONE]\n\n"),
        "the others are not harmed"
    );
    server.wait_idle();
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_broken_engine_fails_all_and_ends_the_server() {
    for (token, why) in [
        ("<|panic|>", "breaks its own rules"),
        ("<|device|>", "the device has gone"),
        // It gives a row less than it was asked for.
        ("<|short|>", "output rows; the first that is missing is row"),
    ] {
        let server = TestServer::ready();
        server.gate.close_after(0);
        let mut running = server.post_open(TEXT, LOOP);
        server.gate.wait_held();
        let mut breaking = server.post_open(TEXT, &json!({ "prompt": [control(token)] }).to_string());
        server.eventually("both are in flight", |server| server.app.in_flight() == 2);
        server.gate.open();
        for open in [&mut running, &mut breaking] {
            assert_eq!(open.head().0, 500, "{token}");
        }
        let error = server
            .join()
            .expect_err("a broken engine is an error of the server");
        let error = error.to_string();
        assert!(
            error.contains("engine has failed") && error.contains(why),
            "{error}"
        );
    }
}

#[test]
fn shutting_down_lets_running_requests_finish() {
    let server = TestServer::ready();
    server.gate.close_after(2);
    let mut running = server.post_open(TEXT, r#"{"prompt": "x", "stream": true}"#);
    server.gate.wait_held();
    assert_eq!(server.post("/admin/shutdown", "").status, 200);
    server.eventually("it drains", |server| {
        server.get("/health").json()["status"] == "draining"
    });
    let reply = server.post(TEXT, LOOP);
    assert_eq!(reply.status, 503);
    assert!(reply.headers.contains_key("retry-after"));
    assert_eq!(server.get("/metrics").status, 200);
    server.gate.open();
    running.head();
    assert!(running.rest().ends_with("data: [DONE]\n\n"));
    assert_eq!(server.join().unwrap(), Stopped::Drained);
}

#[test]
fn a_drain_that_takes_too_long_ends_with_an_error_event() {
    let server = TestServer::start(ServerConfig {
        drain_timeout: Duration::from_millis(30),
        ..ServerConfig::default()
    });
    server.gate.close_after(2);
    let mut stream = server.post_open(TEXT, LOOP_STREAM);
    let mut plain = server.post_open(TEXT, LOOP);
    server.gate.wait_held();
    stream.head();
    server.eventually("both are in flight", |server| server.app.in_flight() == 2);
    server.app.request_stop();
    // The engine hears of the end after the step in which it is held.
    server.eventually("the deadline has passed", {
        let begin = std::time::Instant::now();
        move |server| {
            server.get("/live");
            begin.elapsed() > Duration::from_millis(60)
        }
    });
    server.gate.open();
    let events = stream.rest();
    assert!(events.contains("event: error\ndata: {\"error\":"), "{events}");
    assert!(!events.contains("[DONE]"));
    assert_eq!(plain.head().0, 503);
    assert_eq!(server.join().unwrap(), Stopped::DeadlinePassed);
}

#[test]
fn many_requests_at_once_each_get_their_own_reply() {
    let server = TestServer::ready();
    std::thread::scope(|scope| {
        for i in 0..24 {
            let server = &server;
            scope.spawn(move || {
                let max = 1 + i % 9;
                let prompt = "y".repeat(1 + i * 7 % 120);
                let body =
                    json!({ "prompt": prompt, "max_tokens": max, "stream": i % 2 == 0, "temperature": 0 });
                let reply = server.post(TEXT, &body.to_string());
                let text = if i % 2 == 0 {
                    let events = reply.events();
                    events
                        .iter()
                        .map(|event| event["choices"][0]["text"].as_str().unwrap())
                        .collect::<String>()
                } else {
                    reply.json()["choices"][0]["text"].as_str().unwrap().to_owned()
                };
                assert!(
                    crate::support::REPLY.starts_with(&text) && !text.is_empty(),
                    "{text}"
                );
            });
        }
    });
    server.wait_idle();
}
