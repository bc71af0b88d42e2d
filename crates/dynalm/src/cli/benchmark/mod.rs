//! `dynalm benchmark`: prefill, decode and several users, of our engine in this process and of servers, measured in the
//! same way.
//!
//! This file has the options and the order of a run: after one round that is not counted, every round goes through all
//! figures in turn, and each figure through all engines, forwards and backwards by turns, so that a slow phase of the
//! machine meets all of them. [`drive`] makes the load and takes the times, [`report`] writes what they say.

mod drive;
mod local;
mod reading;
mod remote;
mod report;
mod roofline;
mod stats;
mod svg;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::{Args, ValueEnum};
use dynacore::cpu::Topology;
use serde_json::{Value, json};

use super::options::{Flags, ModelArgs};
use super::{Usage, console, pull, session, text};
use crate::client::{self, Route};
use crate::settings::{self, Settings};
use drive::{Engine, Point, Random};
use report::{RoundRecord, Series};

/// Most tokens of a prompt or reply.
const MAX_TOKENS: usize = 1 << 24;
/// Most requests at the same time, and of a round: each has a thread.
const MAX_REQUESTS: usize = 4096;
/// How the figures come about; stands in every summary.
const METHOD: &str = "one warm-up round not counted; each round goes through all figures and engines in turn, engines \
                      in alternating order; prompts are random and unlike each other; greedy; times are those at which \
                      the client sees a token";

/// The routes that a server can be asked at.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum EndpointArg {
    /// /v1/completions
    Completions,
    /// /v1/chat/completions
    Chat,
}

/// Arguments of `benchmark`.
#[derive(Debug, Args)]
pub(super) struct BenchmarkArgs {
    /// File, folder or name of a model, to run in this process
    #[arg(value_name = "MODEL", required_unless_present = "url")]
    name: Option<String>,
    /// Prompt lengths to prefill, separated by commas; 0 leaves the figure out
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "512", value_parser = tokens)]
    prefill: Vec<usize>,
    /// Tokens to decode; 0 leaves the figure out
    #[arg(long, value_name = "N", default_value = "128", value_parser = tokens)]
    decode: usize,
    /// Contexts that decoding starts from, separated by commas
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0,512", value_parser = tokens)]
    context: Vec<usize>,
    /// Numbers of users that ask at the same time, separated by commas; 0 leaves the figure out
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "4,16", value_parser = requests)]
    users: Vec<usize>,
    /// Prompt tokens of each user's request
    #[arg(long, value_name = "N", default_value = "128", value_parser = some_tokens)]
    user_context: usize,
    /// Reply tokens of each user's request
    #[arg(long, value_name = "N", default_value = "64", value_parser = some_tokens)]
    user_decode: usize,
    /// Requests of each user, one after another
    #[arg(long, value_name = "N", default_value = "1", value_parser = some_requests)]
    user_requests: usize,
    /// Open loop: requests a second that arrive on their own, separated by commas
    #[arg(long, value_name = "R,…", value_delimiter = ',', value_parser = rate)]
    rate: Vec<f64>,
    /// Requests of a round of --rate
    #[arg(long, value_name = "N", default_value = "32", value_parser = some_requests)]
    requests: usize,
    /// First tokens that all users' prompts have in common, so that a prefix cache can help
    #[arg(long, value_name = "N", default_value = "0", value_parser = tokens)]
    shared_prefix: usize,
    /// Counted rounds
    #[arg(long, value_name = "N", default_value = "3", value_parser = rounds)]
    rounds: usize,
    /// Seed of the prompts; by default another one each time
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Name of the engine in this process
    #[arg(long, value_name = "NAME", default_value = "dynalm", requires = "name")]
    label: String,
    /// Also (or only) measure an OpenAI-compatible server; may be repeated. NAME=URL gives it a name
    #[arg(long, value_name = "[NAME=]URL")]
    url: Vec<String>,
    /// The server's name of the model; by default the only one it lists
    #[arg(long, value_name = "ID", requires = "url")]
    model_name: Option<String>,
    /// Key for the server
    #[arg(long, value_name = "KEY", requires = "url", conflicts_with = "api_key_file")]
    api_key: Option<String>,
    /// File whose first line is the key for the server
    #[arg(long, value_name = "FILE", requires = "url")]
    api_key_file: Option<PathBuf>,
    /// Where to ask the server
    #[arg(long, value_enum, default_value = "completions", requires = "url")]
    endpoint: EndpointArg,
    /// Do not ask the server to go on past the end of a reply (`ignore_eos`); replies may be shorter then
    #[arg(long, requires = "url")]
    allow_eos: bool,
    /// Longest wait for one answer of the server, seconds
    #[arg(long, value_name = "S", default_value = "600", value_parser = seconds, requires = "url")]
    timeout: Duration,
    /// Process of the server on this machine whose peak memory is reported
    #[arg(long, value_name = "PID", requires = "url")]
    pid: Option<u32>,
    /// Also compare with the rounds that an earlier run wrote with --json
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// JSON lines: a record for each figure and round, then summaries and comparisons
    #[arg(long)]
    json: bool,
    /// Also draw the figures into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Instead of speeds: bytes, operations and time of every op of the plan, beside what this machine can do
    #[arg(long, conflicts_with_all = ["url", "compare", "svg", "rate", "shared_prefix"])]
    roofline: bool,
    #[command(flatten)]
    model: ModelArgs,
}

