//! The fields that chat and completions share: how tokens are drawn, how many, when to stop, how to reply.
//!
//! A field of the request goes before the model's published default, which goes before the engine's.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, kind};
use crate::sample::params::{SamplingParams, TokenId};

/// Most stop texts of a request.
const MAX_STOPS: usize = 16;
/// Longest stop text, bytes: it bounds how much of a reply may be held back.
const MAX_STOP_BYTES: usize = 512;
/// Most replies to one prompt.
const MAX_CHOICES: i64 = 16;
/// Most alternatives reported per token.
pub(super) const MAX_TOP_LOGPROBS: i64 = 20;
/// Most entries of `logit_bias`.
const MAX_BIAS: usize = 20_000;
/// Longest `timeout`, seconds.
const MAX_TIMEOUT_S: f64 = 86_400.0;
/// Drawn seeds stay below 2^53, so that a client whose numbers are floats reads back the exact value.
const DRAWN_SEED_MASK: u64 = (1 << 53) - 1;

/// What a request says besides its prompt.
#[derive(Debug, Clone)]
pub(super) struct Options {
    /// How tokens are drawn; `logprobs` is filled by the route, whose shapes differ.
    pub(super) sampling: SamplingParams,
    /// Most tokens to generate.
    pub(super) max_tokens: Option<usize>,
    /// Texts that end the reply.
    pub(super) stop: Vec<String>,
    /// Replies per prompt.
    pub(super) n: usize,
    /// Reply as a stream of events.
    pub(super) stream: bool,
    /// End the stream with a chunk that holds the usage.
    pub(super) include_usage: bool,
    /// Larger goes first.
    pub(super) priority: i32,
    /// How long the request may take.
    pub(super) time_limit: Option<Duration>,
    /// Whether cached prefixes may be used and kept.
    pub(super) cache_prompt: bool,
    /// Go on past the end of the turn.
    pub(super) ignore_eos: bool,
}

impl Options {
    /// Takes the shared fields. `defaults` are the model's; `min_tokens` is the least `max_tokens` the route allows.
    ///
    /// # Errors
    /// 400 naming the field that is wrong.
    pub(super) fn take(
        fields: &mut Fields,
        defaults: &SamplingParams,
        vocab_size: usize,
        min_tokens: i64,
    ) -> Result<Options, ApiError> {
        take_no_ops(fields)?;
        let older = fields.integer("max_tokens", min_tokens, i64::from(u32::MAX))?;
        let newer = fields.integer("max_completion_tokens", min_tokens, i64::from(u32::MAX))?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = match fields.object("stream_options")? {
            None => false,
            Some(_) if !stream => {
                return Err(ApiError::invalid(
                    "stream_options",
                    "`stream_options` needs `\"stream\": true`",
                ));
            }
            Some(mut options) => {
                let usage = options.boolean("include_usage")?.unwrap_or(false);
                options.only("include_obfuscation", "false", |value| {
                    value == &Value::Bool(false)
                })?;
                options.finish()?;
                usage
            }
        };
        let timeout = fields.number("timeout", 0.001, MAX_TIMEOUT_S)?;
        Ok(Options {
            sampling: take_sampling(fields, defaults, vocab_size)?,
            max_tokens: newer.or(older).map(|tokens| tokens as usize),
            stop: take_stop(fields)?,
            n: fields.integer("n", 1, MAX_CHOICES)?.unwrap_or(1) as usize,
            stream,
            include_usage,
            priority: fields.integer("priority", -1_000_000, 1_000_000)?.unwrap_or(0) as i32,
            time_limit: timeout.map(Duration::from_secs_f64),
            cache_prompt: fields.boolean("cache_prompt")?.unwrap_or(true),
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        })
    }
}

/// Fields of OpenAI's API that label a request or ask for what this server does anyway.
fn take_no_ops(fields: &mut Fields) -> Result<(), ApiError> {
    for label in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.string(label)?;
    }
    fields.object("metadata")?;
    fields.only("store", "false", |value| value == &Value::Bool(false))?;
    fields.only("service_tier", "\"auto\" or \"default\"", |value| {
        value == "auto" || value == "default"
    })?;
    fields.only("best_of", "1", |value| value == &Value::from(1))?;
    fields.only("response_format", "{\"type\": \"text\"}", |value| {
        value
            .as_object()
            .is_some_and(|format| format.len() == 1 && format.get("type") == Some(&"text".into()))
    })
}

