//! `dynalm parity`: how near a model's results here are to a reference.
//!
//! Teacher-forced: the texts of a reference file are fed token by token and the distributions compared at every
//! position. Against a reference file the five largest logits are compared, the next token, and greedy continuations;
//! with `--against safe` the full distributions of this program's plain fp32 mode.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use dynacore::KvType;
use dynacore::cpu::Mode;
use serde::Deserialize;

use super::direct::{Direct, DirectOptions, argmax, log_sum_exp};
use super::options::Flags;
use super::{Usage, pull, session, text};
use crate::settings::Settings;

/// Rows whose full logits are held at one time.
const CHUNK: usize = 64;

/// Arguments of `parity`.
#[derive(Debug, Args)]
pub(super) struct ParityArgs {
    /// File, folder or name of a model
    #[arg(value_name = "MODEL")]
    name: String,
    /// Reference file: texts as token ids with the largest logits at each position, and greedy continuations
    #[arg(long, value_name = "FILE")]
    reference: PathBuf,
    /// Kernels to judge: auto, exact or safe
    #[arg(long, value_name = "MODE")]
    mode: Option<String>,
    /// Compare full distributions with this mode's instead of the file's logits
    #[arg(long, value_name = "MODE")]
    against: Option<String>,
    /// Element type of the cache of the judged model; by default f32 in safe mode, else f16
    #[arg(long, value_name = "TYPE")]
    kv: Option<String>,
    /// Worker threads: auto or a number
    #[arg(long, value_name = "N")]
    threads: Option<String>,
}

impl ParityArgs {
    pub(super) fn flags(&self) -> Flags {
        let all = [
            (&self.mode, "mode", "mode"),
            (&self.threads, "threads", "threads"),
            (&self.kv, "kv", "kv"),
        ];
        all.into_iter()
            .filter_map(|(v, key, flag)| Some((key, v.clone()?, flag)))
            .collect()
    }
}

#[derive(Debug, Deserialize)]
struct Reference {
    texts: Vec<Text>,
    #[serde(default)]
    greedy: Vec<Greedy>,
}

#[derive(Debug, Deserialize)]
struct Text {
    file: String,
    ids: Vec<u32>,
    top5: Vec<Top>,
}