/// A whole number in a range.
fn whole(text: &str, least: usize, most: usize) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (least..=most).contains(n));
    n.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
}

fn tokens(text: &str) -> Result<usize, String> {
    whole(text, 0, MAX_TOKENS)
}

fn some_tokens(text: &str) -> Result<usize, String> {
    whole(text, 1, MAX_TOKENS)
}

fn requests(text: &str) -> Result<usize, String> {
    whole(text, 0, MAX_REQUESTS)
}

fn some_requests(text: &str) -> Result<usize, String> {
    whole(text, 1, MAX_REQUESTS)
}

fn rounds(text: &str) -> Result<usize, String> {
    whole(text, 1, 100)
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|r| (0.001..=10_000.0).contains(r));
    rate.ok_or_else(|| "expected requests a second, 0.001 to 10000".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let s = text.parse().ok().filter(|s| (1.0..=86_400.0).contains(s));
    s.map(Duration::from_secs_f64)
        .ok_or_else(|| "expected seconds, 1 to 86400".to_owned())
}

/// The first value that stands in a list twice.
fn twice<T: PartialEq + Copy>(all: &[T]) -> Option<T> {
    let again = |(i, v): (usize, &T)| all[..i].contains(v).then_some(*v);
    all.iter().enumerate().find_map(again)
}

impl BenchmarkArgs {
    /// The model options as settings.
    pub(super) fn flags(&self) -> anyhow::Result<Flags> {
        let flags = self.model.flags()?;
        if let (None, Some((_, _, flag))) = (&self.name, flags.first()) {
            return Err(Usage(format!(
                "--{flag}: concerns a model in this process, and there is none; the server at --url decides for itself"
            ))
            .into());
        }
        if self.model.chat_template.is_some() {
            return Err(Usage(
                "--chat-template: prompts are random tokens, no template is applied".to_owned(),
            )
            .into());
        }
        Ok(flags)
    }

    /// The figures to measure.
    fn points(&self) -> anyhow::Result<Vec<Point>> {
        let repeated = [
            ("prefill", twice(&self.prefill).map(|n| n.to_string())),
            ("context", twice(&self.context).map(|n| n.to_string())),
            ("users", twice(&self.users).map(|n| n.to_string())),
            ("rate", twice(&self.rate).map(|r| r.to_string())),
        ];
        if let Some((flag, Some(n))) = repeated.into_iter().find(|(_, n)| n.is_some()) {
            return Err(Usage(format!("--{flag}: {n} is given twice")).into());
        }
        if self.shared_prefix >= self.user_context {
            return Err(Usage(format!(
                "--shared-prefix {}: prompts have {} tokens (--user-context), and the last ones must differ",
                self.shared_prefix, self.user_context
            ))
            .into());
        }
        let some = |all: &[usize]| all.iter().copied().filter(|n| *n > 0).collect::<Vec<_>>();
        let (context, tokens) = (self.user_context, self.user_decode);
        let mut points: Vec<Point> = Vec::new();
        points.extend(
            some(&self.prefill)
                .into_iter()
                .map(|tokens| Point::Prefill { tokens }),
        );
        if self.decode > 0 {
            let tokens = self.decode;
            points.extend(
                self.context
                    .iter()
                    .map(|&context| Point::Decode { context, tokens }),
            );
        }
        points.extend(some(&self.users).into_iter().map(|users| Point::Users {
            users,
            requests: self.user_requests,
            context,
            tokens,
        }));
        points.extend(self.rate.iter().map(|&rate| Point::Rate {
            rate,
            requests: self.requests,
            context,
            tokens,
        }));
        if points.is_empty() {
            return Err(Usage("nothing to measure: --prefill, --decode and --users are 0".to_owned()).into());
        }
        if let Some(p) = points.iter().find(|p| p.requests() > MAX_REQUESTS) {
            return Err(Usage(format!(
                "--users and --user-requests: {} requests of a round are more than {MAX_REQUESTS}",
                p.requests()
            ))
            .into());
        }
        Ok(points)
    }

