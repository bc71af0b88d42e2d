//! From files to a model that can run: read and validate, build and plan, place on the device.
//!
//! Order: metadata and tensor table → family, spec and graph → every tensor used, none missing → tokenizer and
//! template → plan for the device → memory → weights (in parallel) → cache → executor. Anything that does not fit is
//! refused by name before weights are touched.

mod published;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use dynacore::device::weight_usage;
use dynacore::{Device, Executor, KvGeometry, KvType, Tensor};
use dynair::{CacheDecl, Graph, Limits, Plan, TensorIndex};
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::format::gguf::Gguf;
use crate::format::value::{KeyValues, Strings};
use crate::models::{self, Metadata, ModelSpec};
use crate::sample::params::SamplingParams;
use crate::text::{ChatTemplate, Tokenizer, VocabSource};

pub use published::{PublishedSampling, published_sampling};

/// Tokens per cache block: the field's usual size. Prefix reuse works in these steps.
pub const BLOCK_TOKENS: usize = 16;
/// The cache takes at most this share of the memory that is free once the weights are loaded.
const KV_MEMORY_SHARE: f64 = 0.5;
/// Unless a single context needs more, the cache is no larger than this by itself, bytes.
const KV_AUTO_BYTES: usize = 4 << 30;

/// What the user decides about loading.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadOptions {
    /// Context window in tokens; `None`: the model's, if memory allows.
    pub ctx: Option<usize>,
    /// Element type of the cache.
    pub kv: KvType,
    /// Tokens the cache holds for all sequences together; `None`: from free memory.
    pub kv_tokens: Option<usize>,
    /// Most tokens of a step.
    pub batch_tokens: usize,
    /// Most sequences of a step.
    pub max_seqs: usize,
    /// A chat template in place of the checkpoint's: a built-in name or the text itself.
    pub template: Option<String>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            ctx: None,
            kv: KvType::F16,
            kv_tokens: None,
            batch_tokens: 512,
            max_seqs: 64,
            template: None,
        }
    }
}

/// Facts about a checkpoint, for people.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// `general.name`, else the file's name.
    pub title: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Elements of all tensors.
    pub parameters: u64,
    /// The commonest type of the large tensors, or the file's own name for its mix.
    pub quantization: String,
    /// Bytes of the files.
    pub file_bytes: u64,
    /// Positions the model was made for.
    pub trained_context: usize,
}

/// A checkpoint whose metadata has been read and validated; no weight has been touched.
pub struct Checkpoint {
    /// The files.
    pub gguf: Gguf,
    /// Structure.
    pub spec: ModelSpec,
    /// The forward pass, as built.
    pub graph: Graph,
    /// Facts.
    pub facts: ModelFacts,
}

/// A model on a device.
pub struct LoadedModel {
    /// Facts about the checkpoint.
    pub facts: ModelFacts,
    /// Runs it.
    pub executor: Box<dyn Executor>,
    /// Size of the cache.
    pub geometry: KvGeometry,
    /// Sliding window of each cache group.
    pub windows: Vec<Option<u32>>,
    /// The largest step.
    pub limits: Limits,
    /// Most tokens of prompt and reply together.
    pub max_context: usize,
    /// Columns of the logits.
    pub vocab_size: usize,
    /// The vocabulary.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template, if there is one.
    pub template: Option<Arc<ChatTemplate>>,
    /// The model's published sampling values over the engine's defaults.
    pub defaults: SamplingParams,
    /// Which of `defaults` the checkpoint itself gave, by GGUF key.
    pub published: Vec<String>,
    /// Bytes of weights on the device.
    pub weight_bytes: usize,
    /// Bytes of the cache, when full.
    pub kv_bytes: usize,
    /// Bytes of intermediate values.
    pub arena_bytes: usize,
    /// How long loading took, seconds.
    pub load_s: f64,
}

/// GGUF metadata as the families read it.
struct GgufMetadata<'a> {
    arch: &'a str,
    values: &'a KeyValues,
}

