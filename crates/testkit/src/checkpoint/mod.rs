//! Checkpoints of random weights in the shape of real models, described without a file format.
//!
//! [`make`] gives the metadata and the tensor table, [`Checkpoint::write`] streams the data of all tensors, a gigabyte
//! in a second or two. Everything follows from shape, mix, seed and vocabulary, on every machine alike. Writing a
//! file is left to crates that know a format (`modelkit` for GGUF).
//!
//! # Weights
//!
//! Normal numbers, with deviations that keep a forward pass sane whatever the dimensions: projections give outputs of
//! deviation one (`1 / sqrt(columns)`); what the branches add to the residual stream outweighs the embedding, so that the
//! context and not the last token decides; logits have a deviation of about 2.5. Norm weights and biases vary from
//! element to element, so that a forward pass that forgets one is seen to be wrong.
//!
//! Matrices of more than [`FRESH`] elements repeat: runs of encoded blocks from random places of a pool that is drawn
//! once per type and deviation, because encoding a K type costs a thousand times a copy.

use std::collections::HashMap;

use dynair::{DType, quant};
use rayon::prelude::*;

mod mix;
mod shape;
#[cfg(test)]
mod tests;

pub use mix::Mix;
pub use shape::{Experts, ModelShape, Rope, SHAPES, Scales};

use crate::random::Random;
use crate::vocab::Vocab;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the variants say their types")]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strings(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

/// Where a tensor's values come from.
#[derive(Debug, Clone, PartialEq)]
pub enum Fill {
    /// Normal numbers.
    Normal {
        /// Mean; zero for every quantised tensor.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// These numbers.
    Values(Vec<f32>),
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// GGUF name.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Row length first: `[cols]`, `[cols, rows]` or `[cols, rows, experts]`.
    pub dims: Vec<usize>,
    /// Its values.
    pub fill: Fill,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        let row = self
            .dtype
            .row_bytes(self.dims[0])
            .expect("types are chosen to fit the rows");
        row * self.dims[1..].iter().product::<usize>()
    }
}

/// A checkpoint: metadata in order, tensors in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Keys and values, GGUF's.
    pub metadata: Vec<(String, Meta)>,
    /// The tensors.
    pub tensors: Vec<TensorSpec>,
    /// What the values are drawn by.
    pub seed: u64,
}

/// Elements up to which every element of a tensor is drawn for itself.
pub const FRESH: usize = 1 << 17;
/// Elements of a pool, of a granule (the unit of copying, whole blocks of every type), and granules of a run.
const POOL: usize = 1 << 19;
const GRANULE: usize = 256;
const RUN: usize = 32;

/// Deviation of the logits, and the deviation of the sum of all branches.
const LOGIT_STD: f32 = 2.5;
const BRANCHES_STD: f32 = 2.0;

/// The checkpoint of a shape with the types of `mix`, drawn by `seed`, with the tokenizer and number of tokens of
/// `vocab`.
pub fn make(shape: &ModelShape, mix: Mix, seed: u64, vocab: &Vocab) -> Checkpoint {
    let mut metadata = metadata(shape, mix, vocab.size);
    metadata.extend(vocab.metadata.iter().cloned());
    let mut tensors = Tensors {
        shape,
        mix,
        layer: 0,
        list: Vec::new(),
    };
    tensors.model(vocab.size);
    Checkpoint {
        metadata,
        tensors: tensors.list,
        seed,
    }
}

/// A tiny checkpoint of `family` (`llama`, `qwen3moe`, …) with the built-in vocabulary.
///
/// # Panics
/// If there is no tiny shape of that family.
pub fn tiny(family: &str, mix: Mix, seed: u64) -> Checkpoint {
    let name = format!("tiny-{family}");
    let shape = ModelShape::named(&name).unwrap_or_else(|| panic!("there is no shape `{name}`"));
    make(&shape, mix, seed, &Vocab::small("gpt-2", shape.vocab_size))
}