    fn remote_options(&self) -> anyhow::Result<remote::RemoteOptions> {
        let key = match &self.api_key_file {
            None => self.api_key.clone(),
            Some(path) => {
                let content = text::read_file(path)?;
                let key = content.lines().next().map(str::trim).unwrap_or_default();
                if key.is_empty() {
                    return Err(Usage(format!(
                        "--api-key-file {}: the first line is empty",
                        path.display()
                    ))
                    .into());
                }
                Some(key.to_owned())
            }
        };
        if let Some(bad) = key
            .as_ref()
            .filter(|k| k.chars().any(|c| c.is_control() || !c.is_ascii()))
        {
            let n = bad.len();
            return Err(Usage(format!(
                "--api-key: {n} bytes with control or non-ASCII characters are no key"
            ))
            .into());
        }
        if let Some(pid) = self.pid {
            if self.url.len() > 1 {
                return Err(Usage(format!(
                    "--pid {pid}: names one process, and there are {} servers",
                    self.url.len()
                ))
                .into());
            }
            if dynacore::cpu::peak_resident_bytes(Some(pid)).is_none() {
                return Err(Usage(format!(
                    "--pid {pid}: the memory of such a process cannot be read here"
                ))
                .into());
            }
        }
        Ok(remote::RemoteOptions {
            key,
            timeout: self.timeout,
            route: match self.endpoint {
                EndpointArg::Completions => Route::Completions,
                EndpointArg::Chat => Route::Chat,
            },
            ignore_eos: !self.allow_eos,
            model: self.model_name.clone(),
            pid: self.pid,
        })
    }

