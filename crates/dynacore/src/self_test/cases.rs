//! Builders of [`Case`]s, one per kind of op, over shapes and kinds of values.

use dynair::{
    Activation, AttnSpec, BatchMeta, BlockId, BlockTables, DType, ExpertWeights, Graph, GraphBuilder,
    QuantType, RopeScaling, RopeSpec, RopeStyle, RouterSpec, SeqSpan, ValueId,
};

use super::{Case, Tensors, geometry};
use crate::cpu::ops::linear::Form;
use crate::kv::KvType;

/// Kinds of values, for what goes wrong at the ends of the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// About 1.
    Normal,
    /// About 1e-15: squares vanish.
    Tiny,
    /// About 1e15: squares and exponentials overflow soon.
    Huge,
    /// Magnitudes from 1e-4 to 1e4, zeros among them.
    Mixed,
}

/// Pseudo-random numbers, the same on every machine (xorshift64*, Vigna 2016).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number in −1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// `n` numbers of a kind.
    pub fn values(&mut self, n: usize, kind: Values) -> Vec<f32> {
        let one = |rng: &mut Rng| match kind {
            Values::Normal => 2.0 * rng.unit(),
            Values::Tiny => 1e-15 * rng.unit(),
            Values::Huge => 1e15 * rng.unit(),
            Values::Mixed => match rng.below(8) {
                0 => 0.0,
                k => rng.unit() * 10f32.powi(k as i32 - 4),
            },
        };
        (0..n).map(|_| one(self)).collect()
    }
}

/// A step of one sequence without cache: rows 0..n, all of them wanted.
fn plain_step(n: usize) -> BatchMeta {
    BatchMeta {
        tokens: (0..n as u32).collect(),
        positions: (0..n as u32).collect(),
        seqs: vec![SeqSpan {
            first_row: 0,
            rows: n as u32,
            context_len: n as u32,
        }],
        tables: Vec::new(),
        output_rows: (0..n as u32).collect(),
    }
}

fn case(
    name: String,
    graph: Graph,
    tensors: Tensors,
    n: usize,
    tolerance: f64,
    reason: &'static str,
) -> Case {
    let geometry = geometry(&graph, KvType::F32, 16, 1);
    Case {
        name,
        graph,
        tensors,
        steps: vec![plain_step(n)],
        geometry,
        tolerance,
        reason,
    }
}

/// Shapes and types of a case are ours: the builder takes them.
const VALID: &str = "the shapes of a case fit";

/// Rows of an input table for `n` tokens: a table of one row would be a vector.
fn rows(n: usize) -> usize {
    n.max(2)
}

