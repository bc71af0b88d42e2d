//! `dynalm tokenize`, `detokenize`, `template`: what the model's text handling does, without loading weights.

use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;

use super::{Usage, pull};
use crate::format::gguf::Gguf;
use crate::load;
use crate::settings::Settings;
use crate::text::{AddSpecial, DetokenizeOptions, Message, Piece, RenderOptions, TokenId, ToolCall};

/// Arguments of `tokenize`.
#[derive(Debug, Args)]
pub(super) struct TokenizeArgs {
    /// File, folder or name of a model
    #[arg(value_name = "MODEL")]
    name: String,
    /// The text; standard input without it
    #[arg(value_name = "TEXT")]
    text: Option<String>,
    /// File with the text
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    file: Option<PathBuf>,
    /// Read special tokens such as <|im_start|> in the text as what they stand for
    #[arg(long)]
    special: bool,
    /// Leave out the tokens that the model adds at the beginning or end
    #[arg(long)]
    no_add: bool,
    /// Print the ids only, as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `detokenize`.
#[derive(Debug, Args)]
pub(super) struct DetokenizeArgs {
    /// File, folder or name of a model
    #[arg(value_name = "MODEL")]
    name: String,
    /// Token ids; also as one JSON array on standard input
    #[arg(value_name = "ID")]
    ids: Vec<TokenId>,
}

/// Arguments of `template`.
#[derive(Debug, Args)]
pub(super) struct TemplateArgs {
    /// File, folder or name of a model
    #[arg(value_name = "MODEL")]
    name: String,
    /// A user message; without it, JSON messages are read from standard input
    #[arg(value_name = "TEXT")]
    text: Option<String>,
    /// System message before it
    #[arg(long, value_name = "TEXT", requires = "text")]
    system: Option<String>,
    /// Do not ask for the assistant's turn
    #[arg(long)]
    no_generation_prompt: bool,
    /// Chat template in place of the model's: a file or a built-in name
    #[arg(long, value_name = "FILE|NAME")]
    chat_template: Option<String>,
    /// Show the template's own text instead of a render
    #[arg(long)]
    source: bool,
}

/// Writes a result to stdout.
pub(super) fn out(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// Most bytes of a text that is read from a file or a pipe.
pub(super) const MAX_INPUT: u64 = 64 << 20;

/// A text file of the user's.
pub(super) fn read_file(path: &Path) -> anyhow::Result<String> {
    let what = format!("`{}`", path.display());
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {what}"))?;
    read_text(&what, file)
}

/// What `reader` gives up to its end, within bounds.
fn read_text(what: &str, reader: impl Read) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    reader
        .take(MAX_INPUT + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {what}"))?;
    checked(what, bytes)
}

/// Bytes from outside as text: UTF-8 of a bearable size.
pub(super) fn checked(what: &str, bytes: Vec<u8>) -> anyhow::Result<String> {
    if bytes.len() as u64 > MAX_INPUT {
        return Err(Usage(format!(
            "{what} has more than {} MiB; give less text",
            MAX_INPUT >> 20
        ))
        .into());
    }
    String::from_utf8(bytes).map_err(|e| Usage(format!("{what} is not UTF-8: {e}")).into())
}

fn input(text: Option<&String>, file: Option<&PathBuf>) -> anyhow::Result<String> {
    match (text, file) {
        (Some(text), _) => Ok(text.clone()),
        (_, Some(path)) => read_file(path),
        _ if std::io::stdin().is_terminal() => {
            Err(Usage("no text: give one or pipe it in".to_owned()).into())
        }
        _ => read_text("standard input", std::io::stdin().lock()),
    }
}

pub(super) fn tokenize(args: &TokenizeArgs, settings: &Settings) -> anyhow::Result<()> {
    let text = input(args.text.as_ref(), args.file.as_ref())?;
    let gguf = Gguf::open(&pull::find_or_pull(&args.name, settings)?)?;
    let (tokenizer, _) = load::texts(&gguf, None)?;
    let piece = if args.special {
        Piece::Template(&text)
    } else {
        Piece::Text(&text)
    };
    let add = if args.no_add {
        AddSpecial::default()
    } else {
        tokenizer.default_special()
    };
    let ids = tokenizer.encode_with(&[piece], add)?;
    if args.json {
        return out(&format!("{}\n", serde_json::to_string(&ids)?));
    }
    let mut lines = String::new();
    for id in &ids {
        let piece = tokenizer.token_bytes(*id).unwrap_or_default();
        lines.push_str(&format!("{id}\t{:?}\n", String::from_utf8_lossy(piece)));
    }
    out(&lines)?;
    super::console::note(format_args!("{} tokens", ids.len()));
    Ok(())
}

pub(super) fn detokenize(args: &DetokenizeArgs, settings: &Settings) -> anyhow::Result<()> {
    let ids = if args.ids.is_empty() {
        let text = input(None, None)?;
        serde_json::from_str(&text)
            .map_err(|e| Usage(format!("standard input is no JSON array of token ids: {e}")))?
    } else {
        args.ids.clone()
    };
    let gguf = Gguf::open(&pull::find_or_pull(&args.name, settings)?)?;
    let (tokenizer, _) = load::texts(&gguf, None)?;
    let text = tokenizer.decode(
        &ids,
        DetokenizeOptions {
            specials: true,
            start: true,
        },
    )?;
    out(&format!("{text}\n"))
}

pub(super) fn template(args: &TemplateArgs, settings: &Settings) -> anyhow::Result<()> {
    let gguf = Gguf::open(&pull::find_or_pull(&args.name, settings)?)?;
    if args.source {
        let own: Option<&str> = gguf.metadata().get("tokenizer.chat_template")?;
        return out(&format!(
            "{}\n",
            own.with_context(|| format!("`{}` has no chat template", args.name))?
        ));
    }
    let given = super::session::load_options(settings, 1, args.chat_template.as_deref())?.template;
    let (tokenizer, template) = load::texts(&gguf, given.as_deref())?;
    let template = template.with_context(|| format!("`{}` has no chat template", args.name))?;
    let messages = match &args.text {
        Some(text) => {
            let system = args.system.as_ref().map(|s| Message::new("system", s));
            system.into_iter().chain([Message::new("user", text)]).collect()
        }
        None => messages(&input(None, None)?)?,
    };
    let options = RenderOptions {
        add_generation_prompt: !args.no_generation_prompt,
        ..RenderOptions::default()
    };
    let prompt = template.render(&messages, None, &options, &tokenizer)?;
    let ids = tokenizer.encode(&prompt.pieces())?;
    out(&format!("{}\n", prompt.text()))?;
    super::console::note(format_args!("{} tokens", ids.len()));
    Ok(())
}

/// Messages from JSON: `[{"role": …, "content": …}, …]`.
fn messages(text: &str) -> anyhow::Result<Vec<Message>> {
    let all: Vec<serde_json::Value> = serde_json::from_str(text)
        .map_err(|e| Usage(format!("standard input is no JSON array of messages: {e}")))?;
    let mut messages = Vec::new();
    for (i, m) in all.iter().enumerate() {
        let object = m
            .as_object()
            .ok_or_else(|| Usage(format!("message {i} is no object")))?;
        let mut message = Message::new("", "");
        for (key, value) in object {
            match (key.as_str(), value) {
                ("role", serde_json::Value::String(s)) => message.role = s.clone(),
                ("content", serde_json::Value::String(s)) => message.content = Some(s.clone()),
                ("content", serde_json::Value::Null) => message.content = None,
                ("tool_calls", serde_json::Value::Array(calls)) => {
                    message.tool_calls = calls.iter().map(tool_call).collect::<Option<_>>().ok_or_else(|| {
                        Usage(format!("message {i}: `tool_calls` needs `function` with `name` and `arguments` as text"))
                    })?;
                }
                ("tool_call_id", serde_json::Value::String(s)) => message.tool_call_id = Some(s.clone()),
                _ => return Err(Usage(format!("message {i}: cannot use `{key}`: {value}")).into()),
            }
        }
        if message.role.is_empty() {
            return Err(Usage(format!("message {i} has no `role`")).into());
        }
        messages.push(message);
    }
    Ok(messages)
}

/// One entry of OpenAI's `tool_calls`.
fn tool_call(value: &serde_json::Value) -> Option<ToolCall> {
    let text = |v: &serde_json::Value, key: &str| v.get(key)?.as_str().map(str::to_owned);
    let function = value.get("function")?;
    Some(ToolCall {
        id: text(value, "id"),
        name: text(function, "name")?,
        arguments: text(function, "arguments")?,
    })
}
