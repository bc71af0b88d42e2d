//! `run`: what it prints, where prompts come from, and that seeds mean what they say.

use crate::support::{Home, ended};

/// Options of a short greedy reply whose text holds neither an escape nor a carriage return of the model's own (a
/// made model says any byte; these are the two bytes' tokens).
const SHORT: [&str; 8] = [
    "-n",
    "24",
    "--temperature",
    "0",
    "--logit-bias",
    "27=-100",
    "--logit-bias",
    "13=-100",
];

fn args<'a>(first: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    first.iter().chain(more).copied().collect()
}

#[test]
fn a_pipe_gets_the_reply_and_nothing_else() {
    let home = Home::new();
    let model = home.model();
    let plain = home.run(&args(&["run", &model, "tell me a story"], &SHORT)).ok();
    assert!(
        !plain.stdout.contains(&0x1b) && !plain.stdout.contains(&b'\r'),
        "{plain:?}"
    );
    assert_eq!(plain.stderr, "", "nothing to tell");
    let json = home
        .run(&args(&["run", &model, "tell me a story", "--json"], &SHORT))
        .ok()
        .json();
    let text = json["text"].as_str().expect("a text");
    assert!(!text.is_empty());
    assert_eq!(
        plain.out().strip_suffix('\n').unwrap_or(plain.out()),
        text.strip_suffix('\n').unwrap_or(text)
    );
    assert!(plain.out().ends_with('\n'));
    let finish = json["finish_reason"].as_str().expect("a reason");
    assert!(["stop", "length"].contains(&finish), "{json}");
    assert!(json["usage"]["prompt_tokens"].as_u64() > Some(3), "{json}");
    let stats = home
        .run(&args(&["run", &model, "tell me a story", "--stats"], &SHORT))
        .ok();
    assert_eq!(stats.stdout, plain.stdout);
    assert!(
        stats.stderr.contains("tok/s") && !stats.stderr.contains('\x1b'),
        "{}",
        stats.stderr
    );
}

#[test]
fn prompts_come_from_argument_option_file_and_pipe() {
    let home = Home::new();
    let model = home.model();
    let file = home.file("prompt.txt", "name the river");
    let expected = home.run(&args(&["run", &model, "name the river"], &SHORT)).ok();
    let option = home
        .run(&args(&["run", &model, "-p", "name the river"], &SHORT))
        .ok();
    let from_file = home.run(&args(&["run", &model, "-f", &file], &SHORT)).ok();
    let piped = home
        .run_with(&args(&["run", &model], &SHORT), b"name the river")
        .ok();
    for other in [&option, &from_file, &piped] {
        assert_eq!(other.stdout, expected.stdout);
        assert_eq!(other.stderr, "");
    }
    let both = home
        .run_with(
            &args(&["run", &model, "name the river", "--json"], &SHORT),
            b"and the village",
        )
        .ok();
    let one = home
        .run(&args(
            &["run", &model, "name the river\n\nand the village", "--json"],
            &SHORT,
        ))
        .ok();
    assert_eq!(both.json()["text"], one.json()["text"]);
    assert_eq!(both.json()["usage"], one.json()["usage"]);
}

#[test]
fn no_prompt_is_bad_usage() {
    let home = Home::new();
    let model = home.model();
    home.run(&["run", &model]).refused(2, &["prompt is empty"]);
    home.run(&["run", &model, ""]).refused(2, &["prompt is empty"]);
    home.run(&["run", &model, " \n\t "])
        .refused(2, &["prompt is empty"]);
    let empty = home.file("empty.txt", "");
    home.run(&["run", &model, "-f", &empty])
        .refused(2, &["prompt is empty"]);
    home.run(&["run", &model, "-f", "missing.txt"])
        .refused(1, &["missing.txt"]);
    home.run_with(&["run", &model], b"\xff\xfe\xfd")
        .refused(2, &["not UTF-8"]);
    home.run(&["run", &model, "a", "-p", "b"])
        .refused(2, &["cannot be used with"]);
}

#[test]
fn a_prompt_larger_than_the_window_says_both_numbers() {
    let home = Home::new();
    let model = home.model();
    let megabyte = "once upon a time ".repeat(62_000);
    home.run_with(&["run", &model], megabyte.as_bytes())
        .refused(2, &["the context window holds 512", "--ctx"]);
    home.run(&args(
        &[
            "run",
            &model,
            "--ctx",
            "16",
            "once upon a time there was a little girl who lived",
        ],
        &SHORT,
    ))
    .refused(2, &["the context window holds 16"]);
    home.run(&["run", &model, "--ctx", "4096", "x"])
        .refused(1, &["4096", "made for 512"]);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let home = Home::new();
    let model = home.model();
    for list in [
        &["run", &model, "go on", "-n", "400"][..],
        &["run", &model, "go on", "-n", "4", "--json"],
        &["tokenize", &model, "go on"],
        &["detokenize", &model, "1", "2"],
        &["template", &model, "hello"],
        &["inspect", &model],
        &["inspect", &model, "--json", "--tensors", "--metadata"],
        &["models", "--json"],
        &["models", "--available"],
        &["config", "show"],
        &["doctor", "--no-test"],
        &["--help"],
        &["--version"],
    ] {
        let ran = home.run_unread(list);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{list:?}");
    }
}