/// All element-wise ops over `[n, cols]`, a case each; and `Embed` and `TakeOutputs` by the way.
pub fn elementwise(n: usize, cols: usize, values: Values) -> Vec<Case> {
    type Build = fn(&mut GraphBuilder<'_>, ValueId, ValueId) -> dynair::Result<ValueId>;
    let all: [(&str, f64, &'static str, Build); 11] = [
        ("embed", 0.0, "moves values", |_, a, _| Ok(a)),
        ("add", 1e-7, "one rounding", |b, x, y| b.add(x, y, "add")),
        ("mul", 1e-7, "one rounding", |b, x, y| b.mul(x, y, "mul")),
        ("scale", 1e-7, "one rounding", |b, x, _| b.scale(x, 1.7)),
        ("softcap", 1e-6, "tanh within 4 ulp", |b, x, _| b.softcap(x, 30.0)),
        ("silu", 1e-6, "exp within 2 ulp, a quotient", |b, x, _| {
            b.act(x, Activation::Silu, "act")
        }),
        ("gelu_tanh", 2e-6, "exp of a rounded argument", |b, x, _| {
            b.act(x, Activation::GeluTanh, "act")
        }),
        (
            "gelu",
            2e-6,
            "erfc within 1.2e-7, exp of a rounded argument",
            |b, x, _| b.act(x, Activation::Gelu, "act"),
        ),
        ("relu", 0.0, "moves values", |b, x, _| {
            b.act(x, Activation::Relu, "act")
        }),
        ("glu_silu", 1e-6, "as silu, one more rounding", |b, x, y| {
            b.glu(x, y, Activation::Silu, "glu")
        }),
        (
            "glu_gelu_tanh",
            2e-6,
            "as gelu_tanh, one more rounding",
            |b, x, y| b.glu(x, y, Activation::GeluTanh, "glu"),
        ),
    ];
    all.into_iter()
        .map(|(name, tolerance, reason, build)| {
            let mut rng = Rng::new((n * 1000 + cols) as u64);
            let mut tensors = Tensors::default();
            tensors.add(
                "a.weight",
                DType::F32,
                rows(n),
                &rng.values(rows(n) * cols, values),
            );
            // The second operand stays moderate, so that products stay finite.
            tensors.add(
                "b.weight",
                DType::F32,
                rows(n),
                &rng.values(rows(n) * cols, Values::Normal),
            );
            let mut b = GraphBuilder::new(&tensors);
            let x = b.embed("a", rows(n), cols).expect(VALID);
            let y = b.embed("b", rows(n), cols).expect(VALID);
            let z = build(&mut b, x, y).expect(VALID);
            let out = b.take_outputs(z).expect(VALID);
            let graph = b.finish(out).expect(VALID);
            case(
                format!("{name} [{n}, {cols}] {values:?}"),
                graph,
                tensors,
                n,
                tolerance,
                reason,
            )
        })
        .collect()
}

/// `RmsNorm`, and after an addition `AddRmsNorm` where it is fused: both its results enter.
pub fn norm(n: usize, cols: usize, values: Values) -> Case {
    let mut rng = Rng::new((n * 77 + cols) as u64);
    let mut tensors = Tensors::default();
    tensors.add(
        "a.weight",
        DType::F32,
        rows(n),
        &rng.values(rows(n) * cols, values),
    );
    tensors.add(
        "b.weight",
        DType::F32,
        rows(n),
        &rng.values(rows(n) * cols, values),
    );
    tensors.add("norm.weight", DType::F32, 1, &rng.values(cols, Values::Normal));
    let mut b = GraphBuilder::new(&tensors);
    let x = b.embed("a", rows(n), cols).expect(VALID);
    let y = b.embed("b", rows(n), cols).expect(VALID);
    let sum = b.add(x, y, "sum").expect(VALID);
    let normed = b.rms_norm(sum, "norm", 1e-6).expect(VALID);
    let both = b.add(sum, normed, "both").expect(VALID);
    let out = b.take_outputs(both).expect(VALID);
    let graph = b.finish(out).expect(VALID);
    case(
        format!("rms_norm [{n}, {cols}] {values:?}"),
        graph,
        tensors,
        n,
        5e-7,
        "a sum of squares in f32, a root",
    )
}

/// `Rope` of heads of `head_dim` elements, the first `dims` turned.
pub fn rope(style: RopeStyle, head_dim: usize, dims: usize) -> Case {
    rope_scaled(style, head_dim, dims, RopeScaling::None, false)
}

/// [`rope`] with scaling, and with frequency factors where `factors`.
pub fn rope_scaled(
    style: RopeStyle,
    head_dim: usize,
    dims: usize,
    scaling: RopeScaling,
    factors: bool,
) -> Case {
    let (n, heads) = (5, 3);
    let mut rng = Rng::new((head_dim * 31 + dims) as u64);
    let mut tensors = Tensors::default();
    tensors.add(
        "a.weight",
        DType::F32,
        n,
        &rng.values(n * heads * head_dim, Values::Normal),
    );
    if factors {
        let f: Vec<f32> = (0..dims / 2).map(|_| 1.5 + rng.unit()).collect();
        tensors.add("rope_freqs.weight", DType::F32, 1, &f);
    }
    let mut b = GraphBuilder::new(&tensors);
    let x = b.embed("a", n, heads * head_dim).expect(VALID);
    let x = b.view(x, &[heads, head_dim]).expect(VALID);
    let y = b
        .rope(
            x,
            RopeSpec {
                style,
                dims,
                theta: 10_000.0,
                scaling,
            },
        )
        .expect(VALID);
    let y = b.view(y, &[heads * head_dim]).expect(VALID);
    let out = b.take_outputs(y).expect(VALID);
    let graph = b.finish(out).expect(VALID);
    let name = format!("rope {style:?} {dims} of {head_dim} {scaling:?} factors {factors}");
    let mut case = case(
        name,
        graph,
        tensors,
        n,
        3e-7,
        "angles in f64, two products in f32",
    );
    let mut far = plain_step(n);
    far.positions.iter_mut().for_each(|p| *p += 5000);
    far.seqs[0].context_len += 5000;
    case.steps.push(far);
    case
}

/// Products of `x [n, k]` with weights of `dtype`: two of them summed (one with a bias), which a planner may group,
/// and a gated pair, which it may fuse.
pub fn linear(dtype: DType, n: usize, k: usize, m: usize, values: Values) -> Case {
    let mut rng = Rng::new((n * 7 + k * 3 + m) as u64);
    let mut tensors = Tensors::default();
    tensors.add("x.weight", DType::F32, rows(n), &rng.values(rows(n) * k, values));
    for name in ["q", "k", "gate", "up"] {
        let mut w = rng.values(m * k, Values::Normal);
        w.iter_mut().for_each(|w| *w *= 0.05);
        tensors.add(&format!("{name}.weight"), dtype, m, &w);
    }
    tensors.add("k.bias", DType::F32, 1, &rng.values(m, Values::Normal));
    let mut b = GraphBuilder::new(&tensors);
    let x = b.embed("x", rows(n), k).expect(VALID);
    let q = b.linear(x, "q").expect(VALID);
    let key = b.linear(x, "k").expect(VALID);
    let sum = b.add(q, key, "sum").expect(VALID);
    let (gate, up) = (b.linear(x, "gate").expect(VALID), b.linear(x, "up").expect(VALID));
    let glu = b.glu(gate, up, Activation::Silu, "glu").expect(VALID);
    let both = b.add(sum, glu, "both").expect(VALID);
    let out = b.take_outputs(both).expect(VALID);
    let graph = b.finish(out).expect(VALID);
    let name = format!("linear {dtype} [{n}, {k}] x [{m}, {k}] {values:?}");
    case(
        name,
        graph,
        tensors,
        n,
        1e-3,
        "activations rounded to 14 bits per group of 32",
    )
}

/// The case under a device that makes its products from this form.
pub fn from(form: Form, case: Case) -> Case {
    let (what, tolerance, reason) = match form {
        Form::Records => return case,
        Form::Short => (
            "short records",
            2e-2,
            "activations rounded to 8 bits per group of 32: 5e-3 of a product's rms",
        ),
        Form::Tiles => (
            "tiles",
            8e-3,
            "weights and activations of 8 significant bits: 3e-3 a product, two of which are multiplied",
        ),
    };
    Case {
        name: format!("{} from {what}", case.name),
        tolerance,
        reason,
        ..case
    }
}

/// Parameters of [`experts`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Type of the experts' weights.
    pub dtype: DType,
    /// Rows of the step.
    pub n: usize,
    /// Width of the rows, at least as many as experts.
    pub hidden: usize,
    /// Inner size of an expert.
    pub inner: usize,
    /// Experts.
    pub experts: usize,
    /// Experts used per row.
    pub experts_used: usize,
    /// How they are weighted.
    pub weights: ExpertWeights,
}

impl Default for Experts {
    fn default() -> Self {
        Experts {
            dtype: DType::Quant(QuantType::Q4K),
            n: 5,
            hidden: 256,
            inner: 256,
            experts: 6,
            experts_used: 3,
            weights: ExpertWeights::SoftmaxUsed,
        }
    }
}

/// `Route`, `ExpertGlu` and `ExpertDown`. The router reads an expert's logit off one element of the row, and these
/// elements lie apart, so that no rounding changes which experts are chosen.
pub fn experts(e: &Experts) -> Case {
    let mut rng = Rng::new((e.n * 7 + e.hidden * 3 + e.inner + e.experts) as u64);
    let mut tensors = Tensors::default();
    let mut x = rng.values(rows(e.n) * e.hidden, Values::Normal);
    for row in x.chunks_exact_mut(e.hidden) {
        let mut order: Vec<usize> = (0..e.experts).collect();
        for i in (1..e.experts).rev() {
            order.swap(i, rng.below(i + 1));
        }
        for (x, place) in row.iter_mut().zip(order) {
            *x = (place as f32 + 0.2 * rng.unit()) * 4.0 / e.experts as f32 - 2.0;
        }
    }
    tensors.add("x.weight", DType::F32, rows(e.n), &x);
    let mut router = vec![0.0; e.experts * e.hidden];
    router
        .chunks_exact_mut(e.hidden)
        .enumerate()
        .for_each(|(i, row)| row[i] = 1.0);
    tensors.add("blk.0.ffn_gate_inp.weight", DType::F32, e.experts, &router);
    for (name, m, k) in [
        ("blk.0.ffn_gate_exps.weight", e.inner, e.hidden),
        ("blk.0.ffn_up_exps.weight", e.inner, e.hidden),
        ("blk.0.ffn_down_exps.weight", e.hidden, e.inner),
    ] {
        let mut w = rng.values(e.experts * m * k, Values::Normal);
        w.iter_mut().for_each(|w| *w *= 0.05);
        tensors.add(name, e.dtype, e.experts * m, &w);
        tensors.stack(name, e.experts);
    }
    let spec = RouterSpec {
        experts: e.experts,
        experts_used: e.experts_used,
        weights: e.weights,
    };
    let mut b = GraphBuilder::new(&tensors);
    let x = b.embed("x", rows(e.n), e.hidden).expect(VALID);
    let y = b.moe(x, "blk.0", spec, Activation::Silu, e.inner).expect(VALID);
    let out = b.take_outputs(y).expect(VALID);
    let graph = b.finish(out).expect(VALID);
    case(
        format!("experts {e:?}"),
        graph,
        tensors,
        e.n,
        2e-3,
        "activations rounded to 14 bits per group of 32, twice",
    )
}

/// Parameters of [`attention`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Head size.
    pub head_dim: usize,
    /// Sliding window.
    pub window: Option<u32>,
    /// Softcap of the scores.
    pub softcap: Option<f32>,
    /// Cache type.
    pub kind: KvType,
    /// Tokens of each block.
    pub block_tokens: usize,
    /// Rows each of two sequences has in each step.
    pub steps: &'static [[usize; 2]],
    /// Whether keys are turned by RoPE on their way into the cache.
    pub rope: bool,
    /// Multiplies keys; a power of two.
    pub keys: f32,
}

