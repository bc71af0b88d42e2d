//! `cargo xtask make-model`: a GGUF of random weights in the shape of a real model.
//!
//! Owns the command's arguments; shapes, types and weights are `testkit`'s, the file is this crate's library's. It is
//! a program of its own, which `xtask` starts, so that the other commands of `xtask` build without the runtime.

use std::path::PathBuf;

use anyhow::{Context, anyhow, bail};
use clap::Parser;
use testkit::checkpoint::{Checkpoint, Meta, Mix, ModelShape, SHAPES, TensorSpec, make};
use testkit::vocab::Vocab;

/// Make a GGUF of random weights in the shape of a real model, or a tiny one.
#[derive(Parser)]
#[command(name = "make-model")]
struct Args {
    /// Shape, e.g. `qwen2.5-1.5b` or `tiny-llama`; a name that is none lists them.
    shape: String,
    /// File to write.
    out: PathBuf,
    /// A type for all matrices (`Q8_0`, `F16`, …), or a mix as published files have it (`Q4_K_M`, `Q3_K_S`, …).
    #[arg(long = "type", default_value = "Q4_K_M")]
    mix: String,
    /// Number of blocks, if other than the shape's.
    #[arg(long)]
    layers: Option<usize>,
    /// What the weights are drawn by: equal arguments give equal files.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// GGUF whose tokenizer is copied. Without it a small built-in vocabulary, padded to the shape's number of tokens.
    #[arg(long)]
    vocab: Option<PathBuf>,
    /// Metadata to set, as KEY=VALUE: of the type the key has, else a number, true, false or text. May be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let names = |all: Vec<&str>| all.join(", ");
    let Some(mut shape) = ModelShape::named(&args.shape) else {
        let all = names(SHAPES.iter().map(|s| s.name).collect());
        bail!("there is no shape `{}`; the shapes are {all}", args.shape);
    };
    let Some(mix) = Mix::named(&args.mix) else {
        let mut all: Vec<_> = Mix::ALL.iter().map(|m| m.name()).collect();
        all.dedup();
        bail!("there is no type `{}`; the types are {}", args.mix, names(all));
    };
    if let Some(layers) = args.layers {
        anyhow::ensure!(
            (1..=1000).contains(&layers),
            "--layers {layers}: expected 1 to 1000"
        );
        shape.layers = layers;
    }
    let vocab = match &args.vocab {
        Some(path) => modelkit::read_vocab(path)?,
        None => Vocab::small("gpt-2", shape.vocab_size),
    };
    let mut checkpoint = make(&shape, mix, args.seed, &vocab);
    for assignment in &args.set {
        set(&mut checkpoint, assignment).with_context(|| format!("--set {assignment}"))?;
    }
    modelkit::write_gguf(&checkpoint, &args.out)?;
    let parameters: usize = checkpoint.tensors.iter().map(TensorSpec::elements).sum();
    let bytes: usize = checkpoint.tensors.iter().map(TensorSpec::bytes).sum();
    eprintln!(
        "{}: {} {}, {:.1} million parameters in {:.1} MB, {} tokens",
        args.out.display(),
        shape.name,
        mix.name(),
        parameters as f64 / 1e6,
        bytes as f64 / 1e6,
        vocab.size
    );
    Ok(())
}

fn set(checkpoint: &mut Checkpoint, assignment: &str) -> anyhow::Result<()> {
    let (key, text) = assignment
        .split_once('=')
        .ok_or_else(|| anyhow!("expected KEY=VALUE"))?;
    anyhow::ensure!(!key.is_empty(), "the key is empty");
    match checkpoint.metadata.iter_mut().find(|(k, _)| k == key) {
        Some((_, value)) => {
            let wrong = |kind: &str| anyhow!("`{key}` is a {kind}, found `{text}`");
            *value = match value {
                Meta::U32(_) => Meta::U32(text.parse().map_err(|_| wrong("number from 0 to 4294967295"))?),
                Meta::F32(_) => Meta::F32(text.parse().map_err(|_| wrong("number"))?),
                Meta::Bool(_) => Meta::Bool(text.parse().map_err(|_| wrong("boolean, true or false"))?),
                Meta::Str(_) => Meta::Str(text.to_owned()),
                Meta::Strings(_) | Meta::I32s(_) | Meta::F32s(_) => {
                    bail!("`{key}` is a list and cannot be set")
                }
            };
        }
        None => checkpoint.metadata.push((key.to_owned(), guessed(text))),
    }
    Ok(())
}

fn guessed(text: &str) -> Meta {
    if let Ok(v) = text.parse() {
        Meta::U32(v)
    } else if let Ok(v) = text.parse() {
        Meta::F32(v)
    } else if let Ok(v) = text.parse() {
        Meta::Bool(v)
    } else {
        Meta::Str(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_set_in_their_type_or_refused() {
        let mut c = testkit::checkpoint::tiny("llama", Mix::named("F16").unwrap(), 0);
        set(&mut c, "llama.context_length=64").unwrap();
        set(&mut c, "llama.rope.freq_base=1").unwrap();
        set(&mut c, "my.key=0.5").unwrap();
        set(&mut c, "my.text=a=b").unwrap();
        assert_eq!(c.get("llama.context_length"), Some(&Meta::U32(64)));
        assert_eq!(c.get("llama.rope.freq_base"), Some(&Meta::F32(1.0)));
        assert_eq!(c.get("my.key"), Some(&Meta::F32(0.5)));
        assert_eq!(c.get("my.text"), Some(&Meta::Str("a=b".into())));
        for bad in [
            "llama.context_length=many",
            "tokenizer.ggml.tokens=a",
            "novalue",
            "=1",
        ] {
            assert!(set(&mut c, bad).is_err(), "{bad}");
        }
    }
}
