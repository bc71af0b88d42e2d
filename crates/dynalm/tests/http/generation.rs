//! What replies look like: plain and streamed, chat and completions.

use serde_json::{Value, json};

use crate::support::{PIECES, REPLY, TestServer, control, piece};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(extra: Value) -> String {
    with(
        json!({ "model": "chain", "messages": [{ "role": "user", "content": "hi" }] }),
        extra,
    )
}

fn text(extra: Value) -> String {
    with(json!({ "prompt": "hi" }), extra)
}

fn with(mut body: Value, extra: Value) -> String {
    let fields = extra.as_object().expect("extra fields").clone();
    body.as_object_mut().unwrap().extend(fields);
    body.to_string()
}

/// Text, finish reason and tokens of the only choice, plain and streamed, which must agree.
fn both(server: &TestServer, path: &str, extra: Value) -> (String, String, u64) {
    let make = if path == CHAT { chat } else { text };
    let plain = server.post(path, &make(extra.clone()));
    assert_eq!(plain.status, 200, "{}", plain.body);
    let plain = plain.json();
    let choice = &plain["choices"][0];
    let whole = if path == CHAT {
        &choice["message"]["content"]
    } else {
        &choice["text"]
    };
    let mut streamed = extra;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({ "include_usage": true });
    let reply = server.post(path, &make(streamed));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let mut joined = String::new();
    let mut reason = Value::Null;
    let mut usage = Value::Null;
    for event in reply.events() {
        if let Some(choice) = event["choices"].get(0) {
            let delta = if path == CHAT {
                &choice["delta"]["content"]
            } else {
                &choice["text"]
            };
            joined.push_str(delta.as_str().unwrap_or(""));
            if !choice["finish_reason"].is_null() {
                reason = choice["finish_reason"].clone();
            }
        }
        usage = event["usage"].clone();
    }
    assert_eq!(whole.as_str(), Some(joined.as_str()), "plain and streamed text");
    assert_eq!(choice["finish_reason"], reason, "plain and streamed reason");
    assert_eq!(
        plain["usage"]["completion_tokens"], usage["completion_tokens"],
        "plain and streamed tokens"
    );
    (
        joined,
        reason.as_str().unwrap().to_owned(),
        usage["completion_tokens"].as_u64().unwrap(),
    )
}

