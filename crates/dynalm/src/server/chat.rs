//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::Request;
use axum::response::Response;
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Fields, parse_object};
use super::generation::Work;
use super::logprobs;
use super::messages::{self, Conversation};
use super::params::{MAX_TOP_LOGPROBS, Options};
use super::reply::{self, Prepared, Shape};
use super::state::AppState;
use crate::engine::TokenLogprobs;
use crate::sample::params::{SamplingParams, TokenId};
use crate::text::Tokenizer;

/// A chat request, checked as far as that is possible without a model's template.
#[derive(Debug)]
pub(super) struct ChatRequest {
    conversation: Conversation,
    options: Options,
}

impl ChatRequest {
    /// Reads the fields.
    ///
    /// # Errors
    /// 400 naming the field that is wrong.
    pub(super) fn take(
        mut fields: Fields,
        defaults: &SamplingParams,
        vocab_size: usize,
    ) -> Result<ChatRequest, ApiError> {
        fields.only("tool_choice", "\"none\"", |value| value == "none")?;
        fields.only("tools", "an empty array", |value| {
            value.as_array().is_some_and(Vec::is_empty)
        })?;
        let conversation = messages::take(&mut fields)?;
        let mut options = Options::take(&mut fields, defaults, vocab_size, 1)?;
        let wanted = fields.boolean("logprobs")?.unwrap_or(false);
        let top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
        if top.is_some() && !wanted {
            return Err(ApiError::invalid(
                "top_logprobs",
                "`top_logprobs` needs `\"logprobs\": true`",
            ));
        }
        options.sampling.logprobs = wanted.then(|| top.unwrap_or(0) as u32);
        fields.finish()?;
        Ok(ChatRequest {
            conversation,
            options,
        })
    }
}

fn prepare(app: &AppState, body: &Bytes) -> Prepared<ChatShape> {
    let mut fields = parse_object(body)?;
    let name = fields.string("model")?;
    let model = app.model(name.as_deref())?;
    let ChatRequest {
        conversation,
        options,
    } = ChatRequest::take(fields, &model.defaults, model.vocab_size)?;
    let prompt = messages::encode(&model, &conversation)?;
    let choice = || Choice {
        logprobs: options.sampling.logprobs.map(|_| Vec::new()),
        ..Choice::default()
    };
    let shape = ChatShape {
        tokenizer: Arc::clone(&model.tokenizer),
        stream: options.stream,
        choices: (0..options.n).map(|_| choice()).collect(),
    };
    let work = Work {
        model,
        prompts: vec![prompt.into()],
        starts_text: !conversation.continues_text(),
        prompt_logprobs: None,
        options,
    };
    Ok((work, shape))
}

/// Answers a chat.
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
    text: String,
    logprobs: Option<Vec<Value>>,
    reason: &'static str,
}

struct ChatShape {
    tokenizer: Arc<Tokenizer>,
    stream: bool,
    choices: Vec<Choice>,
}

fn delta(index: usize, delta: Value, logprobs: Value, reason: Option<&str>) -> Value {
    json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason })
}

impl Shape for ChatShape {
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const OPENS: bool = true;
    const ID_PREFIX: &'static str = "chatcmpl";
    const PROMPT: &'static str = "messages";

    fn open(&mut self, index: usize) -> Value {
        delta(
            index,
            json!({ "role": "assistant", "content": "" }),
            Value::Null,
            None,
        )
    }

    fn prompt(&mut self, _index: usize, _logprobs: Vec<Option<TokenLogprobs>>) -> Option<Value> {
        None
    }

    fn token(
        &mut self,
        index: usize,
        _token: TokenId,
        text: String,
        logprobs: Option<TokenLogprobs>,
    ) -> Option<Value> {
        let choice = &mut self.choices[index];
        let entry = logprobs.map(|logprobs| logprobs::chat_entry(&self.tokenizer, &logprobs));
        if !self.stream {
            choice.text.push_str(&text);
            if let Some(entries) = &mut choice.logprobs {
                entries.extend(entry);
            }
            return None;
        }
        if text.is_empty() && entry.is_none() {
            return None;
        }
        let logprobs = entry.map_or(Value::Null, |entry| logprobs::chat(vec![entry]));
        Some(delta(index, json!({ "content": text }), logprobs, None))
    }

    fn close(&mut self, index: usize, text: String, reason: &'static str) -> Value {
        let choice = &mut self.choices[index];
        choice.reason = reason;
        let content = if text.is_empty() {
            json!({})
        } else {
            json!({ "content": text })
        };
        choice.text.push_str(&text);
        delta(index, content, Value::Null, Some(reason))
    }

    fn plain(self) -> Vec<Value> {
        let choices = self.choices.into_iter().enumerate();
        choices
            .map(|(index, choice)| {
                json!({
                    "index": index,
                    "message": { "role": "assistant", "content": choice.text, "refusal": null },
                    "logprobs": choice.logprobs.map_or(Value::Null, logprobs::chat),
                    "finish_reason": choice.reason,
                })
            })
            .collect()
    }
}
