//! `config`: layers, where the file is, the starter file; `--help` and `--version`.

use crate::support::{Home, ended};

#[test]
fn show_tells_values_and_where_they_come_from() {
    let home = Home::new();
    let file = home.file("mine.toml", "kv = \"q8_0\"\n[hub]\ntoken = \"hf_secret\"\n");
    let shown = home.run(&["config", "show", "--config", &file]).ok();
    assert!(
        !shown.out().contains("hf_secret") && shown.stderr.is_empty(),
        "{shown:?}"
    );
    let line = |key: &str| {
        shown
            .out()
            .lines()
            .find(|l| l.split_whitespace().next() == Some(key))
            .expect("a line")
    };
    assert!(
        line("kv").contains("q8_0") && line("kv").contains("mine.toml:1"),
        "{}",
        line("kv")
    );
    assert!(line("threads").ends_with("DYNALM_THREADS"), "{}", line("threads"));
    assert!(line("mode").ends_with("default"), "{}", line("mode"));
    let json = home
        .run(&["config", "show", "--json", "--config", &file])
        .ok()
        .json();
    assert_eq!(json["offline"]["source"], "DYNALM_OFFLINE");
    assert_eq!(json["hub.token"]["value"], "(set)");
}

#[test]
fn init_writes_a_file_that_is_read_and_never_replaces_one_unasked() {
    let home = Home::new();
    let path = home.run(&["config", "path"]).ok().out().trim_end().to_owned();
    assert!(path.starts_with(home.path().to_str().expect("UTF-8")), "{path}");
    let made = home.run(&["config", "init"]).ok();
    assert!(made.stdout.is_empty() && made.stderr.contains(&path), "{made:?}");
    home.run(&["config", "show"]).ok();
    home.run(&["config", "init"]).refused(1, &[&path, "--force"]);
    std::fs::write(&path, "kv = \"f32\"\n").expect("the file can be changed");
    let json = home.run(&["config", "show", "--json"]).ok().json();
    assert_eq!(json["kv"]["value"], "f32");
    assert_eq!(json["kv"]["source"], format!("{path}:1"));
    home.run(&["config", "init", "--force"]).ok();
    assert_eq!(
        home.run(&["config", "show", "--json"]).ok().json()["kv"]["source"],
        "default"
    );
}

#[test]
fn the_file_moves_with_xdg_config_home() {
    let home = Home::new();
    let mut command = home.command(&["config", "path"]);
    command.env("XDG_CONFIG_HOME", home.path().join("elsewhere"));
    assert!(
        ended(command)
            .ok()
            .out()
            .contains("/elsewhere/dynalm/config.toml")
    );
    let mut command = home.command(&["config", "path"]);
    command.env_remove("HOME");
    ended(command).refused(1, &["HOME"]);
}

#[test]
fn help_and_version_go_to_stdout() {
    let home = Home::new();
    for list in [&["--help"][..], &["run", "--help"], &["serve", "-h"]] {
        let ran = home.run(list).ok();
        assert!(
            ran.out().contains("Usage") && ran.stderr.is_empty() && !ran.out().contains('\x1b'),
            "{list:?}"
        );
    }
    assert_eq!(
        home.run(&["--version"]).ok().out(),
        format!("dynalm {}\n", env!("CARGO_PKG_VERSION"))
    );
}
