//! What the program refuses, with which exit code, and whether the message helps.

use crate::support::{Home, ended, text};

#[test]
fn unknown_flags_commands_and_values_name_the_nearest() {
    let home = Home::new();
    let model = home.model();
    home.run(&[]).refused(2, &["Usage"]);
    home.run(&["inspekt", &model])
        .refused(2, &["inspekt", "'inspect'"]);
    home.run(&["run", &model, "x", "--temprature", "1"])
        .refused(2, &["--temprature", "--temperature"]);
    home.run(&["run", &model, "x", "--temperature", "warm"])
        .refused(2, &["warm", "--temperature"]);
    home.run(&["run", &model, "x", "--temperature", "-1"])
        .refused(2, &["-1"]);
    home.run(&["run", &model, "x", "--temperature", "101"])
        .refused(2, &["temperature", "101", "0 to 100"]);
    home.run(&["run", &model, "x", "--top-p", "1.5"])
        .refused(2, &["top_p", "1.5"]);
    home.run(&["run", &model, "x", "--logit-bias", "5"])
        .refused(2, &["ID=BIAS"]);
    home.run(&["run", &model, "x", "--logit-bias", "99999=1"])
        .refused(2, &["99999", "384"]);
    home.run(&["run", &model, "x", "--mode", "fast"])
        .refused(2, &["--mode", "fast", "auto, exact, safe"]);
    home.run(&["run", &model, "x", "--kv", "q4_0"])
        .refused(2, &["--kv", "q4_0", "f16, f32, q8_0"]);
    home.run(&["run", &model, "x", "--threads", "0"])
        .refused(2, &["--threads", "1 to 1024"]);
    home.run(&["run", &model, "x", "--chat-template", "chatmll"])
        .refused(1, &["chatmll"]);
    home.run(&["doctor", "--plan"]).refused(2, &["MODEL"]);
}

#[test]
fn devices_that_this_build_lacks_are_refused_by_name() {
    let home = Home::new();
    let model = home.model();
    for command in ["run", "doctor"] {
        let refuse = |more: &[&str], parts: &[&str]| {
            let mut list = vec![command, &model];
            list.extend(more);
            home.run(&list).refused(2, parts);
        };
        refuse(&["--gpu"], &["--gpu", "no GPU device", "--cpu"]);
        refuse(
            &["--backend", "native-cpu"],
            &["native-cpu", "--backend cpu", "--mode exact"],
        );
        refuse(&["--backend", "cuda"], &["no `cuda` device", "--backend cpu"]);
        refuse(&["--backend", "vulkan"], &["no `vulkan` device"]);
        refuse(&["--backend", "abacus"], &["abacus", "auto, cpu"]);
        refuse(&["--device", "1"], &["--device 1", "number 0"]);
        refuse(&["--cpu", "--gpu"], &["cannot be used with"]);
    }
}

#[test]
fn files_that_are_no_models_say_what_they_are() {
    let home = Home::new();
    let pointer = "version https://git-lfs.github.com/spec/v1\n\
        oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 98362432\n";
    let pointer = home.file("pointer.gguf", pointer);
    let page = home.file(
        "page.gguf",
        "<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n",
    );
    let empty = home.file("empty.gguf", "");
    let short = home.file("short.gguf", "GGUF");
    let other = home.file("other.gguf", [0x50u8; 4096]);
    let folder = home.path().join("folder.gguf");
    std::fs::create_dir(&folder).expect("a folder");
    let folder = text(&folder);
    for command in ["run", "inspect", "tokenize", "doctor"] {
        let refuse = |file: &str, part: &str| {
            let list: &[&str] = if matches!(command, "run" | "tokenize") {
                &[command, file, "x"]
            } else {
                &[command, file]
            };
            home.run(list).refused(1, &[file, part]);
        };
        refuse(&pointer, "LFS");
        refuse(&page, "HTML");
        refuse(&empty, "empty");
        refuse(&short, "short");
        refuse(&other, "GGUF");
        refuse(&folder, "folder");
        refuse("./missing.gguf", "missing.gguf");
    }
}

#[test]
fn a_damaged_model_is_refused_not_run() {
    let home = Home::new();
    let model = home.model();
    let bytes = std::fs::read(&model).expect("the made model");
    let cut = home.file("cut.gguf", &bytes[..bytes.len() - 5000]);
    home.run(&["run", &cut, "x"]).refused(1, &[&cut]);
    let cut = home.file("header.gguf", &bytes[..300]);
    home.run(&["run", &cut, "x"]).refused(1, &[&cut]);
}

#[test]
fn names_nobody_knows_are_refused_without_the_network() {
    let home = Home::new();
    home.run(&["run", "no-such-model", "x"])
        .refused(1, &["no-such-model"]);
    home.run(&["run", "smollm2:136m", "x"])
        .refused(1, &["smollm2:136m", "smollm2:135m"]);
    home.run(&["pull", "smollm2:135m"]).refused(1, &["offline"]);
    home.run(&["pull", "smollm2:135m", "--quant", "Q8_0"])
        .refused(2, &["--quant"]);
    home.run(&["rm", "no-such-model", "-y"])
        .refused(1, &["no-such-model"]);
    home.run(&["rm", "no-such-model"]).refused(2, &["-y"]);
}

#[test]
fn unknown_variables_and_keys_name_the_nearest() {
    let home = Home::new();
    let mut command = home.command(&["config", "show"]);
    command.env("DYNALM_TREADS", "2");
    ended(command).refused(2, &["DYNALM_TREADS", "did you mean `DYNALM_THREADS`"]);
    let mut command = home.command(&["config", "show"]);
    command.env("DYNALM_KV", "f8");
    ended(command).refused(2, &["DYNALM_KV", "f8", "f16, f32, q8_0"]);
    let file = home.file("mine.toml", "\nthreads = 2\n[server]\nprot = 9\n");
    home.run(&["config", "show", "--config", &file])
        .refused(2, &["mine.toml:4", "server.prot", "did you mean `server.port`"]);
    let file = home.file("broken.toml", "threads = \n");
    home.run(&["config", "show", "--config", &file])
        .refused(2, &["broken.toml:1"]);
    home.run(&["config", "show", "--config", "missing.toml"])
        .refused(2, &["missing.toml"]);
}
