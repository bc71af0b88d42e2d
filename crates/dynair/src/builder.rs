//! [`GraphBuilder`]: the only way to make a [`Graph`].
//!
//! A builder knows the tensors of a checkpoint by name, type and shape, and nothing of their data. Every method checks
//! shapes as it goes, so that a file that does not fit its architecture is refused with the tensor's name. Which
//! tensors a model uses can be read off [`Graph::weights`] afterwards.
//!
//! **Names.** Methods that read a layer's weights take the layer's name without suffix, `blk.3.attn_q`, and read
//! `blk.3.attn_q.weight` (and `.bias` where they say so); a name that already ends in `.weight` means the same. The
//! name without suffix is the node's label. Ops without weights take their label from what they work on, or from the
//! caller.

use std::collections::HashMap;
use std::ops::Range;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{CacheDecl, CacheId, Graph, Node, ValueId, WeightDecl, WeightId};
use crate::infer::{MAX_ELEMENTS, MAX_EXPERTS, output_types, weight_type};
use crate::op::{Activation, AttnSpec, Op, RopeSpec, RouterSpec};
use crate::ty::{Dim, Shape, ValueType};
use crate::verify;

/// Name of the tensor that divides RoPE's frequencies (llama3 factors).
pub const ROPE_FREQS: &str = "rope_freqs.weight";

/// The tensors of a checkpoint.
pub trait TensorIndex {
    /// Type, rows and columns of a tensor; a vector has one row. `None` if there is no such tensor.
    fn find(&self, name: &str) -> Option<(DType, usize, usize)>;

    /// Matrices stacked in the tensor, of `rows / experts` rows each: 1 for vectors and matrices.
    fn experts(&self, name: &str) -> usize {
        let _ = name;
        1
    }
}

/// Makes a graph, node by node. See the module's docs.
pub struct GraphBuilder<'a> {
    tensors: &'a dyn TensorIndex,
    graph: Graph,
    /// Node that made each value.
    producer: Vec<usize>,
    weights: HashMap<(String, usize, usize), ValueId>,
    tokens: Option<ValueId>,
    positions: Option<ValueId>,
    batch: Option<ValueId>,
    groups: Vec<Option<u32>>,
}

impl<'a> GraphBuilder<'a> {
    /// A builder over the tensors of a checkpoint.
    pub fn new(tensors: &'a dyn TensorIndex) -> Self {
        GraphBuilder {
            tensors,
            graph: Graph::default(),
            producer: Vec::new(),
            weights: HashMap::new(),
            tokens: None,
            positions: None,
            batch: None,
            groups: Vec::new(),
        }
    }