impl Metadata for GgufMetadata<'_> {
    fn arch(&self) -> &str {
        self.arch
    }
    fn u32(&self, key: &str) -> Option<u32> {
        self.values.get(key).ok().flatten()
    }
    fn f32(&self, key: &str) -> Option<f32> {
        self.values.get(key).ok().flatten()
    }
    fn bool(&self, key: &str) -> Option<bool> {
        self.values.get(key).ok().flatten()
    }
    fn str(&self, key: &str) -> Option<&str> {
        self.values.get(key).ok().flatten()
    }
    fn u32s(&self, key: &str) -> Option<Vec<u32>> {
        if let Ok(Some(bools)) = self.values.get::<&[bool]>(key) {
            return Some(bools.iter().map(|b| u32::from(*b)).collect());
        }
        self.values.get(key).ok().flatten()
    }
    fn array_len(&self, key: &str) -> Option<usize> {
        match self.values.value(key) {
            Some(crate::format::value::Value::Array(a)) => Some(a.len()),
            _ => None,
        }
    }
}

struct Tensors<'a>(&'a Gguf);

impl TensorIndex for Tensors<'_> {
    fn find(&self, name: &str) -> Option<(dynair::DType, usize, usize)> {
        self.0.find(name)
    }
    fn experts(&self, name: &str) -> usize {
        self.0.experts(name)
    }
}

/// Reads and validates a checkpoint: structure known, every tensor used, none missing or misshapen.
///
/// # Errors
/// If the file is not a model this build supports; the message names what and why.
pub fn open(path: &Path) -> Result<Checkpoint> {
    let gguf = Gguf::open(path)?;
    let arch: &str = gguf.metadata().need("general.architecture")?;
    let metadata = GgufMetadata {
        arch,
        values: gguf.metadata(),
    };
    let (spec, graph) = models::build(&metadata, &Tensors(&gguf)).map_err(|e| Error::Format {
        path: path.to_owned(),
        detail: e.to_string(),
    })?;
    let used: HashSet<&str> = graph.weights.iter().map(|w| w.name.as_str()).collect();
    let unused: Vec<&str> = gguf
        .tensors()
        .iter()
        .map(|t| t.name.as_str())
        .filter(|n| !used.contains(n))
        .collect();
    if !unused.is_empty() {
        let shown = unused
            .iter()
            .take(5)
            .map(|n| format!("`{n}`"))
            .collect::<Vec<_>>()
            .join(", ");
        let more = if unused.len() > 5 {
            format!(" and {} more", unused.len() - 5)
        } else {
            String::new()
        };
        return Err(Error::Format {
            path: path.to_owned(),
            detail: format!(
                "architecture `{arch}` does not use tensor {shown}{more}; running without would compute something \
                 else than the model does, so it is refused"
            ),
        });
    }
    let facts = facts(&gguf, arch, &spec, path)?;
    Ok(Checkpoint {
        spec,
        graph,
        facts,
        gguf,
    })
}

fn facts(gguf: &Gguf, arch: &str, spec: &ModelSpec, path: &Path) -> Result<ModelFacts> {
    let mut by_type: BTreeMap<&str, u64> = BTreeMap::new();
    let mut parameters = 0u64;
    for t in gguf.tensors() {
        let elements = t.dims.iter().map(|d| *d as u64).product::<u64>();
        parameters += elements;
        *by_type.entry(t.dtype.name()).or_default() += elements;
    }
    let commonest = by_type
        .iter()
        .max_by_key(|(_, n)| **n)
        .map_or("none", |(name, _)| *name);
    let file_type: Option<u32> = gguf.metadata().get("general.file_type")?;
    let title: Option<&str> = gguf.metadata().get("general.name")?;
    let stem = path
        .file_stem()
        .map(|s| s.to_string_lossy().into_owned())
        .unwrap_or_default();
    Ok(ModelFacts {
        title: title.filter(|t| !t.is_empty()).map_or(stem, str::to_owned),
        architecture: arch.to_owned(),
        parameters,
        quantization: file_type.and_then(file_type_name).unwrap_or(commonest).to_owned(),
        file_bytes: gguf.file_bytes(),
        trained_context: spec.max_context,
    })
}

