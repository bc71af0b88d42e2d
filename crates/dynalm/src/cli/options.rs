//! Options that several commands share, and how they become settings.

use std::path::PathBuf;

use clap::Args;

use super::Usage;
use super::session::End;
use crate::sample::params::SamplingParams;
use crate::settings::{Environment, Settings};

/// Flags as settings: (key, value, name of the flag).
pub(super) type Flags = Vec<(&'static str, String, &'static str)>;

/// Options of every command.
#[derive(Debug, Args)]
pub(super) struct GlobalArgs {
    /// How much is logged: error, warn, info, debug or trace
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Log errors only and show no progress
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Log more: -v info, -vv debug
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Configuration file to read in place of the usual one
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Never touch the network
    #[arg(long, global = true)]
    offline: bool,
}

impl GlobalArgs {
    /// All settings, with `flags` of the command on top.
    pub(super) fn settings(&self, mut flags: Flags) -> anyhow::Result<Settings> {
        let level = match (self.quiet, self.verbose) {
            (true, _) => Some("error"),
            (_, 0) => None,
            (_, 1) => Some("info"),
            _ => Some("debug"),
        };
        if let Some(level) = level {
            flags.push((
                "log_level",
                level.to_owned(),
                if self.quiet { "quiet" } else { "verbose" },
            ));
        }
        if let Some(level) = &self.log_level {
            flags.push(("log_level", level.clone(), "log-level"));
        }
        if self.offline {
            flags.push(("offline", "true".to_owned(), "offline"));
        }
        Environment::of_process()
            .and_then(|environment| Settings::load(self.config.as_deref(), environment, &flags))
            .map_err(|e| anyhow::Error::new(Usage(e.to_string())))
    }
}

/// Options of commands that run a model.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// Device: auto or cpu
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Run on the CPU
    #[arg(long, conflicts_with_all = ["backend", "gpu"])]
    cpu: bool,
    /// Run on a GPU or fail
    #[arg(long, conflicts_with = "backend")]
    gpu: bool,
    /// Number of the device
    #[arg(long, value_name = "N")]
    device: Option<u32>,
    /// Kernels: auto (fastest), exact (results never depend on the batch) or safe (plain fp32)
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// Worker threads: auto or a number
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Context window in tokens: auto or a number
    #[arg(long, value_name = "N")]
    ctx: Option<String>,
    /// Element type of the key and value cache: f16, f32 or q8_0
    #[arg(long, value_name = "TYPE")]
    kv: Option<String>,
    /// Most tokens of one step
    #[arg(long, value_name = "N")]
    batch_tokens: Option<String>,
    /// Chat template in place of the model's: a file or a built-in name
    #[arg(long, value_name = "FILE|NAME")]
    pub(super) chat_template: Option<String>,
}

impl ModelArgs {
    /// These options as settings.
    pub(super) fn flags(&self) -> anyhow::Result<Flags> {
        let mut flags = Flags::new();
        if let Some(backend) = &self.backend {
            if let Some(problem) = refuse_backend(backend) {
                return Err(Usage(problem).into());
            }
            flags.push(("backend", backend.clone(), "backend"));
        }
        if self.cpu {
            flags.push(("backend", "cpu".to_owned(), "cpu"));
        }
        if self.gpu {
            return Err(Usage("--gpu: this build has no GPU device; use --cpu".to_owned()).into());
        }
        if let Some(n) = self.device.filter(|n| *n != 0) {
            return Err(Usage(format!(
                "--device {n}: the only device of this build is the CPU, number 0"
            ))
            .into());
        }
        for (value, key, flag) in [
            (&self.mode, "mode", "mode"),
            (&self.threads, "threads", "threads"),
            (&self.ctx, "ctx", "ctx"),
            (&self.kv, "kv", "kv"),
            (&self.batch_tokens, "batch_tokens", "batch-tokens"),
        ] {
            if let Some(value) = value {
                flags.push((key, value.clone(), flag));
            }
        }
        Ok(flags)
    }
}

fn refuse_backend(name: &str) -> Option<String> {
    match name {
        "native-cpu" => Some(
            "--backend native-cpu: there is no such backend; use --backend cpu, and --mode exact for results that \
             never depend on the batch"
                .to_owned(),
        ),
        "cuda" | "vulkan" | "metal" => {
            Some(format!("--backend {name}: this build has no `{name}` device; use --backend cpu"))
        }
        _ => None,
    }
}

/// Sampling options. What is not given keeps the model's published value, else the command's default.
#[derive(Debug, Args)]
pub(super) struct SamplingArgs {
    /// 0 always takes the most likely token; higher is more varied
    #[arg(long, value_name = "X")]
    temperature: Option<f32>,
    /// Keep the N most likely tokens; 0 keeps all
    #[arg(long, value_name = "N")]
    top_k: Option<u32>,
    /// Keep the most likely tokens that together reach this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Keep tokens at least this fraction as likely as the most likely one
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Locally typical sampling; 1 is off
    #[arg(long, value_name = "P")]
    typical_p: Option<f32>,
    /// Makes tokens of the last --repetition-window less likely; 1 is off
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// How many tokens the repetition penalty looks back; 0 is all
    #[arg(long, value_name = "N")]
    repetition_window: Option<u32>,
    /// Subtracted from the logit of each token already in the reply
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    presence_penalty: Option<f32>,
    /// Subtracted for each occurrence in the reply
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    frequency_penalty: Option<f32>,
    /// Added to the logit of a token, ID=BIAS; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the draw; by default a new one each time
    #[arg(long, value_name = "N")]
    pub(super) seed: Option<u64>,
    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Text that ends the reply; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text
        .split_once('=')
        .ok_or("expected ID=BIAS, for example 42=-100")?;
    Ok((
        id.parse().map_err(|_| format!("`{id}` is no token id"))?,
        bias.parse().map_err(|_| format!("`{bias}` is no number"))?,
    ))
}

impl SamplingArgs {
    /// What ends a reply.
    pub(super) fn end(&self) -> End {
        End {
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
        }
    }

    /// `defaults` with every option that was given.
    ///
    /// # Errors
    /// Bad usage if a value is out of range.
    pub(super) fn over(
        &self,
        defaults: &SamplingParams,
        vocab_size: usize,
    ) -> anyhow::Result<SamplingParams> {
        let mut p = defaults.clone();
        fn set<T: Copy>(field: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *field = value;
            }
        }
        set(&mut p.temperature, self.temperature);
        set(&mut p.top_k, self.top_k);
        set(&mut p.top_p, self.top_p);
        set(&mut p.min_p, self.min_p);
        set(&mut p.typical_p, self.typical_p);
        set(&mut p.repetition_penalty, self.repetition_penalty);
        set(&mut p.repetition_window, self.repetition_window);
        set(&mut p.presence_penalty, self.presence_penalty);
        set(&mut p.frequency_penalty, self.frequency_penalty);
        if !self.logit_bias.is_empty() {
            p.logit_bias = self.logit_bias.clone();
        }
        p.seed = self.seed.unwrap_or_else(super::session::fresh_seed);
        p.validate(vocab_size).map_err(|e| Usage(e.to_string()))?;
        Ok(p)
    }
}
