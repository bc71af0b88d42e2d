//! A model driven step by step without the engine: for comparing logits and for timing what a step costs.

use std::path::Path;

use dynacore::cpu::{CpuDevice, CpuOptions, Mode};
use dynacore::{Executor, KvType, Logits, PhaseTime};
use dynair::{BatchMeta, BlockId, BlockTables, SeqSpan};

use crate::load::{self, BLOCK_TOKENS, LoadOptions, LoadedModel};

/// A loaded model with room for `seqs` sequences of `context` tokens.
pub(super) struct Direct {
    executor: Box<dyn Executor>,
    groups: usize,
    blocks_per_seq: usize,
    max_tokens: usize,
    lengths: Vec<usize>,
    logits: Logits,
    /// Kernel table and thread count.
    pub(super) device: String,
}

/// What to load it for.
#[derive(Debug, Clone)]
pub(super) struct DirectOptions {
    /// Kernels.
    pub(super) mode: Mode,
    /// Worker threads.
    pub(super) threads: Option<usize>,
    /// Element type of the cache.
    pub(super) kv: KvType,
    /// Sequences.
    pub(super) seqs: usize,
    /// Tokens of each.
    pub(super) context: usize,
    /// Most tokens of a step.
    pub(super) batch_tokens: usize,
}

impl Direct {
    pub(super) fn open(path: &Path, options: &DirectOptions) -> anyhow::Result<Direct> {
        let device = CpuDevice::new(&CpuOptions {
            threads: options.threads,
            mode: options.mode,
            isa: None,
        })?;
        let blocks_per_seq = options.context.div_ceil(BLOCK_TOKENS);
        let name = {
            use dynacore::Device;
            format!("{} × {}", device.info().isa, device.info().units)
        };
        let mut model: LoadedModel = load::load_sized(
            path,
            &device,
            &LoadOptions {
                ctx: None,
                kv: options.kv,
                kv_tokens: None,
                batch_tokens: options.batch_tokens,
                max_seqs: options.seqs,
                template: None,
            },
            // Every sequence keeps everything, in windowed groups too: simple, and no attention reads more for it.
            Some(blocks_per_seq * options.seqs),
        )?;
        anyhow::ensure!(
            options.context <= model.facts.trained_context,
            "{} tokens of context are asked for and the model was made for {}",
            options.context,
            model.facts.trained_context
        );
        model.geometry.blocks.truncate(model.windows.len());
        Ok(Direct {
            groups: model.windows.len(),
            executor: model.executor,
            blocks_per_seq,
            max_tokens: model.limits.max_tokens,
            lengths: vec![0; options.seqs],
            logits: Logits::default(),
            device: name,
        })
    }

    /// Most tokens of a step.
    pub(super) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Forgets a sequence's tokens.
    pub(super) fn reset(&mut self, seq: usize) {
        self.lengths[seq] = 0;
    }

    /// One step: appends `tokens` to each named sequence (ascending); `all` asks for the logits of every row, else of
    /// the last row of each sequence.
    pub(super) fn step(&mut self, rows: &[(usize, &[u32])], all: bool) -> anyhow::Result<&Logits> {
        let batch = self.append(rows, all);
        let ticket = self.executor.submit(&batch)?;
        self.executor.wait(ticket, &mut self.logits)?;
        Ok(&self.logits)
    }

    /// As [`Direct::step`] for one sequence, with the time of each phase in place of logits.
    pub(super) fn profile(&mut self, seq: usize, tokens: &[u32]) -> anyhow::Result<Vec<PhaseTime>> {
        let batch = self.append(&[(seq, tokens)], false);
        Ok(self.executor.profile(&batch)?)
    }

    /// The batch of one step; the sequences have moved on.
    fn append(&mut self, rows: &[(usize, &[u32])], all: bool) -> BatchMeta {
        let mut batch = BatchMeta::default();
        let mut tables = BlockTables {
            first: vec![0],
            ..BlockTables::default()
        };
        for (seq, tokens) in rows {
            let (first_row, before) = (batch.tokens.len(), self.lengths[*seq]);
            batch.tokens.extend_from_slice(tokens);
            batch
                .positions
                .extend((before..before + tokens.len()).map(|p| p as u32));
            let length = before + tokens.len();
            batch.seqs.push(SeqSpan {
                first_row: first_row as u32,
                rows: tokens.len() as u32,
                context_len: length as u32,
            });
            let base = seq * self.blocks_per_seq;
            tables
                .blocks
                .extend((0..length.div_ceil(BLOCK_TOKENS)).map(|b| BlockId((base + b) as u32)));
            tables.first.push(tables.blocks.len() as u32);
            tables.start.push(0);
            let outputs = if all {
                first_row..batch.tokens.len()
            } else {
                batch.tokens.len() - 1..batch.tokens.len()
            };
            batch.output_rows.extend(outputs.map(|r| r as u32));
            self.lengths[*seq] = length;
        }
        batch.tables = vec![tables; self.groups];
        batch
    }
}

/// Index of the largest value, the first of equals.
pub(super) fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best
}

/// log Σ exp of a row.
pub(super) fn log_sum_exp(row: &[f32]) -> f64 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|v| f64::from(v - most).exp()).sum();
    f64::from(most) + sum.ln()
}
