//! `dynalm run`: one answer, streamed to stdout, and nothing else there.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::options::{ModelArgs, SamplingArgs};
use super::session::{Session, interrupts, stats_line};
use super::{Interrupted, Usage, console, text};
use crate::engine::FinishReason;
use crate::settings::Settings;
use crate::text::{Message, RenderOptions};

/// How long an open standard input may stay silent when the prompt was given otherwise.
const STDIN_PATIENCE: Duration = Duration::from_millis(300);

/// Arguments of `run`.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// File, folder or name of a model; a catalogue name is pulled if it is missing
    #[arg(value_name = "MODEL")]
    name: String,
    /// The prompt; what is piped in comes after it
    #[arg(value_name = "PROMPT")]
    prompt: Option<String>,
    /// The prompt
    #[arg(
        short = 'p',
        long = "prompt",
        value_name = "TEXT",
        conflicts_with = "prompt",
        allow_hyphen_values = true
    )]
    text: Option<String>,
    /// File with the prompt
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["prompt", "text"])]
    file: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Print one JSON object with the reply, token counts and timings
    #[arg(long)]
    json: bool,
    /// Print token counts and speed to stderr
    #[arg(long)]
    stats: bool,
    #[command(flatten)]
    pub(super) model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(super) fn run(args: &RunArgs, settings: &Settings) -> anyhow::Result<()> {
    let prompt = prompt(args)?;
    interrupts::watch()?;
    let session = Session::open(&args.name, &args.model, settings, true)?;
    let params = args.sampling.over(&session.defaults, session.vocab_size)?;
    let seed = params.seed;
    let tokens = if args.raw {
        session.raw_tokens(&prompt)?
    } else {
        let mut messages = Vec::new();
        if let Some(system) = &args.system {
            messages.push(Message::new("system", system));
        }
        messages.push(Message::new("user", &prompt));
        session.chat_tokens(
            &messages,
            &RenderOptions {
                add_generation_prompt: true,
                ..RenderOptions::default()
            },
        )?
    };
    let mut out = std::io::stdout().lock();
    let mut on_text = |piece: &str| -> anyhow::Result<bool> {
        if !args.json {
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
        Ok(true)
    };
    let outcome = session.generate(tokens, params, &args.sampling.end(), !args.raw, &mut on_text)?;
    if args.json {
        let reason = match outcome.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        };
        let reply = serde_json::json!({
            "text": outcome.text,
            "finish_reason": reason,
            "seed": seed,
            "usage": {
                "prompt_tokens": outcome.usage.prompt_tokens,
                "completion_tokens": outcome.usage.completion_tokens,
                "cached_tokens": outcome.usage.cached_tokens,
            },
            "timings": {
                "queued_s": outcome.timings.queued_s,
                "prefill_s": outcome.timings.prefill_s,
                "decode_s": outcome.timings.decode_s,
            },
        });
        writeln!(out, "{reply}")?;
    } else if !outcome.text.ends_with('\n') {
        writeln!(out)?;
    }
    out.flush()?;
    if args.stats {
        console::note(stats_line(&outcome));
    }
    if outcome.reason == FinishReason::Cancelled {
        return Err(Interrupted.into());
    }
    Ok(())
}

/// The prompt from the argument, `-p`, `-f` or standard input; what is piped in follows an argument.
fn prompt(args: &RunArgs) -> anyhow::Result<String> {
    let given = match (&args.prompt, &args.text, &args.file) {
        (Some(text), _, _) | (_, Some(text), _) => Some(text.clone()),
        (_, _, Some(path)) => Some(text::read_file(path)?),
        _ => None,
    };
    let stdin = std::io::stdin();
    let prompt = match given {
        None if stdin.is_terminal() => {
            return Err(Usage(format!(
                "no prompt: dynalm run {} \"…\", or `chat` for a conversation",
                args.name
            ))
            .into());
        }
        None => piped(None)?,
        Some(text) if args.file.is_some() || stdin.is_terminal() => text,
        Some(text) => match piped(Some(STDIN_PATIENCE))? {
            more if more.trim().is_empty() => text,
            more => format!("{text}\n\n{more}"),
        },
    };
    if prompt.trim().is_empty() {
        return Err(Usage("the prompt is empty".to_owned()).into());
    }
    Ok(prompt)
}

/// Standard input to its end. With `patience`, an input that is open but says nothing at first is left alone.
fn piped(patience: Option<Duration>) -> anyhow::Result<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut first = [0u8; 4096];
        let first = stdin.read(&mut first).map(|n| first[..n].to_vec());
        let more = matches!(&first, Ok(bytes) if !bytes.is_empty());
        // A closed channel means that nobody waits any more.
        if sender.send(first).is_err() || !more {
            return;
        }
        let mut rest = Vec::new();
        let result = stdin.take(text::MAX_INPUT).read_to_end(&mut rest).map(|_| rest);
        let _ = sender.send(result);
    });
    let mut bytes = match patience {
        None => receiver.recv().context("reading standard input")??,
        Some(patience) => match receiver.recv_timeout(patience) {
            Ok(first) => first?,
            Err(_) => {
                tracing::warn!("standard input is open but gave nothing; only the given prompt is used");
                return Ok(String::new());
            }
        },
    };
    if !bytes.is_empty() {
        bytes.extend(receiver.recv().context("reading standard input")??);
    }
    text::checked("standard input", bytes)
}
