//! `inspect`, `models`, `doctor`, `tokenize`, `detokenize`, `template`: what they say about a model without running it.

use crate::support::Home;

#[test]
fn tokens_and_text_are_each_others_inverse() {
    let home = Home::new();
    let model = home.model();
    for text in [
        "the quick brown fox",
        "  spaces\tand\nlines\r\n",
        "naïve café 🐙 漢字 \u{200b}",
        "x",
    ] {
        let ids = home
            .run(&["tokenize", &model, text, "--json", "--no-add"])
            .ok()
            .json();
        let ids: Vec<String> = ids
            .as_array()
            .expect("an array")
            .iter()
            .map(ToString::to_string)
            .collect();
        let mut list = vec!["detokenize", &model];
        list.extend(ids.iter().map(String::as_str));
        assert_eq!(home.run(&list).ok().out(), format!("{text}\n"));
        let array = format!("[{}]", ids.join(","));
        assert_eq!(
            home.run_with(&["detokenize", &model], array.as_bytes())
                .ok()
                .out(),
            format!("{text}\n")
        );
        let piped = home
            .run_with(&["tokenize", &model, "--json", "--no-add"], text.as_bytes())
            .ok();
        assert_eq!(piped.json().to_string(), array);
        let listed = home.run(&["tokenize", &model, text, "--no-add"]).ok();
        assert_eq!(listed.out().lines().count(), ids.len());
        assert_eq!(listed.stderr, format!("{} tokens\n", ids.len()));
    }
    assert_eq!(
        home.run(&["tokenize", &model, "", "--json", "--no-add"])
            .ok()
            .out(),
        "[]\n"
    );
    let special = home
        .run(&[
            "tokenize",
            &model,
            "<|im_end|>",
            "--json",
            "--special",
            "--no-add",
        ])
        .ok()
        .json();
    assert_eq!(special.as_array().map(Vec::len), Some(1), "{special}");
    let plain = home
        .run(&["tokenize", &model, "<|im_end|>", "--json", "--no-add"])
        .ok()
        .json();
    assert!(
        plain.as_array().map(Vec::len) > Some(1),
        "text is never a special token: {plain}"
    );
    home.run(&["detokenize", &model, "384"])
        .refused(1, &["token 384", "384 tokens"]);
    home.run(&["detokenize", &model, "minus"]).refused(2, &["minus"]);
    home.run_with(&["detokenize", &model], b"{}")
        .refused(2, &["JSON array"]);
    home.run_with(&["tokenize", &model], b"\xff")
        .refused(2, &["UTF-8"]);
}