#[test]
fn a_seed_gives_the_same_reply_again() {
    let home = Home::new();
    let model = home.model();
    let with = |seed: &str| {
        let list = [
            "run",
            &model,
            "roll the dice",
            "-n",
            "32",
            "--temperature",
            "2",
            "--seed",
            seed,
            "--json",
        ];
        let json = home.run(&list).ok().json();
        assert_eq!(json["seed"].to_string(), seed);
        json["text"].as_str().expect("a text").to_owned()
    };
    let seven = with("7");
    assert_eq!(with("7"), seven);
    assert_ne!(with("8"), seven, "32 tokens at temperature 2 differ");
    assert_eq!(with("18446744073709551615"), with("18446744073709551615"));
}

#[test]
fn limits_and_stop_texts_end_a_reply() {
    let home = Home::new();
    let model = home.model();
    let base = ["run", &model, "count the boats", "--temperature", "0", "--json"];
    let none = home.run(&args(&base, &["--max-tokens", "0"])).ok().json();
    assert_eq!(
        (none["text"].as_str(), none["usage"]["completion_tokens"].as_u64()),
        (Some(""), Some(0))
    );
    let one = home.run(&args(&base, &["--max-tokens", "1"])).ok().json();
    assert_eq!(one["usage"]["completion_tokens"], 1);
    let long = home.run(&args(&base, &["-n", "24"])).ok().json();
    let text = long["text"].as_str().expect("a text");
    let middle: String = text.chars().skip(text.chars().count() / 2).take(3).collect();
    let cut = home
        .run(&args(&base, &["-n", "24", "--stop", &middle]))
        .ok()
        .json();
    assert_eq!(cut["finish_reason"], "stop");
    assert_eq!(cut["text"].as_str(), text.find(&middle).map(|at| &text[..at]));
}

#[test]
fn cache_types_modes_and_threads_are_taken() {
    let home = Home::new();
    let model = home.model();
    let base = args(&["run", &model, "the quick brown fox", "--json"], &SHORT);
    let reply = |more: &[&str]| home.run(&args(&base, more)).ok().json()["text"].clone();
    let auto = reply(&[]);
    assert_eq!(
        reply(&[
            "--mode",
            "exact",
            "--threads",
            "2",
            "--batch-tokens",
            "16",
            "--cpu"
        ]),
        auto
    );
    assert_eq!(reply(&["--backend", "cpu", "--kv", "f16", "--device", "0"]), auto);
    for more in [&["--kv", "q8_0"][..], &["--kv", "f32"], &["--mode", "safe"]] {
        assert!(reply(more).is_string(), "{more:?}");
    }
    let raw = home.run(&args(&base, &["--raw"])).ok().json();
    let chat = home.run(&base).ok().json();
    assert!(raw["usage"]["prompt_tokens"].as_u64() < chat["usage"]["prompt_tokens"].as_u64());
    let system = home.run(&args(&base, &["--system", "be brief"])).ok().json();
    assert!(system["usage"]["prompt_tokens"].as_u64() > chat["usage"]["prompt_tokens"].as_u64());
}

#[test]
fn terminals_that_are_none_get_no_escapes_whatever_the_environment() {
    let home = Home::new();
    let model = home.model();
    for (name, value) in [
        ("NO_COLOR", "1"),
        ("TERM", "dumb"),
        ("TERM", "xterm-256color"),
        ("CI", "true"),
    ] {
        let mut command = home.command(&args(&["run", &model, "hello", "-vv"], &SHORT));
        command.env(name, value);
        let ran = ended(command).ok();
        assert!(
            !ran.stderr.contains('\x1b') && !ran.stdout.contains(&0x1b),
            "{name}={value}: {ran:?}"
        );
        assert!(ran.stderr.contains("loaded"), "-vv tells: {}", ran.stderr);
    }
    let mut command = home.command(&args(&["run", &model, "hello", "-q"], &SHORT));
    command.env("DYNALM_LOG", "debug");
    assert_eq!(
        ended(command).ok().stderr,
        "",
        "the flag is above the environment"
    );
}

#[test]
fn a_piped_chat_prints_replies_only_and_ends_with_its_input() {
    let home = Home::new();
    let model = home.model();
    let list = args(&["chat", &model], &SHORT);
    let first = home
        .run(&args(&["run", &model, "count the boats", "--json"], &SHORT))
        .ok()
        .json();
    let first = format!("{}\n", first["text"].as_str().expect("a text"));
    let mut command = home.command(&list);
    command
        .env("TERM", "dumb")
        .stdin(std::fs::File::open(home.file("one.txt", "count the boats\r\n")).expect("made"));
    assert_eq!(ended(command).ok().out(), first);
    let script =
        "count the boats\n\n/nonsense\n/set temperature 999\n/stats\n/save talk.json\nand the \\\ndogs";
    let two = home.run_with(&list, script.as_bytes()).ok();
    let second = two.out().strip_prefix(&first).expect("the same first reply");
    assert!(
        !second.trim().is_empty() && !two.stdout.contains(&0x1b),
        "{two:?}"
    );
    assert!(
        two.stderr.contains("/nonsense") && two.stderr.contains("999"),
        "{}",
        two.stderr
    );
    assert!(
        two.stderr.contains("tok/s") && two.stderr.contains("saved 2 messages"),
        "{}",
        two.stderr
    );
    // The conversation goes on where it was saved.
    let again = home
        .run_with(&list, b"/load talk.json\nand the \\\ndogs\n/bye\nnever read\n")
        .ok();
    assert_eq!(again.out(), second);
    assert!(!home.path().join("history").exists(), "a pipe leaves no history");
    assert_eq!(home.run(&list).ok().out(), "", "an empty input ends at once");
    home.run_with(&list, b"\xff\n").refused(1, &["next message"]);
    home.run_with(&list, b"/load missing.json\n").ok();
}
