//! `POST /v1/completions`: raw prompts, as text or as token ids, with `echo` and scoring of the prompt.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::Request;
use axum::response::Response;
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Fields, kind, parse_object};
use super::generation::Work;
use super::logprobs::Legacy;
use super::messages::{decode, encode_prompt};
use super::params::{MAX_TOP_LOGPROBS, Options};
use super::reply::{self, Prepared, Shape};
use super::state::AppState;
use crate::engine::TokenLogprobs;
use crate::sample::params::{SamplingParams, TokenId};
use crate::text::{DetokenizeOptions, Detokenizer, Tokenizer};

/// Most prompts of a request.
const MAX_PROMPTS: usize = 64;
/// Most choices of a request: prompts times `n`.
const MAX_REPLIES: usize = 128;

/// One prompt as it was sent.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Prompt {
    /// Text, to be encoded.
    Text(String),
    /// Token ids, all inside the vocabulary.
    Tokens(Vec<TokenId>),
}

/// A completion request, checked.
#[derive(Debug)]
pub(super) struct CompletionRequest {
    prompts: Vec<Prompt>,
    options: Options,
    echo: bool,
}

impl CompletionRequest {
    /// Reads the fields.
    ///
    /// # Errors
    /// 400 naming the field that is wrong.
    pub(super) fn take(
        mut fields: Fields,
        defaults: &SamplingParams,
        vocab_size: usize,
    ) -> Result<CompletionRequest, ApiError> {
        let prompt = fields
            .take("prompt")
            .ok_or_else(|| ApiError::invalid("prompt", "`prompt` is missing"))?;
        let prompts = read_prompts(prompt, vocab_size)?;
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let mut options = Options::take(&mut fields, defaults, vocab_size, 0)?;
        options.sampling.logprobs = fields
            .integer("logprobs", 0, MAX_TOP_LOGPROBS)?
            .map(|top| top as u32);
        if prompts.len() * options.n > MAX_REPLIES {
            let message = format!(
                "{} prompts times n = {} is more than {MAX_REPLIES} replies",
                prompts.len(),
                options.n
            );
            return Err(ApiError::invalid("n", message));
        }
        fields.finish()?;
        Ok(CompletionRequest {
            prompts,
            options,
            echo,
        })
    }
}

fn read_prompts(value: Value, vocab_size: usize) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a string, an array of strings, an array of token ids, or an array of such arrays";
    let items = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(items) => items,
        other => {
            return Err(ApiError::invalid(
                "prompt",
                format!("`prompt`: found {}, expected {EXPECTED}", kind(&other)),
            ));
        }
    };
    match items.first() {
        None => {
            return Err(ApiError::invalid(
                "prompt",
                format!("`prompt` is an empty array, expected {EXPECTED}"),
            ));
        }
        Some(Value::Number(_)) => return Ok(vec![Prompt::Tokens(read_tokens(items, "prompt", vocab_size)?)]),
        Some(_) => {}
    }
    if items.len() > MAX_PROMPTS {
        let message = format!(
            "`prompt` holds {} prompts; at most {MAX_PROMPTS} are accepted",
            items.len()
        );
        return Err(ApiError::invalid("prompt", message));
    }
    let first = kind(&items[0]);
    let mut prompts = Vec::with_capacity(items.len());
    for (i, item) in items.into_iter().enumerate() {
        let param = format!("prompt[{i}]");
        if kind(&item) != first {
            let message = format!("`{param}`: found {} among others that are {first}", kind(&item));
            return Err(ApiError::invalid(param, message));
        }
        prompts.push(match item {
            Value::String(text) => Prompt::Text(text),
            Value::Array(tokens) => Prompt::Tokens(read_tokens(tokens, &param, vocab_size)?),
            other => {
                let message = format!("`{param}`: found {}; `prompt` is {EXPECTED}", kind(&other));
                return Err(ApiError::invalid(param, message));
            }
        });
    }
    Ok(prompts)
}

/// Token ids of an array that stands at `path`.
///
/// # Errors
/// 400 naming the first element that is no token id.
pub(super) fn read_tokens(
    items: Vec<Value>,
    path: &str,
    vocab_size: usize,
) -> Result<Vec<TokenId>, ApiError> {
    let token = |(i, item): (usize, Value)| {
        let id = item.as_u64().filter(|&id| id < vocab_size as u64);
        id.map(|id| id as TokenId).ok_or_else(|| {
            let param = format!("{path}[{i}]");
            let found = if let Value::Number(number) = &item {
                number.to_string()
            } else {
                kind(&item).to_owned()
            };
            let message = format!(
                "`{param}`: found {found}, expected a token id from 0 to {}",
                vocab_size - 1
            );
            ApiError::invalid(param, message)
        })
    };
    items.into_iter().enumerate().map(token).collect()
}

