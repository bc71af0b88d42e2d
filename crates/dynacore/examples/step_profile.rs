//! Where the time of a step goes: a made decoder of a known shape, time by kind of phase.
//!
//! `cargo run --release -p dynacore --example step_profile [smollm2|gemma270m|qwen1.5b|granite-moe-1b] [context] [rows] [threads] [decodes]`
//!
//! A step has `rows` rows of one sequence after `context` tokens, and one row each of `decodes` others, of which half have
//! a quarter of the context; with 0 rows it has only the decodes. `idle` is the share of the workers' time in which a
//! phase's stage gave them nothing to do: waiting for the others' last items, the change from stage to stage, and what
//! other programs took.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

use dynacore::cpu::{CpuDevice, CpuOptions};
use dynacore::self_test::decoder::{Decoder, Tables};
use dynacore::self_test::geometry;
use dynacore::{Device, Executor, KvType, Logits, PhaseTime, WeightBytes, weight_usage};
use dynair::{DType, Limits, QuantType};

fn shape(name: &str) -> Option<Decoder> {
    let smollm2 = Decoder {
        layers: 30,
        hidden_size: 576,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        ffn_size: 1536,
        vocab_size: 49152,
        dtype: DType::Quant(QuantType::Q4_1),
        head_dtype: DType::Quant(QuantType::Q4_1),
        window: None,
        softcap: None,
        experts: None,
    };
    let q4_k = DType::Quant(QuantType::Q4K);
    match name {
        "smollm2" => Some(smollm2),
        "gemma270m" => Some(Decoder {
            layers: 18,
            hidden_size: 640,
            num_heads: 4,
            num_kv_heads: 1,
            head_dim: 256,
            ffn_size: 2048,
            vocab_size: 262_144,
            dtype: DType::Quant(QuantType::Q5_0),
            head_dtype: DType::Quant(QuantType::Q8_0),
            window: Some(512),
            ..smollm2
        }),
        "qwen1.5b" => Some(Decoder {
            layers: 28,
            hidden_size: 1536,
            num_heads: 12,
            num_kv_heads: 2,
            head_dim: 128,
            ffn_size: 8960,
            vocab_size: 151_936,
            dtype: q4_k,
            head_dtype: DType::Quant(QuantType::Q6K),
            ..smollm2
        }),
        "granite-moe-1b" => Some(Decoder {
            layers: 24,
            hidden_size: 1024,
            num_heads: 16,
            num_kv_heads: 8,
            ffn_size: 512,
            vocab_size: 49_155,
            dtype: q4_k,
            head_dtype: DType::Quant(QuantType::Q6K),
            experts: Some((32, 8)),
            ..smollm2
        }),
        _ => None,
    }
}

