//! `cargo xtask test`: every test of the workspace, then the real client against the real server.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, bail};

/// Runs everything; the first failure ends it.
pub(crate) fn run() -> anyhow::Result<()> {
    let root = root()?;
    step(
        "tests of the workspace",
        Command::new(cargo())
            .args(["test", "--workspace"])
            .current_dir(&root),
    )?;
    let script = root.join("tests/e2e/run.sh");
    if Command::new("python3")
        .arg("--version")
        .output()
        .is_ok_and(|o| o.status.success())
    {
        // The tests of the workspace have built the program beside this one.
        let program =
            std::env::current_exe()?.with_file_name(format!("dynalm{}", std::env::consts::EXE_SUFFIX));
        step(
            "the openai client against the server",
            Command::new("bash")
                .arg(&script)
                .env("E2E_BIN", program)
                .current_dir(&root),
        )?;
    } else {
        eprintln!("skipped: the openai client against the server (python3 is not on this machine)");
    }
    Ok(())
}

/// The cargo that runs this program.
pub(crate) fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// The workspace's folder.
pub(crate) fn root() -> anyhow::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("xtask lies in the workspace")?;
    Ok(root.to_owned())
}

/// Runs a command that must succeed.
pub(crate) fn step(what: &str, command: &mut Command) -> anyhow::Result<()> {
    eprintln!("== {what}");
    let status = command.status();
    ended(
        what,
        status.with_context(|| format!("{what}: cannot start {command:?}"))?,
    )
}

fn ended(what: &str, status: ExitStatus) -> anyhow::Result<()> {
    if !status.success() {
        bail!("{what}: {status}");
    }
    Ok(())
}

/// As [`step`]; every line the command prints is shown, and given to `watch`.
pub(crate) fn watched_step(
    what: &str,
    command: &mut Command,
    mut watch: impl FnMut(&str),
) -> anyhow::Result<()> {
    eprintln!("== {what}");
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{what}: cannot start {command:?}"))?;
    let printed = child.stdout.take().context("its output is a pipe")?;
    for line in BufReader::new(printed).split(b'\n') {
        // Were it not read to its end, the program would wait for that.
        let Ok(line) = line else { break };
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        watch(&line);
    }
    ended(what, child.wait()?)
}