fn metadata(shape: &ModelShape, mix: Mix, vocab_size: usize) -> Vec<(String, Meta)> {
    let mut keys = vec![
        ("general.architecture".to_owned(), Meta::Str(shape.arch.into())),
        ("general.type".to_owned(), Meta::Str("model".into())),
        (
            "general.name".to_owned(),
            Meta::Str(format!("{} shape, random weights", shape.name)),
        ),
        ("general.file_type".to_owned(), Meta::U32(mix.file_type())),
        ("general.quantization_version".to_owned(), Meta::U32(2)),
    ];
    let mut set = |key: &str, value| keys.push((format!("{}.{key}", shape.arch), value));
    let count = |n: usize| Meta::U32(u32::try_from(n).expect("dimensions of models fit 32 bits"));
    set("vocab_size", count(vocab_size));
    set("context_length", count(shape.context_tokens));
    set("embedding_length", count(shape.hidden_size));
    set("block_count", count(shape.layers));
    set("feed_forward_length", count(shape.ffn_size));
    set("attention.head_count", count(shape.num_heads));
    set("attention.head_count_kv", count(shape.num_kv_heads));
    set("attention.key_length", count(shape.head_dim));
    set("attention.value_length", count(shape.head_dim));
    set("attention.layer_norm_rms_epsilon", Meta::F32(shape.norm_eps));
    set("rope.dimension_count", count(shape.head_dim));
    set("rope.freq_base", Meta::F32(shape.rope_theta));
    if let Rope::Linear(factor) = shape.rope {
        set("rope.scaling.type", Meta::Str("linear".into()));
        set("rope.scaling.factor", Meta::F32(factor));
    }
    if let Some(experts) = shape.experts {
        set("expert_count", count(experts.count));
        set("expert_used_count", count(experts.used));
        // Granite's files have the size of an expert as `feed_forward_length` alone.
        if experts.ffn_size != shape.ffn_size {
            set("expert_feed_forward_length", count(experts.ffn_size));
        }
    }
    if let Some(scales) = shape.scales {
        set("embedding_scale", Meta::F32(scales.embedding));
        set("residual_scale", Meta::F32(scales.residual));
        set("attention.scale", Meta::F32(scales.attention));
        set("logit_scale", Meta::F32(scales.logit));
    }
    if let Some(window) = shape.window_tokens {
        set("attention.sliding_window", count(window));
    }
    if shape.arch == "gemma2" {
        set("attn_logit_softcapping", Meta::F32(50.0));
        set("final_logit_softcapping", Meta::F32(30.0));
    }
    keys
}

/// The tensor table as it grows.
struct Tensors<'a> {
    shape: &'a ModelShape,
    mix: Mix,
    layer: usize,
    list: Vec<TensorSpec>,
}

