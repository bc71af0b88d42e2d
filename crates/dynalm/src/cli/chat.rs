//! `dynalm chat`: a conversation with line editing and history.

use std::io::{BufRead, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::options::{ModelArgs, SamplingArgs};
use super::session::{End, Outcome, Session, interrupts, stats_line};
use super::{Usage, console, text};
use crate::engine::FinishReason;
use crate::sample::params::SamplingParams;
use crate::settings::Settings;
use crate::text::{Message, RenderOptions};

const HELP: &str = "\
/help               this list
/system [TEXT]      show or set the system message (starts over)
/set NAME VALUE     temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
                    seed, max_tokens
/show               model, window and sampling values
/save FILE          write the conversation as JSON
/load FILE          read a conversation
/clear              forget the conversation
/regenerate         answer the last message again
/stats              token counts and speed of the last reply
/think on|off       ask the model's template for thinking, or not
/bye                leave (also Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C stops a reply.";

/// Arguments of `chat`.
#[derive(Debug, Args)]
pub(super) struct ChatArgs {
    /// File, folder or name of a model; a catalogue name is pulled if it is missing
    #[arg(value_name = "MODEL")]
    name: String,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    pub(super) model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

struct Chat<'a> {
    session: Session,
    messages: Vec<Message>,
    params: SamplingParams,
    end: End,
    fixed_seed: bool,
    think: Option<bool>,
    last: Option<Outcome>,
    name: &'a str,
}

pub(super) fn run(args: &ChatArgs, settings: &Settings) -> anyhow::Result<()> {
    interrupts::watch()?;
    let session = Session::open(&args.name, &args.model, settings, false)?;
    anyhow::ensure!(
        session.template.is_some(),
        "`{}` has no chat template; give one with --chat-template, or use `dynalm run --raw`",
        args.name
    );
    let params = args.sampling.over(&session.defaults, session.vocab_size)?;
    let mut chat = Chat {
        session,
        messages: Vec::new(),
        params,
        fixed_seed: args.sampling.seed.is_some(),
        end: args.sampling.end(),
        think: None,
        last: None,
        name: &args.name,
    };
    if let Some(system) = &args.system {
        chat.messages.push(Message::new("system", system));
    }
    if std::io::stdin().is_terminal() {
        console::note(format_args!(
            "{} — /help lists the commands",
            chat.session.facts.title
        ));
    }
    chat.talk(settings)
}

impl Chat<'_> {
    fn talk(&mut self, settings: &Settings) -> anyhow::Result<()> {
        let mut input = Input::open(settings)?;
        loop {
            let line = match input.message() {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => break,
                Err(error) => return Err(error).context("cannot read the next message"),
            };
            if line.trim().is_empty() {
                continue;
            }
            interrupts::reset();
            let command = line.trim_start();
            let result = match command.strip_prefix('/') {
                Some("bye" | "exit" | "quit") => break,
                Some(command) => self.command(command),
                None => {
                    self.messages.push(Message::new("user", &line));
                    self.reply()
                }
            };
            // A failed command or reply does not end the conversation, a closed stdout does.
            if let Err(error) = result {
                if super::is_closed_pipe(&error) {
                    return Err(error);
                }
                console::error(&error);
            }
        }
        input.close();
        Ok(())
    }

    /// Answers the last user message; the reply joins the conversation.
    fn reply(&mut self) -> anyhow::Result<()> {
        let mut options = RenderOptions {
            add_generation_prompt: true,
            ..RenderOptions::default()
        };
        if let Some(think) = self.think {
            options.kwargs.insert("enable_thinking".to_owned(), think.into());
        }
        if !self.fixed_seed {
            self.params.seed = super::session::fresh_seed();
        }
        let prepared = self.session.chat_tokens(&self.messages, &options);
        let mut out = std::io::stdout().lock();
        let outcome = prepared.and_then(|tokens| {
            self.session
                .generate(tokens, self.params.clone(), &self.end, true, &mut |piece| {
                    out.write_all(piece.as_bytes())?;
                    out.flush()?;
                    Ok(true)
                })
        });
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                // The message nobody could answer would stand before the next one.
                self.messages.pop();
                return Err(error);
            }
        };
        writeln!(out)?;
        match outcome.reason {
            FinishReason::Length => console::note("(the window or --max-tokens is reached)"),
            FinishReason::Cancelled => console::note("(stopped)"),
            FinishReason::Stop => {}
        }
        self.messages.push(Message::new("assistant", &outcome.text));
        self.last = Some(outcome);
        Ok(())
    }

    fn command(&mut self, line: &str) -> anyhow::Result<()> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("help", _) => console::note(HELP),
            ("clear", _) => self.messages.retain(|m| m.role == "system"),
            ("system", "") => match self.messages.first().filter(|m| m.role == "system") {
                Some(m) => console::note(m.content.as_deref().unwrap_or_default()),
                None => console::note("no system message"),
            },
            ("system", text) => self.messages = vec![Message::new("system", text)],
            ("set", rest) => self.set(rest)?,
            ("show", _) => self.show(),
            ("stats", _) => match &self.last {
                Some(outcome) => console::note(stats_line(outcome)),
                None => console::note("no reply yet"),
            },
            ("think", "on") => self.think = Some(true),
            ("think", "off") => self.think = Some(false),
            ("regenerate", _) => {
                anyhow::ensure!(
                    self.messages.last().is_some_and(|m| m.role == "assistant"),
                    "no reply yet"
                );
                self.messages.pop();
                self.reply()?;
            }
            ("save", path) if !path.is_empty() => self.save(path)?,
            ("load", path) if !path.is_empty() => self.load(path)?,
            _ => return Err(Usage(format!("`/{line}` is no command; /help lists them")).into()),
        }
        Ok(())
    }

    fn show(&self) {
        let p = &self.params;
        console::note(format_args!(
            "{} ({}), {}, window {} tokens\ntemperature {}, top_k {}, top_p {}, min_p {}, repetition_penalty {}, \
             presence_penalty {}, frequency_penalty {}",
            self.session.facts.title,
            self.name,
            self.session.facts.quantization,
            self.session.max_context,
            p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty
        ));
    }

    fn set(&mut self, rest: &str) -> anyhow::Result<()> {
        let (name, value) = rest
            .split_once(char::is_whitespace)
            .ok_or_else(|| Usage("/set needs a name and a value; /help lists them".to_owned()))?;
        let value = value.trim();
        let bad = || Usage(format!("`{value}` is no value for {name}"));
        let number = || value.parse::<f32>().map_err(|_| bad());
        let mut p = self.params.clone();
        match name {
            "temperature" => p.temperature = number()?,
            "top_k" => p.top_k = value.parse().map_err(|_| bad())?,
            "top_p" => p.top_p = number()?,
            "min_p" => p.min_p = number()?,
            "repetition_penalty" => p.repetition_penalty = number()?,
            "presence_penalty" => p.presence_penalty = number()?,
            "frequency_penalty" => p.frequency_penalty = number()?,
            "seed" => p.seed = value.parse().map_err(|_| bad())?,
            "max_tokens" => {
                self.end.max_tokens = Some(value.parse().map_err(|_| bad())?);
                return Ok(());
            }
            _ => return Err(Usage(format!("`{name}` cannot be set; /help lists what can")).into()),
        }
        p.validate(self.session.vocab_size)?;
        self.fixed_seed |= name == "seed";
        self.params = p;
        Ok(())
    }

    fn save(&self, path: &str) -> anyhow::Result<()> {
        let all: Vec<_> = self
            .messages
            .iter()
            .map(|m| serde_json::json!({"role": m.role, "content": m.content}))
            .collect();
        std::fs::write(path, serde_json::to_string_pretty(&all)?)
            .with_context(|| format!("cannot write `{path}`"))?;
        console::note(format_args!("saved {} messages", all.len()));
        Ok(())
    }

    fn load(&mut self, path: &str) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{path}`"))?;
        let all: Vec<serde_json::Value> =
            serde_json::from_str(&text).with_context(|| format!("`{path}` is no saved conversation"))?;
        let mut messages = Vec::new();
        for (i, m) in all.iter().enumerate() {
            let field = |key: &str| m.get(key).and_then(serde_json::Value::as_str);
            let (Some(role), Some(content)) = (field("role"), field("content")) else {
                anyhow::bail!("`{path}`: message {i} has no `role` and `content`");
            };
            anyhow::ensure!(
                matches!(role, "system" | "user" | "assistant"),
                "`{path}`: message {i} has the role `{role}`"
            );
            messages.push(Message::new(role, content));
        }
        console::note(format_args!("loaded {} messages", messages.len()));
        self.messages = messages;
        Ok(())
    }
}

/// Where messages come from: a terminal with line editing and a history, or a pipe, which gets neither prompts nor a
/// place in the history.
struct Input {
    editor: Option<DefaultEditor>,
    history: Option<PathBuf>,
}

impl Input {
    fn open(settings: &Settings) -> anyhow::Result<Input> {
        if !std::io::stdin().is_terminal() {
            return Ok(Input {
                editor: None,
                history: None,
            });
        }
        let mut editor = DefaultEditor::new().context("cannot read the terminal")?;
        let history = settings
            .path("models_dir")
            .and_then(|d| Some(d.parent()?.join("history")));
        if let Some(path) = history.as_deref().filter(|p| p.exists())
            && let Err(e) = editor.load_history(path)
        {
            tracing::warn!("the history `{}` cannot be read: {e}", path.display());
        }
        Ok(Input {
            editor: Some(editor),
            history,
        })
    }

    /// One message: lines that end with a backslash go on in the next.
    fn message(&mut self) -> Result<String, ReadlineError> {
        let mut message = self.line(">>> ")?;
        while message.ends_with('\\') {
            message.pop();
            message.push('\n');
            match self.line("... ") {
                Ok(line) => message.push_str(&line),
                // The text before the end is a message too.
                Err(ReadlineError::Eof) => break,
                Err(error) => return Err(error),
            }
        }
        if let Some(editor) = &mut self.editor
            && !message.trim().is_empty()
            && let Err(error) = editor.add_history_entry(&message)
        {
            tracing::debug!("no history: {error}");
        }
        Ok(message)
    }

    fn line(&mut self, prompt: &str) -> Result<String, ReadlineError> {
        if let Some(editor) = &mut self.editor {
            return editor.readline(prompt);
        }
        let mut bytes = Vec::new();
        let mut stdin = std::io::stdin().lock().take(text::MAX_INPUT);
        if stdin.read_until(b'\n', &mut bytes)? == 0 {
            return Err(ReadlineError::Eof);
        }
        let line = String::from_utf8(bytes)
            .map_err(|e| ReadlineError::Io(std::io::Error::new(std::io::ErrorKind::InvalidData, e)))?;
        let line = line.strip_suffix('\n').unwrap_or(&line);
        Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
    }

    /// Keeps the history.
    fn close(self) {
        let (Some(mut editor), Some(path)) = (self.editor, self.history) else {
            return;
        };
        let folder = path.parent().unwrap_or(Path::new("."));
        let saved = std::fs::create_dir_all(folder)
            .map_err(ReadlineError::from)
            .and_then(|()| editor.save_history(&path));
        if let Err(error) = saved {
            tracing::warn!("the history cannot be saved: {error}");
        }
    }
}
