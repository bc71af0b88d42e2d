//! `cargo xtask test-neon`: the tests of `dynacore` for AArch64, run by QEMU's user-mode emulation.
//!
//! Whatever the emulated CPU has is tested: all sets on the first, then those that choose their kernels by less. Results
//! are checked, speed is not: emulation says nothing about it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::bail;

use crate::test::{cargo, root, step, watched_step};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Where Debian's cross packages put the libraries of the other architecture.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// An emulated CPU: its name, the instruction set that must be chosen on it, and which tests run (none named: all).
const CPUS: [(&str, &str, &[&str]); 3] = [
    ("max", "i8mm", &[]),
    ("neoverse-n1", "dotprod", QUICK),
    ("cortex-a72", "neon", QUICK),
];

/// Tests that show which set is chosen, that all its kernels run without instructions the CPU lacks, and that they have
/// the bits of all others.
const QUICK: &[&str] = &[
    "the_cap_is_honoured_or_refused",
    "the_short_self_test_passes_on_every_table_fused_and_plain",
    "products_have_the_same_bits_on_every_architecture",
    "results_have_the_same_bits_on_every_architecture",
];

/// Builds and runs; the first failure ends it, and a name that no test bears is one. `filters` name tests, and replace the
/// lists above.
pub(crate) fn run(filters: &[String]) -> anyhow::Result<()> {
    if cfg!(target_arch = "aarch64") {
        bail!("this machine is AArch64: `cargo test -p dynacore` runs its kernels without emulation");
    }
    if let Some(option) = filters.iter().find(|name| name.starts_with('-')) {
        bail!("test-neon takes parts of tests' names, not options of the test program: found `{option}`");
    }
    let missing = missing();
    if !missing.is_empty() {
        bail!("test-neon needs what this machine lacks:\n{}", missing.join("\n"));
    }
    let root = root()?;
    step(
        "build the tests of dynacore for AArch64",
        command(&root, "max").arg("--no-run"),
    )?;
    for (cpu, isa, tests) in CPUS {
        let mut command = command(&root, cpu);
        let names: Vec<&str> = match filters {
            [] => tests.to_vec(),
            _ => filters.iter().map(String::as_str).collect(),
        };
        command.env("DYNACORE_TEST_ISA", isa).arg("--").args(&names);
        let what = format!("tests of dynacore on an emulated {cpu} ({isa})");
        let mut printed = Vec::new();
        watched_step(&what, &mut command, |line| printed.push(line.to_owned()))?;
        let unmet: Vec<&str> = names.into_iter().filter(|name| !is_met(&printed, name)).collect();
        if !unmet.is_empty() {
            bail!("{what}: no test ran whose name has `{}`", unmet.join("`, or `"));
        }
        if tests_run(&printed) == 0 {
            bail!("{what}: no test ran");
        }
    }
    Ok(())
}

/// Tests that ran, by the summary line of each test program: `test result: ok. 3 passed; 1 failed; …`.
fn tests_run(printed: &[String]) -> usize {
    let counts = |line: &String| {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let ran = counts.split("; ").filter_map(|part| {
            let (count, of) = part.split_once(' ')?;
            let count = count.parse::<usize>().ok()?;
            matches!(of, "passed" | "failed").then_some(count)
        });
        Some(ran.sum::<usize>())
    };
    printed.iter().filter_map(counts).sum()
}

/// Whether a test ran that `name` is a part of: `test a::name_of_it ... ok`.
fn is_met(printed: &[String], name: &str) -> bool {
    printed.iter().any(|line| {
        let test = line
            .strip_prefix("test ")
            .and_then(|test| test.split_once(" ... "));
        test.is_some_and(|(test, result)| test.contains(name) && !result.starts_with("ignored"))
    })
}

/// `cargo test` for the emulated CPU, without arguments for the tests.
fn command(root: &Path, cpu: &str) -> Command {
    let mut command = Command::new(cargo());
    command
        .args([
            "test",
            "--package",
            "dynacore",
            "--lib",
            "--tests",
            "--target",
            TARGET,
        ])
        // Flags for this machine's CPU are not for another's.
        .env_remove("RUSTFLAGS")
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -L {LIBRARIES} -cpu {cpu}"),
        )
        .env_remove("DYNACORE_ISA")
        .current_dir(root);
    command
}

/// What must be installed first, a line each.
fn missing() -> Vec<String> {
    let mut all = Vec::new();
    let libdir = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", TARGET])
        .output()
        .ok()
        .filter(|o| o.status.success())
        .map(|o| PathBuf::from(String::from_utf8_lossy(&o.stdout).trim()));
    if !libdir.is_some_and(|path| path.is_dir()) {
        all.push(format!(
            "- Rust's library for {TARGET}: `rustup target add {TARGET}`"
        ));
    }
    for (program, package) in [(LINKER, "gcc-aarch64-linux-gnu"), (EMULATOR, "qemu-user")] {
        if !in_path(program, std::env::var_os("PATH")) {
            all.push(format!(
                "- `{program}` in PATH; on Debian and Ubuntu: `apt-get install {package}`"
            ));
        }
    }
    if !Path::new(LIBRARIES).join("lib/ld-linux-aarch64.so.1").exists() {
        all.push(format!(
            "- the C library for AArch64 in {LIBRARIES}; on Debian and Ubuntu: `apt-get install libc6-arm64-cross`"
        ));
    }
    all
}

fn in_path(program: &str, path: Option<OsString>) -> bool {
    path.is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "
running 3 tests
test cpu::tests::sums ... ok
test cpu::tests::slow ... ignored
test cpu::tests::broken ... FAILED

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 64 filtered out; finished in 0.43s

running 0 tests

test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 66 filtered out; finished in 0.00s

running 12 tests
test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 1.00s
";

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn tests_are_counted_over_all_programs_and_only_those_that_ran() {
        assert_eq!(tests_run(&lines(PRINTED)), 14);
        let none =
            "test result: ok. 0 passed; 0 failed; 7 ignored; 0 measured; 66 filtered out; finished in 0.00s";
        assert_eq!(tests_run(&lines(none)), 0);
        assert_eq!(tests_run(&lines("test passed ... ok\n3 passed; 2 failed")), 0);
    }

    #[test]
    fn a_name_is_met_by_a_test_that_ran() {
        let printed = lines(PRINTED);
        assert!(is_met(&printed, "tests::sum") && is_met(&printed, "broken"));
        assert!(!is_met(&printed, "slow") && !is_met(&printed, "running") && !is_met(&printed, "FAILED"));
    }

    #[test]
    fn programs_are_looked_for_in_all_folders_of_the_path() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = std::env::join_paths([here.join("none"), here.join("src")]).expect("no colons");
        assert!(in_path("neon.rs", Some(path.clone())));
        assert!(!in_path("no-such-program", Some(path)));
        assert!(!in_path("neon.rs", None));
    }
}
