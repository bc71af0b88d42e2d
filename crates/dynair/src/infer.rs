//! Shape rules: which inputs each op takes and which types come out.
//!
//! One function, used by the builder (so that a graph is well typed from the start), by the verifier (so that a parsed
//! or rewritten graph is too) and by tools that need the type of an operand.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{CacheDecl, CacheId, WeightDecl};
use crate::op::{AttnSpec, FusedOp, Op, RopeScaling, RopeSpec, RouterSpec};
use crate::ty::{Dim, Shape, TensorType, ValueType};

/// Most elements a fixed part of a shape may have: keeps every byte count far from overflow, whatever a text or a
/// checkpoint claims.
pub const MAX_ELEMENTS: usize = 1 << 40;

/// Most experts of a layer: far above any model, and small enough for lists by expert.
pub const MAX_EXPERTS: usize = 1 << 14;

/// The type of a weight, with the dimensions of [`WeightDecl::dims`].
pub fn weight_type(decl: &WeightDecl) -> TensorType {
    let dims: Vec<Dim> = decl.dims().into_iter().map(Dim::Fixed).collect();
    TensorType {
        dtype: decl.dtype,
        shape: Shape::new(&dims),
    }
}

/// Types of the outputs of `op` on inputs of the given types.
///
/// # Errors
/// [`Error::BadInput`] if the op is not defined for them.
pub fn output_types(
    op: &Op,
    inputs: &[ValueType],
    weights: &[WeightDecl],
    caches: &[CacheDecl],
) -> Result<Vec<ValueType>> {
    let rule = Rule { op, inputs, caches };
    let tensor = |t: TensorType| Ok(vec![ValueType::Tensor(t)]);
    match op {
        Op::Weight(id) => {
            rule.arity(0..=0)?;
            let decl = weights
                .get(id.0 as usize)
                .ok_or_else(|| rule.bad("weight", id.0, format_args!("below {}", weights.len())))?;
            tensor(weight_type(decl))
        }
        Op::Tokens | Op::Positions => {
            rule.arity(0..=0)?;
            tensor(TensorType {
                dtype: DType::I32,
                shape: Shape::new(&[Dim::Tokens]),
            })
        }
        Op::Batch => {
            rule.arity(0..=0)?;
            Ok(vec![ValueType::Batch])
        }
        Op::Cache(id) => {
            rule.arity(0..=0)?;
            rule.kv_decl(*id)?;
            Ok(vec![ValueType::Cache(*id)])
        }
        Op::Embed => rule.embed(),
        Op::Linear => rule.linear(),
        Op::Add | Op::Mul | Op::Glu(_) => {
            rule.arity(2..=2)?;
            tensor(rule.same(0, 1)?)
        }
        Op::Scale(s) | Op::Softcap(s) => {
            rule.arity(1..=1)?;
            if !s.is_finite() || (matches!(op, Op::Softcap(_)) && *s <= 0.0) {
                return Err(rule.bad("parameter", s, "a finite number (positive for softcap)"));
            }
            tensor(rule.activation(0)?)
        }
        Op::Act(_) => {
            rule.arity(1..=1)?;
            tensor(rule.activation(0)?)
        }
        Op::RmsNorm { eps } => {
            rule.arity(2..=2)?;
            rule.eps(*eps)?;
            let x = rule.activation(0)?;
            rule.vector(1, x.shape.cols())?;
            tensor(x)
        }
        Op::Rope(spec) => {
            rule.arity(2..=3)?;
            let x = rule.heads(0, None)?;
            rule.rope(spec, x.shape.cols(), 1, 2)?;
            tensor(x)
        }
        Op::View(shape) => rule.view(*shape),
        Op::TakeOutputs => {
            rule.arity(2..=2)?;
            let x = rule.rows_of(0)?;
            if x.rows() != Dim::Tokens {
                return Err(rule.bad("input 0", x, "[T, H]"));
            }
            rule.batch(1)?;
            tensor(TensorType::f32(&[Dim::Outputs, Dim::Fixed(x.cols())]))
        }
        Op::KvWrite => {
            rule.arity(4..=4)?;
            Ok(vec![ValueType::Cache(rule.kv_write()?.0)])
        }
        Op::Attention(spec) => rule.attention(spec),
        Op::Route(spec) => rule.route(spec),
        Op::ExpertGlu(_) => rule.expert_glu(),
        Op::ExpertDown => rule.expert_down(),
        Op::Fused(fused) => rule.fused(fused),
    }
}

