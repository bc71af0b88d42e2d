//! `dynalm benchmark`: tokens per second of prefill, decode and several users, and memory, without a server.
//!
//! Each figure is a whole pass on unique tokens after one pass that is not counted. Rounds go through all figures in
//! turn, so that a slow phase of the machine meets all of them. One JSON object per figure and round goes to stdout.

use std::time::Instant;

use clap::Args;

use super::direct::{Direct, DirectOptions};
use super::options::Flags;
use super::{console, pull, session, text};
use crate::settings::Settings;

/// Arguments of `benchmark`.
#[derive(Debug, Args)]
pub(super) struct BenchmarkArgs {
    /// File, folder or name of a model
    #[arg(value_name = "MODEL")]
    name: String,
    /// Prompt lengths to prefill, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "512")]
    prefill: Vec<usize>,
    /// Tokens to decode from an empty context
    #[arg(long, value_name = "N", default_value_t = 128)]
    decode: usize,
    /// Numbers of users that decode together, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "4,16")]
    users: Vec<usize>,
    /// Context each user has when decoding starts
    #[arg(long, value_name = "N", default_value_t = 512)]
    user_context: usize,
    /// Tokens each user decodes
    #[arg(long, value_name = "N", default_value_t = 32)]
    user_decode: usize,
    /// Counted rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Kernels: auto, exact or safe
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// Worker threads: auto or a number
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Element type of the cache
    #[arg(long, value_name = "TYPE")]
    kv: Option<String>,
    /// Most tokens of a step
    #[arg(long, value_name = "N")]
    batch_tokens: Option<String>,
}

impl BenchmarkArgs {
    pub(super) fn flags(&self) -> Flags {
        let all = [
            (&self.mode, "mode", "mode"),
            (&self.threads, "threads", "threads"),
            (&self.kv, "kv", "kv"),
            (&self.batch_tokens, "batch_tokens", "batch-tokens"),
        ];
        all.into_iter()
            .filter_map(|(v, key, flag)| Some((key, v.clone()?, flag)))
            .collect()
    }
}

/// A cheap stream of token ids, different for every seed, away from the first ids (specials).
struct Ids(u64, u32);

impl Ids {
    fn take(&mut self, n: usize) -> Vec<u32> {
        (0..n)
            .map(|_| {
                self.0 = self
                    .0
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                300 + ((self.0 >> 33) as u32) % (self.1 - 300)
            })
            .collect()
    }
}

pub(super) fn run(args: &BenchmarkArgs, settings: &Settings) -> anyhow::Result<()> {
    let loading = session::load_options(settings, 1, None)?;
    let path = pull::find_or_pull(&args.name, settings)?;
    let seqs = args.users.iter().copied().max().unwrap_or(1).max(1);
    let longest = args.prefill.iter().copied().max().unwrap_or(0);
    let context = (args.user_context + args.user_decode)
        .max(longest)
        .max(args.decode + 1);
    let options = DirectOptions {
        mode: session::mode(settings),
        threads: settings.integer("threads"),
        kv: loading.kv,
        seqs,
        context,
        batch_tokens: loading.batch_tokens,
    };
    let mut model = Direct::open(&path, &options)?;
    let vocab = model.step(&[(0, &[300])], false)?.vocab as u32;
    anyhow::ensure!(
        vocab > 600,
        "a vocabulary of {vocab} tokens is too small to measure with"
    );
    let mut ids = Ids(0x5EED, vocab);
    console::note(format_args!(
        "{}: {}, weights {}, loaded in {:.2} s",
        args.name,
        model.device,
        console::bytes(model.weight_bytes as u64),
        model.load_s
    ));
    for round in 0..=args.rounds {
        for n in &args.prefill {
            let seconds = prefill(&mut model, 0, &ids.take(*n))?;
            report(
                args,
                settings,
                round,
                "prefill",
                &[("tokens", *n)],
                *n as f64 / seconds,
            )?;
        }
        model.reset(0);
        let start = Instant::now();
        for id in ids.take(args.decode) {
            model.step(&[(0, &[id])], false)?;
        }
        let rate = args.decode as f64 / start.elapsed().as_secs_f64();
        report(args, settings, round, "decode", &[("tokens", args.decode)], rate)?;
        for users in &args.users {
            for seq in 0..*users {
                prefill(&mut model, seq, &ids.take(args.user_context))?;
            }
            let start = Instant::now();
            for _ in 0..args.user_decode {
                let tokens = ids.take(*users);
                let rows: Vec<(usize, &[u32])> = tokens.chunks(1).enumerate().collect();
                model.step(&rows, false)?;
            }
            let rate = (users * args.user_decode) as f64 / start.elapsed().as_secs_f64();
            report(
                args,
                settings,
                round,
                "users",
                &[("users", *users), ("context", args.user_context)],
                rate,
            )?;
        }
    }
    Ok(())
}

fn prefill(model: &mut Direct, seq: usize, ids: &[u32]) -> anyhow::Result<f64> {
    model.reset(seq);
    let start = Instant::now();
    let most = model.max_tokens();
    for chunk in ids.chunks(most) {
        model.step(&[(seq, chunk)], false)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn report(
    args: &BenchmarkArgs,
    settings: &Settings,
    round: usize,
    what: &str,
    of: &[(&str, usize)],
    rate: f64,
) -> anyhow::Result<()> {
    // Round 0 warms caches and pages.
    if round == 0 {
        return Ok(());
    }
    let mut line = serde_json::json!({"model": args.name, "mode": settings.text("mode"), "kv": settings.text("kv"), "round": round, "figure": what});
    for (key, value) in of {
        line[*key] = (*value).into();
    }
    line["tokens_per_s"] = ((rate * 100.0).round() / 100.0).into();
    text::out(&format!("{line}\n"))
}