/// Tokens that each sequence has before the steps: that of the rows, then the decodes.
fn contexts(context: usize, rows: usize, decodes: usize) -> Vec<usize> {
    let of = |seq| match seq {
        // Without rows its context would be for nobody.
        0 if rows == 0 => 0,
        seq if seq % 2 == 0 => context,
        _ => context / 4,
    };
    (0..=decodes).map(of).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "smollm2".into());
    let decoder = shape(&name).ok_or("unknown shape")?;
    let context: usize = args.next().map_or(Ok(64), |a| a.parse())?;
    let rows: usize = args.next().map_or(Ok(1), |a| a.parse())?;
    let threads = args.next().map(|a| a.parse()).transpose()?;
    let decodes: usize = args.next().map_or(Ok(0), |a| a.parse())?;
    if rows + decodes == 0 {
        return Err("a step of 0 rows and 0 decodes has nothing to do".into());
    }
    let device = CpuDevice::new(&CpuOptions {
        threads,
        ..CpuOptions::default()
    })?;
    println!(
        "{name}, context {context}, {rows} rows, {decodes} decodes, {:?}",
        device.info()
    );
    let (graph, tensors) = decoder.build(1);
    let chunk = 512.max(rows);
    let limits = Limits {
        max_tokens: chunk + decodes,
        max_seqs: 1 + decodes,
        max_outputs: 1 + decodes,
    };
    let plan = dynair::plan(graph.clone(), &device, limits)?;
    let weights = plan
        .weights
        .iter()
        .zip(weight_usage(&plan))
        .map(|(decl, usage)| device.load_weight(decl, &WeightBytes::Owned(tensors.bytes(decl)), usage))
        .collect::<Result<Vec<_>, _>>()?;
    drop(tensors);
    // The best of them is printed; each of many rows is long, and makes the next one's context longer.
    let steps = if rows <= 64 { 30 } else { 6 };
    let contexts = contexts(context, rows, decodes);
    let of = |context: usize, rows: usize| (context + (steps + 8) * rows).div_ceil(32) + 1;
    let blocks = of(contexts[0], rows) + contexts[1..].iter().map(|c| of(*c, 1)).sum::<usize>();
    let kv = device.alloc_kv(&plan.caches, &geometry(&graph, KvType::F16, 32, blocks))?;
    let mut executor = device.compile_cpu(&plan, &weights, kv)?;
    let windows: Vec<_> = if decoder.window.is_some() {
        vec![decoder.window, None]
    } else {
        vec![None]
    };
    let mut tables = Tables::new(&windows, 32, blocks, 1 + decodes, 1);
    let tokens: Vec<u32> = (0..chunk as u32).map(|i| i * 31 % 4096).collect();
    let mut logits = Logits::default();
    // The last row of each sequence gives logits.
    let last = |mut batch: dynair::BatchMeta| {
        batch.output_rows = batch.seqs.iter().map(|s| s.first_row + s.rows - 1).collect();
        batch
    };
    for (seq, &context) in contexts.iter().enumerate() {
        while tables.past(seq) < context {
            let n = chunk.min(context - tables.past(seq));
            let batch = last(tables.step(&[(seq, &tokens[..n])]));
            let ticket = executor.submit(&batch)?;
            executor.wait(ticket, &mut logits)?;
        }
    }
    let mut work: Vec<(usize, &[u32])> = (1..=decodes).map(|seq| (seq, &tokens[..1])).collect();
    if rows > 0 {
        work.insert(0, (0, &tokens[..rows]));
    }
    let mut best = f64::MAX;
    let mut times = Vec::new();
    for _ in 0..steps {
        let batch = last(tables.step(&work));
        let start = Instant::now();
        let found = executor.profile(&batch)?;
        let took = start.elapsed().as_secs_f64() * 1e3;
        if took < best {
            (best, times) = (took, found);
        }
    }
    print(&times, device.info().units);
    Ok(())
}

fn print(times: &[PhaseTime], threads: usize) {
    let idle = |work: u64, wall: u64| 100.0 * (1.0 - work as f64 / (wall as f64 * threads as f64));
    // Phases of one item share a stage, whose time stands with the last of them.
    let mut by_phase: BTreeMap<(&str, String), (u64, u64, u64, usize)> = BTreeMap::new();
    let mut of_stage = 0;
    for t in times {
        let kind = t.label.rsplit('.').next().unwrap_or("").to_owned();
        let sum = by_phase.entry((t.phase, kind)).or_default();
        of_stage += t.work_ns;
        let all = if t.wall_ns > 0 {
            std::mem::take(&mut of_stage)
        } else {
            0
        };
        *sum = (sum.0 + t.work_ns, sum.1 + t.wall_ns, sum.2 + all, sum.3 + 1);
    }
    for ((phase, label), (work, wall, stages, count)) in &by_phase {
        println!(
            "{phase:18} {label:16} x{count:3}  work {:8.1} us  wall {:8.1} us  idle {:5.1} %",
            *work as f64 / 1e3,
            *wall as f64 / 1e3,
            if *wall > 0 { idle(*stages, *wall) } else { 0.0 }
        );
    }
    let (work, wall) = by_phase
        .values()
        .fold((0, 0), |all, p| (all.0 + p.0, all.1 + p.1));
    println!("all phases: idle {:.1} %", idle(work, wall));
}