struct Rule<'a> {
    op: &'a Op,
    inputs: &'a [ValueType],
    caches: &'a [CacheDecl],
}

impl Rule<'_> {
    fn bad(
        &self,
        what: impl std::fmt::Display,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Error {
        Error::BadInput {
            op: self.op.name().to_string(),
            what: what.to_string(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    fn arity(&self, range: std::ops::RangeInclusive<usize>) -> Result<()> {
        if range.contains(&self.inputs.len()) {
            return Ok(());
        }
        let expected = if range.start() == range.end() {
            range.start().to_string()
        } else {
            format!("{} to {}", range.start(), range.end())
        };
        Err(self.bad("number of inputs", self.inputs.len(), expected))
    }

    fn tensor(&self, i: usize) -> Result<TensorType> {
        match self.inputs[i] {
            ValueType::Tensor(t) => Ok(t),
            ref other => Err(self.bad(format_args!("input {i}"), other, "a tensor")),
        }
    }

    /// Input `i` as an activation: an f32 tensor.
    fn activation(&self, i: usize) -> Result<TensorType> {
        let t = self.tensor(i)?;
        if t.dtype != DType::F32 {
            return Err(self.bad(format_args!("input {i}"), t, "an F32 tensor"));
        }
        Ok(t)
    }

    /// Input `i` as an f32 matrix `[n, K]`.
    fn rows_of(&self, i: usize) -> Result<Shape> {
        let t = self.activation(i)?;
        if t.shape.rank() != 2 {
            return Err(self.bad(format_args!("input {i}"), t, "F32[n, K]"));
        }
        Ok(t.shape)
    }

    /// Input `i` as `[T, heads, D]`.
    fn heads(&self, i: usize, expected: Option<(usize, usize)>) -> Result<TensorType> {
        let t = self.activation(i)?;
        let want = match expected {
            Some((heads, dim)) => format!("F32[T, {heads}, {dim}]"),
            None => "F32[T, heads, D]".to_string(),
        };
        let fits = match t.shape.dims() {
            [Dim::Tokens, Dim::Fixed(h), Dim::Fixed(d)] => expected.is_none_or(|e| e == (*h, *d)),
            _ => false,
        };
        if fits {
            Ok(t)
        } else {
            Err(self.bad(format_args!("input {i}"), t, want))
        }
    }

    /// Input `i` as a weight vector of `len` elements.
    fn vector(&self, i: usize, len: usize) -> Result<()> {
        let t = self.tensor(i)?;
        if t.dtype == DType::I32 || t.shape.dims() != [Dim::Fixed(len)] {
            return Err(self.bad(format_args!("input {i}"), t, format_args!("a vector [{len}]")));
        }
        Ok(())
    }

    /// Input `i` as the weight of a linear op on `x`; gives its rows M.
    fn linear_weight(&self, i: usize, x: Shape) -> Result<usize> {
        let t = self.tensor(i)?;
        let k = x.cols();
        let rows = match t.shape.dims() {
            [Dim::Fixed(m), Dim::Fixed(c)] if *c == k => Some(*m),
            [Dim::Fixed(c)] if *c == k => Some(1),
            _ => None,
        };
        rows.filter(|_| t.dtype != DType::I32)
            .ok_or_else(|| self.bad(format_args!("input {i}"), t, format_args!("a weight [M, {k}]")))
    }

    fn same(&self, a: usize, b: usize) -> Result<TensorType> {
        let (ta, tb) = (self.activation(a)?, self.activation(b)?);
        if ta != tb {
            return Err(self.bad(format_args!("input {b}"), tb, ta));
        }
        Ok(ta)
    }

    fn eps(&self, eps: f32) -> Result<()> {
        if eps.is_finite() && eps >= 0.0 {
            return Ok(());
        }
        Err(self.bad("eps", eps, "a finite number of at least 0"))
    }

    fn batch(&self, i: usize) -> Result<()> {
        match self.inputs[i] {
            ValueType::Batch => Ok(()),
            ref other => Err(self.bad(format_args!("input {i}"), other, "batch")),
        }
    }

    fn linear(&self) -> Result<Vec<ValueType>> {
        self.arity(2..=3)?;
        let x = self.rows_of(0)?;
        let m = self.linear_weight(1, x)?;
        if self.inputs.len() == 3 {
            self.vector(2, m)?;
        }
        let out = TensorType::f32(&[x.rows(), Dim::Fixed(m)]);
        Ok(vec![ValueType::Tensor(out)])
    }

    fn embed(&self) -> Result<Vec<ValueType>> {
        self.arity(2..=2)?;
        let w = self.tensor(0)?;
        let [Dim::Fixed(_), Dim::Fixed(h)] = *w.shape.dims() else {
            return Err(self.bad("input 0", w, "a weight [V, H]"));
        };
        if w.dtype == DType::I32 {
            return Err(self.bad("input 0", w, "a weight [V, H]"));
        }
        let ids = self.tensor(1)?;
        if ids.dtype != DType::I32 || ids.shape.rank() != 1 {
            return Err(self.bad("input 1", ids, "I32[T]"));
        }
        Ok(vec![ValueType::Tensor(TensorType::f32(&[
            ids.shape.rows(),
            Dim::Fixed(h),
        ]))])
    }

    fn view(&self, shape: Shape) -> Result<Vec<ValueType>> {
        self.arity(1..=1)?;
        let x = self.activation(0)?;
        if x.shape.rows() != shape.rows() || x.shape.row_elements() != shape.row_elements() {
            return Err(self.bad("input 0", x, format_args!("the elements of {shape}, row by row")));
        }
        Ok(vec![ValueType::Tensor(TensorType {
            dtype: DType::F32,
            shape,
        })])
    }

    fn rope(&self, spec: &RopeSpec, head_dim: usize, positions: usize, factors: usize) -> Result<()> {
        let p = self.tensor(positions)?;
        if p.dtype != DType::I32 || p.shape.dims() != [Dim::Tokens] {
            return Err(self.bad(format_args!("input {positions}"), p, "I32[T]"));
        }
        if spec.dims == 0 || !spec.dims.is_multiple_of(2) || spec.dims > head_dim {
            return Err(self.bad(
                "dims",
                spec.dims,
                format_args!("an even number of 2 to {head_dim}"),
            ));
        }
        if !(spec.theta.is_finite() && spec.theta > 0.0) {
            return Err(self.bad("theta", spec.theta, "a positive number"));
        }
        let factor = match spec.scaling {
            RopeScaling::None => 1.0,
            RopeScaling::Linear { factor } | RopeScaling::Yarn { factor, .. } => factor,
        };
        if !(factor.is_finite() && factor > 0.0) {
            return Err(self.bad("scaling factor", factor, "a positive number"));
        }
        if self.inputs.len() > factors {
            self.vector(factors, spec.dims / 2)?;
        }
        Ok(())
    }

    /// Key and value heads and head size of a cache.
    fn kv_decl(&self, id: CacheId) -> Result<(usize, usize)> {
        match self.caches.get(id.0 as usize) {
            Some(CacheDecl::Kv {
                num_kv_heads,
                head_dim,
                ..
            }) => Ok((*num_kv_heads, *head_dim)),
            Some(CacheDecl::State { .. }) => Err(self.bad("cache", "recurrent state", "keys and values")),
            None => Err(self.bad("cache", id.0, format_args!("below {}", self.caches.len()))),
        }
    }

    fn cache(&self, i: usize) -> Result<CacheId> {
        match self.inputs[i] {
            ValueType::Cache(id) => Ok(id),
            ref other => Err(self.bad(format_args!("input {i}"), other, "a cache")),
        }
    }

    /// The first four inputs as cache, k, v, batch; gives the cache and its head size.
    fn kv_write(&self) -> Result<(CacheId, usize)> {
        let id = self.cache(0)?;
        let (heads, dim) = self.kv_decl(id)?;
        self.heads(1, Some((heads, dim)))?;
        self.heads(2, Some((heads, dim)))?;
        self.batch(3)?;
        Ok((id, dim))
    }

    fn attention(&self, spec: &AttnSpec) -> Result<Vec<ValueType>> {
        self.arity(3..=3)?;
        let AttnSpec {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = *spec;
        if num_kv_heads == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            return Err(self.bad(
                "num_heads",
                num_heads,
                format_args!("a multiple of {num_kv_heads} kv heads"),
            ));
        }
        if spec.sliding_window == Some(0) {
            return Err(self.bad("sliding_window", 0, "at least 1"));
        }
        if !spec.scale.is_finite() || spec.softcap.is_some_and(|c| !(c.is_finite() && c > 0.0)) {
            return Err(self.bad("scale or softcap", spec.scale, "finite numbers, softcap positive"));
        }
        let q = self.heads(0, Some((num_heads, head_dim)))?;
        let id = self.cache(1)?;
        let decl = self.kv_decl(id)?;
        if decl != (num_kv_heads, head_dim) {
            return Err(self.bad(
                "cache",
                format_args!("{} kv heads of {}", decl.0, decl.1),
                format_args!("{num_kv_heads} kv heads of {head_dim}"),
            ));
        }
        self.batch(2)?;
        Ok(vec![ValueType::Tensor(q)])
    }

    fn route(&self, spec: &RouterSpec) -> Result<Vec<ValueType>> {
        self.arity(1..=1)?;
        let logits = self.rows_of(0)?;
        if !(1..=MAX_EXPERTS).contains(&spec.experts) || logits.cols() != spec.experts {
            return Err(self.bad(
                "experts",
                spec.experts,
                format_args!("1 to {MAX_EXPERTS} and the {} columns of input 0", logits.cols()),
            ));
        }
        if !(1..=spec.experts).contains(&spec.experts_used) {
            return Err(self.bad(
                "experts_used",
                spec.experts_used,
                format_args!("1 to {} experts", spec.experts),
            ));
        }
        let dims = [logits.rows(), Dim::Fixed(spec.experts_used)];
        let ids = TensorType {
            dtype: DType::I32,
            shape: Shape::new(&dims),
        };
        Ok(vec![
            ValueType::Tensor(ids),
            ValueType::Tensor(TensorType::f32(&dims)),
        ])
    }

    /// Input `i` as the experts that `rows` rows use; gives how many each row uses.
    fn expert_ids(&self, i: usize, rows: Dim) -> Result<usize> {
        let t = self.tensor(i)?;
        match t.shape.dims() {
            [n, Dim::Fixed(used)] if t.dtype == DType::I32 && *n == rows => Ok(*used),
            _ => Err(self.bad(format_args!("input {i}"), t, format_args!("I32[{rows}, U]"))),
        }
    }

    /// Input `i` as stacked matrices of `cols` columns; gives their number and the rows of one.
    fn expert_weight(&self, i: usize, cols: usize) -> Result<(usize, usize)> {
        let t = self.tensor(i)?;
        let found = match t.shape.dims() {
            [Dim::Fixed(e), Dim::Fixed(m), Dim::Fixed(c)] if *c == cols => Some((*e, *m)),
            [Dim::Fixed(m), Dim::Fixed(c)] if *c == cols => Some((1, *m)),
            _ => None,
        };
        found.filter(|_| t.dtype != DType::I32).ok_or_else(|| {
            self.bad(
                format_args!("input {i}"),
                t,
                format_args!("a weight [E, M, {cols}]"),
            )
        })
    }

    fn expert_glu(&self) -> Result<Vec<ValueType>> {
        self.arity(4..=4)?;
        let x = self.rows_of(0)?;
        let used = self.expert_ids(1, x.rows())?;
        let (experts, f) = self.expert_weight(2, x.cols())?;
        if self.expert_weight(3, x.cols())? != (experts, f) {
            return Err(self.bad("input 3", self.tensor(3)?, self.tensor(2)?.shape));
        }
        let dims = [x.rows(), Dim::Fixed(used), Dim::Fixed(f)];
        Ok(vec![ValueType::Tensor(TensorType::f32(&dims))])
    }

    fn expert_down(&self) -> Result<Vec<ValueType>> {
        self.arity(4..=4)?;
        let h = self.activation(0)?;
        let [rows, Dim::Fixed(used), Dim::Fixed(f)] = *h.shape.dims() else {
            return Err(self.bad("input 0", h, "F32[n, U, F]"));
        };
        if self.expert_ids(1, rows)? != used {
            return Err(self.bad("input 1", self.tensor(1)?, format_args!("I32[{rows}, {used}]")));
        }
        let weights = TensorType::f32(&[rows, Dim::Fixed(used)]);
        if self.activation(2)? != weights {
            return Err(self.bad("input 2", self.tensor(2)?, weights));
        }
        let (_, hidden) = self.expert_weight(3, f)?;
        Ok(vec![ValueType::Tensor(TensorType::f32(&[
            rows,
            Dim::Fixed(hidden),
        ]))])
    }

    fn fused(&self, fused: &FusedOp) -> Result<Vec<ValueType>> {
        match fused {
            FusedOp::LinearGroup { bias } => {
                let n = 1 + bias.len() + bias.iter().filter(|b| **b).count();
                if bias.is_empty() {
                    return Err(self.bad("members", 0, "at least 1"));
                }
                self.arity(n..=n)?;
                let x = self.rows_of(0)?;
                let mut at = 1;
                let mut out = Vec::with_capacity(bias.len());
                for has_bias in bias {
                    let m = self.linear_weight(at, x)?;
                    at += 1;
                    if *has_bias {
                        self.vector(at, m)?;
                        at += 1;
                    }
                    out.push(ValueType::Tensor(TensorType::f32(&[x.rows(), Dim::Fixed(m)])));
                }
                Ok(out)
            }
            FusedOp::LinearGlu(_) => {
                self.arity(3..=3)?;
                let x = self.rows_of(0)?;
                let (gate, up) = (self.linear_weight(1, x)?, self.linear_weight(2, x)?);
                if gate != up {
                    return Err(self.bad("rows of up", up, gate));
                }
                Ok(vec![ValueType::Tensor(TensorType::f32(&[
                    x.rows(),
                    Dim::Fixed(gate),
                ]))])
            }
            FusedOp::AddRmsNorm { eps } => {
                self.arity(3..=3)?;
                self.eps(*eps)?;
                let x = self.same(0, 1)?;
                self.vector(2, x.shape.cols())?;
                Ok(vec![ValueType::Tensor(x); 2])
            }
            FusedOp::RopeKvWrite(spec) => {
                self.arity(5..=6)?;
                let (id, dim) = self.kv_write()?;
                self.rope(spec, dim, 4, 5)?;
                Ok(vec![ValueType::Cache(id)])
            }
        }
    }
}