#[test]
fn a_plain_chat_reply() {
    let server = TestServer::ready();
    let reply = server.post(CHAT, &chat(json!({ "seed": 7 }))).json();
    assert_eq!(reply["object"], "chat.completion");
    assert_eq!(reply["model"], "chain");
    assert_eq!(reply["seed"], 7);
    assert!(reply["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(reply["choices"].as_array().unwrap().len(), 1);
    let choice = &reply["choices"][0];
    assert_eq!(
        choice["message"],
        json!({ "role": "assistant", "content": REPLY, "refusal": null })
    );
    assert_eq!(
        (&choice["finish_reason"], &choice["index"]),
        (&json!("stop"), &json!(0))
    );
    assert_eq!(choice["logprobs"], Value::Null);
    // <|user|>, h, i, <|assistant|>; the pieces and <|end|>.
    let usage = &reply["usage"];
    assert_eq!(usage["prompt_tokens"], 4);
    assert_eq!(usage["completion_tokens"], PIECES.len() + 1);
    assert_eq!(usage["total_tokens"], 4 + PIECES.len() + 1);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    for timing in ["queued_s", "prefill_s", "decode_s"] {
        assert!(reply["timings"][timing].as_f64().unwrap() >= 0.0, "{timing}");
    }
}

#[test]
fn a_chat_stream_has_the_shape_that_strict_clients_expect() {
    let server = TestServer::ready();
    let reply = server.post(CHAT, &chat(json!({ "stream": true })));
    assert_eq!(reply.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(reply.headers["x-accel-buffering"], "no");
    assert_eq!(reply.headers["cache-control"], "no-cache");
    let events = reply.events();
    let last = events.len() - 1;
    let mut joined = String::new();
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["object"], "chat.completion.chunk");
        for field in ["id", "created", "model"] {
            assert_eq!(
                event[field], events[0][field],
                "{field} is the same in all chunks"
            );
        }
        assert!(event.get("usage").is_none(), "no usage unless asked for");
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        assert_eq!(
            delta.get("role").is_some(),
            i == 0,
            "the role stands in the first chunk only"
        );
        assert_eq!(
            choice["finish_reason"],
            if i == last { json!("stop") } else { Value::Null }
        );
        joined.push_str(delta["content"].as_str().unwrap_or(""));
    }
    assert_eq!(joined, REPLY);
    assert_eq!(
        events[0]["choices"][0]["delta"],
        json!({ "role": "assistant", "content": "" })
    );
}

#[test]
fn the_usage_chunk_comes_exactly_when_asked_for() {
    let server = TestServer::ready();
    for path in [CHAT, TEXT] {
        let make = if path == CHAT { chat } else { text };
        let asked = json!({ "stream": true, "stream_options": { "include_usage": true } });
        let events = server.post(path, &make(asked)).events();
        let (last, others) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], PIECES.len() + 1);
        assert!(last["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
        assert!(last["seed"].is_u64() && last["timings"].is_object());
        for event in others {
            assert_eq!(event["usage"], Value::Null);
            assert!(event.as_object().unwrap().contains_key("usage"));
            assert_eq!(event["choices"].as_array().unwrap().len(), 1);
        }
        let not = json!({ "stream": true, "stream_options": { "include_usage": false } });
        let events = server.post(path, &make(not)).events();
        assert!(
            events
                .iter()
                .all(|event| event.get("usage").is_none() && event["choices"] != json!([]))
        );
        let plain = server.post(
            path,
            &make(json!({ "stream_options": { "include_usage": true } })),
        );
        assert_eq!(
            (plain.status, &plain.error()["param"]),
            (400, &json!("stream_options"))
        );
    }
}

#[test]
fn stop_texts_may_span_tokens() {
    let server = TestServer::ready();
    let cases: &[(Value, &str, &str)] = &[
        (json!("tern mea"), "copper lan", "stop"),
        (json!(["violin", "tern mea"]), "copper lan", "stop"),
        (json!("ntern"), "copper la", "stop"),
        (json!("copper"), "", "stop"),
        (json!("c"), "", "stop"),
        (json!("🐙"), "copper lantern meadow ", "stop"),
        (json!("é"), "copper lantern meadow 🐙 violin caf", "stop"),
        (json!("café au lait"), REPLY, "stop"),
        (json!("never"), REPLY, "stop"),
        (json!([]), REPLY, "stop"),
        (json!(null), REPLY, "stop"),
    ];
    for path in [CHAT, TEXT] {
        for (stop, shown, reason) in cases {
            let (text, why, _) = both(&server, path, json!({ "stop": stop }));
            assert_eq!(
                (text.as_str(), why.as_str()),
                (*shown, *reason),
                "{path}, stop {stop}"
            );
        }
    }
}

#[test]
fn a_reply_cut_inside_a_character_shows_whole_characters_only() {
    let server = TestServer::ready();
    for path in [CHAT, TEXT] {
        for max in 1..=PIECES.len() {
            let bytes = PIECES[..max].concat();
            let whole = match std::str::from_utf8(&bytes) {
                Ok(text) => text,
                Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap(),
            };
            for logprobs in [Value::Null, if path == CHAT { json!(true) } else { json!(2) }] {
                let (text, reason, tokens) =
                    both(&server, path, json!({ "max_tokens": max, "logprobs": logprobs }));
                assert_eq!(
                    (text.as_str(), reason.as_str(), tokens),
                    (whole, "length", max as u64),
                    "{path} {max}"
                );
                assert!(!text.contains('\u{fffd}'));
            }
        }
    }
}

#[test]
fn the_newer_token_limit_wins() {
    let server = TestServer::ready();
    let (text, reason, tokens) = both(
        &server,
        CHAT,
        json!({ "max_tokens": 9, "max_completion_tokens": 2 }),
    );
    assert_eq!(
        (text.as_str(), reason.as_str(), tokens),
        ("copper lan", "length", 2)
    );
    let (_, reason, tokens) = both(&server, CHAT, json!({ "max_tokens": null, "ignore_eos": true }));
    assert_eq!(reason, "length", "the window ends a reply that never ends");
    assert_eq!(tokens as usize, crate::support::WINDOW - 4);
}

#[test]
fn chat_logprobs() {
    let server = TestServer::ready();
    let extra = json!({ "logprobs": true, "top_logprobs": 5, "max_tokens": 7 });
    let plain = server.post(CHAT, &chat(extra.clone())).json();
    let content = plain["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(content.len(), 7);
    for (entry, piece) in content.iter().zip(PIECES) {
        assert_eq!(entry["bytes"], json!(piece));
        let token = entry["token"].as_str().unwrap();
        match std::str::from_utf8(piece) {
            Ok(text) => assert_eq!(token, text),
            Err(_) => assert!(token.starts_with("bytes:\\x"), "{token}"),
        }
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 5);
        assert_eq!(
            (&top[0]["token"], &top[0]["logprob"]),
            (&entry["token"], &entry["logprob"])
        );
        let values: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(
            values.is_sorted_by(|a, b| a >= b) && values[0] <= 0.0,
            "{values:?}"
        );
    }
    let mut streamed = extra;
    streamed["stream"] = true.into();
    let events = server.post(CHAT, &chat(streamed)).events();
    let entries = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    let entries: Vec<Value> = entries.flatten().cloned().collect();
    assert_eq!(entries, content, "streamed and plain");
    // Without alternatives.
    let plain = server
        .post(CHAT, &chat(json!({ "logprobs": true, "max_tokens": 1 })))
        .json();
    assert_eq!(
        plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"],
        json!([])
    );
}

#[test]
fn logprobs_tell_the_same_story_as_the_text() {
    let server = TestServer::ready();
    let plain = server
        .post(CHAT, &chat(json!({ "logprobs": true, "stop": "tern mea" })))
        .json();
    let content = plain["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let joined: String = content
        .iter()
        .map(|entry| entry["token"].as_str().unwrap())
        .collect();
    assert_eq!(joined, "copper lan");
}

#[test]
fn several_choices() {
    let server = TestServer::ready();
    let plain = server
        .post(
            CHAT,
            &chat(json!({ "n": 3, "temperature": 1.0, "max_tokens": 4 })),
        )
        .json();
    let choices = plain["choices"].as_array().unwrap();
    assert_eq!(
        choices
            .iter()
            .map(|choice| choice["index"].clone())
            .collect::<Vec<_>>(),
        [json!(0), json!(1), json!(2)]
    );
    assert_eq!(plain["usage"]["prompt_tokens"], 4, "a prompt counts once");
    let reply = server.post(
        TEXT,
        &text(json!({ "n": 2, "stream": true, "prompt": ["a", "b"], "max_tokens": 2 })),
    );
    let mut texts = vec![String::new(); 4];
    for event in reply.events() {
        let choice = &event["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(texts, ["copper lan"; 4]);
}

#[test]
fn completions_take_text_and_tokens() {
    let server = TestServer::ready();
    let prompts: &[(Value, usize)] = &[
        (json!("hi"), 1),
        (json!(["hi", "ho", "ha"]), 3),
        (json!([104, 105]), 1),
        (json!([[104], [105, 105]]), 2),
        (json!([control("<|user|>")]), 1),
    ];
    for (prompt, choices) in prompts {
        let reply = server.post(TEXT, &text(json!({ "prompt": prompt, "max_tokens": 3 })));
        assert_eq!(reply.status, 200, "{prompt}: {}", reply.body);
        let reply = reply.json();
        assert_eq!(reply["object"], "text_completion");
        let texts = reply["choices"].as_array().unwrap();
        assert_eq!(texts.len(), *choices, "{prompt}");
        assert!(
            texts.iter().all(|choice| choice["text"] == "copper lantern"),
            "{prompt}: {texts:?}"
        );
    }
}

#[test]
fn echo_scores_the_prompt() {
    let server = TestServer::ready();
    let prompt = json!([piece(0), piece(1), 122]);
    let extra = json!({ "prompt": prompt, "echo": true, "max_tokens": 0, "logprobs": 2 });
    let plain = server.post(TEXT, &text(extra.clone())).json();
    let choice = &plain["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"]),
        (&json!("copper lanz"), &json!("length"))
    );
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["copper", " lan", "z"]));
    assert_eq!(logprobs["text_offset"], json!([0, 6, 10]));
    let values = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(values[0], Value::Null, "nothing precedes the first token");
    assert!(
        values[1].as_f64().unwrap() > -0.1,
        "the chain says ` lan` after `copper`"
    );
    assert!(values[2].as_f64().unwrap() < -5.0, "the chain never says `z`");
    assert_eq!(logprobs["top_logprobs"][2].as_object().unwrap().len(), 2);
    assert_eq!(plain["usage"]["completion_tokens"], 0);
    let mut streamed = extra.clone();
    streamed["stream"] = true.into();
    let events = server.post(TEXT, &text(streamed)).events();
    assert_eq!(events[0]["choices"][0]["text"], "copper lanz");
    assert_eq!(events[0]["choices"][0]["logprobs"], *logprobs);
    // Echo with a reply: offsets go on, and the text is prompt and reply.
    let mut longer = extra;
    longer["max_tokens"] = 2.into();
    longer["prompt"] = "x".into();
    let plain = server.post(TEXT, &text(longer)).json();
    assert_eq!(plain["choices"][0]["text"], "xcopper lan");
    assert_eq!(plain["choices"][0]["logprobs"]["text_offset"], json!([0, 1, 7]));
    let (text, _, _) = both(&server, TEXT, json!({ "echo": true, "max_tokens": 1 }));
    assert_eq!(text, "hicopper");
}