impl Default for Attention {
    fn default() -> Self {
        Attention {
            num_heads: 6,
            num_kv_heads: 2,
            head_dim: 64,
            window: None,
            softcap: None,
            kind: KvType::F16,
            block_tokens: 16,
            steps: &[[21, 3], [1, 1], [1, 270]],
            rope: false,
            keys: 1.0,
        }
    }
}

/// `KvWrite` (or `RopeKvWrite`) and `Attention` of two sequences over several steps, blocks in no order.
pub fn attention(a: &Attention) -> Case {
    let mut rng = Rng::new((a.head_dim * 13 + a.num_heads) as u64);
    let totals = [0, 1].map(|s| a.steps.iter().map(|step| step[s]).sum::<usize>());
    let rows = 64;
    let mut tensors = Tensors::default();
    for (name, heads) in [("q", a.num_heads), ("k", a.num_kv_heads), ("v", a.num_kv_heads)] {
        let mut values = rng.values(rows * heads * a.head_dim, Values::Normal);
        // Numbers binary16 holds exactly, so that the cache's rounding does not enter.
        let factor = if name == "k" { a.keys } else { 1.0 };
        values
            .iter_mut()
            .for_each(|v| *v = (*v * 64.0).round() / 64.0 * factor);
        tensors.add(&format!("{name}.weight"), DType::F32, rows, &values);
    }
    let mut b = GraphBuilder::new(&tensors);
    let heads = |b: &mut GraphBuilder<'_>, name: &str, heads: usize| {
        let x = b.embed(name, rows, heads * a.head_dim).expect(VALID);
        b.view(x, &[heads, a.head_dim]).expect(VALID)
    };
    let q = heads(&mut b, "q", a.num_heads);
    let mut k = heads(&mut b, "k", a.num_kv_heads);
    let v = heads(&mut b, "v", a.num_kv_heads);
    if a.rope {
        let dims = a.head_dim / 2 * 2;
        let spec = RopeSpec {
            style: RopeStyle::Half,
            dims,
            theta: 10_000.0,
            scaling: RopeScaling::None,
        };
        k = b.rope(k, spec).expect(VALID);
    }
    let spec = AttnSpec {
        num_heads: a.num_heads,
        num_kv_heads: a.num_kv_heads,
        head_dim: a.head_dim,
        scale: (a.head_dim as f32).powf(-0.5),
        sliding_window: a.window,
        softcap: a.softcap,
    };
    let out = b.attention(0, q, k, v, spec).expect(VALID);
    let out = b.view(out, &[a.num_heads * a.head_dim]).expect(VALID);
    let out = b.take_outputs(out).expect(VALID);
    let graph = b.finish(out).expect(VALID);
    let per_seq = totals.map(|t| t.div_ceil(a.block_tokens));
    let mut blocks: Vec<u32> = (0..(per_seq[0] + per_seq[1]) as u32).collect();
    for i in (1..blocks.len()).rev() {
        blocks.swap(i, rng.below(i + 1));
    }
    let (tolerance, reason) = match (a.kind, a.rope) {
        (KvType::Q8_0, _) => (1e-2, "keys and values rounded to 8 bits per 32"),
        (KvType::F16, true) => (1e-3, "turned keys rounded to 11 bits"),
        (KvType::F16 | KvType::F32, _) => (3e-6, "sums over head size and context in f32"),
    };
    let geometry = geometry(&graph, a.kind, a.block_tokens, blocks.len());
    let mut past = [0, 0];
    let steps = a
        .steps
        .iter()
        .map(|rows| attention_step(a, *rows, &mut past, per_seq, &blocks, &mut rng))
        .collect();
    Case {
        name: format!("attention {a:?}"),
        graph,
        tensors,
        steps,
        geometry,
        tolerance,
        reason,
    }
}

