//! `dynalm config`: effective settings with the source of each; the file's place; a starter file.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};

use super::console;
use crate::settings::{self, Settings};

/// Arguments of `config`.
#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Every setting with its value and where it came from
    Show {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Where the configuration file is looked for
    Path,
    /// Write a starter file with every setting commented out
    Init {
        /// Replace an existing file
        #[arg(long)]
        force: bool,
    },
}

pub(super) fn run(args: &ConfigArgs, settings: &Settings, path: Option<PathBuf>) -> anyhow::Result<()> {
    let place = || {
        path.clone()
            .context("no home folder: set HOME or XDG_CONFIG_HOME, or name a file with --config")
    };
    match &args.action {
        Action::Show { json: false } => {
            let rows: Vec<Vec<String>> = settings
                .rows()
                .into_iter()
                .map(|(s, value, origin)| vec![s.key.to_owned(), value, origin])
                .collect();
            super::text::out(&console::table(&rows))
        }
        Action::Show { json: true } => {
            let all: serde_json::Map<String, serde_json::Value> = settings
                .rows()
                .into_iter()
                .map(|(s, value, origin)| {
                    (
                        s.key.to_owned(),
                        serde_json::json!({"value": value, "source": origin}),
                    )
                })
                .collect();
            super::text::out(&format!("{}\n", serde_json::to_string_pretty(&all)?))
        }
        Action::Path => super::text::out(&format!("{}\n", place()?.display())),
        Action::Init { force } => {
            let path = place()?;
            anyhow::ensure!(
                *force || !path.exists(),
                "`{}` exists; --force replaces it",
                path.display()
            );
            let folder = path.parent().context("the configuration file has a folder")?;
            std::fs::create_dir_all(folder)
                .with_context(|| format!("cannot create `{}`", folder.display()))?;
            std::fs::write(&path, settings::starter_file())
                .with_context(|| format!("cannot write `{}`", path.display()))?;
            console::note(format_args!("wrote {}", path.display()));
            Ok(())
        }
    }
}
