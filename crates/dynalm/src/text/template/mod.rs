//! Chat templates: a model's own Jinja, from messages to a prompt.
//!
//! Rendering equals Python's jinja2 as `transformers` sets it up, byte for byte, and is bounded in instructions, memory,
//! recursion and output. The prompt says which special tokens the template wrote, so that those a user typed stay text.

mod mark;
mod message;
pub mod named;
mod quirks;
mod time;
mod tojson;

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, Value, ValueKind};
use minijinja::{Environment, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;

pub use self::mark::Prompt;
pub use self::message::{Message, ToolCall};
use self::quirks::Quirks;
use super::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Longest template source accepted; the longest published one is 25 KiB.
pub const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Longest render accepted.
pub const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Work of one render: about one a template instruction and one for each 64 bytes made. A turn costs about a hundred.
const FUEL: u64 = 4_000_000;
/// Nesting of loops, macros and conditions.
const RECURSION: usize = 150;
const NAME: &str = "chat";
/// Variables a request may not set.
const RESERVED: &[&str] = &[
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
];

/// A compiled template. Immutable; share it with `Arc`.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    quirks: Quirks,
}

/// What a request says about rendering.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// End with what opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// Leave the last message open, for the model to go on with. Excludes `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Further variables (`chat_template_kwargs`), e.g. `enable_thinking`.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    /// What `strftime_now` takes for now, seconds since 1970 UTC; absent: the clock.
    pub now: Option<i64>,
}

/// A template's `raise_exception`, kept apart from the engine's own errors.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Compiles `source`; `bos` and `eos` are the texts of the vocabulary's tokens, empty if it has none.
    ///
    /// # Errors
    /// [`Error::Template`] with the line if it does not compile, or is longer than [`MAX_SOURCE_BYTES`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(Error::Template(format!(
                "{} bytes long; at most {MAX_SOURCE_BYTES} are accepted",
                source.len()
            )));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| Error::Internal(format!("template syntax: {error}")))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.add_filter("tojson", tojson::tojson);
        // To Python nothing is not iterable.
        environment.add_test("iterable", |value: &Value| {
            matches!(
                value.kind(),
                ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable
            )
        });
        environment.add_function(
            "raise_exception",
            |message: Rest<Value>| -> Result<Value, minijinja::Error> {
                let text = message.first().map(Value::to_string).unwrap_or_default();
                Err(
                    minijinja::Error::new(ErrorKind::InvalidOperation, "raised by the template")
                        .with_source(Raised(text)),
                )
            },
        );
        environment.add_function(
            "strftime_now",
            |state: &minijinja::State, format: String, _: Kwargs| -> Result<String, minijinja::Error> {
                let now = state
                    .lookup("__now")
                    .and_then(|now| i64::try_from(now).ok())
                    .unwrap_or_else(time::now);
                time::strftime(&format, now).map_err(|what| {
                    minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {what}"))
                })
            },
        );
        environment
            .add_template_owned(NAME, plain_generation_tags(source))
            .map_err(|error| describe(&error))?;
        let mut template = ChatTemplate {
            environment,
            source: source.to_owned(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            quirks: Quirks::default(),
        };
        template.quirks = Quirks::of(&template);
        Ok(template)
    }

    /// The template's source, as given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether `word` occurs in the source, e.g. `tools` or `enable_thinking`: what it never names it cannot honour.
    pub fn mentions(&self, word: &str) -> bool {
        self.source.contains(word)
    }

    /// Renders a conversation. `tokenizer` says what a special token is.
    ///
    /// # Errors
    /// [`Error::Template`]: the template raised (the message is its own), failed, exceeded its bounds, or cannot take
    /// tools; [`Error::Request`]: arguments of a tool call are not JSON, or an option cannot be honoured.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        options: &RenderOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Prompt> {
        self.check(messages, tools, options)?;
        let context = Context {
            messages: serde_json::Value::Array(message::normalise(messages, &self.quirks)?),
            tools: tools
                .filter(|tools| !is_empty(tools))
                .cloned()
                .unwrap_or(serde_json::Value::Null),
            kwargs: options.kwargs.clone(),
        };
        let render = |context: &Context| self.run(context, options);
        let mut prompt =
            mark::render(&context, tokenizer, render).map_err(|error| locate(error, messages))?;
        if options.continue_final_message {
            let last = messages
                .last()
                .and_then(|last| last.content.as_deref())
                .unwrap_or("");
            prompt.cut_after(last)?;
        }
        Ok(prompt)
    }

    fn check(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        options: &RenderOptions,
    ) -> Result<()> {
        let refuse = |param: &str, message: String| {
            Err(Error::Request {
                param: Some(param.to_owned()),
                code: None,
                message,
            })
        };
        if let Some(name) = options
            .kwargs
            .keys()
            .find(|name| RESERVED.contains(&name.as_str()))
        {
            return refuse(
                "chat_template_kwargs",
                format!("`{name}` is set by the server and cannot be given"),
            );
        }
        if options.add_generation_prompt && options.continue_final_message {
            return refuse(
                "continue_final_message",
                "`add_generation_prompt` and `continue_final_message` exclude each other".into(),
            );
        }
        if options.continue_final_message
            && messages
                .last()
                .and_then(|m| m.content.as_deref())
                .is_none_or(str::is_empty)
        {
            return refuse(
                "continue_final_message",
                "the last message has no content to continue".into(),
            );
        }
        if let Some(tools) = tools {
            if !tools.is_array() {
                return refuse("tools", "`tools` must be a list".into());
            }
            if !is_empty(tools) && !self.mentions("tools") {
                return Err(Error::Template(
                    "this model's chat template has no place for tools".into(),
                ));
            }
        }
        Ok(())
    }

    /// One bounded render.
    fn run(&self, context: &Context, options: &RenderOptions) -> Result<String> {
        let mut variables = context.kwargs.clone();
        variables.insert("messages".into(), context.messages.clone());
        variables.insert("tools".into(), context.tools.clone());
        variables.insert("documents".into(), serde_json::Value::Null);
        variables.insert(
            "add_generation_prompt".into(),
            options.add_generation_prompt.into(),
        );
        variables.insert("bos_token".into(), self.bos.as_str().into());
        variables.insert("eos_token".into(), self.eos.as_str().into());
        if let Some(now) = options.now {
            variables.insert("__now".into(), now.into());
        }
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| describe(&error))?;
        let mut out = Bounded::default();
        template
            .render_captured_to(Value::from(Serde(&variables)), &mut out)
            .map_err(|error| if out.full { too_long() } else { describe(&error) })?;
        String::from_utf8(out.bytes).map_err(|_| Error::Internal("a template wrote invalid UTF-8".into()))
    }

    /// A render for finding out what the template can take.
    fn probe(&self, messages: &serde_json::Value) -> Option<String> {
        let context = Context {
            messages: messages.clone(),
            tools: serde_json::Value::Null,
            kwargs: serde_json::Map::new(),
        };
        self.run(&context, &RenderOptions::default()).ok()
    }
}

