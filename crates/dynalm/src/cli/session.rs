//! A model loaded for one user: resolving its name, loading it, and generating with it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use anyhow::Context;
use dynacore::KvType;
use dynacore::cpu::{CpuDevice, CpuOptions, Mode};

use super::options::ModelArgs;
use super::{Usage, console, pull};
use crate::engine::{
    EngineConfig, EngineHandle, EngineModel, Event, FinishReason, Request, Timings, Usage as Tokens,
};
use crate::load::{self, LoadOptions, LoadedModel, ModelFacts};
use crate::metrics::Metrics;
use crate::sample::params::{SamplingParams, TokenId};
use crate::settings::Settings;
use crate::text::{ChatTemplate, Message, Piece, RenderOptions, Tokenizer};

/// A running engine with one model.
pub(super) struct Session {
    engine: Option<EngineHandle>,
    thread: Option<JoinHandle<()>>,
    /// The vocabulary.
    pub(super) tokenizer: Arc<Tokenizer>,
    /// The chat template, if there is one.
    pub(super) template: Option<Arc<ChatTemplate>>,
    /// Published sampling values, else the command's defaults.
    pub(super) defaults: SamplingParams,
    /// Most tokens of prompt and reply.
    pub(super) max_context: usize,
    /// Columns of the logits.
    pub(super) vocab_size: usize,
    /// Facts about the model.
    pub(super) facts: ModelFacts,
}

/// What ends a reply besides the model.
#[derive(Debug, Clone, Default)]
pub(super) struct End {
    /// Most tokens.
    pub(super) max_tokens: Option<usize>,
    /// Texts.
    pub(super) stop: Vec<String>,
}

/// How a reply went.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    /// The whole reply.
    pub(super) text: String,
    /// Why it ended.
    pub(super) reason: FinishReason,
    /// Token counts.
    pub(super) usage: Tokens,
    /// Durations.
    pub(super) timings: Timings,
}

/// A seed nobody chose, another one each time.
pub(super) fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's hasher keys come from the system's random source.
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}

/// The kernels that the settings ask for.
pub(super) fn mode(settings: &Settings) -> Mode {
    match settings.text("mode") {
        "exact" => Mode::Exact,
        "safe" => Mode::Safe,
        _ => Mode::Auto,
    }
}

/// The device that the settings ask for.
pub(super) fn device(settings: &Settings) -> anyhow::Result<CpuDevice> {
    let mode = mode(settings);
    Ok(CpuDevice::new(&CpuOptions {
        threads: settings.integer("threads"),
        mode,
        isa: None,
    })?)
}

/// Loading options from the settings; `template` is `--chat-template`.
pub(super) fn load_options(
    settings: &Settings,
    max_seqs: usize,
    template: Option<&str>,
) -> anyhow::Result<LoadOptions> {
    let kv = match (settings.text("kv"), settings.text("mode")) {
        // `safe` is plain fp32 throughout, unless the user names a type himself.
        ("f16", "safe") if *settings.origin("kv") == crate::settings::Origin::Default => KvType::F32,
        ("f32", _) => KvType::F32,
        ("q8_0", _) => KvType::Q8_0,
        _ => KvType::F16,
    };
    let template = match template {
        Some(name) if std::path::Path::new(name).is_file() => Some(
            std::fs::read_to_string(name)
                .with_context(|| format!("cannot read the chat template `{name}`"))?,
        ),
        other => other.map(str::to_owned),
    };
    Ok(LoadOptions {
        ctx: settings.integer("ctx"),
        kv,
        kv_tokens: settings.integer("kv_tokens"),
        batch_tokens: settings
            .integer("batch_tokens")
            .unwrap_or(LoadOptions::default().batch_tokens),
        max_seqs,
        template,
    })
}

/// What the engine needs of a loaded model.
pub(super) fn engine_model(model: LoadedModel) -> EngineModel {
    EngineModel {
        executor: model.executor,
        geometry: model.geometry,
        windows: model.windows,
        limits: model.limits,
        max_context: model.max_context,
        vocab_size: model.vocab_size,
        tokenizer: model.tokenizer,
    }
}

impl Session {
    /// Finds or pulls the model, loads it and starts the engine. `greedy` is the default where the model publishes no
    /// temperature.
    pub(super) fn open(
        name: &str,
        args: &ModelArgs,
        settings: &Settings,
        greedy: bool,
    ) -> anyhow::Result<Session> {
        let path: PathBuf = pull::find_or_pull(name, settings)?;
        let device = device(settings)?;
        let options = load_options(settings, 1, args.chat_template.as_deref())?;
        let model = load::load(&path, &device, &options)?;
        let mut defaults = model.defaults.clone();
        if !model.published.iter().any(|key| key == "general.sampling.temp") {
            defaults.temperature = if greedy { 0.0 } else { 0.7 };
        }
        let (tokenizer, template) = (Arc::clone(&model.tokenizer), model.template.clone());
        let (max_context, vocab_size, facts) = (model.max_context, model.vocab_size, model.facts.clone());
        let config = EngineConfig {
            prefix_cache: settings.flag("prefix_cache"),
            ..EngineConfig::default()
        };
        let failed = |why: &str| tracing::error!("the engine has failed: {why}");
        let (engine, thread) =
            EngineHandle::spawn(engine_model(model), &config, Arc::new(Metrics::default()), failed)?;
        Ok(Session {
            engine: Some(engine),
            thread: Some(thread),
            tokenizer,
            template,
            defaults,
            max_context,
            vocab_size,
            facts,
        })
    }

