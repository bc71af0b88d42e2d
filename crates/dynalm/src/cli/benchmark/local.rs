//! Our engine in this process, as `serve` runs it, without HTTP.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::Context;
use dynacore::Device;
use dynacore::cpu::isa::Isa;
use serde_json::json;

use super::drive::{Engine, Prompt, Random, Trace};
use super::reading::Reading;
use crate::cli::{Usage, session};
use crate::engine::{EngineConfig, EngineHandle, Event, Request};
use crate::load::{self, Checkpoint, LoadOptions, ModelFacts};
use crate::metrics::Metrics;
use crate::sample::params::{SamplingParams, TokenId};
use crate::settings::Settings;

/// Fewer plain tokens than this make no unique prompts.
const LEAST_TOKENS: usize = 64;

/// What the figures need room for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    /// Requests at the same time.
    pub(super) seqs: usize,
    /// Tokens of the longest request.
    pub(super) context: usize,
    /// Requests that may wait.
    pub(super) waiting: usize,
}

/// A model, loaded, with its engine.
pub(super) struct Local {
    label: String,
    engine: EngineHandle,
    thread: Option<JoinHandle<()>>,
    /// Tokens that prompts are made of.
    plain: Vec<TokenId>,
    facts: ModelFacts,
    name: String,
    description: serde_json::Value,
    reading: Reading,
}

/// Loading options for `needs` of a model made for `trained` tokens: every request has its room, so that none is
/// preempted.
fn options(trained: usize, needs: Needs, settings: &Settings) -> anyhow::Result<LoadOptions> {
    let context = needs
        .context
        .next_multiple_of(load::BLOCK_TOKENS)
        .min(trained.max(1));
    if needs.context > trained {
        return Err(Usage(format!(
            "the longest request takes {} tokens and the model was made for {trained}; ask for less with --prefill, \
             --context, --decode, --user-context and --user-decode",
            needs.context
        ))
        .into());
    }
    let mut options = session::load_options(settings, needs.seqs, None)?;
    if let Some(window) = options.ctx.filter(|n| *n < needs.context) {
        return Err(Usage(format!(
            "the longest request takes {} tokens and the context window is {window} (`ctx`); raise it or ask for less",
            needs.context
        ))
        .into());
    }
    options.ctx = Some(options.ctx.unwrap_or(context));
    // A block more for each, because a sequence's last block is its own.
    let tokens = needs.seqs * (context + load::BLOCK_TOKENS);
    if let Some(given) = options.kv_tokens.filter(|n| *n < tokens) {
        return Err(Usage(format!(
            "{} requests of {} tokens take a cache of {tokens} tokens and `kv_tokens` is {given}; raise it or ask for \
             fewer users",
            needs.seqs, needs.context
        ))
        .into());
    }
    options.kv_tokens = Some(options.kv_tokens.unwrap_or(tokens).max(options.ctx.unwrap_or(0)));
    Ok(options)
}