/// The parts of a render that come from a request.
#[derive(Debug, Clone)]
struct Context {
    messages: serde_json::Value,
    tools: serde_json::Value,
    kwargs: serde_json::Map<String, serde_json::Value>,
}

fn is_empty(list: &serde_json::Value) -> bool {
    list.as_array().is_some_and(Vec::is_empty)
}

/// Output that refuses to grow past [`MAX_OUTPUT_BYTES`].
#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + data.len() > MAX_OUTPUT_BYTES {
            self.full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn too_long() -> Error {
    Error::Template(format!(
        "the prompt would be longer than {MAX_OUTPUT_BYTES} bytes"
    ))
}

/// The engine's error as ours: the template's own words if it raised, else the line and what is wrong there.
fn describe(error: &minijinja::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut deepest = error;
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return Error::Template(message.clone());
        }
        if let Some(inner) = current.downcast_ref::<minijinja::Error>() {
            deepest = inner;
        }
        cause = current.source();
    }
    if deepest.kind() == ErrorKind::OutOfFuel {
        return Error::Template(format!(
            "rendering takes more than {FUEL} steps; the conversation is too long or the template loops"
        ));
    }
    let what = deepest.detail().map_or_else(
        || deepest.kind().to_string(),
        |detail| format!("{}: {detail}", deepest.kind()),
    );
    Error::Template(match deepest.line() {
        Some(line) => format!("line {line}: {what}"),
        None => what,
    })
}

/// Names a system message in the middle when the template failed, since that is the usual cause.
fn locate(error: Error, messages: &[Message]) -> Error {
    let leading = messages.iter().take_while(|message| is_system(message)).count();
    match (error, messages.iter().skip(leading).position(is_system)) {
        (Error::Template(what), Some(at)) => Error::Template(format!(
            "{what} (message {} has the role `{}` and does not stand at the beginning)",
            leading + at,
            messages[leading + at].role
        )),
        (error, _) => error,
    }
}

fn is_system(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// `{% generation %}` only marks text for training: as a condition that always holds it keeps its white space rules.
fn plain_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let sign = tag.len() - tag.strip_prefix(['-', '+']).unwrap_or(tag).len();
        let body = &tag[sign..];
        let word = body.trim_start();
        let replaced = [("generation", "if true"), ("endgeneration", "endif")]
            .into_iter()
            .find_map(|(name, by)| {
                let after = word.strip_prefix(name)?;
                let end = after.trim_start();
                (end.starts_with("%}") || end.starts_with("-%}") || end.starts_with("+%}"))
                    .then_some((after, by))
            });
        match replaced {
            Some((after, by)) => {
                out.push_str(&tag[..sign]);
                out.push(' ');
                out.push_str(by);
                rest = after;
            }
            None => rest = tag,
        }
    }
    out.push_str(rest);
    out
}
