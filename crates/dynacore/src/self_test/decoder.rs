//! Whole decoders with made weights: for tests of batching, and to see where a step's time goes.

use dynair::{
    Activation, AttnSpec, BatchMeta, BlockId, BlockTables, DType, ExpertWeights, Graph, GraphBuilder,
    RopeScaling, RopeSpec, RopeStyle, RouterSpec, SeqSpan, ValueId,
};

use super::Tensors;
use super::cases::{Rng, Values};

/// Shape of a made decoder: norm, attention, norm, gated feed-forward; the embedding serves as output head.
#[derive(Debug, Clone)]
pub struct Decoder {
    /// Layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Head size.
    pub head_dim: usize,
    /// Feed-forward size.
    pub ffn_size: usize,
    /// Vocabulary.
    pub vocab_size: usize,
    /// Type of the layers' weights.
    pub dtype: DType,
    /// Type of the embedding.
    pub head_dtype: DType,
    /// Every other layer sees only so many tokens.
    pub window: Option<u32>,
    /// Softcap of scores and logits.
    pub softcap: Option<f32>,
    /// Experts of each layer and how many a row uses; `None`: a plain feed-forward network.
    pub experts: Option<(usize, usize)>,
}

impl Decoder {
    /// Two layers small enough for thousands of steps in a test.
    pub fn small() -> Decoder {
        Decoder {
            layers: 2,
            hidden_size: 64,
            num_heads: 6,
            num_kv_heads: 2,
            head_dim: 32,
            ffn_size: 96,
            vocab_size: 80,
            dtype: DType::Quant(dynair::QuantType::Q8_0),
            head_dtype: DType::F16,
            window: Some(24),
            softcap: Some(30.0),
            experts: None,
        }
    }

    /// Its graph and weights.
    ///
    /// # Panics
    /// If a size is no whole number of its type's blocks.
    pub fn build(&self, seed: u64) -> (Graph, Tensors) {
        let tensors = self.tensors(seed);
        let graph = self.graph(&tensors).expect("the shapes of a made decoder fit");
        (graph, tensors)
    }

    fn tensors(&self, seed: u64) -> Tensors {
        let mut rng = Rng::new(seed);
        let mut tensors = Tensors::default();
        let mut add = |name: &str, dtype: DType, rows: usize, cols: usize| {
            // Few distinct rows: encoding a large model's worth of random numbers takes longer than the test. Of stacked
            // weights a prime number of them, so that the experts differ.
            let stacked = name.ends_with("_exps.weight");
            let distinct = rows.min(if stacked { 67 } else { 64 });
            let mut values = rng.values(distinct * cols, Values::Normal);
            let size = 1.0 / (cols as f32).sqrt();
            values.iter_mut().for_each(|v| *v *= size);
            tensors.add_repeated(name, dtype, rows, cols, &values);
        };
        let (q, kv) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let mut stacked = Vec::new();
        add(
            "token_embd.weight",
            self.head_dtype,
            self.vocab_size,
            self.hidden_size,
        );
        for i in 0..self.layers {
            add(&format!("blk.{i}.attn_q.weight"), self.dtype, q, self.hidden_size);
            add(
                &format!("blk.{i}.attn_k.weight"),
                self.dtype,
                kv,
                self.hidden_size,
            );
            add(
                &format!("blk.{i}.attn_v.weight"),
                self.dtype,
                kv,
                self.hidden_size,
            );
            add(
                &format!("blk.{i}.attn_output.weight"),
                self.dtype,
                self.hidden_size,
                q,
            );
            let (stack, suffix) = match self.experts {
                Some((experts, _)) => (experts, "_exps"),
                None => (1, ""),
            };
            for (part, rows, cols) in [
                ("ffn_gate", self.ffn_size, self.hidden_size),
                ("ffn_up", self.ffn_size, self.hidden_size),
                ("ffn_down", self.hidden_size, self.ffn_size),
            ] {
                let name = format!("blk.{i}.{part}{suffix}.weight");
                add(&name, self.dtype, stack * rows, cols);
                stacked.push((name, stack));
            }
            if stack > 1 {
                let name = format!("blk.{i}.ffn_gate_inp.weight");
                add(&name, DType::F32, stack, self.hidden_size);
            }
        }
        for (name, experts) in stacked {
            tensors.stack(&name, experts);
        }
        let norm: Vec<f32> = (0..self.hidden_size).map(|i| 4.0 + (i % 7) as f32).collect();
        for i in 0..self.layers {
            tensors.add(&format!("blk.{i}.attn_norm.weight"), DType::F32, 1, &norm);
            tensors.add(&format!("blk.{i}.ffn_norm.weight"), DType::F32, 1, &norm);
        }
        tensors.add("output_norm.weight", DType::F32, 1, &norm);
        tensors
    }

    fn ffn(&self, b: &mut GraphBuilder<'_>, h: ValueId, i: usize) -> dynair::Result<ValueId> {
        if let Some((experts, experts_used)) = self.experts {
            let spec = RouterSpec {
                experts,
                experts_used,
                weights: ExpertWeights::SoftmaxUsed,
            };
            return b.moe(h, &format!("blk.{i}"), spec, Activation::Silu, self.ffn_size);
        }
        let gate = b.linear(h, &format!("blk.{i}.ffn_gate"))?;
        let up = b.linear(h, &format!("blk.{i}.ffn_up"))?;
        let y = b.glu(gate, up, Activation::Silu, &format!("blk.{i}.ffn_act"))?;
        b.linear(y, &format!("blk.{i}.ffn_down"))
    }