/// Names of `general.file_type` (GGML's table of file types).
fn file_type_name(n: u32) -> Option<&'static str> {
    Some(match n {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        25 => "IQ4_NL",
        30 => "IQ4_XS",
        32 => "BF16",
        38 => "MXFP4",
        _ => return None,
    })
}

/// The vocabulary as the checkpoint's metadata gives it.
///
/// # Errors
/// If a key has another type than it should.
pub fn vocab_source(values: &KeyValues) -> Result<VocabSource> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let id = |name: &str| values.get::<u32>(&key(name));
    let strings = |name: &str| -> Result<Vec<String>> {
        Ok(values
            .get::<&Strings>(&key(name))?
            .map(|s| s.iter().map(str::to_owned).collect())
            .unwrap_or_default())
    };
    Ok(VocabSource {
        model: values.need::<&str>(&key("model"))?.to_owned(),
        pre: values.get::<&str>(&key("pre"))?.map(str::to_owned),
        architecture: values.get::<&str>("general.architecture")?.map(str::to_owned),
        tokens: strings("tokens")?,
        scores: values
            .get::<&[f32]>(&key("scores"))?
            .map(<[f32]>::to_vec)
            .unwrap_or_default(),
        token_types: values.get::<Vec<i32>>(&key("token_type"))?.unwrap_or_default(),
        merges: strings("merges")?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        add_bos: values.get(&key("add_bos_token"))?,
        add_eos: values.get(&key("add_eos_token"))?,
        add_space_prefix: values.get(&key("add_space_prefix"))?,
        legacy_prefix: None,
        chat_template: values.get::<&str>("tokenizer.chat_template")?.map(str::to_owned),
    })
}

/// Tokenizer and chat template of a checkpoint.
///
/// # Errors
/// If the vocabulary cannot be used, has another size than the logits, or the template does not compile.
pub fn texts(gguf: &Gguf, template: Option<&str>) -> Result<(Arc<Tokenizer>, Option<Arc<ChatTemplate>>)> {
    let source = vocab_source(gguf.metadata())?;
    let tokenizer = Tokenizer::new(&source)?;
    let template = match template.or(source.chat_template.as_deref()) {
        Some(text) => Some(Arc::new(chat_template(text, &tokenizer)?)),
        None => None,
    };
    Ok((Arc::new(tokenizer), template))
}

/// A template by built-in name, or its text: a name has no braces.
fn chat_template(text: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
    let source = if text.contains('{') {
        text
    } else {
        crate::text::template::named::find(text)?
    };
    ChatTemplate::new(source, tokenizer.vocab().bos_text(), tokenizer.vocab().eos_text())
}

/// The plan of a checkpoint on a device.
///
/// # Errors
/// If the device lacks an op.
pub fn plan(graph: Graph, device: &dyn Device, options: &LoadOptions) -> Result<Plan> {
    let limits = Limits {
        max_tokens: options.batch_tokens.max(options.max_seqs),
        max_seqs: options.max_seqs,
        // Scoring a prompt wants every row of a chunk.
        max_outputs: options.batch_tokens.max(options.max_seqs),
    };
    Ok(dynair::plan::plan(graph, device, limits)?)
}

/// Sizes of the cache that fit: context window and blocks per group.
#[derive(Debug, Clone, PartialEq)]
pub struct CachePlan {
    /// Most tokens of one sequence.
    pub max_context: usize,
    /// Geometry for [`Device::alloc_kv`].
    pub geometry: KvGeometry,
    /// Sliding window per group.
    pub windows: Vec<Option<u32>>,
    /// Bytes of all blocks.
    pub bytes: usize,
}

/// The cache groups of a model: what a block of each holds.
struct Groups {
    /// Sliding window per group.
    windows: Vec<Option<u32>>,
    /// Bytes of one block, over all layers of the group.
    block_bytes: Vec<usize>,
}