    /// Whether the checkpoint has a tensor of exactly this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.find(name).is_some()
    }

    /// Type of a value made by this builder.
    pub fn value_type(&self, value: ValueId) -> ValueType {
        self.graph.values[value.0 as usize]
    }

    fn label_of(&self, value: ValueId) -> &str {
        &self.graph.nodes[self.producer[value.0 as usize]].label
    }

    /// Appends a node with one output.
    fn push(&mut self, op: Op, inputs: &[ValueId], label: &str) -> Result<ValueId> {
        let [value] = self.push_all(op, inputs, label)?;
        Ok(value)
    }

    /// Appends a node with N outputs, which is what its op has.
    fn push_all<const N: usize>(&mut self, op: Op, inputs: &[ValueId], label: &str) -> Result<[ValueId; N]> {
        let types: Vec<ValueType> = inputs.iter().map(|v| self.value_type(*v)).collect();
        let outs = output_types(&op, &types, &self.graph.weights, &self.graph.caches)
            .map_err(|e| verify::located(e, label))?;
        assert_eq!(outs.len(), N, "an op has as many outputs as the builder takes");
        let values = std::array::from_fn(|i| ValueId((self.graph.values.len() + i) as u32));
        for out in outs {
            self.graph.values.push(out);
            self.producer.push(self.graph.nodes.len());
        }
        self.graph.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: values.to_vec(),
            label: label.to_string(),
        });
        Ok(values)
    }

    /// Tensor `name`, whole. Interned: asking twice gives the same value. `name` is the full checkpoint name.
    ///
    /// # Errors
    /// If the checkpoint lacks it.
    pub fn weight(&mut self, name: &str) -> Result<ValueId> {
        let (_, rows, _) = self.find(name)?;
        self.weight_part(name, 0..rows)
    }

    fn find(&self, name: &str) -> Result<(DType, usize, usize)> {
        let found = self.tensors.find(name).ok_or_else(|| Error::MissingTensor {
            name: name.to_string(),
        })?;
        let (dtype, rows, cols) = found;
        let fits = rows > 0 && cols > 0 && rows.checked_mul(cols).is_some_and(|n| n <= MAX_ELEMENTS);
        if !fits || dtype == DType::I32 {
            return Err(shape_error(name, found, "a weight of at least one element"));
        }
        if dtype.row_bytes(cols).is_none() {
            return Err(shape_error(
                name,
                found,
                format_args!("rows of whole {dtype} blocks"),
            ));
        }
        let experts = self.tensors.experts(name);
        if !(1..=MAX_EXPERTS).contains(&experts) || !rows.is_multiple_of(experts) {
            let expected = format!("1 to {MAX_EXPERTS} stacked matrices, found {experts}");
            return Err(shape_error(name, found, expected));
        }
        Ok(found)
    }

    fn weight_part(&mut self, name: &str, rows: Range<usize>) -> Result<ValueId> {
        let (dtype, have, cols) = self.find(name)?;
        let experts = self.tensors.experts(name);
        if rows.start >= rows.end || rows.end > have || (experts > 1 && rows.len() < have) {
            return Err(shape_error(
                name,
                (dtype, have, cols),
                format_args!("rows {} to {}", rows.start, rows.end),
            ));
        }
        let key = (name.to_string(), rows.start, rows.len());
        if let Some(value) = self.weights.get(&key) {
            return Ok(*value);
        }
        let id = WeightId(self.graph.weights.len() as u32);
        self.graph.weights.push(WeightDecl {
            name: name.to_string(),
            dtype,
            first_row: rows.start,
            rows: rows.len(),
            cols,
            experts,
        });
        let value = self.push(Op::Weight(id), &[], name)?;
        self.weights.insert(key, value);
        Ok(value)
    }

    /// A vector of `len` elements.
    fn vector(&mut self, name: &str, len: usize) -> Result<ValueId> {
        let found = self.find(name)?;
        if (found.1, found.2) != (1, len) {
            return Err(shape_error(name, found, format_args!("[{len}]")));
        }
        self.weight(name)
    }

    /// Token embeddings: the rows of `name.weight` that the step's tokens name, `[T, hidden_size]`.
    ///
    /// # Errors
    /// If the tensor is missing or is not `[vocab_size, hidden_size]`.
    pub fn embed(&mut self, name: &str, vocab_size: usize, hidden_size: usize) -> Result<ValueId> {
        let (base, full) = names(name);
        let found = self.find(&full)?;
        if (found.1, found.2) != (vocab_size, hidden_size) {
            return Err(shape_error(
                &full,
                found,
                format_args!("[{vocab_size}, {hidden_size}]"),
            ));
        }
        let w = self.weight(&full)?;
        let tokens = match self.tokens {
            Some(t) => t,
            None => self.push(Op::Tokens, &[], "tokens")?,
        };
        self.tokens = Some(tokens);
        self.push(Op::Embed, &[w, tokens], base)
    }

    /// `x [n, K]` times `name.weight [M, K]` transposed, plus `name.bias [M]` if the checkpoint has it: `[n, M]`.
    ///
    /// # Errors
    /// If the weight is missing, or it or the bias has a wrong shape.
    pub fn linear(&mut self, x: ValueId, name: &str) -> Result<ValueId> {
        let (_, full) = names(name);
        let (_, rows, _) = self.find(&full)?;
        self.linear_to(x, name, rows)
    }

    /// [`GraphBuilder::linear`] whose weight must have exactly `rows` rows.
    ///
    /// # Errors
    /// As [`GraphBuilder::linear`], and if the number of rows differs.
    pub fn linear_to(&mut self, x: ValueId, name: &str, rows: usize) -> Result<ValueId> {
        let (base, full) = names(name);
        let k = self.cols(x);
        let found = self.find(&full)?;
        if (found.1, found.2) != (rows, k) {
            return Err(shape_error(&full, found, format_args!("[{rows}, {k}]")));
        }
        let w = self.weight(&full)?;
        let bias = format!("{base}.bias");
        if self.has(&bias) {
            let b = self.vector(&bias, rows)?;
            return self.push(Op::Linear, &[x, w, b], base);
        }
        self.push(Op::Linear, &[x, w], base)
    }

    /// [`GraphBuilder::linear`] with rows `rows` of `name.weight` only: one part of a merged q/k/v or gate/up weight.
    /// `part` ends the label, as in `blk.3.attn_qkv.q`.
    ///
    /// # Errors
    /// If the weight is missing or has a wrong shape, or if the checkpoint has a bias, of which no part can be taken.
    pub fn linear_rows(&mut self, x: ValueId, name: &str, rows: Range<usize>, part: &str) -> Result<ValueId> {
        let (base, full) = names(name);
        let k = self.cols(x);
        let found = self.find(&full)?;
        if found.2 != k {
            return Err(shape_error(&full, found, format_args!("[.., {k}]")));
        }
        let bias = format!("{base}.bias");
        if let Some(found) = self.tensors.find(&bias) {
            return Err(shape_error(&bias, found, "no bias on a merged weight"));
        }
        let w = self.weight_part(&full, rows)?;
        self.push(Op::Linear, &[x, w], &format!("{base}.{part}"))
    }

    /// RMS norm over the last dimension with `name.weight`.
    ///
    /// # Errors
    /// If the weight is missing or is no vector of the last dimension's length; if there is a `name.bias`, which an
    /// RMS norm has no place for.
    pub fn rms_norm(&mut self, x: ValueId, name: &str, eps: f32) -> Result<ValueId> {
        let (base, full) = names(name);
        let bias = format!("{base}.bias");
        if let Some(found) = self.tensors.find(&bias) {
            return Err(shape_error(&bias, found, "no bias on an RMS norm"));
        }
        let w = self.vector(&full, self.cols(x))?;
        self.push(Op::RmsNorm { eps }, &[x, w], base)
    }

    /// Rotary embedding of `x [T, heads, D]`; uses `rope_freqs.weight` if the checkpoint has it.
    ///
    /// # Errors
    /// If `x` or the factors do not fit `spec`.
    pub fn rope(&mut self, x: ValueId, spec: RopeSpec) -> Result<ValueId> {
        let label = format!("{}.rope", self.label_of(x));
        let positions = match self.positions {
            Some(p) => p,
            None => self.push(Op::Positions, &[], "positions")?,
        };
        self.positions = Some(positions);
        if self.has(ROPE_FREQS) {
            let factors = self.vector(ROPE_FREQS, spec.dims / 2)?;
            return self.push(Op::Rope(spec), &[x, positions, factors], &label);
        }
        self.push(Op::Rope(spec), &[x, positions], &label)
    }

    /// Writes `k` and `v [T, G, D]` of layer `layer` to its cache, which this makes, and attends with `q [T, N, D]`:
    /// `[T, N, D]`.
    ///
    /// # Errors
    /// If a shape does not fit `spec`.
    pub fn attention(
        &mut self,
        layer: usize,
        q: ValueId,
        k: ValueId,
        v: ValueId,
        spec: AttnSpec,
    ) -> Result<ValueId> {
        let group = match self.groups.iter().position(|w| *w == spec.sliding_window) {
            Some(g) => g,
            None => {
                self.groups.push(spec.sliding_window);
                self.groups.len() - 1
            }
        };
        let id = CacheId(self.graph.caches.len() as u32);
        self.graph.caches.push(CacheDecl::Kv {
            num_kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
            window: spec.sliding_window,
            group,
        });
        let batch = self.batch()?;
        let cache = self.push(Op::Cache(id), &[], &format!("blk.{layer}.cache"))?;
        let next = self.push(
            Op::KvWrite,
            &[cache, k, v, batch],
            &format!("blk.{layer}.kv_write"),
        )?;
        self.push(
            Op::Attention(spec),
            &[q, next, batch],
            &format!("blk.{layer}.attention"),
        )
    }

    fn batch(&mut self) -> Result<ValueId> {
        let batch = match self.batch {
            Some(b) => b,
            None => self.push(Op::Batch, &[], "batch")?,
        };
        self.batch = Some(batch);
        Ok(batch)
    }

    /// The rows of `x [T, H]` whose logits are wanted: `[R, H]`.
    ///
    /// # Errors
    /// If `x` is not `[T, H]`.
    pub fn take_outputs(&mut self, x: ValueId) -> Result<ValueId> {
        let label = format!("{}.outputs", self.label_of(x));
        let batch = self.batch()?;
        self.push(Op::TakeOutputs, &[x, batch], &label)
    }

    /// `x` under another shape with the same leading dimension; `dims` are the dimensions after it.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn view(&mut self, x: ValueId, dims: &[usize]) -> Result<ValueId> {
        let label = self.label_of(x).to_string();
        let ValueType::Tensor(t) = self.value_type(x) else {
            return self.push(Op::View(Shape::new(&[Dim::Fixed(1)])), &[x], &label);
        };
        let all: Vec<Dim> = std::iter::once(t.shape.rows())
            .chain(dims.iter().map(|d| Dim::Fixed(*d)))
            .collect();
        self.push(Op::View(Shape::new(&all)), &[x], &label)
    }

    /// a + b.
    ///
    /// # Errors
    /// If their types differ.
    pub fn add(&mut self, a: ValueId, b: ValueId, label: &str) -> Result<ValueId> {
        self.push(Op::Add, &[a, b], label)
    }

    /// a·b, element-wise.
    ///
    /// # Errors
    /// If their types differ.
    pub fn mul(&mut self, a: ValueId, b: ValueId, label: &str) -> Result<ValueId> {
        self.push(Op::Mul, &[a, b], label)
    }

    /// factor·x; `x` itself where the factor is 1.
    ///
    /// # Errors
    /// If `x` is no activation or the factor is not finite.
    pub fn scale(&mut self, x: ValueId, factor: f32) -> Result<ValueId> {
        if factor == 1.0 {
            return Ok(x);
        }
        let label = format!("{}.scale", self.label_of(x));
        self.push(Op::Scale(factor), &[x], &label)
    }

    /// cap·tanh(x/cap).
    ///
    /// # Errors
    /// If `x` is no activation or the cap is not positive.
    pub fn softcap(&mut self, x: ValueId, cap: f32) -> Result<ValueId> {
        let label = format!("{}.softcap", self.label_of(x));
        self.push(Op::Softcap(cap), &[x], &label)
    }

    /// act(x).
    ///
    /// # Errors
    /// If `x` is no activation.
    pub fn act(&mut self, x: ValueId, act: Activation, label: &str) -> Result<ValueId> {
        self.push(Op::Act(act), &[x], label)
    }

    /// act(gate)·up.
    ///
    /// # Errors
    /// If their types differ.
    pub fn glu(&mut self, gate: ValueId, up: ValueId, act: Activation, label: &str) -> Result<ValueId> {
        self.push(Op::Glu(act), &[gate, up], label)
    }

    /// A layer's mixture of experts: `prefix.ffn_gate_inp` gives each row of `x [n, H]` the experts it uses, and the
    /// stacked weights `prefix.ffn_gate_exps`, `ffn_up_exps` and `ffn_down_exps` their gated feed-forward networks of
    /// inner size `intermediate_size`: `[n, H]`.
    ///
    /// # Errors
    /// If a weight is missing or has a wrong shape.
    pub fn moe(
        &mut self,
        x: ValueId,
        prefix: &str,
        spec: RouterSpec,
        act: Activation,
        intermediate_size: usize,
    ) -> Result<ValueId> {
        let hidden = self.cols(x);
        let logits = self.linear_to(x, &format!("{prefix}.ffn_gate_inp"), spec.experts)?;
        let [ids, weights] = self.push_all(Op::Route(spec), &[logits], &format!("{prefix}.ffn_route"))?;
        let mut stacked = |part: &str, rows: usize, cols: usize| {
            self.stacked(&format!("{prefix}.{part}.weight"), spec.experts, rows, cols)
        };
        let gate = stacked("ffn_gate_exps", intermediate_size, hidden)?;
        let up = stacked("ffn_up_exps", intermediate_size, hidden)?;
        let down = stacked("ffn_down_exps", hidden, intermediate_size)?;
        let h = self.push(
            Op::ExpertGlu(act),
            &[x, ids, gate, up],
            &format!("{prefix}.ffn_glu_exps"),
        )?;
        self.push(
            Op::ExpertDown,
            &[h, ids, weights, down],
            &format!("{prefix}.ffn_down_exps"),
        )
    }

    /// Stacked matrices of exactly this shape.
    fn stacked(&mut self, name: &str, experts: usize, rows: usize, cols: usize) -> Result<ValueId> {
        let (dtype, have, have_cols) = self.find(name)?;
        let found = WeightDecl {
            name: String::new(),
            dtype,
            first_row: 0,
            rows: have,
            cols: have_cols,
            experts: self.tensors.experts(name),
        };
        let expected = if experts == 1 {
            vec![rows, cols]
        } else {
            vec![experts, rows, cols]
        };
        if found.dims() != expected {
            return Err(Error::TensorShape {
                name: name.to_string(),
                found: weight_type(&found).to_string(),
                expected: format!("{expected:?}"),
            });
        }
        self.weight(name)
    }

    /// The graph whose result is `logits [R, V]`.
    ///
    /// # Errors
    /// If the graph breaks a rule of [`verify`].
    pub fn finish(mut self, logits: ValueId) -> Result<Graph> {
        self.graph.logits = Some(logits);
        verify::graph(&self.graph)?;
        Ok(self.graph)
    }

    /// Length of a value's last dimension; 0 for what is no tensor, which then fits nothing.
    fn cols(&self, value: ValueId) -> usize {
        match self.value_type(value) {
            ValueType::Tensor(t) => t.shape.cols(),
            ValueType::Batch | ValueType::Cache(_) => 0,
        }
    }
}

/// `(label, full tensor name)` of a layer's weight.
fn names(name: &str) -> (&str, String) {
    let base = name.strip_suffix(".weight").unwrap_or(name);
    (base, format!("{base}.weight"))
}

fn shape_error(name: &str, found: (DType, usize, usize), expected: impl std::fmt::Display) -> Error {
    let (dtype, rows, cols) = found;
    let decl = WeightDecl {
        name: String::new(),
        dtype,
        first_row: 0,
        rows,
        cols,
        experts: 1,
    };
    Error::TensorShape {
        name: name.to_string(),
        found: weight_type(&decl).to_string(),
        expected: expected.to_string(),
    }
}
