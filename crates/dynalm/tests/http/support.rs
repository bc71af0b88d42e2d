//! A server over a scripted model, and a plain HTTP client.
//!
//! The model's reply is a fixed chain of tokens: each token has one successor. The device underneath is the testkit's,
//! which checks every block table it is given. A gate can hold the device before a step.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dynacore::{Executor, KvGeometry, KvType, Logits, Ticket};
use dynair::{BatchMeta, Limits};
use dynalm::engine::EngineModel;
use dynalm::error::{Error, Result};
use dynalm::sample::params::SamplingParams;
use dynalm::server::{AppState, ModelInfo, ModelToServe, Server, ServerConfig, Stopped};
use dynalm::text::{ChatTemplate, Tokenizer, VocabSource};
use serde_json::Value;
use testkit::scripted::{ScriptedExecutor, ScriptedGroup};
use testkit::vocab::byte_char;

/// What the model says, token by token. The fourth and fifth piece end inside a character.
pub(crate) const PIECES: [&[u8]; 12] = [
    b"copper",
    b" lan",
    b"tern",
    b" mea",
    b"dow ",
    b"\xf0\x9f\x90",
    b"\x99",
    b" vio",
    b"lin",
    b" caf",
    b"\xc3",
    b"\xa9",
];
/// What it says, whole.
pub(crate) const REPLY: &str = "copper lantern meadow 🐙 violin café";
/// Tokens of the window.
pub(crate) const WINDOW: usize = 256;
const BLOCK_TOKENS: usize = 16;
const BLOCKS: usize = 64;

/// Names of the control tokens, from id 256 on.
const CONTROLS: [&str; 10] = [
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<|loop|>",
    "<|nan|>",
    "<|panic|>",
    "<|device|>",
    "<|short|>",
];
const TEMPLATE: &str = "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('roles must \
     alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last or m.role != 'assistant' %}\
     {% if m.role == 'assistant' %}<|end|>{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}\
     <|assistant|>{% endif %}";

/// The id of a control token.
pub(crate) fn control(name: &str) -> u32 {
    256 + CONTROLS
        .iter()
        .position(|control| *control == name)
        .expect("a control token's name") as u32
}

/// The id of piece `i` of the reply.
pub(crate) fn piece(i: usize) -> u32 {
    256 + CONTROLS.len() as u32 + i as u32
}

fn visible(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| byte_char(byte)).collect()
}

/// Bytes, control tokens, pieces.
fn vocabulary() -> VocabSource {
    let mut tokens: Vec<String> = (0..=255_u8).map(|byte| visible(&[byte])).collect();
    let mut types = vec![1; 256];
    tokens.extend(CONTROLS.iter().map(|name| (*name).to_owned()));
    types.resize(tokens.len(), 3);
    tokens.extend(PIECES.iter().map(|piece| visible(piece)));
    tokens.push("la".into());
    types.resize(tokens.len(), 1);
    VocabSource {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens,
        token_types: types,
        merges: vec!["l a".into()],
        eos: Some(control("<|end|>")),
        chat_template: Some(TEMPLATE.into()),
        ..VocabSource::default()
    }
}

/// Holds the device before its steps.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    closed: bool,
    permits: usize,
    held: bool,
    /// How often it was opened: who was held then goes through, even if it is closed again before he wakes.
    opened: usize,
}

impl Gate {
    /// Lets `steps` more steps through, then holds.
    pub(crate) fn close_after(&self, steps: usize) {
        let mut state = self.state.lock().unwrap();
        (state.closed, state.permits) = (true, steps);
        self.changed.notify_all();
    }

    pub(crate) fn open(&self) {
        let mut state = self.state.lock().unwrap();
        (state.closed, state.held) = (false, false);
        state.opened += 1;
        self.changed.notify_all();
    }

    /// Waits until the device is held before a step.
    pub(crate) fn wait_held(&self) {
        let state = self.state.lock().unwrap();
        let wait = self
            .changed
            .wait_timeout_while(state, Duration::from_secs(20), |state| !state.held)
            .unwrap();
        assert!(!wait.1.timed_out(), "the device never came to the gate");
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        let opened = state.opened;
        while state.closed && state.permits == 0 && state.opened == opened {
            state.held = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap();
        }
        state.held = false;
        state.permits = state.permits.saturating_sub(1);
    }
}

/// The scripted device with the chain's answers in place of its own.
struct Chain {
    inner: ScriptedExecutor,
    next: HashMap<u32, u32>,
    gate: Arc<Gate>,
    rows: HashMap<u64, Vec<u32>>,
}

