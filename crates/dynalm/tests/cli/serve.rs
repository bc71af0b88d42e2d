//! `serve` as a process: it says where it listens, answers, keeps keys to itself, and ends as asked.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command};

use crate::support::Home;

/// How often a server that has its model may say that it is not ready yet.
const ATTEMPTS: usize = 10_000;

/// A running server. Killed if a test fails.
struct Serving {
    child: Child,
    stderr: BufReader<ChildStderr>,
    /// What it has said so far.
    said: String,
    address: String,
}

impl Serving {
    /// Starts `serve` with these arguments on a free port and waits until it is ready.
    fn start(mut command: Command) -> Serving {
        let mut child = command.spawn().expect("the program starts");
        let stderr = BufReader::new(child.stderr.take().expect("stderr is a pipe"));
        let mut serving = Serving {
            child,
            stderr,
            said: String::new(),
            address: String::new(),
        };
        serving.read_until("serving `");
        let at = serving.said.find("http://").expect("the address comes first") + "http://".len();
        let address = serving.said[at..].split_whitespace().next().expect("an address");
        serving.address = address.replace("0.0.0.0", "127.0.0.1");
        // The model is there; the engine starts in the same moment.
        let ready = (0..ATTEMPTS).any(|_| serving.ask("GET", "/ready", &[], "").0 == 200);
        assert!(ready, "never ready: {}", serving.said);
        serving
    }

    fn read_until(&mut self, mark: &str) {
        while !self.said.contains(mark) {
            let read = self.stderr.read_line(&mut self.said).expect("messages are UTF-8");
            assert!(read > 0, "ended without `{mark}`: {}", self.said);
        }
    }

    /// One request on a connection of its own: status and body.
    fn ask(&self, method: &str, path: &str, headers: &[&str], body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("the server listens");
        let headers: String = headers.iter().map(|h| format!("{h}\r\n")).collect();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n{headers}\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("the server reads");
        let mut reply = String::new();
        stream
            .read_to_string(&mut reply)
            .expect("the server answers in UTF-8");
        let status = reply
            .split(' ')
            .nth(1)
            .and_then(|s| s.parse().ok())
            .expect("a status line");
        (status, reply)
    }

