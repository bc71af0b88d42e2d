//! `dynalm models` and `dynalm rm`.

use std::io::{BufRead, IsTerminal, Write};

use clap::Args;

use super::{Usage, console, text};
use crate::load;
use crate::settings::Settings;
use crate::source::{self, SourceConfig};

/// Arguments of `models`.
#[derive(Debug, Args)]
pub(super) struct ModelsArgs {
    /// Show the catalogue instead, with what fits this machine
    #[arg(long)]
    available: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `rm`.
#[derive(Debug, Args)]
pub(super) struct RmArgs {
    /// Names as `models` shows them
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

pub(super) fn list(args: &ModelsArgs, settings: &Settings) -> anyhow::Result<()> {
    if args.available {
        available(args, settings)
    } else {
        local(args, settings)
    }
}

fn local(args: &ModelsArgs, settings: &Settings) -> anyhow::Result<()> {
    let models = source::list(&SourceConfig::from_settings(settings)?)?;
    let mut rows = vec![
        [
            "NAME",
            "ARCHITECTURE",
            "PARAMETERS",
            "TYPE",
            "SIZE",
            "CONTEXT",
            "STATE",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    let mut all = Vec::new();
    for model in &models {
        let opened = if model.complete {
            load::open(model.path()).map_err(|e| e.to_string())
        } else {
            Err("incomplete".to_owned())
        };
        let state = match &opened {
            Ok(_) => "ready".to_owned(),
            Err(problem) => problem.clone(),
        };
        let facts = opened.ok().map(|c| c.facts);
        let or_dash =
            |f: &dyn Fn(&load::ModelFacts) -> String| facts.as_ref().map_or_else(|| "-".to_owned(), f);
        rows.push(vec![
            model.name.clone(),
            or_dash(&|f| f.architecture.clone()),
            or_dash(&|f| console::parameters(f.parameters)),
            or_dash(&|f| f.quantization.clone()),
            console::bytes(model.bytes),
            or_dash(&|f| f.trained_context.to_string()),
            state.clone(),
        ]);
        all.push(serde_json::json!({
            "name": model.name, "path": model.path(), "origin": model.origin, "bytes": model.bytes, "state": state,
            "architecture": facts.as_ref().map(|f| f.architecture.as_str()),
            "parameters": facts.as_ref().map(|f| f.parameters),
            "quantization": facts.as_ref().map(|f| f.quantization.as_str()),
            "context": facts.as_ref().map(|f| f.trained_context),
        }));
    }
    if args.json {
        return text::out(&format!("{}\n", serde_json::Value::from(all)));
    }
    if models.is_empty() {
        console::note(
            "no local models; `dynalm pull smollm2:135m` fetches a small one, `models --available` lists more",
        );
        return Ok(());
    }
    text::out(&console::table(&rows))
}

fn available(args: &ModelsArgs, settings: &Settings) -> anyhow::Result<()> {
    let config = SourceConfig::from_settings(settings)?;
    let free = dynacore::cpu::Topology::detect().free_bytes();
    let mut rows = vec![
        ["NAME", "PARAMETERS", "TYPE", "FROM", "HERE"]
            .map(str::to_owned)
            .to_vec(),
    ];
    let mut all = Vec::new();
    for entry in source::catalog() {
        let here = source::find_local(entry.name, &config).ok().flatten().is_some();
        let bytes = u64::from(entry.parameters_millions) * 1_000_000 * bits(entry.quant) / 8;
        let state = match (entry.unsupported(), here, bytes < free) {
            (Some(_), ..) => "not supported yet",
            (None, true, _) => "local",
            (None, false, true) => "fits",
            (None, false, false) => "too large",
        };
        let from = entry.origins.iter().map(ToString::to_string).collect::<Vec<_>>();
        rows.push(vec![
            entry.name.to_owned(),
            console::parameters(u64::from(entry.parameters_millions) * 1_000_000),
            entry.quant.to_owned(),
            from.first().cloned().unwrap_or_default(),
            state.to_owned(),
        ]);
        all.push(serde_json::json!({
            "name": entry.name, "aliases": entry.aliases, "parameters_millions": entry.parameters_millions,
            "quantization": entry.quant, "origins": from, "state": state,
        }));
    }
    if args.json {
        return text::out(&format!("{}\n", serde_json::Value::from(all)));
    }
    text::out(&console::table(&rows))
}

/// Bits per weight of a quantisation, roughly: enough to tell what fits.
fn bits(quant: &str) -> u64 {
    match quant.as_bytes() {
        [b'Q', n @ b'2'..=b'8', ..] => u64::from(n - b'0') + 1,
        b"F32" => 32,
        _ => 16,
    }
}

pub(super) fn remove(args: &RmArgs, settings: &Settings) -> anyhow::Result<()> {
    let config = SourceConfig::from_settings(settings)?;
    for name in &args.names {
        if !args.yes {
            if !std::io::stdin().is_terminal() {
                return Err(Usage(format!(
                    "rm {name}: nobody to ask here; -y deletes without asking"
                ))
                .into());
            }
            let mut stderr = std::io::stderr();
            write!(stderr, "delete {name}? [y/N] ")?;
            stderr.flush()?;
            let mut answer = String::new();
            std::io::stdin().lock().read_line(&mut answer)?;
            if !answer.trim().eq_ignore_ascii_case("y") {
                console::note(format_args!("kept {name}"));
                continue;
            }
        }
        let freed = source::remove(name, &config)?;
        console::note(format_args!(
            "deleted {name}, {} are free again",
            console::bytes(freed)
        ));
    }
    Ok(())
}