impl Executor for Chain {
    fn submit(&mut self, batch: &BatchMeta) -> dynacore::Result<Ticket> {
        self.gate.pass();
        assert!(
            !batch.tokens.contains(&control("<|panic|>")),
            "a device that breaks its own rules"
        );
        if batch.tokens.contains(&control("<|device|>")) {
            return Err(dynacore::Error::Batch("the device has gone".into()));
        }
        let ticket = self.inner.submit(batch)?;
        let tokens = batch
            .output_rows
            .iter()
            .map(|&row| batch.tokens[row as usize])
            .collect();
        self.rows.insert(ticket.0, tokens);
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, logits: &mut Logits) -> dynacore::Result<()> {
        let rows = self.rows.remove(&ticket.0).expect("a ticket is waited for once");
        self.inner.wait(ticket, logits)?;
        let vocab = logits.vocab;
        if rows.contains(&control("<|short|>")) {
            logits.data.truncate((rows.len() - 1) * vocab);
        }
        for (values, token) in logits.data.chunks_exact_mut(vocab).zip(rows) {
            if token == control("<|nan|>") {
                values.fill(f32::NAN);
                continue;
            }
            for (i, value) in values.iter_mut().enumerate() {
                *value = (i * 7919 % 1000) as f32 / 1000.0;
            }
            values[self.next.get(&token).copied().unwrap_or(piece(0)) as usize] = 12.0;
        }
        Ok(())
    }
}

/// The model to serve; `gate` may hold it.
pub(crate) fn model(gate: Arc<Gate>) -> Result<ModelToServe> {
    let source = vocabulary();
    let vocab_size = source.tokens.len();
    let limits = Limits {
        max_tokens: 64,
        max_seqs: 8,
        max_outputs: 64,
    };
    let la = vocab_size as u32 - 1;
    let mut next: HashMap<u32, u32> = (0..PIECES.len() - 1).map(|i| (piece(i), piece(i + 1))).collect();
    next.insert(piece(PIECES.len() - 1), control("<|end|>"));
    next.insert(control("<|loop|>"), la);
    next.insert(la, la);
    let tokenizer = Arc::new(Tokenizer::new(&source)?);
    let group = ScriptedGroup {
        blocks: BLOCKS,
        window: None,
    };
    let inner = ScriptedExecutor::new(vocab_size, BLOCK_TOKENS, limits, vec![group]);
    let template = ChatTemplate::new(TEMPLATE, "", "<|end|>")?;
    Ok(ModelToServe {
        name: "chain".into(),
        aliases: vec!["chain:latest".into()],
        engine: EngineModel {
            executor: Box::new(Chain {
                inner,
                next,
                gate,
                rows: HashMap::new(),
            }),
            geometry: KvGeometry {
                kind: KvType::F16,
                block_tokens: BLOCK_TOKENS,
                blocks: vec![BLOCKS],
            },
            windows: vec![None],
            limits,
            max_context: WINDOW,
            vocab_size,
            tokenizer,
        },
        template: Some(Arc::new(template)),
        defaults: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        info: ModelInfo {
            architecture: "chain".into(),
            quantization: "F32".into(),
            parameters: 1,
            file_bytes: 1,
        },
    })
}

/// A running server; ends with the value.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) app: AppState,
    pub(crate) gate: Arc<Gate>,
    thread: Option<JoinHandle<Result<Stopped>>>,
}

impl TestServer {
    /// A server that is ready.
    pub(crate) fn start(config: ServerConfig) -> TestServer {
        let gate = Arc::new(Gate::default());
        let for_model = Arc::clone(&gate);
        let server = TestServer::start_with(config, gate, move || model(for_model));
        server.eventually("the server is ready", |server| {
            server.get("/health").status == 200
        });
        server
    }

    /// A server with the default configuration.
    pub(crate) fn ready() -> TestServer {
        TestServer::start(ServerConfig::default())
    }

    /// A server that loads with `load`.
    pub(crate) fn start_with(
        config: ServerConfig,
        gate: Arc<Gate>,
        load: impl FnOnce() -> Result<ModelToServe> + Send + 'static,
    ) -> TestServer {
        let server = Server::bind(ServerConfig { port: 0, ..config }).expect("a free port");
        let (address, app) = (server.address(), server.app());
        let thread = std::thread::spawn(move || server.run(false, load));
        TestServer {
            address,
            app,
            gate,
            thread: Some(thread),
        }
    }

    /// Waits until the server has ended by itself.
    pub(crate) fn join(mut self) -> Result<Stopped> {
        let thread = self.thread.take().expect("joined once");
        thread
            .join()
            .unwrap_or_else(|_| Err(Error::Internal("the server panicked".into())))
    }

    /// Repeats a question until the answer is yes. The questions go over the network, so this does not spin.
    pub(crate) fn eventually(&self, what: &str, mut yes: impl FnMut(&TestServer) -> bool) {
        let begin = Instant::now();
        while !yes(self) {
            assert!(
                begin.elapsed() < Duration::from_secs(30),
                "never came true: {what}"
            );
        }
    }

