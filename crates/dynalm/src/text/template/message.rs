//! What a conversation is to a template, and how it is brought into the form a template expects.
//!
//! Templates were written against Python objects of one library and disagree on details; this file owns the rules that
//! make one conversation fit all of them.

use serde_json::{Map, Value, json};

use super::quirks::Quirks;
use crate::{Error, Result};

/// One message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant`, `tool`, or what the template knows besides.
    pub role: String,
    /// The text; absent and empty mean the same.
    pub content: Option<String>,
    /// Name of the participant or tool.
    pub name: Option<String>,
    /// Calls the assistant made.
    pub tool_calls: Vec<ToolCall>,
    /// Which call a `tool` message answers. Absent: the oldest one not answered.
    pub tool_call_id: Option<String>,
    /// The assistant's reasoning, for templates that show it again.
    pub reasoning_content: Option<String>,
}

/// One call of a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the call; absent: one is made, the same for the same conversation.
    pub id: Option<String>,
    /// Name of the function.
    pub name: String,
    /// The arguments, JSON text as OpenAI has it. Empty is `{}`.
    pub arguments: String,
}

impl Message {
    /// A message with a role and text.
    pub fn new(role: &str, content: &str) -> Self {
        Message {
            role: role.to_owned(),
            content: Some(content.to_owned()),
            ..Message::default()
        }
    }
}

/// The messages as the template's `messages`.
///
/// * `developer` is `system` unless the template knows `developer`.
/// * System messages that open the conversation become one, joined by a blank line; later ones are left to the template.
/// * No content is empty content; with tool calls it is what the template handles ([`Quirks::null_content`]).
/// * Calls without an id are named `call00000`, `call00001`, …; a tool message without one answers the oldest open call.
/// * Arguments are an object, or JSON text where the template needs that ([`Quirks::text_arguments`]).
pub(super) fn normalise(messages: &[Message], quirks: &Quirks) -> Result<Vec<Value>> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut made = 0;
    let mut open: std::collections::VecDeque<String> = std::collections::VecDeque::new();
    for (at, message) in messages.iter().enumerate() {
        let role = if message.role == "developer" && !quirks.knows_developer {
            "system"
        } else {
            message.role.as_str()
        };
        let content = message.content.as_deref().unwrap_or("");
        if role == "system"
            && let [Value::Object(first)] = out.as_mut_slice()
            && first["role"] == "system"
        {
            let joined = match first["content"].as_str().unwrap_or("") {
                "" => content.to_owned(),
                before if content.is_empty() => before.to_owned(),
                before => format!("{before}\n\n{content}"),
            };
            first["content"] = joined.into();
            continue;
        }
        let mut map = Map::new();
        map.insert("role".into(), role.into());
        let is_null = content.is_empty() && !message.tool_calls.is_empty() && quirks.null_content;
        map.insert(
            "content".into(),
            if is_null { Value::Null } else { content.into() },
        );
        if let Some(name) = &message.name {
            map.insert("name".into(), name.as_str().into());
        }
        if let Some(reasoning) = message
            .reasoning_content
            .as_deref()
            .filter(|text| !text.is_empty())
        {
            map.insert("reasoning_content".into(), reasoning.into());
        }
        if !message.tool_calls.is_empty() {
            open.clear();
            let mut calls = Vec::with_capacity(message.tool_calls.len());
            for call in &message.tool_calls {
                let id = call.id.clone().unwrap_or_else(|| {
                    made += 1;
                    format!("call{:05}", made - 1)
                });
                open.push_back(id.clone());
                let arguments = arguments(at, call, quirks.text_arguments)?;
                calls.push(json!({
                    "id": id, "type": "function",
                    "function": { "name": call.name, "arguments": arguments },
                }));
            }
            map.insert("tool_calls".into(), calls.into());
        }
        if role == "tool" {
            let id = message.tool_call_id.clone().or_else(|| open.front().cloned());
            if let Some(id) = id {
                open.retain(|other| *other != id);
                map.insert("tool_call_id".into(), id.into());
            }
        } else if let Some(id) = &message.tool_call_id {
            map.insert("tool_call_id".into(), id.as_str().into());
        }
        out.push(Value::Object(map));
    }
    Ok(out)
}

fn arguments(at: usize, call: &ToolCall, as_text: bool) -> Result<Value> {
    let text = if call.arguments.trim().is_empty() {
        "{}"
    } else {
        call.arguments.as_str()
    };
    if as_text {
        return Ok(text.into());
    }
    serde_json::from_str(text).map_err(|error| Error::Request {
        param: Some(format!("messages[{at}].tool_calls")),
        code: None,
        message: format!(
            "the arguments of the call of `{}` in message {at} are not JSON: {error}",
            call.name
        ),
    })
}