    /// Waits for the end: exit code, stdout, all of stderr.
    fn end(mut self) -> (Option<i32>, String, String) {
        self.stderr
            .read_to_string(&mut self.said)
            .expect("messages are UTF-8");
        let mut out = String::new();
        self.child
            .stdout
            .take()
            .expect("stdout is a pipe")
            .read_to_string(&mut out)
            .expect("UTF-8");
        let code = self.child.wait().expect("the program ends").code();
        (code, out, std::mem::take(&mut self.said))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Fails where the process has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const QUESTION: &str = r#"{"model": "MODEL", "messages": [{"role": "user", "content": "count the boats"}],
    "max_tokens": 8, "temperature": 0}"#;

#[test]
fn it_answers_as_run_does_and_ends_with_sigterm() {
    let home = Home::new();
    let model = home.model();
    let serving = Serving::start(home.command(&["serve", &model, "--port", "0"]));
    assert!(serving.address.starts_with("127.0.0.1:"), "{}", serving.address);
    assert_eq!(serving.ask("GET", "/health", &[], "").0, 200);
    let (status, list) = serving.ask("GET", "/v1/models", &[], "");
    assert!(status == 200 && list.contains("tiny-llama-Q8_0-5"), "{list}");
    let question = QUESTION.replace("MODEL", "tiny-llama-Q8_0-5");
    let (status, reply) = serving.ask("POST", "/v1/chat/completions", &[], &question);
    assert_eq!(status, 200, "{reply}");
    let body: serde_json::Value =
        serde_json::from_str(reply.split("\r\n\r\n").nth(1).expect("a body")).expect("JSON");
    let run = [
        "run",
        &model,
        "count the boats",
        "-n",
        "8",
        "--temperature",
        "0",
        "--json",
    ];
    let expected = home.run(&run).ok().json();
    assert_eq!(body["choices"][0]["message"]["content"], expected["text"]);
    assert_eq!(body["usage"]["prompt_tokens"], expected["usage"]["prompt_tokens"]);
    let kill = format!("kill -TERM {}", serving.child.id());
    assert!(
        Command::new("sh")
            .args(["-c", &kill])
            .status()
            .expect("a shell")
            .success()
    );
    let (code, out, err) = serving.end();
    assert_eq!((code, out.as_str()), (Some(0), ""), "{err}");
    assert!(!err.contains('\x1b') && !err.contains("panicked"), "{err}");
}

#[test]
fn keys_come_from_flag_file_and_environment_and_are_never_shown() {
    let home = Home::new();
    let model = home.model();
    let keys = home.file("keys.txt", "# ours\nsecret-one\n\nsecret-two\n");
    let mut command = home.command(&[
        "serve",
        &model,
        "--port",
        "0",
        "--api-key-file",
        &keys,
        "--alias",
        "tiny",
        "-vv",
    ]);
    command.env("DYNALM_SERVER_API_KEYS", "secret-three");
    let serving = Serving::start(command);
    let question = QUESTION.replace("MODEL", "tiny");
    for key in ["secret-one", "secret-two", "secret-three"] {
        for header in [
            format!("Authorization: Bearer {key}"),
            format!("x-api-key: {key}"),
        ] {
            let (status, reply) = serving.ask("POST", "/v1/chat/completions", &[&header], &question);
            assert_eq!(status, 200, "{reply}");
        }
    }
    for header in [
        "Authorization: Bearer secret-four",
        "x-api-key: # ours",
        "x-api-key: ",
    ] {
        let (status, reply) = serving.ask("POST", "/v1/chat/completions", &[header], &question);
        assert!(status == 401 && !reply.contains("secret-"), "{reply}");
    }
    assert_eq!(serving.ask("GET", "/health", &[], "").0, 200);
    assert_eq!(serving.ask("GET", "/metrics", &[], "").0, 401);
    assert_eq!(serving.ask("POST", "/admin/shutdown", &[], "").0, 401);
    assert_eq!(
        serving
            .ask("POST", "/admin/shutdown", &["x-api-key: secret-two"], "")
            .0,
        200
    );
    let (code, _, err) = serving.end();
    assert_eq!(code, Some(0), "{err}");
    assert!(!err.contains("secret-"), "{err}");
    // The flag is above the environment.
    let mut command = home.command(&["serve", &model, "--port", "0", "--api-key", "secret-five"]);
    command.env("DYNALM_SERVER_API_KEYS", "secret-three");
    let serving = Serving::start(command);
    assert_eq!(
        serving
            .ask("GET", "/v1/models", &["x-api-key: secret-three"], "")
            .0,
        401
    );
    assert_eq!(
        serving
            .ask("GET", "/v1/models", &["x-api-key: secret-five"], "")
            .0,
        200
    );
}

#[test]
fn an_open_address_without_a_key_is_warned_of() {
    let home = Home::new();
    let model = home.model();
    let serving = Serving::start(home.command(&["serve", &model, "--port", "0", "--host", "0.0.0.0"]));
    assert!(serving.said.contains("no API key is set"), "{}", serving.said);
    assert_eq!(serving.ask("POST", "/admin/shutdown", &[], "").0, 200);
    assert_eq!(serving.end().0, Some(0));
    let keyed = [
        "serve",
        &model,
        "--port",
        "0",
        "--host",
        "0.0.0.0",
        "--api-key",
        "k",
    ];
    let serving = Serving::start(home.command(&keyed));
    assert!(!serving.said.contains("no API key"), "{}", serving.said);
}

#[test]
fn what_cannot_be_served_is_refused() {
    let home = Home::new();
    let model = home.model();
    home.run(&["serve", &model, &model])
        .refused(2, &["one model at a time"]);
    home.run(&["serve", &model, "--port", "70000"])
        .refused(2, &["--port", "70000"]);
    home.run(&["serve", &model, "--port", "0", "--host", "no host"])
        .refused(2, &["no host"]);
    home.run(&["serve", "missing.gguf", "--port", "0"])
        .refused(1, &["missing.gguf"]);
    home.run(&["serve", &model, "--port", "0", "--api-key-file", "none.txt"])
        .refused(1, &["none.txt"]);
    let empty = home.file("none.txt", "# nothing\n");
    home.run(&["serve", &model, "--port", "0", "--api-key-file", &empty])
        .refused(1, &["no API key"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    home.run(&["serve", &model, "--port", &port])
        .refused(1, &["cannot listen on", &port]);
}