#[derive(Debug, Deserialize)]
struct Top {
    id: Vec<u32>,
    logit: Vec<f32>,
    #[serde(default)]
    next_logprob: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct Greedy {
    prompt: String,
    prompt_ids: Vec<u32>,
    out_ids: Vec<u32>,
    margin_to_second: Vec<f32>,
}

fn open(
    args: &ParityArgs,
    settings: &Settings,
    mode: Mode,
    kv: KvType,
    context: usize,
) -> anyhow::Result<Direct> {
    let path = pull::find_or_pull(&args.name, settings)?;
    let threads = settings.integer("threads");
    Direct::open(
        &path,
        &DirectOptions {
            mode,
            threads,
            kv,
            seqs: 1,
            context,
            batch_tokens: CHUNK,
        },
    )
}

pub(super) fn run(args: &ParityArgs, settings: &Settings) -> anyhow::Result<()> {
    let file = std::fs::read_to_string(&args.reference)
        .with_context(|| format!("cannot read the reference `{}`", args.reference.display()))?;
    let reference: Reference = serde_json::from_str(&file)
        .with_context(|| format!("`{}` is no reference file", args.reference.display()))?;
    let longest = reference.texts.iter().map(|t| t.ids.len());
    let longest = longest
        .chain(
            reference
                .greedy
                .iter()
                .map(|g| g.prompt_ids.len() + g.out_ids.len()),
        )
        .max();
    let context = longest.context("the reference holds no texts")?;
    let kv = session::load_options(settings, 1, None)?.kv;
    let mut model = open(args, settings, session::mode(settings), kv, context)?;
    let report = match &args.against {
        Some(other) => {
            let (mode, kv) = match other.as_str() {
                "safe" => (Mode::Safe, KvType::F32),
                "exact" => (Mode::Exact, KvType::F16),
                "auto" => (Mode::Auto, KvType::F16),
                _ => return Err(Usage(format!("--against {other}: expected auto, exact or safe")).into()),
            };
            let mut truth = open(args, settings, mode, kv, context)?;
            against(&mut model, &mut truth, &reference)?
        }
        None => {
            let mut report = against_file(&mut model, &reference)?;
            report["greedy"] = greedy(&mut model, &reference)?;
            report
        }
    };
    let all = serde_json::json!({
        "model": args.name, "mode": settings.text("mode"), "kv": kv.name(), "against": args.against.as_deref().unwrap_or("reference file"),
        "device": model.device, "result": report,
    });
    text::out(&format!("{}\n", serde_json::to_string_pretty(&all)?))
}

/// Largest difference of the reference's top logits, next-token agreement, mean negative log-likelihood.
fn against_file(model: &mut Direct, reference: &Reference) -> anyhow::Result<serde_json::Value> {
    let (mut positions, mut agree, mut worst) = (0usize, 0usize, 0f32);
    let (mut differences, mut nll, mut their_nll, mut scored) = (Vec::new(), 0f64, 0f64, 0usize);
    let mut worst_at = String::new();
    for t in &reference.texts {
        anyhow::ensure!(
            t.top5.len() <= t.ids.len(),
            "`{}` has more logits than tokens",
            t.file
        );
        model.reset(0);
        for (start, chunk) in (0..).step_by(CHUNK).zip(t.ids.chunks(CHUNK)) {
            let logits = model.step(&[(0, chunk)], true)?;
            for i in 0..chunk.len() {
                let (row, at) = (logits.row(i), start + i);
                let Some(top) = t.top5.get(at) else { break };
                positions += 1;
                agree += usize::from(top.id.first() == Some(&(argmax(row) as u32)));
                for (id, logit) in top.id.iter().zip(&top.logit) {
                    let value = row
                        .get(*id as usize)
                        .context("the reference has another vocabulary")?;
                    let difference = (value - logit).abs();
                    differences.push(difference);
                    if difference > worst {
                        (worst, worst_at) = (difference, format!("{}:{at}", t.file));
                    }
                }
                if let (Some(next), Some(theirs)) = (t.ids.get(at + 1), top.next_logprob) {
                    nll -= f64::from(row[*next as usize]) - log_sum_exp(row);
                    their_nll -= theirs;
                    scored += 1;
                }
            }
        }
    }
    differences.sort_by(f32::total_cmp);
    let quantile = |q: f64| differences[((differences.len() - 1) as f64 * q) as usize];
    let n = scored.max(1) as f64;
    Ok(serde_json::json!({
        "positions": positions,
        "next_token_agreement": agree as f64 / positions.max(1) as f64,
        "top5_logit_difference": {"max": worst, "at": worst_at, "p99": quantile(0.99), "median": quantile(0.5)},
        "perplexity": (nll / n).exp(),
        "perplexity_reference": (their_nll / n).exp(),
    }))
}

/// Greedy continuations, and where they first differ, with the reference's margin there.
fn greedy(model: &mut Direct, reference: &Reference) -> anyhow::Result<serde_json::Value> {
    let mut all = Vec::new();
    for g in &reference.greedy {
        model.reset(0);
        let mut last = 0;
        for chunk in g.prompt_ids.chunks(CHUNK) {
            let logits = model.step(&[(0, chunk)], false)?;
            last = argmax(logits.row(0)) as u32;
        }
        let mut differs = None;
        for (i, wanted) in g.out_ids.iter().enumerate() {
            if last != *wanted {
                differs = Some((i, g.margin_to_second.get(i).copied()));
                break;
            }
            last = argmax(model.step(&[(0, &[last])], false)?.row(0)) as u32;
        }
        all.push(match differs {
            None => serde_json::json!({"prompt": g.prompt, "equal_tokens": g.out_ids.len()}),
            Some((at, margin)) => {
                serde_json::json!({"prompt": g.prompt, "equal_tokens": at, "reference_margin_there": margin})
            }
        });
    }
    Ok(all.into())
}

/// Divergence of full distributions: KL(truth ‖ model), perplexities, next-token agreement.
fn against(
    model: &mut Direct,
    truth: &mut Direct,
    reference: &Reference,
) -> anyhow::Result<serde_json::Value> {
    let (mut positions, mut agree) = (0usize, 0usize);
    let (mut divergences, mut nll, mut true_nll) = (Vec::new(), 0f64, 0f64);
    for t in &reference.texts {
        model.reset(0);
        truth.reset(0);
        for (start, chunk) in (0..).step_by(CHUNK).zip(t.ids.chunks(CHUNK)) {
            let ours = model.step(&[(0, chunk)], true)?;
            let theirs = truth.step(&[(0, chunk)], true)?;
            for i in 0..chunk.len() {
                let (q, p) = (ours.row(i), theirs.row(i));
                let (lq, lp) = (log_sum_exp(q), log_sum_exp(p));
                let kl: f64 = p
                    .iter()
                    .zip(q)
                    .map(|(p, q)| {
                        let (p, q) = (f64::from(*p) - lp, f64::from(*q) - lq);
                        p.exp() * (p - q)
                    })
                    .sum();
                divergences.push(kl);
                positions += 1;
                agree += usize::from(argmax(p) == argmax(q));
                if let Some(next) = t.ids.get(start + i + 1) {
                    nll -= f64::from(q[*next as usize]) - lq;
                    true_nll -= f64::from(p[*next as usize]) - lp;
                }
            }
        }
    }
    let scored = (positions - reference.texts.len()).max(1) as f64;
    let mean = divergences.iter().sum::<f64>() / positions.max(1) as f64;
    divergences.sort_by(f64::total_cmp);
    let (ours, theirs) = ((nll / scored).exp(), (true_nll / scored).exp());
    Ok(serde_json::json!({
        "positions": positions,
        "next_token_agreement": agree as f64 / positions.max(1) as f64,
        "kl_mean": mean,
        "kl_p99": divergences[(divergences.len() - 1) * 99 / 100],
        "kl_max": divergences.last(),
        "perplexity": ours,
        "perplexity_truth": theirs,
        "perplexity_change": ours / theirs - 1.0,
    }))
}