impl Tensors<'_> {
    fn model(&mut self, vocab_size: usize) {
        let s = self.shape;
        let logit = s.scales.map_or(1.0, |s| s.logit);
        let embed_std = LOGIT_STD * logit / (s.hidden_size as f32).sqrt();
        self.matrix("token_embd", s.hidden_size, vocab_size, embed_std);
        if let Rope::Llama3 {
            factor,
            original_context,
        } = s.rope
        {
            let values = llama3_factors(s.rope_theta.into(), s.head_dim, factor, original_context);
            self.push(
                "rope_freqs.weight".into(),
                DType::F32,
                vec![values.len()],
                Fill::Values(values),
            );
        }
        for layer in 0..s.layers {
            self.layer = layer;
            self.block();
        }
        self.vector("output_norm.weight", s.hidden_size, 1.0, 0.1);
        if !s.tied {
            self.matrix("output", s.hidden_size, vocab_size, embed_std);
        }
    }

    fn block(&mut self) {
        let s = self.shape;
        let (hidden, queries, keys) = (
            s.hidden_size,
            s.num_heads * s.head_dim,
            s.num_kv_heads * s.head_dim,
        );
        let qk_norm = matches!(s.arch, "qwen3" | "gemma3" | "qwen3moe");
        let unit = 1.0 / (hidden as f32).sqrt();
        // What one branch adds, when the sum of all 2 * layers has the deviation wanted. A gated branch has a
        // deviation of 0.6 and averaged values less than 1 before the projection, which BRANCHES_STD allows for.
        let mut branch = BRANCHES_STD / (2.0 * s.layers as f32).sqrt();
        // Scores of a deviation above one: attention that prefers some positions clearly.
        let mut scores = 1.5 * unit;
        if let Some(scales) = s.scales {
            // As without scales, relative to the embedding that the branches are added to.
            branch *= scales.embedding * scales.logit / scales.residual;
            scores /= (scales.attention * (s.head_dim as f32).sqrt()).sqrt();
        }
        // Gemma scales the embedding up to LOGIT_STD, so its branches must be greater by the same.
        let post = branch * (hidden as f32).sqrt() * 0.5;
        let name = |part: &str| format!("blk.{}.{part}", self.layer);
        let names = [
            "attn_norm.weight",
            "attn_q_norm.weight",
            "attn_k_norm.weight",
            "post_attention_norm.weight",
            "ffn_norm.weight",
            "post_ffw_norm.weight",
        ]
        .map(name);
        let [attn_norm, q_norm, k_norm, post_attention, ffn_norm, post_ffw] = &names;
        let [q, k, v, output] = ["attn_q", "attn_k", "attn_v", "attn_output"].map(name);

        self.vector(attn_norm, hidden, 1.0, 0.1);
        self.matrix(&q, hidden, queries, scores);
        self.matrix(&k, hidden, keys, scores);
        self.matrix(&v, hidden, keys, unit);
        if s.arch == "qwen2" {
            for (name, n) in [(&q, queries), (&k, keys), (&v, keys)] {
                self.vector(&format!("{name}.bias"), n, 0.0, 0.5);
            }
        }
        if qk_norm {
            self.vector(q_norm, s.head_dim, 1.4, 0.1);
            self.vector(k_norm, s.head_dim, 1.4, 0.1);
        }
        let scaled = |columns: usize| if s.is_gemma() { 1.0 } else { branch } / (columns as f32).sqrt();
        self.matrix(&output, queries, hidden, scaled(queries));
        if s.is_gemma() {
            self.vector(post_attention, hidden, post, 0.1 * post);
        }
        self.vector(ffn_norm, hidden, 1.0, 0.1);
        self.feed_forward(unit, &scaled);
        if s.is_gemma() {
            self.vector(post_ffw, hidden, post, 0.1 * post);
        }
    }

    /// Gate, up and down, of one network or of each expert; `scaled` gives the deviation of a branch's last projection.
    fn feed_forward(&mut self, unit: f32, scaled: &dyn Fn(usize) -> f32) {
        let (s, layer) = (self.shape, self.layer);
        let [gate, up, down] = ["gate", "up", "down"].map(|part| format!("blk.{layer}.ffn_{part}"));
        let Some(experts) = s.experts else {
            self.matrix(&gate, s.hidden_size, s.ffn_size, unit);
            self.matrix(&up, s.hidden_size, s.ffn_size, unit);
            self.matrix(&down, s.ffn_size, s.hidden_size, scaled(s.ffn_size));
            return;
        };
        let (n, size) = (experts.count, experts.ffn_size);
        // Routers are kept in F32. A row prefers some experts clearly.
        let router = Fill::Normal {
            mean: 0.0,
            std: 2.0 * unit,
        };
        self.push(
            format!("blk.{layer}.ffn_gate_inp.weight"),
            DType::F32,
            vec![s.hidden_size, n],
            router,
        );
        self.stacked(&format!("{gate}_exps"), [s.hidden_size, size, n], unit);
        self.stacked(&format!("{up}_exps"), [s.hidden_size, size, n], unit);
        self.stacked(&format!("{down}_exps"), [size, s.hidden_size, n], scaled(size));
    }

    fn matrix(&mut self, name: &str, cols: usize, rows: usize, std: f32) {
        self.weight(name, vec![cols, rows], std);
    }

    fn stacked(&mut self, name: &str, dims: [usize; 3], std: f32) {
        self.weight(name, dims.to_vec(), std);
    }

    fn weight(&mut self, name: &str, dims: Vec<usize>, std: f32) {
        let name = format!("{name}.weight");
        let dtype = self
            .mix
            .dtype(&name, dims[0], self.layer, self.shape.layers, self.shape.tied);
        self.push(name, dtype, dims, Fill::Normal { mean: 0.0, std });
    }

    fn vector(&mut self, name: &str, n: usize, mean: f32, std: f32) {
        self.push(name.into(), DType::F32, vec![n], Fill::Normal { mean, std });
    }

    fn push(&mut self, name: String, dtype: DType, dims: Vec<usize>, fill: Fill) {
        self.list.push(TensorSpec {
            name,
            dtype,
            dims,
            fill,
        });
    }
}

