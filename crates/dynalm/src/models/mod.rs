//! Model families: what a checkpoint's metadata says about the structure of its network, as data.
//!
//! A [`Family`] turns metadata into a [`ModelSpec`]; one shared builder ([`decoder::build`]) turns the spec into a
//! graph. A family that needs a block no other has writes its own builder. All names of keys and tensors are GGUF's.
//!
//! An option that changes what a model computes is honoured or refused by name: [`decoder::spec`] knows the keys that
//! do, and a family names those it handles itself.

pub mod decoder;
mod gemma2;
mod gemma3;
mod gguf;
mod granite;
mod granitemoe;
mod llama;
mod qwen2;
mod qwen3;
mod qwen3moe;
#[cfg(test)]
mod tests;

use dynair::op::{Activation, AttnSpec, RopeSpec, RouterSpec};
use dynair::{Graph, GraphBuilder, TensorIndex};

use crate::error::{Error, Result};

/// Metadata of a checkpoint: typed look-ups by GGUF key. A key of another type than asked for is not found.
pub trait Metadata {
    /// `general.architecture`.
    fn arch(&self) -> &str;
    /// A number that fits `u32`, of any integer type.
    fn u32(&self, key: &str) -> Option<u32>;
    /// A floating-point number.
    fn f32(&self, key: &str) -> Option<f32>;
    /// A truth value.
    fn bool(&self, key: &str) -> Option<bool>;
    /// A string.
    fn str(&self, key: &str) -> Option<&str>;
    /// An array of numbers that fit `u32`, or of truth values as 0 and 1.
    fn u32s(&self, key: &str) -> Option<Vec<u32>>;
    /// Number of entries of an array of any type.
    fn array_len(&self, key: &str) -> Option<usize>;
    /// A number that must be there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the key.
    fn need(&self, key: &str) -> Result<usize> {
        self.u32(key)
            .map(|n| n as usize)
            .ok_or_else(|| Error::Unsupported(format!("metadata key `{key}` is missing or no whole number")))
    }
}

/// Architectures that share a spec function.
pub struct Family {
    /// Name of the family.
    pub name: &'static str,
    /// Values of `general.architecture` it stands for.
    pub arch: &'static [&'static str],
    /// Metadata to spec.
    pub spec: fn(&dyn Metadata) -> Result<ModelSpec>,
    /// Spec and tensors to graph.
    pub build: fn(&ModelSpec, GraphBuilder<'_>) -> Result<Graph>,
}

/// Every family.
pub const FAMILIES: &[Family] = &[
    llama::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    qwen3moe::FAMILY,
    granite::FAMILY,
    granitemoe::FAMILY,
];

/// Structure of a decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding table and of the logits.
    pub vocab_size: usize,
    /// Positions the model was made for, tokens.
    pub max_context: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// Multiplies the embeddings.
    pub embed_scale: f32,
    /// Multiplies each branch before it is added to the residual stream.
    pub residual_scale: f32,
    /// Multiplies the logits, before the softcap.
    pub logit_scale: f32,
    /// c: logits become c·tanh(logit/c).
    pub logit_softcap: Option<f32>,
}

/// Structure of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// Attention.
    pub attn: AttnSpec,
    /// Rotary embedding; `None`: the layer has none.
    pub rope: Option<RopeSpec>,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Feed-forward block.
    pub ffn: FfnSpec,
    /// Norms of the branches.
    pub norms: NormPlacement,
}

/// Norms of queries and keys before the rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// RMS norm over each head, `attn_q_norm` and `attn_k_norm`.
    PerHead,
}

/// Feed-forward block of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FfnSpec {
    /// down(act(gate(x))·up(x)).
    Gated {
        /// The non-linearity.
        act: Activation,
        /// Rows of gate and up.
        intermediate_size: usize,
    },
    /// The same of several experts each, chosen and weighted row by row by a router.
    Moe {
        /// Which experts a row uses.
        router: RouterSpec,
        /// The non-linearity.
        act: Activation,
        /// Rows of an expert's gate and up.
        intermediate_size: usize,
    },
}

impl FfnSpec {
    /// Its non-linearity.
    fn act_mut(&mut self) -> &mut Activation {
        let (FfnSpec::Gated { act, .. } | FfnSpec::Moe { act, .. }) = self;
        act
    }
}

/// Where a layer normalises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before each branch.
    Pre,
    /// Before each branch, and after it (`post_attention_norm`, `post_ffw_norm`) before it is added.
    PreAndPost,
}

/// The family of an architecture.
///
/// # Errors
/// [`Error::Unsupported`] listing the architectures there are.
pub fn family(arch: &str) -> Result<&'static Family> {
    FAMILIES.iter().find(|f| f.arch.contains(&arch)).ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|f| f.arch).copied().collect();
        Error::Unsupported(format!(
            "architecture `{arch}` is not supported; supported are {}",
            known.join(", ")
        ))
    })
}

/// Spec and graph of a checkpoint. Which tensors the graph uses stands in [`Graph::weights`].
///
/// # Errors
/// If the architecture or one of its options is not supported, or a tensor is missing or has a wrong shape.
pub fn build(meta: &dyn Metadata, tensors: &dyn TensorIndex) -> Result<(ModelSpec, Graph)> {
    let family = family(meta.arch())?;
    let spec = (family.spec)(meta)?;
    let graph = (family.build)(&spec, GraphBuilder::new(tensors))?;
    Ok((spec, graph))
}