impl Groups {
    fn read(caches: &[CacheDecl], kind: KvType) -> Result<Groups> {
        let (mut windows, mut block_bytes) = (Vec::new(), Vec::new());
        let one = KvGeometry {
            kind,
            block_tokens: BLOCK_TOKENS,
            blocks: Vec::new(),
        };
        for cache in caches {
            let CacheDecl::Kv {
                group,
                window,
                head_dim,
                ..
            } = cache
            else {
                return Err(Error::Unsupported(
                    "recurrent state is not supported by this build".to_owned(),
                ));
            };
            let bytes = one.block_bytes(cache).ok_or_else(|| {
                Error::Settings(format!(
                    "--kv {kind}: a head size of {head_dim} is no multiple of 32; use --kv f16"
                ))
            })?;
            if windows.len() <= *group {
                windows.resize(group + 1, None);
                block_bytes.resize(group + 1, 0);
            }
            windows[*group] = *window;
            block_bytes[*group] += bytes;
        }
        Ok(Groups { windows, block_bytes })
    }

    /// Blocks per group for `tokens` tokens of all sequences together.
    fn blocks(&self, tokens: usize, options: &LoadOptions) -> Vec<usize> {
        let full = tokens.div_ceil(BLOCK_TOKENS) + options.max_seqs;
        let windowed = |w: &u32| {
            // A sequence holds its window and the chunk being computed; as much again serves prefix reuse.
            let per_seq = (*w as usize + options.batch_tokens).div_ceil(BLOCK_TOKENS) + 2;
            full.min(per_seq * options.max_seqs.max(2))
        };
        self.windows
            .iter()
            .map(|w| w.as_ref().map_or(full, windowed))
            .collect()
    }

    /// Bytes of these blocks.
    fn bytes(&self, tokens: usize, options: &LoadOptions) -> usize {
        let blocks = self.blocks(tokens, options);
        blocks.iter().zip(&self.block_bytes).map(|(n, b)| n * b).sum()
    }
}

/// Chooses the context window and the size of the cache from what the user said and the memory that is left.
///
/// # Errors
/// If what the user asked for does not fit, saying by how much and what would help.
pub fn size_cache(
    caches: &[CacheDecl],
    trained: usize,
    free_bytes: u64,
    options: &LoadOptions,
) -> Result<CachePlan> {
    let groups = Groups::read(caches, options.kv)?;
    let bytes_for = |tokens: usize| groups.bytes(tokens, options);
    let budget = (free_bytes as f64 * KV_MEMORY_SHARE) as usize;
    let ctx = match options.ctx {
        Some(n) if n > trained => {
            return Err(Error::Settings(format!(
                "--ctx {n}: the model was made for {trained} tokens; ask for at most that"
            )));
        }
        Some(n) => n,
        None => largest(trained, |n| bytes_for(n) <= budget),
    };
    let tokens = match options.kv_tokens {
        Some(n) if n < ctx => {
            return Err(Error::Settings(format!(
                "the cache of {n} tokens (`kv_tokens`) is smaller than the context window of {ctx}; \
                 raise it or lower --ctx"
            )));
        }
        Some(n) => n,
        None => {
            let most = budget.min(KV_AUTO_BYTES.max(bytes_for(ctx)));
            largest(ctx.saturating_mul(options.max_seqs), |n| bytes_for(n) <= most).max(ctx)
        }
    };
    let bytes = bytes_for(tokens);
    if bytes as u64 > free_bytes {
        let fits = largest(trained, |n| bytes_for(n) as u64 <= free_bytes);
        return Err(Error::Settings(format!(
            "a cache for {tokens} tokens takes {} MiB and {} MiB are free; --ctx {fits} would fit, and --kv q8_0 \
             halves it",
            bytes >> 20,
            free_bytes >> 20
        )));
    }
    let geometry = KvGeometry {
        kind: options.kv,
        block_tokens: BLOCK_TOKENS,
        blocks: groups.blocks(tokens, options),
    };
    Ok(CachePlan {
        max_context: ctx,
        geometry,
        windows: groups.windows,
        bytes,
    })
}