/// What Llama 3 divides each of the `head_dim / 2` rotary frequencies by. Source: the Llama 3.1 model card's
/// `apply_scaling`, with its factors of 1 and 4 for low and high frequencies.
fn llama3_factors(theta: f64, head_dim: usize, factor: f64, original_context: f64) -> Vec<f32> {
    let (low, high) = (1.0, 4.0);
    (0..head_dim / 2)
        .map(|i| {
            let frequency = theta.powf(-2.0 * i as f64 / head_dim as f64);
            let turns = original_context * frequency / (2.0 * std::f64::consts::PI);
            let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / ((1.0 - kept) / factor + kept)) as f32
        })
        .collect()
}

/// A pool's key: type and the bits of the deviation.
type PoolKey = (DType, u32);

impl Checkpoint {
    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Meta> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// The bytes of one tensor, as in [`Checkpoint::write`].
    pub fn tensor_bytes(&self, tensor: &TensorSpec) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(tensor.bytes());
        let pools = self.pools(std::slice::from_ref(tensor));
        let done = self.write_tensor(tensor, &pools, &mut |b| {
            bytes.extend_from_slice(b);
            Ok::<(), std::convert::Infallible>(())
        });
        let Ok(()) = done;
        bytes
    }

    /// Gives the data of all tensors, in order and without padding, to `put` in pieces that do not cross tensors.
    ///
    /// # Errors
    /// The first error of `put`.
    pub fn write<E>(&self, mut put: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let pools = self.pools(&self.tensors);
        self.tensors
            .iter()
            .try_for_each(|t| self.write_tensor(t, &pools, &mut put))
    }

    fn write_tensor<E>(
        &self,
        tensor: &TensorSpec,
        pools: &HashMap<PoolKey, Vec<u8>>,
        put: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut random = Random::named(self.seed, &tensor.name);
        let (mean, std) = match tensor.fill {
            Fill::Values(ref values) => return put(&encoded(tensor.dtype, values)),
            Fill::Normal { mean, std } => (mean, std),
        };
        let Some(pool) = pool_key(tensor).map(|key| &pools[&key]) else {
            let values: Vec<f32> = (0..tensor.elements())
                .map(|_| mean + std * random.normal())
                .collect();
            return put(&encoded(tensor.dtype, &values));
        };
        let granule = pool.len() / (POOL / GRANULE);
        let mut left = tensor.bytes();
        while left > 0 {
            let start = random.below(POOL / GRANULE - RUN + 1) * granule;
            let n = left.min(RUN * granule);
            put(&pool[start..start + n])?;
            left -= n;
        }
        Ok(())
    }

    /// The pools that `tensors` draw from.
    fn pools(&self, tensors: &[TensorSpec]) -> HashMap<PoolKey, Vec<u8>> {
        let mut keys: Vec<PoolKey> = tensors.iter().filter_map(pool_key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter()
            .map(|(dtype, std)| {
                let pieces: Vec<Vec<u8>> = (0..POOL / GRANULE / RUN)
                    .into_par_iter()
                    .map(|piece| {
                        let mut random = Random::named(self.seed, &format!("{dtype} {std} {piece}"));
                        let values: Vec<f32> = (0..RUN * GRANULE)
                            .map(|_| f32::from_bits(std) * random.normal())
                            .collect();
                        encoded(dtype, &values)
                    })
                    .collect();
                ((dtype, std), pieces.concat())
            })
            .collect()
    }
}

/// The pool a tensor's bytes come from; none if its elements are drawn one by one.
fn pool_key(tensor: &TensorSpec) -> Option<PoolKey> {
    match tensor.fill {
        Fill::Normal { mean: 0.0, std } if tensor.elements() > FRESH => Some((tensor.dtype, std.to_bits())),
        _ => None,
    }
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    quant::encode(dtype, values).expect("rows are whole blocks and weights are small finite numbers")
}