fn take_sampling(
    fields: &mut Fields,
    defaults: &SamplingParams,
    vocab_size: usize,
) -> Result<SamplingParams, ApiError> {
    let mut params = defaults.clone();
    let mut float = |name: &str, low: f64, high: f64, into: &mut f32| -> Result<(), ApiError> {
        if let Some(value) = fields.number(name, low, high)? {
            *into = value as f32;
        }
        Ok(())
    };
    float("temperature", 0.0, 100.0, &mut params.temperature)?;
    float("top_p", 0.0, 1.0, &mut params.top_p)?;
    float("min_p", 0.0, 1.0, &mut params.min_p)?;
    float("typical_p", 0.001, 1.0, &mut params.typical_p)?;
    float("presence_penalty", -2.0, 2.0, &mut params.presence_penalty)?;
    float("frequency_penalty", -2.0, 2.0, &mut params.frequency_penalty)?;
    // Both names are in use elsewhere.
    let named = fields.number("repetition_penalty", 0.01, 10.0)?;
    let alias = fields.number("repeat_penalty", 0.01, 10.0)?;
    if let (Some(named), Some(alias)) = (named, alias)
        && named != alias
    {
        let message = format!(
            "`repeat_penalty` is {alias} and `repetition_penalty` is {named}: they are two names of one field; give one"
        );
        return Err(ApiError::invalid("repeat_penalty", message));
    }
    if let Some(value) = named.or(alias) {
        params.repetition_penalty = value as f32;
    }
    if let Some(k) = fields.integer("top_k", -1, i64::from(i32::MAX))? {
        // −1 and everything from the vocabulary's size up mean what 0 means: all tokens.
        params.top_k = if k < 0 || k as u64 >= vocab_size as u64 {
            0
        } else {
            k as u32
        };
    }
    if let Some(window) = fields.integer("repetition_window", 0, i64::from(i32::MAX))? {
        params.repetition_window = window as u32;
    }
    params.logit_bias = take_bias(fields, vocab_size)?;
    params.seed = match fields.take("seed") {
        None => draw_seed(),
        Some(value) => value.as_u64().ok_or_else(|| {
            let message = format!(
                "`seed`: found {}, expected an integer from 0 to {}",
                brief(&value),
                u64::MAX
            );
            ApiError::invalid("seed", message)
        })?,
    };
    params.logprobs = None;
    Ok(params)
}

/// A value as it may stand in a message.
fn brief(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind(other).to_owned(),
    }
}

/// A seed nobody can predict: the hasher's keys come from the operating system.
pub(super) fn draw_seed() -> u64 {
    RandomState::new().build_hasher().finish() & DRAWN_SEED_MASK
}

fn take_bias(fields: &mut Fields, vocab_size: usize) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(value) = fields.take("logit_bias") else {
        return Ok(Vec::new());
    };
    let Value::Object(map) = value else {
        let message = format!(
            "`logit_bias`: found {}, expected an object from token id to bias",
            kind(&value)
        );
        return Err(ApiError::invalid("logit_bias", message));
    };
    if map.len() > MAX_BIAS {
        let message = format!(
            "`logit_bias` has {} entries; at most {MAX_BIAS} are accepted",
            map.len()
        );
        return Err(ApiError::invalid("logit_bias", message));
    }
    let mut bias = Vec::with_capacity(map.len());
    for (key, value) in map {
        let short: String = key.chars().take(32).collect();
        let param = format!("logit_bias.{short}");
        let token = key
            .parse::<TokenId>()
            .ok()
            .filter(|&token| (token as usize) < vocab_size)
            .ok_or_else(|| {
                let message = format!(
                    "`logit_bias`: found key `{short}`, expected a token id from 0 to {}",
                    vocab_size - 1
                );
                ApiError::invalid(&*param, message)
            })?;
        let amount = value
            .as_f64()
            .filter(|amount| (-100.0..=100.0).contains(amount))
            .ok_or_else(|| {
                let message = format!(
                    "`{param}`: found {}, expected a number from -100 to 100",
                    brief(&value)
                );
                ApiError::invalid(&*param, message)
            })?;
        bias.push((token, amount as f32));
    }
    Ok(bias)
}

fn take_stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let expected = format!("a string or an array of at most {MAX_STOPS} strings");
    let values = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(values)) => values,
        Some(single @ Value::String(_)) => vec![single],
        Some(other) => {
            let message = format!("`stop`: found {}, expected {expected}", kind(&other));
            return Err(ApiError::invalid("stop", message));
        }
    };
    if values.len() > MAX_STOPS {
        let message = format!("`stop`: found {} texts, expected {expected}", values.len());
        return Err(ApiError::invalid("stop", message));
    }
    let mut stops = Vec::with_capacity(values.len());
    for (i, value) in values.into_iter().enumerate() {
        let param = format!("stop[{i}]");
        match value {
            Value::String(text) if text.is_empty() => {
                return Err(ApiError::invalid(
                    &*param,
                    format!("`{param}` is empty; leave it out"),
                ));
            }
            Value::String(text) if text.len() > MAX_STOP_BYTES => {
                let message = format!(
                    "`{param}` has {} bytes; at most {MAX_STOP_BYTES} are accepted",
                    text.len()
                );
                return Err(ApiError::invalid(param, message));
            }
            Value::String(text) => stops.push(text),
            other => {
                let message = format!("`{param}`: found {}, expected a string", kind(&other));
                return Err(ApiError::invalid(param, message));
            }
        }
    }
    Ok(stops)
}
