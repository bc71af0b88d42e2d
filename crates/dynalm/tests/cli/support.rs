//! A home folder with a tiny model, and the program run in it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A temporary home. Nothing of the user's environment reaches the program.
pub(crate) struct Home {
    folder: TempDir,
}

/// What a run of the program left.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Ran {
    /// Stdout as text.
    pub(crate) fn out(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("the program writes UTF-8")
    }

    /// The run succeeded.
    pub(crate) fn ok(self) -> Ran {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// The run failed with `code` and each of `parts` in its message, and wrote no result.
    pub(crate) fn refused(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for part in parts {
            assert!(
                self.stderr.contains(part),
                "`{part}` is missing in: {}",
                self.stderr
            );
        }
        assert!(self.stdout.is_empty(), "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
    }

    /// Stdout as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(self.out()).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

impl Home {
    pub(crate) fn new() -> Home {
        let home = Home {
            folder: tempfile::tempdir().expect("a temporary folder"),
        };
        std::fs::create_dir(home.models()).expect("a folder in it");
        home
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The model store.
    pub(crate) fn models(&self) -> PathBuf {
        self.path().join("models")
    }

    /// A file with this content.
    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path().join(name);
        std::fs::write(&path, content).expect("a file in the temporary folder");
        text(&path)
    }

    /// A tiny model.
    pub(crate) fn model(&self) -> String {
        text(&modelkit::tiny_gguf(self.path(), "llama", "Q8_0", 5))
    }

    /// The program with these arguments, to be changed and run.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dynalm"));
        command.args(args).env_clear().current_dir(self.path());
        command
            .env("HOME", self.path())
            .env("DYNALM_MODELS_DIR", self.models());
        // No test may reach the network, whatever it asks for.
        command.env("DYNALM_OFFLINE", "true").env("DYNALM_THREADS", "1");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs it to its end, standard input empty.
    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        ended(self.command(args))
    }

    /// Runs it with this standard input.
    pub(crate) fn run_with(&self, args: &[&str], input: &[u8]) -> Ran {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let mut command = self.command(args);
        command.stdin(reader);
        let input = input.to_vec();
        let feeder = std::thread::spawn(move || {
            // A program that refuses its arguments does not read its input.
            let _ = writer.write_all(&input);
        });
        let ran = ended(command);
        feeder.join().expect("the feeder ends");
        ran
    }

    /// Runs it with a standard output nobody reads.
    pub(crate) fn run_unread(&self, args: &[&str]) -> Ran {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = self.command(args);
        command.stdout(writer);
        ended(command)
    }
}

/// A path as text.
pub(crate) fn text(path: &Path) -> String {
    path.to_str()
        .expect("temporary folders have UTF-8 names")
        .to_owned()
}

/// Runs a command to its end.
pub(crate) fn ended(mut command: Command) -> Ran {
    let output = command.output().expect("the program starts");
    Ran {
        code: output.status.code(),
        stdout: output.stdout,
        stderr: String::from_utf8(output.stderr).expect("messages are UTF-8"),
    }
}