    /// The tokens of a conversation. Without a template a single user message is continued as plain text.
    pub(super) fn chat_tokens(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> anyhow::Result<Vec<TokenId>> {
        let Some(template) = &self.template else {
            anyhow::bail!(
                "`{}` has no chat template; give one with --chat-template, or use `run --raw` to continue plain text",
                self.facts.title
            );
        };
        let prompt = template.render(messages, None, options, &self.tokenizer)?;
        Ok(self.tokenizer.encode(&prompt.pieces())?)
    }

    /// The tokens of a text to continue.
    pub(super) fn raw_tokens(&self, text: &str) -> anyhow::Result<Vec<TokenId>> {
        Ok(self.tokenizer.encode(&[Piece::Text(text)])?)
    }

    /// Generates; `on_text` gets each piece as it becomes certain and returns whether to go on.
    pub(super) fn generate(
        &self,
        prompt: Vec<TokenId>,
        params: SamplingParams,
        end: &End,
        starts_text: bool,
        on_text: &mut dyn FnMut(&str) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Outcome> {
        let (prompt_len, most) = (prompt.len(), self.max_context);
        if prompt_len >= most {
            return Err(Usage(format!(
                "the prompt has {prompt_len} tokens and the context window holds {most}; shorten it or raise --ctx"
            ))
            .into());
        }
        let (sender, events) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let request = Request {
            prompt,
            params,
            max_tokens: end.max_tokens,
            stop: end.stop.clone(),
            ignore_eos: false,
            starts_text,
            prompt_logprobs: None,
            cache_prompt: true,
            priority: 0,
            deadline: None,
            events: Box::new(move |event| !stopping.load(Ordering::Relaxed) && sender.send(event).is_ok()),
        };
        let engine = self.engine.as_ref().context("the engine has been shut down")?;
        let id = engine.submit(request)?;
        let mut text = String::new();
        loop {
            let event = events.recv().context("the engine stopped without an answer")?;
            let piece = match event {
                Event::Token { text, .. } => text,
                Event::Finished {
                    reason,
                    text: rest,
                    usage,
                    timings,
                } => {
                    if !rest.is_empty() {
                        text.push_str(&rest);
                        on_text(&rest)?;
                    }
                    return Ok(Outcome {
                        text,
                        reason,
                        usage,
                        timings,
                    });
                }
                Event::Failed(error) => return Err(error.into()),
                Event::Admitted { .. } | Event::PromptLogprobs(_) => continue,
            };
            text.push_str(&piece);
            let go_on = piece.is_empty() || on_text(&piece).inspect_err(|_| engine.abort(id))?;
            if !go_on || interrupts::seen() {
                engine.abort(id);
                stop.store(true, Ordering::Relaxed);
                let usage = Tokens {
                    prompt_tokens: prompt_len,
                    ..Tokens::default()
                };
                return Ok(Outcome {
                    text,
                    reason: FinishReason::Cancelled,
                    usage,
                    timings: Timings::default(),
                });
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            engine.shutdown();
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            console::note("dynalm: the engine thread panicked");
        }
    }
}

/// One line about a reply's cost.
pub(super) fn stats_line(outcome: &Outcome) -> String {
    let (usage, timings) = (&outcome.usage, &outcome.timings);
    let rate = |n: usize, s: f64| {
        if s > 0.0 {
            format!("{:.1} tok/s", n as f64 / s)
        } else {
            "-".to_owned()
        }
    };
    format!(
        "prompt {} tokens ({} cached) in {:.2} s, {}; reply {} tokens in {:.2} s, {}",
        usage.prompt_tokens,
        usage.cached_tokens,
        timings.prefill_s,
        rate(
            usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
            timings.prefill_s
        ),
        usage.completion_tokens,
        timings.decode_s,
        rate(usage.completion_tokens.saturating_sub(1), timings.decode_s),
    )
}

/// Ctrl-C while generating.
pub(super) mod interrupts {
    use std::sync::atomic::{AtomicUsize, Ordering};

    static SEEN: AtomicUsize = AtomicUsize::new(0);

    /// From now on Ctrl-C is counted instead of ending the process; a third one in a row ends it at once.
    pub(in crate::cli) fn watch() -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        runtime.spawn(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if SEEN.fetch_add(1, Ordering::Relaxed) >= 2 {
                    std::process::exit(130);
                }
            }
        });
        // Lives as long as the process.
        std::mem::forget(runtime);
        Ok(())
    }

    /// Whether Ctrl-C was pressed since the last [`reset`].
    pub(in crate::cli) fn seen() -> bool {
        SEEN.load(Ordering::Relaxed) > 0
    }

    /// Forgets.
    pub(in crate::cli) fn reset() {
        SEEN.store(0, Ordering::Relaxed);
    }
}
