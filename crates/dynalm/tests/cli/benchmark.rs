//! `benchmark`: what it writes, and what it refuses. No speed is asserted.

use serde_json::Value;

use crate::support::{Home, Ran};

/// A small run of every figure.
const SMALL: [&str; 18] = [
    "--prefill",
    "16",
    "--decode",
    "4",
    "--context",
    "0,8",
    "--users",
    "2",
    "--user-context",
    "24",
    "--user-decode",
    "6",
    "--rounds",
    "2",
    "--batch-tokens",
    "32",
    "--seed",
    "5",
];

fn benchmark(home: &Home, model: &str, more: &[&str]) -> Ran {
    let mut list = vec!["benchmark", model];
    list.extend(SMALL);
    list.extend(more);
    home.run(&list)
}

fn records(ran: &Ran) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    ran.out().lines().map(parse).collect()
}

fn of<'a>(records: &'a [Value], kind: &str) -> Vec<&'a Value> {
    records.iter().filter(|r| r["record"] == kind).collect()
}

#[test]
fn every_figure_and_round_has_a_record_and_the_summary_says_how() {
    let home = Home::new();
    let model = home.model();
    let ran = benchmark(&home, &model, &["--json", "--rate", "200", "--requests", "3"]).ok();
    let all = records(&ran);
    let rounds = of(&all, "round");
    let figures: Vec<String> = rounds
        .iter()
        .map(|r| format!("{} {}", r["round"], r["figure"].as_str().expect("a name")))
        .collect();
    let expected = ["prefill", "decode", "decode", "users", "rate"];
    let expected: Vec<String> = (1..=2)
        .flat_map(|n| expected.map(|figure| format!("{n} {figure}")))
        .collect();
    assert_eq!(figures, expected, "the warm-up round is not counted");
    for r in &rounds {
        let (requests, prompt, reply) = match (r["figure"].as_str(), r["context"].as_u64()) {
            (Some("prefill"), _) => (1, 16, 1),
            // The first token belongs to the prompt; an empty context still takes one to begin with.
            (Some("decode"), Some(context)) => (1, context.max(1), 5),
            (Some("users"), _) => (2, 24, 6),
            _ => (3, 24, 6),
        };
        assert_eq!(r["prompt_tokens"], requests * prompt, "{r}");
        assert_eq!(r["output_tokens"], requests * reply, "{r}");
        assert_eq!(r["events"], r["output_tokens"], "{r}");
        assert_eq!(r["cached_tokens"], 0, "prompts are unique: {r}");
        assert_eq!(r["engine"], "dynalm");
        assert!(r["tokens_per_s"].as_f64().expect("a number") > 0.0, "{r}");
        for key in ["p50", "p95", "p99"] {
            assert!(r["ttft_ms"][key].is_f64(), "{r}");
            assert_eq!(r["gap_ms"][key].is_f64(), reply > 1, "{r}");
        }
        reads_are_stated_where_decode_is(r);
        if cfg!(target_os = "linux") {
            assert!(
                r["peak_resident_bytes"].as_u64().expect("a count") > 1 << 20,
                "{r}"
            );
        }
    }
    let [summary] = of(&all, "summary")[..] else {
        panic!("one summary: {}", ran.out());
    };
    assert_eq!(summary["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(summary["figures"].as_array().expect("a list").len(), 5);
    assert_eq!(summary["figures"][0]["rounds"], 2);
    assert_eq!(summary["seed"], 5);
    assert_eq!(summary["about"]["kind"], "in-process");
    assert_eq!(summary["about"]["device"]["threads"], 1);
    assert_eq!(summary["about"]["model"]["architecture"], "llama");
    assert_eq!(summary["about"]["settings"]["batch_tokens"], 32);
    let command = summary["command"].as_str().expect("text");
    assert!(
        command.contains("benchmark") && command.contains("--seed 5") && command.contains(&model),
        "{command}"
    );
    for key in ["machine", "method", "measured_at"] {
        assert!(!summary[key].is_null(), "{key}: {summary}");
    }
}

/// Decoding states what it reads, in numbers that agree with each other; no other figure does.
fn reads_are_stated_where_decode_is(record: &Value) {
    let names = [
        "read_bytes_per_token",
        "read_bytes_per_s",
        "stream_bytes_per_s",
        "read_share",
    ];
    if record["figure"] != "decode" {
        assert!(names.iter().all(|name| record.get(name).is_none()), "{record}");
        return;
    }
    let [bytes, reads, stream, share] = names.map(|name| record[name].as_f64().expect(name));
    assert!(bytes > 0.0 && stream > 0.0, "{record}");
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
    let rate = record["tokens_per_s"].as_f64().expect("a rate");
    assert!(
        near(reads, bytes * rate) && near(share, reads / stream),
        "{record}"
    );
}

#[test]
fn what_decoding_reads_is_what_the_roofline_says_of_its_steps() {
    let home = Home::new();
    let model = home.model();
    let decode = ["--prefill", "0", "--users", "0", "--rounds", "1", "--json"];
    let run = |more: &[&str]| {
        let mut list = vec!["benchmark", &model];
        list.extend(decode);
        list.extend(more);
        records(&home.run(&list).ok())
    };
    let decoded = run(&["--decode", "4", "--context", "8"]);
    // The step of the second token finds the prompt and the first one.
    let steps = run(&["--roofline", "--decode", "1", "--context", "8,9,10,11"]);
    let bytes = of(&steps, "roofline").into_iter().map(|table| {
        let whole = table["ops"].as_array().and_then(|ops| ops.last()).expect("ops");
        let of = |name: &str| whole[name].as_u64().expect("a count");
        of("weight_bytes") + of("cache_bytes")
    });
    let expected = bytes.sum::<u64>() as f64 / 4.0;
    let found = of(&decoded, "round")[0]["read_bytes_per_token"].as_f64();
    assert_eq!(found, Some(expected));
    let summary = &of(&decoded, "summary")[0]["figures"][0];
    assert_eq!(summary["read_bytes_per_token"], expected);
    assert!(summary["read_share"]["median"].is_f64(), "{summary}");
}

#[test]
fn a_shared_prefix_is_found_in_the_cache_and_said() {
    let home = Home::new();
    let model = home.model();
    let more = [
        "--shared-prefix",
        "16",
        "--json",
        "--prefill",
        "0",
        "--decode",
        "0",
    ];
    let mut list = vec!["benchmark", model.as_str()];
    list.extend(&SMALL[6..]);
    list.extend(more);
    let all = records(&home.run(&list).ok());
    // The warm-up round has filled the cache: a block of 16 for each of two users.
    for r in of(&all, "round") {
        assert_eq!(r["cached_tokens"], 32, "{r}");
    }
    list.retain(|word| *word != "--json");
    let ran = home.run(&list).ok();
    assert!(
        ran.out().contains("prompt tokens of a round came from a cache"),
        "{ran:?}"
    );
}

#[test]
fn an_earlier_run_is_compared_and_drawn() {
    let home = Home::new();
    let model = home.model();
    let before = benchmark(&home, &model, &["--json"]).ok();
    let file = home.file("before.jsonl", before.out());
    let ran = benchmark(
        &home,
        &model,
        &["--compare", &file, "--svg", "plot.svg", "--label", "a<b"],
    )
    .ok();
    for part in [
        "prefill 16",
        "decode 4 at 8",
        "2 users, 24 + 6",
        "a<b / dynalm",
        "2 of at least 3",
        "repeat: ",
    ] {
        assert!(ran.out().contains(part), "`{part}` is missing in: {}", ran.out());
    }
    let picture = std::fs::read_to_string(home.path().join("plot.svg")).expect("the picture");
    assert!(picture.starts_with("<svg") && picture.contains("a&lt;b") && picture.contains("decode 4 at 8"));
    // The same name as before, so the earlier one is told apart by its file.
    let ran = benchmark(&home, &model, &["--compare", &file, "--json"]).ok();
    let all = records(&ran);
    let comparisons = of(&all, "comparison");
    assert!(
        comparisons
            .iter()
            .any(|c| c["against"] == "dynalm (before)" && c["value"] == "ttft_ms.p50"),
        "{comparisons:?}"
    );
    assert!(
        comparisons.iter().all(|c| c["confirmed"] == false),
        "two rounds confirm nothing"
    );
}

#[test]
fn the_roofline_has_every_op_of_the_plan() {
    let home = Home::new();
    let model = home.model();
    let ran = benchmark(&home, &model, &["--roofline", "--json"]).ok();
    let all = records(&ran);
    let [peak] = of(&all, "peak")[..] else {
        panic!("one record of the machine: {}", ran.out());
    };
    assert!(peak["read_bytes_per_s"].as_f64().expect("a number") > 0.0);
    let tables = of(&all, "roofline");
    // Two contexts and one prompt.
    let sizes: Vec<_> = tables.iter().map(|t| (&t["context"], &t["tokens"])).collect();
    assert_eq!(
        sizes,
        [
            (&0.into(), &1.into()),
            (&8.into(), &1.into()),
            (&0.into(), &16.into())
        ]
    );
    for table in tables {
        let ops = table["ops"].as_array().expect("a list");
        let whole = ops.last().expect("the whole step");
        assert_eq!(whole["op"], "whole step");
        let plan = home
            .run(&["doctor", &model, "--plan", "--json", "--no-test"])
            .ok()
            .json();
        assert_eq!(whole["steps"], plan["model"]["steps"]);
        let sum: u64 = ops[..ops.len() - 1]
            .iter()
            .map(|op| op["flops"].as_u64().expect("a count"))
            .sum();
        assert!(sum > 0 && whole["flops"] == sum, "{table}");
        let timed: f64 = ops[..ops.len() - 1]
            .iter()
            .map(|op| op["seconds"].as_f64().expect("a time"))
            .sum();
        let step = whole["seconds"].as_f64().expect("a time");
        assert!(timed > 0.0 && timed <= step, "{timed} of {step}");
    }
    let text = benchmark(&home, &model, &["--roofline"]).ok();
    for part in [
        "streaming read",
        "decode at 8",
        "prefill 16",
        "blk.*.",
        "of peak",
        "whole step",
    ] {
        assert!(
            text.out().contains(part),
            "`{part}` is missing in: {}",
            text.out()
        );
    }
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    let home = Home::new();
    let model = home.model();
    let refuse = |more: &[&str], code: i32, parts: &[&str]| {
        let mut list = vec!["benchmark"];
        list.extend(more);
        home.run(&list).refused(code, parts);
    };
    refuse(&[], 2, &["MODEL"]);
    for (flag, value, part) in [
        ("--prefill", "x", "0 to"),
        ("--prefill", "512,-1", "-1"),
        ("--prefill", "8,16,8", "8 is given twice"),
        ("--users", "5000", "0 to 4096"),
        ("--user-decode", "0", "1 to"),
        ("--rounds", "0", "1 to 100"),
        ("--rate", "0", "0.001 to 10000"),
        ("--shared-prefix", "128", "--user-context"),
        ("--user-requests", "4000", "more than 4096"),
        ("--mode", "fast", "auto, exact, safe"),
        ("--chat-template", "chatml", "no template"),
        ("--compare", "none.jsonl", "none.jsonl"),
        ("--svg", "no/such/plot.svg", "no/such"),
    ] {
        let code = if flag == "--compare" { 1 } else { 2 };
        refuse(
            &[&model, flag, value],
            code,
            &[flag.trim_start_matches('-'), part][usize::from(code == 1)..],
        );
    }
    refuse(
        &[&model, "--prefill", "0", "--decode", "0", "--users", "0"],
        2,
        &["nothing to measure"],
    );
    refuse(
        &[&model, "--prefill", "9999999"],
        2,
        &["10000000", "made for 512", "--prefill"],
    );
    refuse(
        &[
            &model,
            "--prefill",
            "64",
            "--ctx",
            "32",
            "--decode",
            "0",
            "--users",
            "0",
        ],
        2,
        &["context window is 32"],
    );
}

#[test]
fn what_concerns_a_server_needs_one_and_the_rest_a_model() {
    let home = Home::new();
    let model = home.model();
    let refuse = |more: &[&str], code: i32, parts: &[&str]| {
        let mut list = vec!["benchmark"];
        list.extend(more);
        home.run(&list).refused(code, parts);
    };
    for flag in [
        &["--api-key", "k"][..],
        &["--model-name", "m"],
        &["--timeout", "9"],
        &["--pid", "1"],
        &["--allow-eos"],
    ] {
        let mut list = vec![model.as_str()];
        list.extend(flag);
        refuse(&list, 2, &["--url"]);
    }
    let url = ["--url", "http://127.0.0.1:1"];
    let with_url = |more: &[&'static str]| [&url[..], more].concat();
    refuse(&with_url(&["--threads", "2"]), 2, &["--threads", "no"]);
    refuse(&with_url(&["--roofline"]), 2, &["--roofline", "--url"]);
    refuse(&with_url(&["--label", "x"]), 2, &["MODEL"]);
    refuse(&with_url(&["--timeout", "0"]), 2, &["--timeout", "1 to 86400"]);
    refuse(
        &with_url(&["--endpoint", "embeddings"]),
        2,
        &["completions", "chat"],
    );
    refuse(&with_url(&["--api-key-file", "none.txt"]), 1, &["none.txt"]);
    refuse(
        &with_url(&["--url", "http://127.0.0.1:1"]),
        2,
        &["two engines", "NAME=URL"],
    );
    refuse(&with_url(&["--pid", "4294967295"]), 2, &["--pid 4294967295"]);
    refuse(&with_url(&[]), 1, &["127.0.0.1:1"]);
    refuse(&["--url", "ftp://x"], 2, &["ftp://x", "http://"]);
    // This home is offline; its own machine can still be asked.
    refuse(&["--url", "https://example.org"], 2, &["example.org", "offline"]);
}