#[test]
fn seeds_differ_unless_given() {
    let server = TestServer::ready();
    let seeds: std::collections::BTreeSet<u64> = (0..6)
        .map(|_| {
            server.post(CHAT, &chat(json!({ "max_tokens": 1 }))).json()["seed"]
                .as_u64()
                .unwrap()
        })
        .collect();
    assert!(seeds.len() >= 5, "{seeds:?}");
    let hot = json!({ "temperature": 100, "seed": 5, "max_tokens": 12 });
    let reply = || server.post(TEXT, &text(hot.clone())).json()["choices"][0]["text"].clone();
    assert_eq!(reply(), reply(), "a seed repeats a reply");
}

#[test]
fn a_prompt_seen_before_comes_from_the_cache() {
    let server = TestServer::ready();
    let body = text(json!({ "prompt": "a".repeat(100), "max_tokens": 1 }));
    let first = server.post(TEXT, &body).json();
    let second = server.post(TEXT, &body).json();
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert!(cached >= 84, "{cached}");
    let cold = server
        .post(
            TEXT,
            &text(json!({ "prompt": "a".repeat(100), "max_tokens": 1, "cache_prompt": false })),
        )
        .json();
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(server.metric("dynalm_prefix_cache_hits_total") >= 84.0);
    server.wait_idle();
}

