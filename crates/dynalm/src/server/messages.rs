//! The messages of a chat: reading them, and turning them into a prompt.
//!
//! Reading is lenient where OpenAI's API is: content may be a string, null, absent, or an array of text parts (joined
//! by a line break). What templates disagree about (`developer`, several system messages, calls without an id) is
//! settled in [`crate::text::template`].

use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, kind};
use super::state::ServedModel;
use crate::sample::params::TokenId;
use crate::text::{AddSpecial, DetokenizeOptions, Message, Piece, Prompt, RenderOptions, ToolCall};

/// Most messages of a request.
const MAX_MESSAGES: usize = 16_384;

/// A chat, checked and in canonical form.
#[derive(Debug, Clone)]
pub(super) struct Conversation {
    /// The messages, in order.
    pub(super) messages: Vec<Message>,
    /// Variables for the template.
    pub(super) kwargs: Map<String, Value>,
}

/// Takes `messages` and `chat_template_kwargs`.
///
/// # Errors
/// 400 naming the message and field that is wrong.
pub(super) fn take(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let Some(items) = fields.array("messages")? else {
        return Err(ApiError::invalid("messages", "`messages` is missing"));
    };
    if items.is_empty() || items.len() > MAX_MESSAGES {
        let message = format!(
            "`messages` has {} entries, expected 1 to {MAX_MESSAGES}",
            items.len()
        );
        return Err(ApiError::invalid("messages", message));
    }
    let mut messages = Vec::with_capacity(items.len());
    for (i, item) in items.into_iter().enumerate() {
        messages.push(read_message(Fields::new(item, format!("messages[{i}]"))?)?);
    }
    let kwargs = fields
        .object("chat_template_kwargs")?
        .map(Fields::into_map)
        .unwrap_or_default();
    Ok(Conversation { messages, kwargs })
}

/// Encodes a text that the client wrote as the whole prompt: names of special tokens in it stand for those tokens.
///
/// # Errors
/// 400 if the vocabulary cannot express it.
pub(super) fn encode_prompt(
    model: &ServedModel,
    text: &str,
    special: bool,
) -> Result<Vec<TokenId>, ApiError> {
    let add = if special {
        model.tokenizer.default_special()
    } else {
        AddSpecial::default()
    };
    let tokens = model.tokenizer.encode_with(&[Piece::Template(text)], add);
    tokens.map_err(|error| ApiError::invalid("prompt", error.to_string()))
}

/// The text of tokens that the client sent.
///
/// # Errors
/// 400 if one is outside the vocabulary.
pub(super) fn decode(model: &ServedModel, tokens: &[TokenId], param: &str) -> Result<String, ApiError> {
    let options = DetokenizeOptions {
        specials: true,
        start: true,
    };
    model
        .tokenizer
        .decode(tokens, options)
        .map_err(|error| ApiError::invalid(param, error.to_string()))
}

fn missing(param: String) -> ApiError {
    let message = format!("`{param}` is missing");
    ApiError::invalid(param, message)
}

fn read_message(mut fields: Fields) -> Result<Message, ApiError> {
    let role_path = fields.path("role");
    let role = fields.string("role")?.ok_or_else(|| missing(role_path.clone()))?;
    if !matches!(
        role.as_str(),
        "system" | "developer" | "user" | "assistant" | "tool"
    ) {
        let short: String = role.chars().take(32).collect();
        let message =
            format!("`{role_path}`: found `{short}`, expected system, developer, user, assistant or tool");
        return Err(ApiError::invalid(role_path, message));
    }
    let mut message = Message {
        content: read_content(&mut fields)?,
        name: fields.string("name")?,
        ..Message::default()
    };
    if role == "assistant" {
        message.reasoning_content = fields.string("reasoning_content")?;
        for field in ["refusal", "audio", "function_call"] {
            fields.only(field, "null", Value::is_null)?;
        }
        fields.only("annotations", "an empty array", |value| {
            value.as_array().is_some_and(Vec::is_empty)
        })?;
        let path = fields.path("tool_calls");
        for (i, call) in fields
            .array("tool_calls")?
            .unwrap_or_default()
            .into_iter()
            .enumerate()
        {
            message
                .tool_calls
                .push(read_tool_call(Fields::new(call, format!("{path}[{i}]"))?)?);
        }
    }
    if role == "tool" {
        message.tool_call_id = fields.string("tool_call_id")?;
    }
    if message.content.is_none() && message.tool_calls.is_empty() {
        let param = fields.path("content");
        return Err(ApiError::invalid(
            &*param,
            format!("`{param}` is missing: this {role} message needs text"),
        ));
    }
    message.role = role;
    fields.finish()?;
    Ok(message)
}

