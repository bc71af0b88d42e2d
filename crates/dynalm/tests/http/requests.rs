//! Requests that are wrong: each is refused with the field's name, and the server goes on.

use serde_json::{Value, json};

use crate::support::{TestServer, WINDOW};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// The next valid request works.
fn still_alive(server: &TestServer) {
    let reply = server.post(TEXT, r#"{"prompt": "hi", "max_tokens": 1}"#);
    assert_eq!(reply.status, 200, "{}", reply.body);
}

fn refused(server: &TestServer, path: &str, body: &str, param: Option<&str>) -> String {
    let reply = server.post(path, body);
    let short: String = body.chars().take(200).collect();
    assert_eq!(reply.status, 400, "{path} {short}: {}", reply.body);
    let error = reply.error();
    assert_eq!(error["type"], "invalid_request_error", "{short}");
    assert_eq!(error["param"].as_str(), param, "{short}: {}", error["message"]);
    error["message"].as_str().unwrap().to_owned()
}

#[test]
fn bodies_that_are_no_chat() {
    let server = TestServer::ready();
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let deep_messages = format!("{{\"messages\": {deep}}}");
    let wide = format!(
        "{{{}}}",
        (0..5000)
            .map(|i| format!("\"f{i}\": 1"))
            .collect::<Vec<_>>()
            .join(",")
    );
    let cases: &[(&str, Option<&str>)] = &[
        ("{:", None),
        ("", None),
        ("[]", None),
        ("null", None),
        ("7", None),
        ("\"x\"", None),
        ("{\"a\": \"\\ud800\"}", None),
        (&deep, None),
        (&deep_messages, None),
        (&wide, None),
        ("{}", Some("messages")),
        (r#"{"messages": "x"}"#, Some("messages")),
        (r#"{"messages": []}"#, Some("messages")),
        (r#"{"messages": null}"#, Some("messages")),
        (r#"{"messages": [{}]}"#, Some("messages[0].role")),
        (r#"{"messages": [7]}"#, Some("messages[0]")),
        (
            r#"{"messages": [{"role": 7, "content": "x"}]}"#,
            Some("messages[0].role"),
        ),
        (
            r#"{"messages": [{"role": "king", "content": "x"}]}"#,
            Some("messages[0].role"),
        ),
        (
            r#"{"messages": [{"role": "function", "content": "x"}]}"#,
            Some("messages[0].role"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": 7}]}"#,
            Some("messages[0].content"),
        ),
        (r#"{"messages": [{"role": "user"}]}"#, Some("messages[0].content")),
        (
            r#"{"messages": [{"role": "user", "content": "x", "extra": 1}]}"#,
            Some("messages[0].extra"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "x"}], "stream": "true"}"#,
            Some("stream"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "x"}], "model": 7}"#,
            Some("model"),
        ),
    ];
    for (body, param) in cases {
        refused(&server, CHAT, body, *param);
    }
    still_alive(&server);
}

/// A field with its value, and the name that the refusal gives.
const OUT_OF_RANGE: &[(&str, &str)] = &[
    ("\"temperature\": 5e8", "temperature"),
    ("\"temperature\": -1", "temperature"),
    ("\"temperature\": \"hot\"", "temperature"),
    ("\"top_p\": -0.3", "top_p"),
    ("\"top_p\": 1.5", "top_p"),
    ("\"min_p\": -0.1", "min_p"),
    ("\"typical_p\": 2", "typical_p"),
    ("\"top_k\": -2", "top_k"),
    ("\"top_k\": 1.5", "top_k"),
    ("\"top_k\": 1e300", "top_k"),
    ("\"repeat_penalty\": -2", "repeat_penalty"),
    ("\"repetition_penalty\": 0", "repetition_penalty"),
    (
        "\"repetition_penalty\": 1.5, \"repeat_penalty\": 1.4",
        "repeat_penalty",
    ),
    (
        "\"repetition_penalty\": 1, \"repeat_penalty\": 1.4",
        "repeat_penalty",
    ),
    (
        "\"repetition_penalty\": 1.4, \"repeat_penalty\": 1.0",
        "repeat_penalty",
    ),
    ("\"repeat_penalty\": 11", "repeat_penalty"),
    ("\"presence_penalty\": 1e30", "presence_penalty"),
    ("\"frequency_penalty\": -2.1", "frequency_penalty"),
    ("\"max_tokens\": 0", "max_tokens"),
    ("\"max_tokens\": -5", "max_tokens"),
    ("\"max_completion_tokens\": 1.5", "max_completion_tokens"),
    ("\"n\": 0", "n"),
    ("\"n\": 17", "n"),
    ("\"seed\": -1", "seed"),
    ("\"seed\": \"x\"", "seed"),
    ("\"seed\": 1.5", "seed"),
    ("\"stop\": 7", "stop"),
    ("\"stop\": \"\"", "stop[0]"),
    ("\"stop\": [\"a\", 7]", "stop[1]"),
    (
        "\"stop\": [\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\"]",
        "stop",
    ),
    ("\"logprobs\": 1", "logprobs"),
    ("\"top_logprobs\": 3", "top_logprobs"),
    ("\"logprobs\": false, \"top_logprobs\": 3", "top_logprobs"),
    ("\"logprobs\": true, \"top_logprobs\": 21", "top_logprobs"),
    ("\"logit_bias\": []", "logit_bias"),
    ("\"logit_bias\": {\"abc\": 1}", "logit_bias.abc"),
    ("\"logit_bias\": {\"-1\": 1}", "logit_bias.-1"),
    ("\"logit_bias\": {\"999999\": 1}", "logit_bias.999999"),
    ("\"logit_bias\": {\"1\": 101}", "logit_bias.1"),
    ("\"logit_bias\": {\"1\": null}", "logit_bias.1"),
    (
        "\"stream_options\": {\"include_usage\": 1}, \"stream\": true",
        "stream_options.include_usage",
    ),
    (
        "\"stream_options\": {\"other\": 1}, \"stream\": true",
        "stream_options.other",
    ),
    ("\"timeout\": 0", "timeout"),
    ("\"priority\": 1e12", "priority"),
    ("\"chat_template_kwargs\": 7", "chat_template_kwargs"),
];

#[test]
fn parameters_out_of_range() {
    let server = TestServer::ready();
    for (field, param) in OUT_OF_RANGE {
        let body = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"hi\"}}], {field}}}");
        let message = refused(&server, CHAT, &body, Some(param));
        assert!(
            message.contains(param.split('.').next().unwrap()),
            "{field}: {message}"
        );
    }
    let reserved =
        r#"{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"messages": []}}"#;
    let message = refused(&server, CHAT, reserved, Some("chat_template_kwargs"));
    assert!(message.contains("`messages`"), "{message}");
    // Not JSON at all.
    for field in [
        "\"temperature\": NaN",
        "\"temperature\": 1e400",
        "\"temperature\": Infinity",
    ] {
        refused(&server, CHAT, &format!("{{\"messages\": [], {field}}}"), None);
    }
    let message = refused(
        &server,
        TEXT,
        r#"{"prompt": "x", "temperature": 101}"#,
        Some("temperature"),
    );
    assert!(
        message.contains("101") && message.contains("from 0 to 100"),
        "{message}"
    );
    still_alive(&server);
}

#[test]
fn fields_that_are_not_supported_are_refused_by_name() {
    let server = TestServer::ready();
    let cases: &[(&str, Value)] = &[
        (
            "tools",
            json!([{ "type": "function", "function": { "name": "f" } }]),
        ),
        ("tool_choice", json!("auto")),
        ("functions", json!([])),
        ("function_call", json!("auto")),
        ("response_format", json!({ "type": "json_object" })),
        ("response_format", json!({ "type": "text", "more": 1 })),
        ("grammar", json!("x")),
        ("best_of", json!(2)),
        ("audio", json!({})),
        ("modalities", json!(["text", "audio"])),
        ("reasoning_effort", json!("high")),
        ("parallel_tool_calls", json!(true)),
        ("echo", json!(true)),
        ("suffix", json!("x")),
        ("store", json!(true)),
        ("service_tier", json!("flex")),
        ("temperatur", json!(1)),
        ("temperatur", json!(null)),
    ];
    for (name, value) in cases {
        let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 1 });
        body[*name] = value.clone();
        let message = refused(&server, CHAT, &body.to_string(), Some(name));
        assert!(message.contains(&format!("`{name}`")), "{message}");
    }
    refused(&server, TEXT, r#"{"prompt": "x", "suffix": "y"}"#, Some("suffix"));
    refused(
        &server,
        TEXT,
        r#"{"prompt": "x", "messages": []}"#,
        Some("messages"),
    );
}

#[test]
fn values_that_change_nothing_are_accepted() {
    let server = TestServer::ready();
    let body = json!({
        "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 1,
        "user": "u", "metadata": { "a": "b" }, "store": false, "service_tier": "auto", "best_of": null,
        "response_format": { "type": "text" }, "tools": [], "tool_choice": "none", "n": null, "temperature": null,
        "top_p": null, "stop": null, "seed": null, "logit_bias": null, "stream": null, "stream_options": null,
        "grammar": null, "logprobs": null, "top_logprobs": null, "max_completion_tokens": null, "model": null,
        "functions": null, "presence_penalty": null, "prompt_cache_key": "k", "safety_identifier": "s",
        "chat_template_kwargs": { "enable_thinking": false }, "priority": 3, "timeout": 60, "typical_p": 1,
        "repetition_window": 0, "top_k": 0, "min_p": 0, "cache_prompt": true, "ignore_eos": false,
    });
    let reply = server.post(CHAT, &body.to_string());
    assert_eq!(reply.status, 200, "{}", reply.body);
    let body = json!({ "prompt": "hi", "max_tokens": 0, "best_of": 1, "suffix": null, "echo": false });
    let reply = server.post(TEXT, &body.to_string());
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.json()["choices"][0]["text"], "");
}

#[test]
fn only_text_parts_are_read() {
    let server = TestServer::ready();
    let image = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AAAA" } });
    let audio = json!({ "type": "input_audio", "input_audio": { "data": "AA", "format": "wav" } });
    let text = json!({ "type": "text", "text": "hi" });
    for role in ["system", "developer", "user", "assistant", "tool"] {
        for part in [&image, &audio, &json!({ "type": "hologram" })] {
            let body = json!({ "messages": [{ "role": role, "content": [text, part] }] });
            let message = refused(&server, CHAT, &body.to_string(), Some("messages[0].content[1]"));
            assert!(message.contains(part["type"].as_str().unwrap()), "{message}");
        }
    }
    let body = json!({ "messages": [{ "role": "user", "content": [text, { "type": "text" }] }] });
    refused(
        &server,
        CHAT,
        &body.to_string(),
        Some("messages[0].content[1].text"),
    );
    let body = json!({ "messages": [{ "role": "user", "content": [text, text] }] });
    let reply = server.post("/apply-template", &body.to_string()).json();
    assert_eq!(reply["prompt"], "<|user|>hi\nhi<|assistant|>");
}

#[test]
fn assistant_turns_without_content_are_read_alike() {
    let server = TestServer::ready();
    let mut prompts = Vec::new();
    for content in [None, Some(Value::Null), Some(json!("")), Some(json!([]))] {
        let call = json!({ "id": null, "type": "function", "function": { "name": "f", "arguments": "{}" } });
        let mut turn = json!({ "role": "assistant", "tool_calls": [call] });
        if let Some(content) = content {
            turn["content"] = content;
        }
        let messages = json!([
            { "role": "user", "content": "hi" },
            turn,
            { "role": "tool", "tool_call_id": null, "content": "4" },
        ]);
        let body = json!({ "messages": messages, "max_tokens": 1 });
        let reply = server.post(CHAT, &body.to_string());
        assert_eq!(reply.status, 200, "{}", reply.body);
        let reply = server
            .post("/apply-template", &json!({ "messages": messages }).to_string())
            .json();
        prompts.push(reply["prompt"].as_str().unwrap().to_owned());
    }
    assert!(prompts.iter().all(|prompt| *prompt == prompts[0]), "{prompts:?}");
    let body = json!({ "messages": [{ "role": "assistant", "content": null }] });
    refused(&server, CHAT, &body.to_string(), Some("messages[0].content"));
}

#[test]
fn a_template_that_refuses_is_quoted() {
    let server = TestServer::ready();
    for stream in [false, true] {
        let body = json!({ "messages": [{ "role": "user", "content": "raise" }], "stream": stream });
        let message = refused(&server, CHAT, &body.to_string(), Some("messages"));
        assert!(message.contains("roles must alternate"), "{message}");
    }
    for roles in [
        ["system", "system", "user"],
        ["user", "system", "user"],
        ["developer", "user", "user"],
    ] {
        let messages: Vec<Value> = roles
            .iter()
            .map(|role| json!({ "role": role, "content": "x" }))
            .collect();
        let reply = server.post(
            CHAT,
            &json!({ "messages": messages, "max_tokens": 1 }).to_string(),
        );
        assert_eq!(reply.status, 200, "{roles:?}: {}", reply.body);
    }
    let body = json!({ "messages": [{ "role": "developer", "content": "x" }] });
    let reply = server.post("/apply-template", &body.to_string()).json();
    assert_eq!(reply["prompt"], "<|system|>x<|assistant|>");
}

#[test]
fn the_model_is_checked() {
    let server = TestServer::ready();
    for path in [CHAT, TEXT] {
        for (name, status) in [
            (json!("nope"), 404),
            (json!("chain"), 200),
            (json!("chain:latest"), 200),
            (json!(null), 200),
        ] {
            let mut body = json!({ "model": name, "max_tokens": 1 });
            if path == CHAT {
                body["messages"] = json!([{ "role": "user", "content": "x" }]);
            } else {
                body["prompt"] = "x".into();
            }
            let reply = server.post(path, &body.to_string());
            assert_eq!(reply.status, status, "{name}: {}", reply.body);
            if status == 404 {
                let error = reply.error();
                assert_eq!(
                    (&error["code"], &error["param"]),
                    (&json!("model_not_found"), &json!("model"))
                );
                assert!(
                    error["message"].as_str().unwrap().contains("chain"),
                    "the served names are told"
                );
            } else {
                assert_eq!(reply.json()["model"], "chain");
            }
        }
    }
}

#[test]
fn prompts_longer_than_the_window() {
    let server = TestServer::ready();
    let long = "a".repeat(2 * WINDOW);
    for stream in [false, true] {
        let chat = json!({ "messages": [{ "role": "user", "content": long }], "stream": stream });
        let text = json!({ "prompt": long, "stream": stream });
        for (path, body, param, tokens) in [
            (CHAT, chat, "messages", 2 * WINDOW + 2),
            (TEXT, text, "prompt", 2 * WINDOW),
        ] {
            let reply = server.post(path, &body.to_string());
            assert_eq!(
                (reply.status, reply.headers["content-type"].as_str()),
                (400, "application/json")
            );
            let error = reply.error();
            assert_eq!(
                (&error["code"], &error["param"]),
                (&json!("context_length_exceeded"), &json!(param))
            );
            let message = error["message"].as_str().unwrap();
            assert!(
                message.contains(&tokens.to_string()) && message.contains(&WINDOW.to_string()),
                "{message}"
            );
        }
    }
    // The window itself: no room for a reply, but enough to be scored; one less leaves room for one token.
    let full = json!({ "prompt": "a".repeat(WINDOW) });
    refused(&server, TEXT, &full.to_string(), Some("prompt"));
    let scored = json!({ "prompt": "a".repeat(WINDOW), "max_tokens": 0 });
    assert_eq!(server.post(TEXT, &scored.to_string()).status, 200);
    let last = json!({ "prompt": "a".repeat(WINDOW - 1) });
    let reply = server.post(TEXT, &last.to_string()).json();
    assert_eq!(
        (
            &reply["usage"]["completion_tokens"],
            &reply["choices"][0]["finish_reason"]
        ),
        (&json!(1), &json!("length"))
    );
}

#[test]
fn prompts_that_are_no_prompts() {
    let server = TestServer::ready();
    let cases: &[(Value, &str)] = &[
        (json!([-1]), "prompt[0]"),
        (json!([2_147_483_647]), "prompt[0]"),
        (json!([1.5]), "prompt[0]"),
        (json!([1, "a"]), "prompt[1]"),
        (json!(["a", 1]), "prompt[1]"),
        (json!([[1], [2, -7]]), "prompt[1][1]"),
        (json!([[1], "a"]), "prompt[1]"),
        (json!([[[1]]]), "prompt[0][0]"),
        (json!([null]), "prompt[0]"),
        (json!([]), "prompt"),
        (json!([[]]), "prompt"),
        (json!({}), "prompt"),
        (json!(true), "prompt"),
        (json!(7), "prompt"),
        (json!(null), "prompt"),
        (json!(""), "prompt"),
    ];
    for (prompt, param) in cases {
        refused(
            &server,
            TEXT,
            &json!({ "prompt": prompt, "max_tokens": 1 }).to_string(),
            Some(param),
        );
    }
    let many = json!({ "prompt": vec!["a"; 65], "max_tokens": 1 });
    refused(&server, TEXT, &many.to_string(), Some("prompt"));
    still_alive(&server);
}

#[test]
fn routes_and_methods() {
    let server = TestServer::ready();
    let reply = server.get("/v2/nothing");
    assert_eq!(
        (reply.status, &reply.error()["code"]),
        (404, &json!("unknown_url"))
    );
    let reply = server.get(CHAT);
    assert_eq!(reply.status, 405);
    reply.error();
    let root = server.get("/").json();
    assert_eq!(
        (&root["name"], &root["models"]),
        (&json!("dynalm"), &json!(["chain"]))
    );
}
