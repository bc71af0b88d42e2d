//! `dynalm inspect`: what a model file holds, without loading its weights.

use std::collections::BTreeMap;
use std::path::Path;

use clap::Args;
use dynacore::KvType;
use dynair::CacheDecl;

use super::options::Flags;
use super::{console, pull, session, text};
use crate::format::value::Value;
use crate::load::{self, Checkpoint, PublishedSampling};
use crate::settings::Settings;
use crate::text::Tokenizer;

/// Longest value shown for a metadata key, characters.
const SHOWN: usize = 100;

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// File, folder or name of a model
    #[arg(value_name = "MODEL")]
    name: String,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// List every metadata key; as JSON with whole values, else with the beginning of each
    #[arg(long)]
    metadata: bool,
    /// Context window whose memory is shown; auto: the model's
    #[arg(long, value_name = "N")]
    ctx: Option<String>,
    /// Element type of the cache whose memory is shown
    #[arg(long, value_name = "TYPE")]
    kv: Option<String>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

impl InspectArgs {
    pub(super) fn flags(&self) -> Flags {
        let all = [(&self.ctx, "ctx", "ctx"), (&self.kv, "kv", "kv")];
        all.into_iter()
            .filter_map(|(v, key, flag)| Some((key, v.clone()?, flag)))
            .collect()
    }
}

pub(super) fn run(args: &InspectArgs, settings: &Settings) -> anyhow::Result<()> {
    let path = pull::find_or_pull(&args.name, settings)?;
    let checkpoint = load::open(&path)?;
    let (tokenizer, template) = load::texts(&checkpoint.gguf, None)?;
    let options = session::load_options(settings, 1, None)?;
    let trained = checkpoint.facts.trained_context;
    let context = options.ctx.unwrap_or(trained);
    let one = load::LoadOptions {
        ctx: Some(context),
        kv_tokens: Some(context),
        ..options
    };
    let cache = load::size_cache(&checkpoint.graph.caches, trained, u64::MAX >> 1, &one)?;
    let mut by_type: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for t in checkpoint.gguf.tensors() {
        let entry = by_type.entry(t.dtype.name()).or_default();
        entry.0 += 1;
        entry.1 += t.bytes();
    }
    let findings = Findings {
        path: &path,
        checkpoint: &checkpoint,
        tokenizer: &tokenizer,
        chat: template.is_some(),
        context,
        kv: one.kv,
        weights: checkpoint.gguf.tensors().iter().map(|t| t.bytes()).sum(),
        cache_bytes: cache.bytes,
        sampling: load::published_sampling(checkpoint.gguf.metadata())?,
        by_type,
    };
    if args.json {
        let all = findings.json(args);
        return text::out(&format!("{}\n", serde_json::to_string_pretty(&all)?));
    }
    findings.print(args)
}

/// What a file holds and needs.
struct Findings<'a> {
    path: &'a Path,
    checkpoint: &'a Checkpoint,
    tokenizer: &'a Tokenizer,
    /// Whether there is a chat template.
    chat: bool,
    /// Tokens the cache is stated for.
    context: usize,
    kv: KvType,
    weights: usize,
    cache_bytes: usize,
    sampling: PublishedSampling,
    /// Tensors and bytes of each type.
    by_type: BTreeMap<&'a str, (usize, usize)>,
}

