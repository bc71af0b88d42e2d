//! `dynalm serve`: the HTTP server.

use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::options::{Flags, ModelArgs};
use super::{Usage, console, pull, session};
use crate::engine::EngineConfig;
use crate::load;
use crate::server::{self, Keys, ModelInfo, ModelToServe, ServerConfig, Stopped};
use crate::settings::Settings;

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// File, folder or name of the model to serve
    #[arg(value_name = "MODEL", required = true, num_args = 1..)]
    names: Vec<String>,
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS")]
    host: Option<String>,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N")]
    port: Option<String>,
    /// Key that clients must send; better in DYNALM_SERVER_API_KEYS or a file, where other users cannot see it
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// File with one API key per line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Origin whose pages may call the server; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Name besides this machine's own that a loopback server answers to; may be repeated
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// Most requests in one step
    #[arg(long, value_name = "N")]
    max_seqs: Option<String>,
    /// Tokens the cache holds for all requests together: auto or a number
    #[arg(long, value_name = "N")]
    kv_tokens: Option<String>,
    /// Name the model answers to in requests
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    #[command(flatten)]
    model: ModelArgs,
}

impl ServeArgs {
    pub(super) fn flags(&self) -> anyhow::Result<Flags> {
        let mut flags = self.model.flags()?;
        for (value, key, flag) in [
            (&self.host, "server.host", "host"),
            (&self.port, "server.port", "port"),
            (&self.api_key, "server.api_keys", "api-key"),
            (&self.max_seqs, "max_seqs", "max-seqs"),
            (&self.kv_tokens, "kv_tokens", "kv-tokens"),
        ] {
            if let Some(value) = value {
                flags.push((key, value.clone(), flag));
            }
        }
        if let Some(file) = &self.api_key_file {
            flags.push(("server.api_key_file", file.display().to_string(), "api-key-file"));
        }
        if !self.cors_origin.is_empty() {
            flags.push(("server.cors_origins", self.cors_origin.join(","), "cors-origin"));
        }
        if !self.allowed_host.is_empty() {
            flags.push((
                "server.allowed_hosts",
                self.allowed_host.join(","),
                "allowed-host",
            ));
        }
        Ok(flags)
    }
}

pub(super) fn run(args: &ServeArgs, settings: &Settings) -> anyhow::Result<()> {
    let [name] = args.names.as_slice() else {
        return Err(Usage(format!(
            "serve: this build serves one model at a time, found {}; start one server per model",
            args.names.join(", ")
        ))
        .into());
    };
    let config = config(settings)?;
    let max_seqs = settings.integer("max_seqs").context("max_seqs is a number")?;
    let options = session::load_options(settings, max_seqs, args.model.chat_template.as_deref())?;
    let server = server::Server::bind(config)?;
    console::note(format_args!("listening on http://{}", server.address()));
    let (name, alias, settings) = (name.clone(), args.alias.clone(), settings.clone());
    let stopped = server.run(true, move || {
        let path = pull::find_or_pull(&name, &settings).map_err(as_source)?;
        let device = session::device(&settings).map_err(as_source)?;
        let model = load::load(&path, &device, &options)?;
        let served = alias.clone().unwrap_or_else(|| served_name(&name));
        let facts = model.facts.clone();
        let info = ModelInfo {
            architecture: facts.architecture,
            quantization: facts.quantization,
            parameters: facts.parameters,
            file_bytes: facts.file_bytes,
        };
        console::note(format_args!(
            "serving `{served}`, window {} tokens",
            model.max_context
        ));
        Ok(ModelToServe {
            name: served,
            aliases: Vec::new(),
            template: model.template.clone(),
            defaults: model.defaults.clone(),
            info,
            engine: session::engine_model(model),
        })
    })?;
    match stopped {
        Stopped::Drained => Ok(()),
        Stopped::DeadlinePassed => {
            console::note("requests that were still running have been ended");
            Ok(())
        }
        Stopped::Forced => anyhow::bail!("stopped at once by a second signal"),
    }
}

fn as_source(error: anyhow::Error) -> crate::Error {
    match error.downcast::<crate::Error>() {
        Ok(error) => error,
        Err(error) => crate::Error::Source(format!("{error:#}")),
    }
}

/// A catalogue name stays; a path becomes its file's stem.
fn served_name(name: &str) -> String {
    let path = std::path::Path::new(name);
    if path.exists()
        && let Some(stem) = path.file_stem()
    {
        return stem.to_string_lossy().into_owned();
    }
    name.to_owned()
}

fn config(settings: &Settings) -> anyhow::Result<ServerConfig> {
    let host = settings.text("server.host");
    let host: IpAddr = match host.parse() {
        Ok(ip) => ip,
        Err(_) => (host, 0)
            .to_socket_addrs()
            .ok()
            .and_then(|mut all| all.next())
            .ok_or_else(|| Usage(format!("--host {host}: no such address on this machine")))?
            .ip(),
    };
    let mut keys = settings.list("server.api_keys");
    if let Some(path) = settings.path("server.api_key_file") {
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read the API keys in `{}`", path.display()))?;
        let lines = text
            .lines()
            .map(str::trim)
            .filter(|l| !l.is_empty() && !l.starts_with('#'));
        keys.extend(lines.map(str::to_owned));
        anyhow::ensure!(!keys.is_empty(), "`{}` holds no API key", path.display());
    }
    let number = |key: &str| {
        settings
            .integer(key)
            .with_context(|| format!("{key} is a number"))
    };
    Ok(ServerConfig {
        host,
        port: u16::try_from(number("server.port")?).context("a port is at most 65535")?,
        keys: Keys::new(keys),
        cors_origins: settings.list("server.cors_origins"),
        allowed_hosts: settings.list("server.allowed_hosts"),
        max_body_bytes: number("server.body_limit")?,
        drain_timeout: Duration::from_secs_f64(settings.seconds("server.drain").unwrap_or(0.0)),
        engine: EngineConfig {
            max_waiting: number("server.queue")?,
            prefix_cache: settings.flag("prefix_cache"),
            ..EngineConfig::default()
        },
        ..ServerConfig::default()
    })
}