#[test]
fn a_trailing_assistant_message_is_continued() {
    let server = TestServer::ready();
    let messages = json!([{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "well" }]);
    let reply = server
        .post("/apply-template", &json!({ "messages": messages }).to_string())
        .json();
    assert_eq!(reply["prompt"], "<|user|>hi<|assistant|>well");
    let reply = server
        .post(
            CHAT,
            &json!({ "messages": messages, "max_tokens": 1 }).to_string(),
        )
        .json();
    assert_eq!(reply["choices"][0]["message"]["content"], "copper");
}

#[test]
fn logit_bias_and_filters() {
    let server = TestServer::ready();
    let banned = json!({ "logit_bias": { piece(0).to_string(): -100 }, "max_tokens": 1 });
    let (text, _, _) = both(&server, TEXT, banned);
    assert_ne!(text, "copper");
    let forced = json!({ "logit_bias": { "120": 100 }, "max_tokens": 1 });
    assert_eq!(both(&server, TEXT, forced).0, "x");
    // Each of these leaves the likeliest token or all of them.
    for greedy in [
        json!({ "top_k": 1 }),
        json!({ "top_p": 0 }),
        json!({ "min_p": 1 }),
        json!({ "temperature": 1e-30 }),
    ] {
        let mut extra = json!({ "temperature": 1, "max_tokens": 3 });
        extra
            .as_object_mut()
            .unwrap()
            .extend(greedy.as_object().unwrap().clone());
        assert_eq!(both(&server, TEXT, extra).0, "copper lantern", "{greedy}");
    }
    let all = |k: i64| {
        let extra = json!({ "temperature": 100, "seed": 3, "top_k": k, "max_tokens": 8, "logprobs": 0 });
        server.post(TEXT, &with(json!({ "prompt": "hi" }), extra)).json()["choices"][0]["logprobs"]["tokens"]
            .clone()
    };
    assert_eq!(all(0), all(-1));
    assert_eq!(all(0), all(1_000_000_000));
}

#[test]
fn tokens_and_templates_can_be_looked_at() {
    let server = TestServer::ready();
    let reply = server
        .post(
            "/tokenize",
            r#"{"prompt": "hi<|end|>", "return_token_strs": true}"#,
        )
        .json();
    assert_eq!(reply["tokens"], json!([104, 105, control("<|end|>")]));
    assert_eq!(reply["token_strs"], json!(["h", "i", "<|end|>"]));
    assert_eq!(
        (&reply["count"], &reply["max_model_len"]),
        (&json!(3), &json!(crate::support::WINDOW))
    );
    let user = json!({ "messages": [{ "role": "user", "content": "<|end|>" }] }).to_string();
    let reply = server.post("/tokenize", &user).json();
    assert_eq!(
        reply["count"],
        2 + "<|end|>".len(),
        "names of special tokens in a message are plain text"
    );
    let reply = server.post("/detokenize", r#"{"tokens": [104, 105]}"#).json();
    assert_eq!(reply["prompt"], "hi");
    let reply = server.post("/detokenize", r#"{"tokens": [104, -1]}"#);
    assert_eq!(
        (reply.status, &reply.error()["param"]),
        (400, &json!("tokens[1]"))
    );
}

#[test]
fn models_are_listed() {
    let server = TestServer::ready();
    let list = server.get("/v1/models").json();
    assert_eq!(
        (&list["object"], &list["data"][0]["id"]),
        (&json!("list"), &json!("chain"))
    );
    assert_eq!(list["data"][0]["state"], "ready");
    assert_eq!(list["data"][0]["max_model_len"], crate::support::WINDOW);
    assert_eq!(server.get("/v1/models/chain").json()["quantization"], "F32");
    assert_eq!(server.get("/v1/models/chain:latest").json()["id"], "chain");
    let missing = server.get("/v1/models/nope");
    assert_eq!(
        (missing.status, &missing.error()["code"]),
        (404, &json!("model_not_found"))
    );
}