impl Findings<'_> {
    fn json(&self, args: &InspectArgs) -> serde_json::Value {
        let (checkpoint, facts) = (self.checkpoint, &self.checkpoint.facts);
        let types: serde_json::Map<_, _> = self
            .by_type
            .iter()
            .map(|(name, (n, bytes))| {
                (
                    (*name).to_owned(),
                    serde_json::json!({"tensors": n, "bytes": bytes}),
                )
            })
            .collect();
        let mut all = serde_json::json!({
            "path": self.path, "title": facts.title, "architecture": facts.architecture,
            "parameters": facts.parameters, "quantization": facts.quantization, "file_bytes": facts.file_bytes,
            "layers": checkpoint.spec.layers.len(), "hidden_size": checkpoint.spec.hidden_size,
            "vocab_size": checkpoint.spec.vocab_size, "trained_context": facts.trained_context,
            "types": types, "chat_template": self.chat,
            "sampling": {
                "applied": self.published(&self.sampling.applied),
                "not_applied": self.published(self.sampling.not_applied.iter().map(|(key, _)| key)),
            },
            "memory": {"context": self.context, "weights": self.weights, "cache": self.cache_bytes, "cache_type": self.kv.name()},
        });
        if args.metadata {
            all["metadata"] = checkpoint
                .gguf
                .metadata()
                .iter()
                .map(|(key, value)| (key.to_owned(), serde_json::Value::from(value)))
                .collect::<serde_json::Map<_, _>>()
                .into();
        }
        if args.tensors {
            all["tensors"] = checkpoint
                .gguf
                .tensors()
                .iter()
                .map(|t| serde_json::json!({"name": t.name, "type": t.dtype.name(), "shape": t.dims, "bytes": t.bytes()}))
                .collect();
        }
        all
    }

    /// Keys of the metadata with their values.
    fn published<'k>(
        &self,
        keys: impl IntoIterator<Item = &'k String>,
    ) -> serde_json::Map<String, serde_json::Value> {
        let metadata = self.checkpoint.gguf.metadata();
        keys.into_iter()
            .filter_map(|key| Some((key.clone(), metadata.value(key)?.into())))
            .collect()
    }

    fn print(&self, args: &InspectArgs) -> anyhow::Result<()> {
        let (checkpoint, facts) = (self.checkpoint, &self.checkpoint.facts);
        let mut rows = vec![
            vec!["file".to_owned(), self.path.display().to_string()],
            vec!["name".to_owned(), facts.title.clone()],
            vec!["architecture".to_owned(), facts.architecture.clone()],
            vec!["parameters".to_owned(), console::parameters(facts.parameters)],
            vec!["quantisation".to_owned(), facts.quantization.clone()],
            vec!["size".to_owned(), console::bytes(facts.file_bytes)],
            vec!["layers".to_owned(), layers(checkpoint)],
            vec!["context".to_owned(), format!("{} tokens", facts.trained_context)],
            vec![
                "vocabulary".to_owned(),
                format!(
                    "{} tokens, {} end a turn",
                    self.tokenizer.vocab().len(),
                    self.tokenizer.vocab().eog_tokens().len()
                ),
            ],
            vec![
                "chat template".to_owned(),
                if self.chat { "yes" } else { "none" }.to_owned(),
            ],
            vec![
                "memory".to_owned(),
                format!(
                    "weights {}, cache {} for {} tokens ({})",
                    console::bytes(self.weights as u64),
                    console::bytes(self.cache_bytes as u64),
                    self.context,
                    self.kv
                ),
            ],
        ];
        let listed = |entries: serde_json::Map<String, serde_json::Value>| {
            let entries = entries.iter().map(|(key, value)| format!("{key} = {value}"));
            entries.collect::<Vec<_>>().join(", ")
        };
        if !self.sampling.applied.is_empty() {
            let applied = listed(self.published(&self.sampling.applied));
            rows.push(vec!["sampling".to_owned(), applied]);
        }
        if !self.sampling.not_applied.is_empty() {
            let missing = self.sampling.not_applied.iter().map(|(key, _)| key);
            let missing = listed(self.published(missing));
            rows.push(vec![
                "not applied".to_owned(),
                format!("{missing} (samplers this build does not have)"),
            ]);
        }
        for (name, (n, bytes)) in &self.by_type {
            rows.push(vec![
                format!("type {name}"),
                format!("{n} tensors, {}", console::bytes(*bytes as u64)),
            ]);
        }
        text::out(&console::table(&rows))?;
        if args.metadata {
            let rows: Vec<_> = checkpoint
                .gguf
                .metadata()
                .iter()
                .map(|(key, value)| vec![key.to_owned(), short(value)])
                .collect();
            text::out(&format!("\n{}", console::table(&rows)))?;
        }
        if args.tensors {
            text::out(&format!("\n{}", console::table(&tensor_rows(checkpoint))))?;
        }
        Ok(())
    }
}

fn layers(checkpoint: &Checkpoint) -> String {
    let spec = &checkpoint.spec;
    let attn = spec.layers.first().map(|l| l.attn);
    let windowed = checkpoint
        .graph
        .caches
        .iter()
        .filter_map(|c| match c {
            CacheDecl::Kv { window, .. } => *window,
            CacheDecl::State { .. } => None,
        })
        .collect::<Vec<_>>();
    let heads = attn.map_or_else(String::new, |a| {
        format!(
            ", {} query and {} key/value heads of {}",
            a.num_heads, a.num_kv_heads, a.head_dim
        )
    });
    let window = match windowed.first() {
        Some(w) => format!(", {} of them see {w} tokens", windowed.len()),
        None => String::new(),
    };
    format!(
        "{} of width {}{heads}{window}",
        spec.layers.len(),
        spec.hidden_size
    )
}

fn tensor_rows(checkpoint: &Checkpoint) -> Vec<Vec<String>> {
    let row = |t: &crate::format::gguf::Tensor| {
        vec![
            t.name.clone(),
            t.dtype.name().to_owned(),
            format!("{:?}", t.dims),
            t.bytes().to_string(),
        ]
    };
    checkpoint.gguf.tensors().iter().map(row).collect()
}

/// A metadata value in one short line.
fn short(value: &Value) -> String {
    let text = match value {
        Value::Str(s) => s.replace('\n', "\\n"),
        Value::Array(a) => format!("{} of {} entries", value.type_name(), a.len()),
        other => other.to_string(),
    };
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