    /// The command that repeats this run: as it was given, with the seed, without the key.
    fn command(&self, seed: u64) -> String {
        let mut words = Vec::new();
        let mut secret = false;
        for word in settings::command_line() {
            let shown = match word.split_once('=') {
                _ if secret => "KEY".to_owned(),
                Some(("--api-key", _)) => "--api-key=KEY".to_owned(),
                _ => quoted(&word),
            };
            secret = word == "--api-key";
            words.push(shown);
        }
        if self.seed.is_none() {
            words.push(format!("--seed {seed}"));
        }
        words.join(" ")
    }
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

pub(super) fn run(args: &BenchmarkArgs, settings: &Settings) -> anyhow::Result<()> {
    let points = args.points()?;
    let seed = args.seed.unwrap_or_else(|| session::fresh_seed() >> 11);
    if args.roofline {
        let Some(name) = &args.name else {
            return Err(Usage("--roofline: needs MODEL, whose plan is measured".to_owned()).into());
        };
        let options = roofline::RooflineOptions {
            contexts: if args.decode > 0 { &args.context } else { &[] },
            prefill: &args
                .prefill
                .iter()
                .copied()
                .filter(|n| *n > 0)
                .collect::<Vec<_>>(),
            seed,
            json: args.json,
        };
        return roofline::run(name, &pull::find_or_pull(name, settings)?, &options, settings);
    }
    // What can be refused is refused before anything is measured.
    let earlier = args.compare.as_deref().map(report::read).transpose()?;
    if let Some(folder) = args.svg.as_deref().and_then(Path::parent)
        && !folder.as_os_str().is_empty()
        && !folder.is_dir()
    {
        return Err(Usage(format!("--svg: there is no folder `{}`", folder.display())).into());
    }
    let engines = open(args, &points, seed, settings)?;
    let labels: Vec<&str> = engines.iter().map(|e| e.label()).collect();
    let mut records = measure(args, &points, &engines, seed, settings)?;
    if let (Some(mut earlier), Some(path)) = (earlier, &args.compare) {
        report::rename_apart(&mut earlier, &labels, path)?;
        let before = earlier.iter().any(|r| points.contains(&r.point));
        if !before {
            console::note(format_args!(
                "{}: none of its figures is one of this run's; nothing to compare",
                path.display()
            ));
        }
        records.extend(earlier.into_iter().filter(|r| points.contains(&r.point)));
    }
    finish(args, &records, &engines, seed)
}

/// All engines, loaded and reachable.
fn open(
    args: &BenchmarkArgs,
    points: &[Point],
    seed: u64,
    settings: &Settings,
) -> anyhow::Result<Vec<Box<dyn Engine>>> {
    let mut engines: Vec<Box<dyn Engine>> = Vec::new();
    let remote = args.remote_options()?;
    let names = args.url.iter().map(|u| remote::named(u).0);
    let labels: Vec<String> = args
        .name
        .iter()
        .map(|_| args.label.clone())
        .chain(names)
        .collect();
    if let Some(label) = labels
        .iter()
        .enumerate()
        .find_map(|(i, l)| labels[..i].contains(l).then_some(l))
    {
        return Err(Usage(format!(
            "two engines are called `{label}`; name them with --label and --url NAME=URL"
        ))
        .into());
    }
    for url in &args.url {
        let base = client::base_url(remote::named(url).1).map_err(|e| Usage(format!("--url {e}")))?;
        if settings.flag("offline") && !client::is_local(&base) {
            return Err(Usage(format!(
                "--url {base}: not this machine, and offline mode is set (--offline or DYNALM_OFFLINE)"
            ))
            .into());
        }
        // Its own numbers, so that what the local engine is asked does not depend on how many servers there are.
        let mut random = Random::new(seed ^ 0xCA11_B8A7E);
        engines.push(Box::new(remote::Remote::open(url, &remote, &mut random)?));
    }
    if let Some(name) = &args.name {
        let path = pull::find_or_pull(name, settings)?;
        let together = |p: &Point| match *p {
            Point::Users { users, .. } => users,
            // As many as a server takes.
            Point::Rate { requests, .. } => requests.min(settings.integer("max_seqs").unwrap_or(1)),
            Point::Prefill { .. } | Point::Decode { .. } => 1,
        };
        let needs = local::Needs {
            seqs: points.iter().map(together).max().unwrap_or(1),
            context: points
                .iter()
                .map(|p| p.lengths().0 + p.lengths().1)
                .max()
                .unwrap_or(1),
            waiting: MAX_REQUESTS,
        };
        engines.insert(
            0,
            Box::new(local::Local::open(name, &path, &args.label, needs, settings)?),
        );
    }
    Ok(engines)
}

/// All rounds; each record is written as soon as it is there.
fn measure(
    args: &BenchmarkArgs,
    points: &[Point],
    engines: &[Box<dyn Engine>],
    seed: u64,
    settings: &Settings,
) -> anyhow::Result<Vec<RoundRecord>> {
    let quiet = settings.text("log_level") == "error";
    let mut random = Random::new(seed);
    let mut records = Vec::new();
    for round in 0..=args.rounds {
        for point in points {
            let mut order: Vec<&dyn Engine> = engines.iter().map(|e| &**e).collect();
            if round % 2 == 0 {
                order.reverse();
            }
            for engine in order {
                let measured = drive::round(engine, point, &mut random, args.shared_prefix)
                    .with_context(|| format!("{}, {}", engine.label(), point.title()))?;
                if !quiet {
                    let which = match round {
                        0 => "warm-up".to_owned(),
                        n => format!("round {n} of {}", args.rounds),
                    };
                    let rate = measured.tokens_per_s.map_or_else(
                        || "no rate, its tokens arrived together".to_owned(),
                        |rate| format!("{} tokens/s", report::number(rate)),
                    );
                    console::note(format_args!(
                        "{which}: {}, {}: {rate}",
                        engine.label(),
                        point.title()
                    ));
                }
                // The first round warms caches, pages and connections.
                if round == 0 {
                    continue;
                }
                let record = RoundRecord {
                    record: "round".to_owned(),
                    engine: engine.label().to_owned(),
                    round,
                    point: point.clone(),
                    measured,
                    peak_resident_bytes: engine.peak_resident(),
                };
                if args.json {
                    text::out(&format!("{}\n", serde_json::to_string(&record)?))?;
                }
                records.push(record);
            }
        }
    }
    Ok(records)
}

/// Summaries, comparisons and the picture.
fn finish(
    args: &BenchmarkArgs,
    records: &[RoundRecord],
    engines: &[Box<dyn Engine>],
    seed: u64,
) -> anyhow::Result<()> {
    let series = Series::of(records);
    let first = engines[0].label();
    let comparisons = report::comparisons(&series, first);
    let machine = machine();
    if args.json {
        for engine in engines {
            let record = summary(args, &**engine, &series, &machine, seed);
            text::out(&format!("{record}\n"))?;
        }
        for comparison in &comparisons {
            text::out(&format!("{}\n", comparison.json()))?;
        }
    } else {
        text::out(&people(args, engines, &series, &machine, seed))?;
        if !comparisons.is_empty() {
            text::out(&format!("\n{}", report::comparison_table(&comparisons)))?;
        }
    }
    if let Some(path) = &args.svg {
        let subtitle = format!(
            "{}; {} rounds; dynalm {}",
            machine_line(&machine),
            args.rounds,
            env!("CARGO_PKG_VERSION")
        );
        let title = format!("dynalm benchmark: {}", model_line(&engines[0].describe()));
        std::fs::write(path, svg::chart(&title, &subtitle, &series))
            .with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    Ok(())
}

/// The machine this program runs on.
fn machine() -> Value {
    let t = Topology::detect();
    let (os, arch) = settings::platform();
    json!({
        "cpu": t.model_name, "logical_cpus": t.logical_cpus, "physical_cores": t.physical_cores,
        "fast_cores": t.fast_cores, "quota_cores": t.quota_cores, "memory_bytes": t.total_bytes(), "os": os, "arch": arch,
    })
}

fn machine_line(machine: &Value) -> String {
    format!(
        "{}, {} cores, {}, {} {}",
        machine["cpu"].as_str().unwrap_or_default(),
        machine["physical_cores"],
        console::bytes(machine["memory_bytes"].as_u64().unwrap_or(0)),
        machine["os"].as_str().unwrap_or_default(),
        machine["arch"].as_str().unwrap_or_default(),
    )
}

fn model_line(engine: &Value) -> String {
    let name = engine["model"]["name"].as_str().unwrap_or_default();
    match engine["model"]["quantization"].as_str() {
        Some(quantization) => format!("{name} ({quantization})"),
        None => name.to_owned(),
    }
}

fn summary(
    args: &BenchmarkArgs,
    engine: &dyn Engine,
    series: &[Series<'_>],
    machine: &Value,
    seed: u64,
) -> Value {
    let figures: Vec<Value> = series
        .iter()
        .filter(|s| s.engine == engine.label())
        .map(Series::json)
        .collect();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    json!({
        "record": "summary", "engine": engine.label(), "version": env!("CARGO_PKG_VERSION"),
        "measured_at": now.map_or(0, |d| d.as_secs()), "machine": machine, "about": engine.describe(),
        "method": METHOD, "command": args.command(seed), "seed": seed, "rounds": args.rounds,
        "shared_prefix": args.shared_prefix, "figures": figures,
        "peak_resident_bytes": engine.peak_resident(),
    })
}

/// The whole result for people.
fn people(
    args: &BenchmarkArgs,
    engines: &[Box<dyn Engine>],
    series: &[Series<'_>],
    machine: &Value,
    seed: u64,
) -> String {
    let mut out = format!("{}\n", machine_line(machine));
    for engine in engines {
        let about = engine.describe();
        let what = match about["device"].as_object() {
            Some(device) => format!(
                "in this process, {} × {}, kv {}",
                device["isa"].as_str().unwrap_or_default(),
                device["threads"],
                about["settings"]["kv"].as_str().unwrap_or_default()
            ),
            None => about["url"].as_str().unwrap_or_default().to_owned(),
        };
        let memory = engine
            .peak_resident()
            .map_or_else(String::new, |n| format!("; peak resident {}", console::bytes(n)));
        out.push_str(&format!(
            "{}: {}, {what}{memory}\n",
            engine.label(),
            model_line(&about)
        ));
    }
    out.push_str(&format!("\n{}", report::table(series)));
    let cached = |s: &Series<'_>| {
        s.rounds()
            .filter_map(|r| r.measured.cached_tokens)
            .max()
            .unwrap_or(0)
    };
    for s in series.iter().filter(|s| cached(s) > 0) {
        out.push_str(&format!(
            "{}, {}: up to {} prompt tokens of a round came from a cache\n",
            s.engine,
            s.point.title(),
            cached(s)
        ));
    }
    out.push_str(&format!("\nrepeat: {}\n", args.command(seed)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_held_to_their_range() {
        assert_eq!(whole("7", 1, 9), Ok(7));
        for bad in ["0", "10", "-1", "x", "1.5", ""] {
            assert!(whole(bad, 1, 9).expect_err(bad).contains("1 to 9"));
        }
        for bad in ["0", "-1", "NaN", "inf", "x"] {
            assert!(rate(bad).is_err() && seconds(bad).is_err(), "{bad}");
        }
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
    }

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted("--users"), "--users");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn a_repeated_value_is_found() {
        assert_eq!(twice(&[1, 2, 3]), None);
        assert_eq!(twice(&[1, 2, 1]), Some(1));
    }
}