    fn graph(&self, tensors: &Tensors) -> dynair::Result<Graph> {
        let mut b = GraphBuilder::new(tensors);
        let rope = RopeSpec {
            style: RopeStyle::Interleaved,
            dims: self.head_dim,
            theta: 10_000.0,
            scaling: RopeScaling::None,
        };
        let mut x = b.embed("token_embd", self.vocab_size, self.hidden_size)?;
        for i in 0..self.layers {
            let h = b.rms_norm(x, &format!("blk.{i}.attn_norm"), 1e-5)?;
            let mut heads = |name: &str, n: usize| {
                let y = b.linear(h, &format!("blk.{i}.{name}"))?;
                b.view(y, &[n, self.head_dim])
            };
            let q = heads("attn_q", self.num_heads)?;
            let k = heads("attn_k", self.num_kv_heads)?;
            let v = heads("attn_v", self.num_kv_heads)?;
            let (q, k) = (b.rope(q, rope)?, b.rope(k, rope)?);
            let spec = AttnSpec {
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
                head_dim: self.head_dim,
                scale: (self.head_dim as f32).powf(-0.5),
                sliding_window: self.window.filter(|_| i % 2 == 0),
                softcap: self.softcap,
            };
            let a = b.attention(i, q, k, v, spec)?;
            let a = b.view(a, &[self.num_heads * self.head_dim])?;
            let a = b.linear(a, &format!("blk.{i}.attn_output"))?;
            x = b.add(x, a, &format!("blk.{i}.attn_add"))?;
            let h = b.rms_norm(x, &format!("blk.{i}.ffn_norm"), 1e-5)?;
            let y = self.ffn(&mut b, h, i)?;
            x = b.add(x, y, &format!("blk.{i}.ffn_add"))?;
        }
        let x = b.take_outputs(x)?;
        let x = b.rms_norm(x, "output_norm", 1e-5)?;
        let mut y = b.linear(x, "token_embd")?;
        if let Some(cap) = self.softcap {
            y = b.softcap(y, cap)?;
        }
        b.finish(y)
    }
}

/// Block tables for sequences that only grow: makes the steps of a schedule.
#[derive(Debug, Clone)]
pub struct Tables {
    block_tokens: usize,
    /// Windows by cache group.
    windows: Vec<Option<u32>>,
    /// Free blocks by cache group.
    free: Vec<Vec<u32>>,
    /// By cache group and sequence.
    held: Vec<Vec<Vec<u32>>>,
    /// Tokens each sequence has had.
    past: Vec<usize>,
}

impl Tables {
    /// For `seqs` sequences; blocks are handed out in an order that depends on `seed`.
    pub fn new(
        windows: &[Option<u32>],
        block_tokens: usize,
        blocks: usize,
        seqs: usize,
        seed: u64,
    ) -> Tables {
        let mut rng = Rng::new(seed);
        let free = windows.iter().map(|_| {
            let mut order: Vec<u32> = (0..blocks as u32).collect();
            for i in (1..blocks).rev() {
                order.swap(i, rng.below(i + 1));
            }
            order
        });
        Tables {
            block_tokens,
            windows: windows.to_vec(),
            free: free.collect(),
            held: vec![vec![Vec::new(); seqs]; windows.len()],
            past: vec![0; seqs],
        }
    }

    /// Tokens sequence `seq` has had.
    pub fn past(&self, seq: usize) -> usize {
        self.past[seq]
    }

    /// The step in which each named sequence takes its next tokens; logits of all rows are wanted.
    ///
    /// # Panics
    /// If the pool has too few blocks.
    pub fn step(&mut self, rows: &[(usize, &[u32])]) -> BatchMeta {
        let mut meta = BatchMeta::default();
        for &(seq, tokens) in rows {
            let (first_row, past) = (meta.tokens.len() as u32, self.past[seq]);
            meta.tokens.extend_from_slice(tokens);
            meta.positions.extend(past as u32..(past + tokens.len()) as u32);
            let context_len = (past + tokens.len()) as u32;
            meta.seqs.push(SeqSpan {
                first_row,
                rows: tokens.len() as u32,
                context_len,
            });
        }
        meta.output_rows = (0..meta.tokens.len() as u32).collect();
        for (group, window) in self.windows.iter().enumerate() {
            let mut table = BlockTables {
                first: vec![0],
                ..BlockTables::default()
            };
            for &(seq, tokens) in rows {
                let held = &mut self.held[group][seq];
                let need = (self.past[seq] + tokens.len()).div_ceil(self.block_tokens);
                while held.len() < need {
                    held.push(
                        self.free[group]
                            .pop()
                            .expect("the pool of a test is large enough"),
                    );
                }
                let low = window.map_or(0, |w| (self.past[seq] + 1).saturating_sub(w as usize));
                let skip = low / self.block_tokens;
                table.blocks.extend(held[skip..need].iter().map(|b| BlockId(*b)));
                table.first.push(table.blocks.len() as u32);
                table.start.push((skip * self.block_tokens) as u32);
            }
            meta.tables.push(table);
        }
        for &(seq, tokens) in rows {
            self.past[seq] += tokens.len();
        }
        meta
    }
}