/// The largest n in `BLOCK_TOKENS..=most` for which `fits` (which holds up to some n) holds; at least `BLOCK_TOKENS`.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (BLOCK_TOKENS.min(most), most);
    while low < high {
        let mid = low + (high - low).div_ceil(2);
        if fits(mid) { low = mid } else { high = mid - 1 }
    }
    low
}

/// Loads a checkpoint onto a device.
///
/// # Errors
/// If it is refused ([`open`]), does not fit memory, or the device fails.
pub fn load(path: &Path, device: &dyn Device, options: &LoadOptions) -> Result<LoadedModel> {
    load_sized(path, device, options, None)
}

/// As [`load`], with `blocks` in every cache group in place of what [`size_cache`] chooses: for callers that lay out
/// the cache themselves.
///
/// # Errors
/// As [`load`].
pub fn load_sized(
    path: &Path,
    device: &dyn Device,
    options: &LoadOptions,
    blocks: Option<usize>,
) -> Result<LoadedModel> {
    let begin = Instant::now();
    let Checkpoint {
        gguf,
        spec,
        graph,
        facts,
    } = open(path)?;
    let (tokenizer, template) = texts(&gguf, options.template.as_deref())?;
    let sampling = published_sampling(gguf.metadata())?;
    for (key, value) in &sampling.not_applied {
        tracing::warn!(
            "the model publishes `{key}` = {value}, which belongs to a sampler this build does not have: replies are \
             drawn without it"
        );
    }
    let caches = graph.caches.clone();
    let plan = plan(graph, device, options)?;
    let need: u64 = gguf.tensors().iter().map(|t| t.bytes() as u64).sum();
    let free = device.free_bytes()?;
    if need + plan.arena_bytes as u64 > free {
        return Err(Error::Settings(format!(
            "`{}` takes {} MiB and {} MiB are free; use a smaller quantisation of the model",
            path.display(),
            (need + plan.arena_bytes as u64) >> 20,
            free >> 20
        )));
    }
    let mut cache = size_cache(
        &caches,
        spec.max_context,
        free - need - plan.arena_bytes as u64,
        options,
    )?;
    if let Some(blocks) = blocks {
        cache.geometry.blocks.fill(blocks);
    }
    let weights = load_weights(&gguf, &plan, device)?;
    let weight_bytes = distinct_bytes(&weights);
    let kv = device.alloc_kv(&caches, &cache.geometry)?;
    let (limits, arena_bytes) = (plan.limits, plan.arena_bytes);
    let executor = device.compile(plan, weights, kv)?;
    let load_s = begin.elapsed().as_secs_f64();
    tracing::info!(
        "loaded {} in {load_s:.2} s: weights {} MiB, cache up to {} MiB, context {}",
        path.display(),
        weight_bytes >> 20,
        cache.bytes >> 20,
        cache.max_context
    );
    Ok(LoadedModel {
        facts,
        executor,
        geometry: cache.geometry,
        windows: cache.windows,
        limits,
        max_context: cache.max_context,
        vocab_size: spec.vocab_size,
        tokenizer,
        template,
        defaults: sampling.params,
        published: sampling.applied,
        weight_bytes,
        kv_bytes: cache.bytes,
        arena_bytes,
        load_s,
    })
}

