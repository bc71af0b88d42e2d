//! How replies look: the parts that chat and completions have in common, and the event stream.
//!
//! A plain reply is assembled from the same events as a stream; only the last step differs.

use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Request, header};
use axum::response::Response;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::body::{ChannelBody, read_json};
use super::error::ApiError;
use super::generation::{Generation, Totals, Work};
use super::params::draw_seed;
use super::state::{AppState, unix_time};
use crate::engine::{Event, FinishReason, TokenLogprobs};
use crate::sample::params::TokenId;

/// A comment is sent when nothing else was for this long, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Events that wait for a slow reader inside the HTTP layer; more wait in the request's channel.
const STREAM_DEPTH: usize = 16;

/// One route's way of writing a choice. An implementation holds the state of all choices of a request.
pub(super) trait Shape: Send + 'static {
    /// Value of `object` in a plain reply.
    const OBJECT: &'static str;
    /// Value of `object` in a stream's chunks.
    const CHUNK_OBJECT: &'static str;
    /// Whether a stream opens each choice with a chunk of its own.
    const OPENS: bool;
    /// What ids of replies begin with.
    const ID_PREFIX: &'static str;
    /// The field that the prompts come from.
    const PROMPT: &'static str;

    /// The opening chunk of a choice.
    fn open(&mut self, index: usize) -> Value;
    /// The log-probabilities of a choice's prompt have arrived: what a stream shows of them.
    fn prompt(&mut self, index: usize, logprobs: Vec<Option<TokenLogprobs>>) -> Option<Value>;
    /// A token: the choice of a stream's chunk, or `None` if there is nothing to show.
    fn token(
        &mut self,
        index: usize,
        token: TokenId,
        text: String,
        logprobs: Option<TokenLogprobs>,
    ) -> Option<Value>;
    /// The closing chunk of a choice; `text` belongs to the reply.
    fn close(&mut self, index: usize, text: String, reason: &'static str) -> Value;
    /// All choices of a plain reply, after every one has been closed.
    fn plain(self) -> Vec<Value>;
}

/// A request as it goes to the engine, and the shape of its reply.
pub(super) type Prepared<S> = Result<(Work, S), ApiError>;

/// What every chunk of a reply repeats.
#[derive(Debug, Clone)]
struct Head {
    id: String,
    created: u64,
    model: String,
    seed: u64,
    include_usage: bool,
}

impl Head {
    /// The head of a reply to `work`, with a fresh id.
    fn new(prefix: &str, work: &Work) -> Head {
        Head {
            id: format!("{prefix}-{:013x}{:013x}", draw_seed(), draw_seed()),
            created: unix_time(),
            model: work.model.name.clone(),
            seed: work.options.sampling.seed,
            include_usage: work.options.include_usage,
        }
    }

    fn object(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.clone().into());
        map.insert("object".into(), object.into());
        map.insert("created".into(), self.created.into());
        map.insert("model".into(), self.model.clone().into());
        map.insert(
            "system_fingerprint".into(),
            concat!("dynalm-", env!("CARGO_PKG_VERSION")).into(),
        );
        map.insert("choices".into(), choices.into());
        map
    }

    fn chunk(&self, object: &str, choice: Value) -> Map<String, Value> {
        let mut chunk = self.object(object, vec![choice]);
        if self.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk
    }
}

/// OpenAI's name of a reason.
fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::Cancelled => "stop",
        FinishReason::Length => "length",
    }
}

fn usage(totals: &Totals) -> Value {
    let usage = &totals.usage;
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}

fn timings(totals: &Totals) -> Value {
    let t = &totals.timings;
    json!({ "queued_s": t.queued_s, "prefill_s": t.prefill_s, "decode_s": t.decode_s })
}

/// Answers a request for generated text: reads the body, lets `prepare` make work and the reply's shape of it, and
/// gives the work to the engine.
///
/// # Errors
/// See [`ApiError`].
pub(super) async fn answer<S: Shape>(
    app: AppState,
    request: Request<Body>,
    prepare: fn(&AppState, &Bytes) -> Prepared<S>,
) -> Result<Response, ApiError> {
    app.ready()?;
    let body = read_json(request, app.config().max_body_bytes).await?;
    let arrival = Instant::now();
    let state = app.clone();
    let (work, shape) = app.blocking(move || prepare(&state, &body)).await?;
    let generation = Generation::start(&app, &work, arrival, S::PROMPT)?;
    let head = Head::new(S::ID_PREFIX, &work);
    if work.options.stream {
        stream(generation, head, shape).await
    } else {
        plain(generation, head, shape).await
    }
}