/// The text of a message; `None` if it has none.
fn read_content(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let param = fields.path("content");
    let parts = match fields.take("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            let message = format!(
                "`{param}`: found {}, expected a string or an array of text parts",
                kind(&other)
            );
            return Err(ApiError::invalid(param, message));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let mut part = Fields::new(part, format!("{param}[{i}]"))?;
        let type_path = part.path("type");
        let found = part.string("type")?.ok_or_else(|| missing(type_path))?;
        if found != "text" {
            let short: String = found.chars().take(32).collect();
            let message =
                format!("`{param}[{i}]`: found a part of type `{short}`; this model reads `text` parts only");
            return Err(ApiError::invalid(format!("{param}[{i}]"), message).with_code("unsupported_content"));
        }
        let text_path = part.path("text");
        let text = part.string("text")?.ok_or_else(|| missing(text_path))?;
        part.only("cache_control", "null", Value::is_null)?;
        part.finish()?;
        texts.push(text);
    }
    Ok((!texts.is_empty()).then(|| texts.join("\n")))
}

/// A tool call of the history.
fn read_tool_call(mut fields: Fields) -> Result<ToolCall, ApiError> {
    let id = fields.string("id")?;
    fields.only("type", "\"function\"", |value| value == "function")?;
    // Clients that assembled a stream's deltas send the delta's index back.
    fields.integer("index", 0, i64::from(u32::MAX))?;
    let path = fields.path("function");
    let mut function = fields.object("function")?.ok_or_else(|| missing(path))?;
    let name_path = function.path("name");
    let name = function.string("name")?.ok_or_else(|| missing(name_path))?;
    let arguments_path = function.path("arguments");
    let arguments = match function.take("arguments") {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(other) => {
            let message = format!(
                "`{arguments_path}`: found {}, expected a JSON text or an object",
                kind(&other)
            );
            return Err(ApiError::invalid(arguments_path, message));
        }
    };
    function.finish()?;
    fields.finish()?;
    Ok(ToolCall { id, name, arguments })
}

/// Renders a conversation with the model's template. A trailing assistant message is left open, to be continued.
fn render(model: &ServedModel, conversation: &Conversation) -> Result<Prompt, ApiError> {
    let Some(template) = &model.template else {
        let message = format!("model `{}` has no chat template; use /v1/completions", model.name);
        return Err(ApiError::invalid("messages", message));
    };
    let mut messages = conversation.messages.as_slice();
    let mut continues = false;
    if let Some((last, before)) = messages.split_last()
        && last.role == "assistant"
        && last.tool_calls.is_empty()
    {
        // Continuing an empty message is opening the turn.
        match last.content.as_deref() {
            None | Some("") if !before.is_empty() => messages = before,
            _ => continues = true,
        }
    }
    let options = RenderOptions {
        add_generation_prompt: !continues,
        continue_final_message: continues,
        kwargs: conversation.kwargs.clone(),
        now: None,
    };
    Ok(template.render(messages, None, &options, &model.tokenizer)?)
}

/// The tokens of a conversation.
///
/// # Errors
/// 400 with the template's own message, or if the vocabulary cannot express the text.
pub(super) fn encode(model: &ServedModel, conversation: &Conversation) -> Result<Vec<TokenId>, ApiError> {
    let prompt = render(model, conversation)?;
    let tokens = model.tokenizer.encode(&prompt.pieces());
    tokens.map_err(|error| ApiError::invalid("messages", error.to_string()))
}

/// The text of a conversation as the model reads it.
///
/// # Errors
/// 400 with the template's own message.
pub(super) fn render_text(model: &ServedModel, conversation: &Conversation) -> Result<String, ApiError> {
    Ok(render(model, conversation)?.text().to_owned())
}

impl Conversation {
    /// Whether the reply goes on with a text that has begun.
    pub(super) fn continues_text(&self) -> bool {
        self.messages.last().is_some_and(|last| {
            last.role == "assistant" && last.content.as_deref().is_some_and(|content| !content.is_empty())
        })
    }
}
