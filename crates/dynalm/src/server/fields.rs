//! Strict reading of a request's JSON object: every field is taken by name with its type and range; what is left over
//! at the end is refused by name. `null` is the same as absent everywhere.

use serde_json::{Map, Value};

use super::error::ApiError;

/// Fields of OpenAI's API (and of other servers) that are known but not supported here. They get a clearer message
/// than a misspelt field.
const KNOWN_UNSUPPORTED: &[&str] = &[
    "audio",
    "best_of",
    "echo",
    "function_call",
    "functions",
    "grammar",
    "guided_json",
    "guided_regex",
    "include_reasoning",
    "json_schema",
    "logit_processors",
    "modalities",
    "parallel_tool_calls",
    "prediction",
    "prompt_logprobs",
    "reasoning",
    "reasoning_effort",
    "response_format",
    "stop_token_ids",
    "suffix",
    "tool_choice",
    "tools",
    "verbosity",
    "web_search_options",
];

/// Most fields an object may have; a body of millions of unknown keys is refused before it is looked at.
const MAX_FIELDS: usize = 256;

/// Checks a request body's type and decodes it.
///
/// # Errors
/// 400 if the text is not JSON, is nested too deeply, or is not an object.
pub(super) fn parse_object(body: &[u8]) -> Result<Fields, ApiError> {
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::malformed(format!("the body is not valid JSON: {error}")))?;
    Fields::new(value, String::new())
}

/// The fields of one JSON object that have not been taken yet.
#[derive(Debug)]
pub(super) struct Fields {
    map: Map<String, Value>,
    /// Where the object stands in the body: empty, or `messages[3]`.
    path: String,
}

/// A JSON value's kind, for messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn wrong_kind(param: &str, found: &Value, expected: &str) -> ApiError {
    ApiError::invalid(
        param,
        format!("`{param}`: found {}, expected {expected}", kind(found)),
    )
}

impl Fields {
    /// The fields of `value`, which stands at `path`.
    ///
    /// # Errors
    /// 400 if it is not an object.
    pub(super) fn new(value: Value, path: String) -> Result<Fields, ApiError> {
        match value {
            Value::Object(map) if map.len() <= MAX_FIELDS => Ok(Fields { map, path }),
            Value::Object(map) => Err(ApiError::malformed(format!(
                "an object with {} fields; at most {MAX_FIELDS} are accepted",
                map.len()
            ))),
            other if path.is_empty() => Err(ApiError::malformed(format!(
                "the body is {}, expected a JSON object",
                kind(&other)
            ))),
            other => Err(wrong_kind(&path, &other, "an object")),
        }
    }

    /// The full name of a field.
    pub(super) fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// Takes a field of any type; `None` if absent or null.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a string.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_kind(&self.path(name), &other, "a string")),
        }
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong_kind(&self.path(name), &other, "true or false")),
        }
    }

    /// Takes an integer in `low..=high`. A number such as `3.0` counts as an integer.
    ///
    /// # Errors
    /// 400 if it is something else or out of range.
    pub(super) fn integer(&mut self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let param = self.path(name);
        let expected = format!("an integer from {low} to {high}");
        let Value::Number(number) = &value else {
            return Err(wrong_kind(&param, &value, &expected));
        };
        let integer = number.as_i64().or_else(|| {
            let float = number.as_f64()?;
            // 2^53: beyond it a float no longer says which integer is meant.
            (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0).then_some(float as i64)
        });
        match integer {
            Some(integer) if (low..=high).contains(&integer) => Ok(Some(integer)),
            _ => Err(ApiError::invalid(
                &*param,
                format!("`{param}`: found {number}, expected {expected}"),
            )),
        }
    }

    /// Takes a number in `low..=high`.
    ///
    /// # Errors
    /// 400 if it is something else or out of range.
    pub(super) fn number(&mut self, name: &str, low: f64, high: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let param = self.path(name);
        let expected = format!("a number from {low} to {high}");
        let Value::Number(number) = &value else {
            return Err(wrong_kind(&param, &value, &expected));
        };
        match number.as_f64() {
            Some(float) if float >= low && float <= high => Ok(Some(float)),
            _ => Err(ApiError::invalid(
                &*param,
                format!("`{param}`: found {number}, expected {expected}"),
            )),
        }
    }

    /// Takes an object.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        let path = self.path(name);
        self.take(name).map(|value| Fields::new(value, path)).transpose()
    }

    /// Takes an array.
    ///
    /// # Errors
    /// 400 if it is something else.
    pub(super) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong_kind(&self.path(name), &other, "an array")),
        }
    }

    /// Everything left, as it stands.
    pub(super) fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// Accepts a field only if `harmless` says its value changes nothing.
    ///
    /// # Errors
    /// 400 naming the field and `expected` otherwise.
    pub(super) fn only(
        &mut self,
        name: &str,
        expected: &str,
        harmless: fn(&Value) -> bool,
    ) -> Result<(), ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(());
        };
        if harmless(&value) {
            return Ok(());
        }
        let param = self.path(name);
        let message = format!("`{param}` is not supported here, except as {expected}; leave it out");
        Err(ApiError::invalid(param, message).with_code("unsupported_parameter"))
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// 400 naming the first field nobody took.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        let Some((name, _)) = self.map.iter().find(|(_, value)| !value.is_null()) else {
            // A null means the default: also for a field that has only its default. A name nobody knows is a mistake.
            return match self
                .map
                .keys()
                .find(|name| !KNOWN_UNSUPPORTED.contains(&name.as_str()))
            {
                Some(name) => Err(self.refusal(name)),
                None => Ok(()),
            };
        };
        Err(self.refusal(name))
    }

    fn refusal(&self, name: &str) -> ApiError {
        // A hostile name is not echoed at full length.
        let short: String = name.chars().take(64).collect();
        let param = self.path(&short);
        if KNOWN_UNSUPPORTED.contains(&name) {
            let message = format!("`{param}` is not supported by this server; leave it out");
            return ApiError::invalid(param, message).with_code("unsupported_parameter");
        }
        ApiError::invalid(&*param, format!("unknown field `{param}`")).with_code("unknown_parameter")
    }
}