/// [`attention`] under a device that attends from many rows by tiles.
pub fn wide_attention(a: &Attention) -> Case {
    let case = attention(a);
    Case {
        name: format!("{} from tiles", case.name),
        tolerance: case.tolerance.max(5e-3),
        reason: "weights and values of 8 significant bits: 1.6e-3 of a sum, or what the cache loses",
        ..case
    }
}

/// A step of `rows` more tokens of each of two sequences that have `past` tokens.
fn attention_step(
    a: &Attention,
    rows: [usize; 2],
    past: &mut [usize; 2],
    per_seq: [usize; 2],
    blocks: &[u32],
    rng: &mut Rng,
) -> BatchMeta {
    let mut meta = BatchMeta::default();
    let mut table = BlockTables {
        first: vec![0],
        ..BlockTables::default()
    };
    for s in 0..2 {
        if rows[s] == 0 {
            continue;
        }
        let first_row = meta.tokens.len() as u32;
        for i in 0..rows[s] {
            meta.tokens.push(rng.below(64) as u32);
            meta.positions.push((past[s] + i) as u32);
        }
        // A windowed group lets go of the blocks nobody in this step sees any more.
        let low = a.window.map_or(0, |w| (past[s] + 1).saturating_sub(w as usize));
        let skip = low / a.block_tokens;
        past[s] += rows[s];
        meta.seqs.push(SeqSpan {
            first_row,
            rows: rows[s] as u32,
            context_len: past[s] as u32,
        });
        let own = if s == 0 {
            0..per_seq[0]
        } else {
            per_seq[0]..per_seq[0] + per_seq[1]
        };
        let used = &blocks[own][skip..past[s].div_ceil(a.block_tokens)];
        table.blocks.extend(used.iter().map(|b| BlockId(*b)));
        table.first.push(table.blocks.len() as u32);
        table.start.push((skip * a.block_tokens) as u32);
    }
    meta.output_rows = (0..meta.tokens.len() as u32).collect();
    meta.tables = vec![table];
    meta
}