impl Local {
    /// Loads the model and starts the engine.
    pub(super) fn open(
        name: &str,
        path: &Path,
        label: &str,
        needs: Needs,
        settings: &Settings,
    ) -> anyhow::Result<Local> {
        let Checkpoint { graph, facts, .. } = load::open(path)?;
        let options = options(facts.trained_context, needs, settings)?;
        let device = session::device(settings)?;
        let info = device.info().clone();
        let plan = load::plan(graph, &device, &options)?;
        let isa = Isa::detect(Some(&info.isa))?;
        let reading = Reading::new(plan, options.kv.block(), isa, info.units);
        let model = load::load(path, &device, &options)?;
        let vocab = model.tokenizer.vocab();
        let plain: Vec<TokenId> = (0..model.vocab_size.min(vocab.len()) as TokenId)
            .filter(|id| !vocab.is_control(*id) && !vocab.is_eog(*id))
            .collect();
        anyhow::ensure!(
            plain.len() >= LEAST_TOKENS,
            "`{name}`: a vocabulary of {} plain tokens is too small for unique prompts",
            plain.len()
        );
        let prefix_cache = settings.flag("prefix_cache");
        let description = json!({
            "kind": "in-process",
            "device": {"kind": info.kind, "name": info.name, "isa": info.isa, "threads": info.units},
            "settings": {
                "mode": settings.text("mode"), "kv": options.kv.name(), "batch_tokens": options.batch_tokens,
                "max_seqs": options.max_seqs, "ctx": model.max_context, "kv_tokens": options.kv_tokens,
                "prefix_cache": prefix_cache,
            },
            "weight_bytes": model.weight_bytes, "arena_bytes": model.arena_bytes, "load_s": model.load_s,
        });
        let config = EngineConfig {
            prefix_cache,
            max_waiting: needs.waiting,
            ..EngineConfig::default()
        };
        let facts = model.facts.clone();
        let failed = |why: &str| tracing::error!("the engine has failed: {why}");
        let (engine, thread) = EngineHandle::spawn(
            session::engine_model(model),
            &config,
            Arc::new(Metrics::default()),
            failed,
        )?;
        Ok(Local {
            label: label.to_owned(),
            engine,
            thread: Some(thread),
            plain,
            facts,
            name: name.to_owned(),
            description,
            reading,
        })
    }
}

impl Engine for Local {
    fn label(&self) -> &str {
        &self.label
    }

    fn prompt(&self, random: &mut Random, tokens: usize, shared: usize) -> Prompt {
        let mut common = Random::new(0);
        let mut ids = Vec::with_capacity(tokens);
        for i in 0..tokens {
            let source = if i < shared { &mut common } else { &mut *random };
            let at = match i {
                // No two prompts begin alike, so that not even one token of another's is found in a cache.
                0 if shared == 0 => source.serial() % self.plain.len(),
                _ => source.below(self.plain.len()),
            };
            ids.push(self.plain[at]);
        }
        Prompt::Tokens(ids)
    }

    fn ask(&self, prompt: Prompt, max_tokens: usize) -> anyhow::Result<Trace> {
        let Prompt::Tokens(prompt) = prompt else {
            anyhow::bail!("internal error: a text prompt for the engine in this process");
        };
        let (sender, ended) = mpsc::channel();
        let mut times = Vec::with_capacity(max_tokens);
        let events = move |event: Event| match event {
            Event::Token { .. } => {
                times.push(Instant::now());
                true
            }
            Event::Finished { usage, .. } => sender.send(Ok((std::mem::take(&mut times), usage))).is_ok(),
            Event::Failed(error) => sender.send(Err(error)).is_ok(),
            Event::Admitted { .. } | Event::PromptLogprobs(_) => true,
        };
        let sent = Instant::now();
        self.engine.submit(Request {
            prompt,
            params: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
            max_tokens: Some(max_tokens),
            stop: Vec::new(),
            ignore_eos: true,
            starts_text: false,
            prompt_logprobs: None,
            cache_prompt: true,
            priority: 0,
            deadline: None,
            events: Box::new(events),
        })?;
        let (events, usage) = ended.recv().context("the engine stopped without an answer")??;
        Ok(Trace {
            sent,
            events,
            prompt_tokens: usage.prompt_tokens,
            output_tokens: usage.completion_tokens,
            cached_tokens: Some(usage.cached_tokens),
        })
    }

    fn peak_resident(&self) -> Option<u64> {
        self.reading.peak_resident()
    }

    fn reading(&self) -> Option<&Reading> {
        Some(&self.reading)
    }

    fn describe(&self) -> serde_json::Value {
        let mut description = self.description.clone();
        description["model"] = json!({
            "name": self.name, "title": self.facts.title, "architecture": self.facts.architecture,
            "quantization": self.facts.quantization, "parameters": self.facts.parameters,
            "file_bytes": self.facts.file_bytes,
        });
        description
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.engine.shutdown();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            crate::cli::console::note("dynalm: the engine thread panicked");
        }
    }
}