/// Hands every weight to the device, several at once. Rows of a merged tensor become weights of their own.
fn load_weights(gguf: &Gguf, plan: &Plan, device: &dyn Device) -> Result<Vec<Tensor>> {
    let usages = weight_usage(plan);
    // The largest first, so that no thread is left with a big one at the end.
    let mut order: Vec<usize> = (0..plan.weights.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(plan.weights[*i].rows * plan.weights[*i].cols));
    let mut loaded: Vec<(usize, Tensor)> = order
        .par_iter()
        .map(|&i| {
            let decl = &plan.weights[i];
            let tensor = gguf
                .bytes(&decl.name)
                .ok_or_else(|| dynair::Error::MissingTensor {
                    name: decl.name.clone(),
                })?;
            let row = decl
                .dtype
                .row_bytes(decl.cols)
                .expect("the builder checked that rows are whole blocks");
            let bytes = match tensor {
                dynacore::WeightBytes::Mapped(file, range) => {
                    let start = range.start + decl.first_row * row;
                    dynacore::WeightBytes::Mapped(file, start..start + decl.rows * row)
                }
                dynacore::WeightBytes::Owned(bytes) => {
                    dynacore::WeightBytes::Owned(bytes[decl.first_row * row..][..decl.rows * row].into())
                }
            };
            Ok((i, device.load_weight(decl, &bytes, usages[i])?))
        })
        .collect::<Result<Vec<_>>>()?;
    loaded.sort_by_key(|(i, _)| *i);
    Ok(loaded.into_iter().map(|(_, t)| t).collect())
}

fn distinct_bytes(weights: &[Tensor]) -> usize {
    let mut seen = BTreeSet::new();
    weights
        .iter()
        .filter(|t| seen.insert(Arc::as_ptr(&t.buffer.data).cast::<u8>() as usize))
        .map(|t| t.buffer.bytes)
        .sum()
}

/// The one model file in a folder, or the file itself.
///
/// # Errors
/// If the folder holds none or several.
pub fn model_file(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let fail = |detail: String| Error::Format {
        path: path.to_owned(),
        detail,
    };
    let mut found: Vec<PathBuf> = std::fs::read_dir(path)
        .map_err(|source| Error::Io {
            what: format!("cannot list `{}`", path.display()),
            source,
        })?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")))
        .collect();
    found.sort();
    // All parts of one split checkpoint count as one.
    found.retain(|p| crate::format::gguf::part_paths(p).is_none_or(|parts| parts.first() == Some(p)));
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(fail(
            "a folder without a .gguf file; name a model file".to_owned(),
        )),
        many => Err(fail(format!(
            "a folder with {} models; name one of its files",
            many.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(window: Option<u32>, group: usize) -> CacheDecl {
        CacheDecl::Kv {
            num_kv_heads: 1,
            head_dim: 64,
            window,
            group,
        }
    }

    #[test]
    fn the_cache_takes_what_fits_and_refuses_with_a_remedy() {
        let caches = [kv(None, 0), kv(Some(64), 1)];
        let options = LoadOptions {
            max_seqs: 2,
            batch_tokens: 64,
            ..LoadOptions::default()
        };
        let all = size_cache(&caches, 4096, 1 << 30, &options).expect("plenty of memory");
        assert_eq!(all.max_context, 4096);
        assert_eq!(all.windows, [None, Some(64)]);
        assert!(
            all.geometry.blocks[1] < all.geometry.blocks[0],
            "a window needs fewer blocks"
        );
        let little = size_cache(&caches, 4096, 600_000, &options).expect("a smaller window fits");
        assert!(little.max_context < 4096 && little.bytes <= 600_000, "{little:?}");
        let ask = LoadOptions {
            ctx: Some(4096),
            ..options.clone()
        };
        let e = size_cache(&caches, 4096, 300_000, &ask)
            .expect_err("too little memory")
            .to_string();
        assert!(e.contains("--kv q8_0") && e.contains("--ctx"), "{e}");
        let e = size_cache(&caches, 1024, 1 << 30, &ask)
            .expect_err("longer than trained")
            .to_string();
        assert!(e.contains("1024"), "{e}");
    }

    #[test]
    fn q8_0_needs_heads_of_whole_blocks() {
        let odd = CacheDecl::Kv {
            num_kv_heads: 1,
            head_dim: 80,
            window: None,
            group: 0,
        };
        let options = LoadOptions {
            kv: KvType::Q8_0,
            ..LoadOptions::default()
        };
        let e = size_cache(&[odd], 128, 1 << 30, &options)
            .expect_err("80 is no multiple of 32")
            .to_string();
        assert!(e.contains("head size of 80"), "{e}");
    }
}