fn prepare(app: &AppState, body: &Bytes) -> Prepared<CompletionShape> {
    let mut fields = parse_object(body)?;
    let name = fields.string("model")?;
    let model = app.model(name.as_deref())?;
    let CompletionRequest {
        prompts: sent,
        options,
        echo,
    } = CompletionRequest::take(fields, &model.defaults, model.vocab_size)?;
    let mut prompts: Vec<Arc<[TokenId]>> = Vec::new();
    let mut choices = Vec::new();
    for prompt in sent {
        let (tokens, text) = match prompt {
            Prompt::Text(text) => (encode_prompt(&model, &text, true)?, text),
            Prompt::Tokens(tokens) if echo => {
                let text = decode(&model, &tokens, "prompt")?;
                (tokens, text)
            }
            Prompt::Tokens(tokens) => (tokens, String::new()),
        };
        prompts.push(tokens.into());
        choices.extend((0..options.n).map(|_| Choice {
            echo: echo.then(|| text.clone()),
            logprobs: options.sampling.logprobs.map(|_| Legacy::default()),
            ..Choice::default()
        }));
    }
    let shape = CompletionShape {
        tokenizer: Arc::clone(&model.tokenizer),
        prompts: prompts.clone(),
        per_prompt: options.n,
        stream: options.stream,
        choices,
    };
    let work = Work {
        model,
        prompts,
        starts_text: false,
        prompt_logprobs: options.sampling.logprobs.filter(|_| echo),
        options,
    };
    Ok((work, shape))
}

/// Answers a completion.
///
/// # Errors
/// See [`ApiError`].
pub(super) async fn completions(
    State(app): State<AppState>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    reply::answer(app, request, prepare).await
}

#[derive(Debug, Default)]
struct Choice {
    /// The prompt's text, until it has been shown.
    echo: Option<String>,
    text: String,
    /// Characters shown so far.
    shown: usize,
    logprobs: Option<Legacy>,
    reason: &'static str,
}

struct CompletionShape {
    tokenizer: Arc<Tokenizer>,
    prompts: Vec<Arc<[TokenId]>>,
    per_prompt: usize,
    stream: bool,
    choices: Vec<Choice>,
}

fn chunk(index: usize, text: String, logprobs: Option<Legacy>, reason: Option<&str>) -> Value {
    let logprobs = logprobs.map_or(Value::Null, Legacy::finish);
    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason })
}

impl CompletionShape {
    /// The text that has become due to be shown before anything of the reply.
    fn due_echo(&mut self, index: usize) -> String {
        let choice = &mut self.choices[index];
        let echo = choice.echo.take().unwrap_or_default();
        choice.shown += echo.chars().count();
        echo
    }
}

impl Shape for CompletionShape {
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const OPENS: bool = false;
    const ID_PREFIX: &'static str = "cmpl";
    const PROMPT: &'static str = "prompt";

    fn open(&mut self, index: usize) -> Value {
        chunk(index, String::new(), None, None)
    }

    fn prompt(&mut self, index: usize, logprobs: Vec<Option<TokenLogprobs>>) -> Option<Value> {
        let prompt = Arc::clone(&self.prompts[index / self.per_prompt]);
        let mut entries = Legacy::default();
        let mut offset = 0;
        let options = DetokenizeOptions {
            specials: false,
            start: true,
        };
        let mut detokenizer = Detokenizer::new(&self.tokenizer, options);
        for (i, &token) in prompt.iter().enumerate() {
            entries.push(
                &self.tokenizer,
                token,
                logprobs.get(i).and_then(Option::as_ref),
                offset,
            );
            offset += detokenizer.push(token).chars().count();
        }
        let echo = self.due_echo(index);
        let choice = &mut self.choices[index];
        if self.stream {
            return Some(chunk(index, echo, Some(entries), None));
        }
        choice.text.push_str(&echo);
        choice.logprobs = Some(entries);
        None
    }

    fn token(
        &mut self,
        index: usize,
        token: TokenId,
        text: String,
        logprobs: Option<TokenLogprobs>,
    ) -> Option<Value> {
        let mut shown = self.due_echo(index);
        let choice = &mut self.choices[index];
        let offset = choice.shown;
        choice.shown += text.chars().count();
        shown.push_str(&text);
        if !self.stream {
            choice.text.push_str(&shown);
            if let Some(entries) = &mut choice.logprobs {
                entries.push(&self.tokenizer, token, logprobs.as_ref(), offset);
            }
            return None;
        }
        let entries = logprobs.map(|logprobs| {
            let mut entries = Legacy::default();
            entries.push(&self.tokenizer, token, Some(&logprobs), offset);
            entries
        });
        (!shown.is_empty() || entries.is_some()).then(|| chunk(index, shown, entries, None))
    }

    fn close(&mut self, index: usize, text: String, reason: &'static str) -> Value {
        let shown = self.due_echo(index) + &text;
        let choice = &mut self.choices[index];
        choice.reason = reason;
        choice.text.push_str(&shown);
        chunk(index, shown, None, Some(reason))
    }

    fn plain(self) -> Vec<Value> {
        let choices = self.choices.into_iter().enumerate();
        choices
            .map(|(index, choice)| chunk(index, choice.text, choice.logprobs, Some(choice.reason)))
            .collect()
    }
}
