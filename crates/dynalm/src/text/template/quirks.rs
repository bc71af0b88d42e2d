//! What one template can and cannot take, found out by rendering small conversations when it is loaded.

use serde_json::json;

use super::ChatTemplate;

/// Answers about one template.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Quirks {
    /// An assistant turn of tool calls alone has no content rather than empty content.
    pub(super) null_content: bool,
    /// Arguments of a tool call must be JSON text, not an object.
    pub(super) text_arguments: bool,
    /// The template gives the role `developer` a meaning of its own.
    pub(super) knows_developer: bool,
}

/// Something no template writes by itself.
const PROBE: &str = "zqprobezq";

impl Quirks {
    pub(super) fn of(template: &ChatTemplate) -> Quirks {
        let render = |content: serde_json::Value, arguments: serde_json::Value| {
            let messages = json!([
                { "role": "user", "content": "a" },
                { "role": "assistant", "content": content, "tool_calls": [
                    { "id": "call00000", "type": "function", "function": { "name": "f", "arguments": arguments } }
                ] },
                { "role": "tool", "content": "b", "tool_call_id": "call00000", "name": "f" },
                { "role": "assistant", "content": "c" },
                { "role": "user", "content": "d" },
            ]);
            template.probe(&messages)
        };
        let object = || json!({ PROBE: 7 });
        let text = || json!(object().to_string());
        let wrote = |result: &Option<String>| result.as_ref().is_some_and(|out| out.contains(PROBE));

        // A template that prints `None`, fails or loses the call cannot take a missing content.
        let clean = |result: &Option<String>| result.as_ref().is_some_and(|out| !out.contains("None"));
        let takes = |content: &serde_json::Value, needs_call: bool| {
            [object(), text()].into_iter().any(|arguments| {
                let result = render(content.clone(), arguments);
                clean(&result) && (wrote(&result) || !needs_call)
            })
        };
        let (null, empty) = (serde_json::Value::Null, "".into());
        // Some templates have no place for calls at all.
        let null_content = takes(&null, true) || (!takes(&empty, true) && takes(&null, false));
        let content = if null_content {
            serde_json::Value::Null
        } else {
            "".into()
        };

        let with_object = render(content.clone(), object());
        let with_text = render(content, text());
        let is_json =
            |result: &Option<String>| result.as_ref().is_some_and(|out| out.contains(r#"{"zqprobezq""#));
        // An object that was printed the Python way, or not at all, where the text came out as JSON.
        let text_arguments = !is_json(&with_object)
            && is_json(&with_text)
            && with_object
                .as_ref()
                .is_none_or(|out| !out.contains(PROBE) || out.contains("{'"));
        let knows_developer = template.mentions("developer");
        Quirks {
            null_content,
            text_arguments,
            knows_developer,
        }
    }
}
