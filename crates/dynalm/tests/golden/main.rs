//! Whole models against an independent forward pass.
//!
//! Each `.json` here was written by `tools/reference/golden.py`: a made checkpoint, and the logits and greedy tokens
//! that a float64 forward pass over its decoded weights gives. The checkpoint is made again, the weights' hash says
//! whether it is the same one, and the whole way from the file to the logits is held against the numbers, on the CPU
//! device in `safe` mode and, with every kernel table this machine can run, in `auto` mode. The prompt is longer than the tiny shapes' sliding window.

use std::path::{Path, PathBuf};

use dynacore::cpu::isa::Isa;
use dynacore::cpu::ops::linear::{Form, has_form};
use dynacore::cpu::table::KernelTable;
use dynacore::cpu::{CpuDevice, CpuOptions, Mode};
use dynacore::{KvType, Logits};
use dynair::{BatchMeta, BlockId, BlockTables, SeqSpan, quant};
use dynalm::format::Gguf;
use dynalm::load::{self, BLOCK_TOKENS, LoadOptions, LoadedModel};
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Blocks per cache group: room for prompt and continuation of the one sequence.
const BLOCKS: usize = 8;

/// One golden file.
#[derive(Deserialize)]
struct Golden {
    shape: String,
    r#type: String,
    seed: u64,
    sha256: String,
    prompt: Vec<u32>,
    positions: Vec<Position>,
    last: Vec<f32>,
    greedy: Vec<(u32, f32)>,
    /// Of models with experts, the least distance of a router's last chosen logit from the next.
    margin: Option<f32>,
}

/// What stands at one position of the prompt.
#[derive(Deserialize)]
struct Position {
    top: Vec<(usize, f32)>,
    logsumexp: f64,
}

/// How far logits may be from the reference.
struct Tolerance {
    /// Largest difference of any logit compared.
    most: f32,
    /// Root mean square difference over all logits after the prompt.
    rms: f32,
}

/// `safe` computes what the reference computes, on the same decoded weights, in f32 instead of float64: what differs
/// is rounding in sums of 128 to 512 terms, and the seven digits of the golden numbers. The largest seen is 1.3e-5
/// (root mean square 4.5e-6). A forgotten norm weight, a window off by one or a swapped pair moves logits, whose
/// deviation is 2.5, by tenths.
const SAFE: Tolerance = Tolerance {
    most: 5e-5,
    rms: 1.5e-5,
};

/// `exact`, and `auto` where the table has nothing coarser, keeps keys and values in f16, a relative error of up to 2^-11 each, which is nearly all there is to see (float
/// and quantised weights differ alike); activations are rounded to 15-bit codes where a kernel uses integers. The
/// largest seen is 1.3e-2 (root mean square 3.9e-3).
const EXACT: Tolerance = Tolerance {
    most: 0.04,
    rms: 0.012,
};

/// From tiles, weights and activations have 8 significant bits: 2.4e-3 a product, of which each layer has four in a row.
/// The largest seen is 0.20 (root mean square 0.064).
const TILES: Tolerance = Tolerance { most: 0.3, rms: 0.09 };

/// From short records, activations of inner layers have 8 bits: 5e-3 a product. The largest seen is 0.24 (root mean square
/// 0.078).
const SHORT: Tolerance = Tolerance { most: 0.3, rms: 0.09 };