/// Answers with one JSON object.
///
/// # Errors
/// What made the generation fail.
async fn plain<S: Shape>(mut generation: Generation, head: Head, mut shape: S) -> Result<Response, ApiError> {
    while let Some((index, event)) = generation.next().await? {
        match event {
            Event::PromptLogprobs(logprobs) => {
                shape.prompt(index, logprobs);
            }
            Event::Token {
                token,
                text,
                logprobs,
            } => {
                shape.token(index, token, text, logprobs);
            }
            Event::Finished { reason, text, .. } => {
                shape.close(index, text, reason_name(reason));
            }
            Event::Admitted { .. } | Event::Failed(_) => {}
        }
    }
    let mut reply = head.object(S::OBJECT, shape.plain());
    reply.insert("usage".into(), usage(&generation.totals));
    reply.insert("seed".into(), head.seed.into());
    reply.insert("timings".into(), timings(&generation.totals));
    Ok(json_response(&Value::Object(reply)))
}

/// A JSON reply with status 200.
pub(super) fn json_response(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Answers with a stream of events. What fails before the first event (a full queue, a deadline in the queue) still
/// becomes an error status; after that it becomes an `error` event and the stream ends.
///
/// # Errors
/// What failed before the first event.
async fn stream<S: Shape>(mut generation: Generation, head: Head, shape: S) -> Result<Response, ApiError> {
    // A long wait in the queue must not look like a dead server: then the stream starts without an event.
    let first = match tokio::time::timeout(KEEP_ALIVE, generation.next()).await {
        Ok(first) => first?,
        Err(_) => None,
    };
    let (out, body) = ChannelBody::new(STREAM_DEPTH);
    tokio::spawn(write_stream(generation, head, shape, first, out));
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// The stream's writer: ends early when the reader has gone, which drops (and so cancels) the generation.
async fn write_stream<S: Shape>(
    mut generation: Generation,
    head: Head,
    mut shape: S,
    first: Option<(usize, Event)>,
    out: mpsc::Sender<Bytes>,
) {
    let mut opened = Vec::new();
    let mut next = first;
    loop {
        if let Some((index, event)) = next.take() {
            let mut text = String::new();
            if S::OPENS && !opened.contains(&index) {
                opened.push(index);
                push_data(&mut text, &head.chunk(S::CHUNK_OBJECT, shape.open(index)));
            }
            let (choice, ended) = match event {
                Event::PromptLogprobs(logprobs) => (shape.prompt(index, logprobs), false),
                Event::Token {
                    token,
                    text,
                    logprobs,
                } => (shape.token(index, token, text, logprobs), false),
                Event::Finished { reason, text, .. } => {
                    (Some(shape.close(index, text, reason_name(reason))), true)
                }
                Event::Admitted { .. } | Event::Failed(_) => (None, false),
            };
            if let Some(choice) = choice {
                let mut chunk = head.chunk(S::CHUNK_OBJECT, choice);
                if ended && generation.finished() && !head.include_usage {
                    add_summary(&mut chunk, &head, &generation.totals);
                }
                push_data(&mut text, &chunk);
            }
            if generation.finished() {
                if head.include_usage {
                    let mut chunk = head.object(S::CHUNK_OBJECT, Vec::new());
                    chunk.insert("usage".into(), usage(&generation.totals));
                    add_summary(&mut chunk, &head, &generation.totals);
                    push_data(&mut text, &chunk);
                }
                text.push_str("data: [DONE]\n\n");
            }
            if !text.is_empty() && out.send(text.into()).await.is_err() {
                return;
            }
            if generation.finished() {
                return;
            }
        }
        next = tokio::select! {
            () = out.closed() => return,
            event = generation.next() => match event {
                Ok(event) => event,
                Err(error) => {
                    let text = format!("event: error\ndata: {}\n\n", error.body());
                    // A reader that has gone needs no error.
                    let _ = out.send(text.into()).await;
                    return;
                }
            },
            () = tokio::time::sleep(KEEP_ALIVE) => {
                if out.send(Bytes::from_static(b": keep-alive\n\n")).await.is_err() {
                    return;
                }
                None
            }
        };
    }
}

fn add_summary(chunk: &mut Map<String, Value>, head: &Head, totals: &Totals) {
    chunk.insert("seed".into(), head.seed.into());
    chunk.insert("timings".into(), timings(totals));
}

fn push_data(text: &mut String, chunk: &Map<String, Value>) {
    text.push_str("data: ");
    text.push_str(&serde_json::to_string(chunk).expect("a JSON object with string keys serialises"));
    text.push_str("\n\n");
}