    /// Posts a body that is chunked already.
    pub(crate) fn send_chunked(&self, path: &str, chunks: &[u8]) -> Reply {
        let mut stream = TcpStream::connect(self.address).expect("the server listens");
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             transfer-encoding: chunked\r\n\r\n"
        );
        let _ = stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(chunks));
        read_reply(BufReader::new(stream))
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        read_reply(self.begin(method, path, headers, body))
    }

    fn begin(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n",
            body.len()
        );
        if !headers.iter().any(|(name, _)| *name == "host") {
            head.push_str("host: localhost\r\n");
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        // A server that refuses a body early closes its end; its answer still counts.
        let _ = stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(body));
        BufReader::new(stream)
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Reply {
        self.send(
            "POST",
            path,
            &[("content-type", "application/json")],
            body.as_bytes(),
        )
    }

    /// Posts and keeps the connection open without waiting for an answer.
    pub(crate) fn post_open(&self, path: &str, body: &str) -> Open {
        Open(self.begin(
            "POST",
            path,
            &[("content-type", "application/json")],
            body.as_bytes(),
        ))
    }

    /// A metric without labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no metric {name} in {text}"))
            .parse()
            .unwrap()
    }

    /// Waits until nothing runs, nothing waits and no page is held.
    pub(crate) fn wait_idle(&self) {
        self.eventually("the engine is idle", |server| {
            let names = [
                "dynalm_requests_running",
                "dynalm_requests_waiting",
                "dynalm_kv_pages_used",
            ];
            names.iter().all(|name| server.metric(name) == 0.0)
        });
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.gate.open();
        self.app.request_stop();
        if let Some(thread) = self.thread.take()
            && let Ok(Err(error)) = thread.join()
        {
            // Panicking twice would end the process.
            assert!(std::thread::panicking(), "the server failed: {error}");
            eprintln!("the server failed: {error}");
        }
    }
}

/// A request under way; dropping it closes the connection.
pub(crate) struct Open(BufReader<TcpStream>);

impl Open {
    /// Reads the head.
    pub(crate) fn head(&mut self) -> (u16, HashMap<String, String>) {
        read_head(&mut self.0)
    }

    /// Reads the next piece of a chunked body; `None` at its end.
    pub(crate) fn chunk(&mut self) -> Option<String> {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim(), 16).expect("a chunk's length");
        let mut data = vec![0; length + 2];
        self.0.read_exact(&mut data).unwrap();
        data.truncate(length);
        (length > 0).then(|| String::from_utf8(data).unwrap())
    }

    /// Reads the whole answer.
    pub(crate) fn reply(self) -> Reply {
        read_reply(self.0)
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> String {
        std::iter::from_fn(|| self.chunk()).collect()
    }
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// `error` of an error reply, whose shape is checked.
    pub(crate) fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        for field in ["message", "type", "param", "code"] {
            assert!(error.get(field).is_some(), "no `{field}` in {}", self.body);
        }
        error
    }

    /// The JSON of a stream's events. `[DONE]` must stand once, at the end.
    pub(crate) fn events(&self) -> Vec<Value> {
        events(&self.body)
    }
}

pub(crate) fn events(body: &str) -> Vec<Value> {
    let mut parts: Vec<&str> = body.split_terminator("\n\n").collect();
    assert!(body.ends_with("\n\n"), "a blank line after each event: {body}");
    assert_eq!(parts.pop(), Some("data: [DONE]"), "{body}");
    let data = |part: &&str| {
        part.strip_prefix("data: ")
            .map(|json| serde_json::from_str(json).expect("JSON data"))
    };
    parts
        .iter()
        .filter(|part| !part.starts_with(':'))
        .map(|part| data(part).expect("only data events"))
        .collect()
}

fn read_reply(mut reader: BufReader<TcpStream>) -> Reply {
    let (status, headers) = read_head(&mut reader);
    let mut raw = Vec::new();
    reader.read_to_end(&mut raw).expect("a whole body");
    let chunked = headers
        .get("transfer-encoding")
        .is_some_and(|value| value == "chunked");
    let body = if chunked { unchunk(&raw) } else { raw };
    Reply {
        status,
        headers,
        body: String::from_utf8(body).expect("bodies are UTF-8"),
    }
}

fn read_head(reader: &mut BufReader<TcpStream>) -> (u16, HashMap<String, String>) {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a status line");
    let status = line
        .split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("no status in `{line}`"))
        .parse()
        .unwrap();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a header line");
        let Some((name, value)) = line.trim_end().split_once(':') else {
            return (status, headers);
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
}

fn unchunk(mut raw: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let end = raw
            .windows(2)
            .position(|pair| pair == b"\r\n")
            .expect("a chunk's length");
        let length = usize::from_str_radix(std::str::from_utf8(&raw[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            return body;
        }
        body.extend_from_slice(&raw[end + 2..end + 2 + length]);
        raw = &raw[end + 2 + length + 2..];
    }
}