/// As `EXACT` without the roundings of the cache. The largest seen is 2.5e-3 (root mean square 5.0e-4).
const EXPERTS: Tolerance = Tolerance {
    most: 0.01,
    rms: 0.002,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn read(path: &Path) -> Golden {
    let text = std::fs::read_to_string(path).expect("golden files are part of the repository");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Hash of all tensors' decoded values in order, as the reference took it.
fn decoded_hash(path: &Path) -> String {
    let gguf = Gguf::open(path).expect("the made file is valid");
    let mut hash = Sha256::new();
    for t in gguf.tensors() {
        let bytes = gguf.bytes(&t.name).expect("a tensor of the table has bytes");
        let elements = t.dims.iter().product();
        let values = quant::decode(t.dtype, bytes.as_slice(), elements).expect("whole blocks");
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        hash.update(&raw);
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Runs `tokens` as the continuation of a sequence of `before` tokens; logits of every row.
fn step(model: &mut LoadedModel, before: usize, tokens: &[u32]) -> Logits {
    let length = before + tokens.len();
    let tables = BlockTables {
        blocks: (0..length.div_ceil(BLOCK_TOKENS))
            .map(|b| BlockId(b as u32))
            .collect(),
        first: vec![0, length.div_ceil(BLOCK_TOKENS) as u32],
        start: vec![0],
        copies: Vec::new(),
    };
    let batch = BatchMeta {
        tokens: tokens.to_vec(),
        positions: (before..length).map(|p| p as u32).collect(),
        seqs: vec![SeqSpan {
            first_row: 0,
            rows: tokens.len() as u32,
            context_len: length as u32,
        }],
        tables: vec![tables; model.windows.len()],
        output_rows: (0..tokens.len() as u32).collect(),
    };
    let mut logits = Logits::default();
    let ticket = model
        .executor
        .submit(&batch)
        .expect("the step is within the limits");
    model.executor.wait(ticket, &mut logits).expect("the step runs");
    logits
}

fn argmax(row: &[f32]) -> usize {
    (0..row.len())
        .max_by(|a, b| row[*a].total_cmp(&row[*b]))
        .expect("logits have columns")
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let most = f64::from(row[argmax(row)]);
    most + row.iter().map(|v| (f64::from(*v) - most).exp()).sum::<f64>().ln()
}

/// Type of the cache, and how near the logits must be.
fn setting(golden: &Golden, mode: Mode, isa: Isa) -> (KvType, Tolerance) {
    let table = KernelTable::of(isa).expect("the CPU has the instruction set");
    let auto = |form| mode == Mode::Auto && has_form(table, form);
    // A row chooses its experts by comparison: where two logits of the router are nearly alike, any rounding may choose
    // the other one, and what follows is another computation. The reference's seeds keep them apart by more than the
    // roundings of activations come to, but not by what an f16 cache adds.
    match (mode, golden.margin) {
        (Mode::Safe, _) => (KvType::F32, SAFE),
        (_, Some(_)) => (KvType::F32, EXPERTS),
        _ if auto(Form::Tiles) => (KvType::F16, TILES),
        _ if auto(Form::Short) => (KvType::F16, SHORT),
        _ => (KvType::F16, EXACT),
    }
}

/// The model at `path` in a mode, and how far its logits may be off.
fn loaded(golden: &Golden, path: &Path, mode: Mode, isa: Isa) -> (LoadedModel, Tolerance) {
    let options = CpuOptions {
        threads: Some(1),
        mode,
        isa: Some(isa.name().to_owned()),
    };
    let device = CpuDevice::new(&options).expect("a CPU");
    let (kv, tolerance) = setting(golden, mode, isa);
    let options = LoadOptions {
        kv,
        batch_tokens: 64,
        max_seqs: 1,
        ..LoadOptions::default()
    };
    let model = load::load_sized(path, &device, &options, Some(BLOCKS)).expect("the made model loads");
    (model, tolerance)
}

/// Holds one mode against a golden file. Gives the largest and the root mean square difference.
fn compare(golden: &Golden, path: &Path, mode: Mode, isa: Isa) -> (f32, f32) {
    let what = format!("{} {} {mode:?} {}", golden.shape, golden.r#type, isa.name());
    let (mut model, tolerance) = loaded(golden, path, mode, isa);
    assert_eq!(
        golden.positions.len(),
        golden.prompt.len(),
        "{what}: positions of the prompt"
    );
    assert_eq!(golden.last.len(), model.vocab_size, "{what}: columns");
    let logits = step(&mut model, 0, &golden.prompt);
    let mut most = 0f32;
    let mut see = |place: String, found: f32, expected: f32| {
        let difference = (found - expected).abs();
        assert!(
            difference <= tolerance.most,
            "{what}: {place} is {found}, expected {expected}"
        );
        most = most.max(difference);
    };
    for (p, position) in golden.positions.iter().enumerate() {
        let row = logits.row(p);
        for (id, expected) in &position.top {
            see(format!("logit {id} at position {p}"), row[*id], *expected);
        }
        see(
            format!("log-sum-exp at position {p}"),
            log_sum_exp(row) as f32,
            position.logsumexp as f32,
        );
    }
    let last = logits.row(golden.prompt.len() - 1);
    let mut squares = 0f64;
    for (id, (found, expected)) in last.iter().zip(&golden.last).enumerate() {
        see(format!("logit {id} after the prompt"), *found, *expected);
        squares += f64::from(found - expected).powi(2);
    }
    let rms = (squares / last.len() as f64).sqrt() as f32;
    assert!(rms <= tolerance.rms, "{what}: root mean square difference {rms}");
    // The reference's tokens are fed, so that every one of them is compared and not only those before a near tie.
    let mut row = last.to_vec();
    let mut decided = 0;
    for (i, (token, margin)) in golden.greedy.iter().enumerate() {
        // Both the first and the second logit may be off.
        if *margin > 2.0 * tolerance.most {
            assert_eq!(
                argmax(&row),
                *token as usize,
                "{what}: greedy token {i}, ahead by {margin}"
            );
            decided += 1;
        }
        row = step(&mut model, golden.prompt.len() + i, &[*token])
            .row(0)
            .to_vec();
    }
    // What coarser products may change decides less in the types of two and three bits, whose logits are flat.
    let least = if tolerance.most > EXACT.most {
        golden.greedy.len() / 4
    } else {
        golden.greedy.len() / 2
    };
    assert!(decided >= least, "{what}: only {decided} tokens were decided");
    (most, rms)
}

/// All golden files of a shape.
fn family(name: &str, expected: usize) {
    let temporary = tempfile::tempdir().expect("a temporary folder");
    let prefix = format!("tiny-{name}-");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder())
        .expect("the folder of golden files")
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "json"))
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with(&prefix))
        })
        .collect();
    files.sort();
    assert_eq!(files.len(), expected, "golden files of {name}");
    for file in files {
        let golden = read(&file);
        let path = modelkit::tiny_gguf(temporary.path(), name, &golden.r#type, golden.seed);
        assert_eq!(
            decoded_hash(&path),
            golden.sha256,
            "{}: not the weights of the reference",
            file.display()
        );
        let shown = |mode: Mode, isa: Isa| {
            let (most, rms) = compare(&golden, &path, mode, isa);
            println!(
                "{name} {} {mode:?} {}: largest {most:.1e}, rms {rms:.1e}",
                golden.r#type,
                isa.name()
            );
        };
        shown(Mode::Safe, Isa::Portable);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            shown(Mode::Exact, isa);
        }
        // Choices between experts do not survive coarser products.
        if golden.margin.is_none() {
            shown(
                Mode::Auto,
                Isa::detect(None).expect("every CPU has an instruction set"),
            );
        }
    }
}

#[test]
fn llama() {
    family("llama", 16);
}

#[test]
fn qwen2() {
    family("qwen2", 3);
}

#[test]
fn qwen3() {
    family("qwen3", 3);
}

#[test]
fn granite() {
    family("granite", 3);
}

#[test]
fn granitemoe() {
    family("granitemoe", 3);
}

#[test]
fn qwen3moe() {
    family("qwen3moe", 3);
}

#[test]
fn gemma2() {
    family("gemma2", 3);
}

#[test]
fn gemma3() {
    family("gemma3", 3);
}