#[test]
fn the_template_renders_messages() {
    let home = Home::new();
    let model = home.model();
    let hello = "<|im_start|>user\nhello<|im_end|>\n";
    let turn = "<|im_start|>assistant\n";
    assert_eq!(
        home.run(&["template", &model, "hello"]).ok().out(),
        format!("{hello}{turn}\n")
    );
    let bare = home
        .run(&["template", &model, "hello", "--no-generation-prompt"])
        .ok();
    assert_eq!(bare.out(), format!("{hello}\n"));
    let messages = br#"[{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]"#;
    let piped = home.run_with(&["template", &model], messages).ok();
    assert_eq!(
        piped.out(),
        format!("<|im_start|>system\nbrief<|im_end|>\n{hello}{turn}\n")
    );
    let flag = home.run(&["template", &model, "hello", "--system", "brief"]).ok();
    assert_eq!(flag.stdout, piped.stdout);
    assert!(
        home.run(&["template", &model, "--source"])
            .ok()
            .out()
            .contains("add_generation_prompt")
    );
    let own = home.file("own.jinja", "{{ messages[0].content | upper }}");
    assert_eq!(
        home.run(&["template", &model, "hello", "--chat-template", &own])
            .ok()
            .out(),
        "HELLO\n"
    );
    home.run_with(&["template", &model], b"{}")
        .refused(2, &["JSON array of messages"]);
    home.run_with(&["template", &model], br#"[{"role": "user", "name": "x"}]"#)
        .refused(2, &["name"]);
    let broken = home.file("broken.jinja", "{% for m in messages %}");
    home.run(&["template", &model, "hello", "--chat-template", &broken])
        .refused(1, &["template"]);
}

#[test]
fn inspect_reads_and_tells_everything() {
    let home = Home::new();
    let model = home.model();
    let json = home
        .run(&[
            "inspect",
            &model,
            "--json",
            "--tensors",
            "--metadata",
            "--ctx",
            "64",
        ])
        .ok()
        .json();
    assert_eq!(json["architecture"], "llama");
    assert_eq!(
        (json["layers"].as_u64(), json["vocab_size"].as_u64()),
        (Some(2), Some(384))
    );
    assert_eq!(
        (
            json["trained_context"].as_u64(),
            json["memory"]["context"].as_u64()
        ),
        (Some(512), Some(64))
    );
    assert_eq!(json["quantization"], "Q8_0");
    assert_eq!(json["chat_template"], true);
    let tensors = json["tensors"].as_array().expect("a list");
    assert!(
        tensors
            .iter()
            .any(|t| t["name"] == "token_embd.weight" && t["shape"].is_array()),
        "{json:#}"
    );
    assert!(
        tensors.iter().all(|t| t["bytes"].as_u64() > Some(0)),
        "sizes are numbers"
    );
    let metadata = &json["metadata"];
    assert_eq!(metadata["general.architecture"], "llama");
    // Values are whole and keep their types.
    assert_eq!(
        metadata["tokenizer.ggml.tokens"].as_array().map(Vec::len),
        Some(384)
    );
    assert_eq!(metadata["llama.block_count"], 2);
    let template = metadata["tokenizer.chat_template"].as_str().expect("a text");
    assert!(template.len() > 100 && !template.ends_with('…'), "{template}");
    let text = home.run(&["inspect", &model, "--tensors", "--metadata"]).ok();
    assert!(
        text.out().contains("token_embd.weight") && text.out().contains("llama.block_count"),
        "{text:?}"
    );
    assert_eq!(text.stderr, "");
    home.run(&["inspect", &model, "--ctx", "513"])
        .refused(1, &["513", "512"]);
    // A folder with one model is that model.
    let folder = home.path().join("one");
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::copy(&model, folder.join("m.gguf")).expect("a copy");
    home.run(&["inspect", folder.to_str().expect("UTF-8")]).ok();
    std::fs::copy(&model, folder.join("n.gguf")).expect("a copy");
    home.run(&["inspect", folder.to_str().expect("UTF-8")])
        .refused(1, &["2 models"]);
}

#[test]
fn models_lists_the_store_and_the_catalogue() {
    let home = Home::new();
    let none = home.run(&["models"]).ok();
    assert!(
        none.stdout.is_empty() && none.stderr.contains("no local models"),
        "{none:?}"
    );
    assert_eq!(home.run(&["models", "--json"]).ok().out(), "[]\n");
    let all = home.run(&["ls", "--available", "--json"]).ok().json();
    let all = all.as_array().expect("a list");
    assert!(
        all.iter()
            .any(|m| m["name"] == "smollm2:135m" && m["origins"].is_array()),
        "{all:?}"
    );
    assert!(
        home.run(&["models", "--available"])
            .ok()
            .out()
            .contains("smollm2:135m")
    );
}

/// The kernel table in use.
fn json_table(home: &Home) -> String {
    let json = home.run(&["doctor", "--json", "--no-test"]).ok().json();
    json["cpu"]["table"].as_str().expect("a name").to_owned()
}

#[test]
fn doctor_reports_the_machine_and_tests_itself() {
    let home = Home::new();
    let json = home.run(&["doctor", "--json"]).ok().json();
    assert_eq!(json["self_test"]["failed"], 0);
    assert!(json["self_test"]["cases"].as_u64() > Some(50), "{json:#}");
    assert!(
        json["cpu"]["tables"]
            .as_array()
            .is_some_and(|t| t.iter().any(|t| t == "portable")),
        "{json:#}"
    );
    assert_eq!(json["cpu"]["threads"], 1);
    let count = |key: &str| {
        json["cpu"][key]
            .as_u64()
            .unwrap_or_else(|| panic!("{key}: {json:#}"))
    };
    assert!(count("fast_cores") >= 1 && count("fast_cores") <= count("physical_cores"));
    assert!(count("physical_cores") <= count("allowed_cpus"));
    assert!(count("auto_threads") >= 1 && count("auto_threads") <= count("fast_cores"));
}

#[test]
fn doctor_prints_every_step_of_a_plan() {
    let home = Home::new();
    let model = home.model();
    let json = home
        .run(&["doctor", &model, "--plan", "--json", "--no-test"])
        .ok()
        .json();
    let steps = json["model"]["steps"].as_u64().expect("a number");
    let plan = json["model"]["plan"].as_array().expect("lines");
    assert!(
        steps > 10 && plan.len() as u64 >= steps,
        "{steps} steps, {} lines",
        plan.len()
    );
    let of = |op: &str| {
        let line = plan
            .iter()
            .filter_map(|line| line.as_str())
            .find(|l| l.contains(op));
        line.unwrap_or_else(|| panic!("no `{op}` in {plan:#?}"))
            .to_owned()
    };
    let table = json_table(&home);
    let product = of("kernel linear.Q8_0");
    let layout = if table == "portable" {
        "layout row-major"
    } else {
        "layout packed-16"
    };
    assert!(
        product.contains(&format!("@{table}")) && product.contains(layout),
        "{product}"
    );
    // The cost follows the cache's type: 34 bytes hold 32 numbers of q8_0.
    let cache_bytes = |kv: &str| {
        let json = home
            .run(&["doctor", &model, "--plan", "--json", "--no-test", "--kv", kv])
            .ok()
            .json();
        let lines = json["model"]["plan"].as_array().expect("lines").clone();
        let total = lines
            .last()
            .and_then(|l| l.as_str())
            .expect("a last line")
            .to_owned();
        let (before, _) = total.split_once(" cache)").expect("the cache's bytes");
        let bytes = before.rsplit(' ').next().expect("a number");
        bytes.parse::<u64>().expect("a number")
    };
    let f16 = cache_bytes("f16");
    assert_eq!(cache_bytes("f32"), 2 * f16);
    assert_eq!(cache_bytes("q8_0") * 64, f16 * 34);
    assert_eq!(json["model"]["fits"], true);
    let text = home.run(&["doctor", &model, "--plan", "--no-test"]).ok();
    for line in plan {
        let line = line.as_str().expect("text");
        assert!(text.out().contains(line), "{line}");
    }
    assert!(!text.out().contains("self-test"), "{}", text.out());
    let named = home.run(&["doctor", &model, "--no-test"]).ok();
    assert!(
        named.out().contains("fits") && named.out().contains("512 of 512 tokens"),
        "{}",
        named.out()
    );
}

#[test]
fn asking_for_a_model_that_is_here_says_what_it_is() {
    let home = Home::new();
    let model = home.model();
    let json = home.run(&["pull", "--check", &model, "--json"]).ok().json();
    assert_eq!(json["architecture"], "llama");
    assert_eq!(
        (&json["path"], &json["fits"]),
        (&model.as_str().into(), &true.into())
    );
    let text = home.run(&["pull", "--check", &model]).ok();
    assert!(text.stderr.contains("it runs here"), "{text:?}");
}
