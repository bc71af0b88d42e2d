//! Every invariant of a [`Graph`], a [`Plan`] and a [`BatchMeta`], each with a name that the error carries.
//!
//! A graph: `weight-decl`, `cache-decl`, `cache-group`, `value-range`, `single-assignment`, `defined`, `order`,
//! `output-count`, `output-type`, `expert-ids`, `cache-source`, `cache-version`, `attention-reads-written`, `logits`. That only
//! dimension 0 is symbolic is a rule of [`Shape`](crate::Shape) itself.
//!
//! A plan: `limits`, `no-source-step`, `operand-type`, `arena-bounds`, `arena-alignment`, `arena-overlap`,
//! `arena-defined`, `expert-ids`, `cache-version`, `attention-reads-written`, `logits`.
//!
//! A batch: `batch-*`; see [`batch`].

#[cfg(test)]
mod tests;

use crate::batch::BatchMeta;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{CacheDecl, CacheId, Graph, Node, ValueId, WeightDecl};
use crate::infer::{MAX_ELEMENTS, MAX_EXPERTS, output_types, weight_type};
use crate::op::{FusedOp, Op};
use crate::plan::{Limits, Operand, Plan, Step};
use crate::ty::{Dim, Shape, TensorType, ValueType};

fn broken(
    what: &'static str,
    rule: &'static str,
    at: impl std::fmt::Display,
    detail: impl std::fmt::Display,
) -> Error {
    Error::Invalid {
        what,
        rule,
        at: at.to_string(),
        detail: detail.to_string(),
    }
}

/// A shape rule's error with the label of the node that breaks it.
pub(crate) fn located(error: Error, label: &str) -> Error {
    match error {
        Error::BadInput {
            op,
            what,
            found,
            expected,
        } => Error::BadInput {
            op: format!("{op} `{label}`"),
            what,
            found,
            expected,
        },
        other => other,
    }
}

/// Checks a graph.
///
/// # Errors
/// [`Error::Invalid`] with the first rule broken; [`Error::BadInput`] where a node's inputs break its op's shape rule.
pub fn graph(graph: &Graph) -> Result<()> {
    declarations("graph", &graph.weights, &graph.caches)?;
    let mut check = GraphCheck {
        graph,
        defined: vec![None; graph.values.len()],
        cache_sources: Vec::new(),
    };
    for (i, node) in graph.nodes.iter().enumerate() {
        check.node(i, node)?;
    }
    if let Some(v) = check.defined.iter().position(|d| d.is_none()) {
        return Err(broken(
            "graph",
            "defined",
            format_args!("%{v}"),
            "no node makes this value",
        ));
    }
    versions(graph)?;
    logits(graph)
}

fn declarations(what: &'static str, weights: &[WeightDecl], caches: &[CacheDecl]) -> Result<()> {
    for (i, w) in weights.iter().enumerate() {
        let at = format!("w{i} `{}`", w.name);
        let size = w
            .rows
            .checked_mul(w.cols)
            .filter(|n| (1..=MAX_ELEMENTS).contains(n));
        if size.is_none() || w.first_row > MAX_ELEMENTS {
            return Err(broken(
                what,
                "weight-decl",
                at,
                format_args!("{} x {} elements", w.rows, w.cols),
            ));
        }
        if w.dtype == DType::I32 || w.dtype.row_bytes(w.cols).is_none() {
            let detail = format!(
                "{} columns are no whole number of {} weight blocks",
                w.cols, w.dtype
            );
            return Err(broken(what, "weight-decl", at, detail));
        }
        if !(1..=MAX_EXPERTS).contains(&w.experts)
            || !w.rows.is_multiple_of(w.experts)
            || (w.experts > 1 && w.first_row > 0)
        {
            let detail = format!(
                "{} stacked matrices in {} rows from {}",
                w.experts, w.rows, w.first_row
            );
            return Err(broken(what, "weight-decl", at, detail));
        }
        if w.name.is_empty() {
            return Err(broken(what, "weight-decl", at, "a weight has a name"));
        }
    }
    let mut groups: Vec<Option<u32>> = Vec::new();
    for (i, c) in caches.iter().enumerate() {
        let at = format!("c{i}");
        let CacheDecl::Kv {
            num_kv_heads,
            head_dim,
            window,
            group,
        } = *c
        else {
            continue;
        };
        let size = num_kv_heads
            .checked_mul(head_dim)
            .filter(|n| (1..=1 << 24).contains(n));
        if size.is_none() || window == Some(0) {
            return Err(broken(
                what,
                "cache-decl",
                at,
                "heads, head size and window are positive and bounded",
            ));
        }
        if group > groups.len() || (group < groups.len() && groups[group] != window) {
            let detail = format!("group {group} of window {window:?}; groups so far: {groups:?}");
            return Err(broken(what, "cache-group", at, detail));
        }
        if group == groups.len() {
            if groups.contains(&window) {
                return Err(broken(
                    what,
                    "cache-group",
                    at,
                    "caches of one window share a group",
                ));
            }
            groups.push(window);
        }
    }
    Ok(())
}

struct GraphCheck<'a> {
    graph: &'a Graph,
    /// Which node made each value.
    defined: Vec<Option<usize>>,
    cache_sources: Vec<CacheId>,
}

impl GraphCheck<'_> {
    fn node(&mut self, i: usize, node: &Node) -> Result<()> {
        let at = || format!("node {i} `{}` ({})", node.label, node.op.name());
        let mut types = Vec::with_capacity(node.inputs.len());
        for v in node.inputs.iter().chain(&node.outputs) {
            if v.0 as usize >= self.graph.values.len() {
                return Err(broken(
                    "graph",
                    "value-range",
                    at(),
                    format_args!("%{} does not exist", v.0),
                ));
            }
        }
        for v in &node.inputs {
            if self.defined[v.0 as usize].is_none() {
                return Err(broken(
                    "graph",
                    "order",
                    at(),
                    format_args!("%{} is read before it is made", v.0),
                ));
            }
            types.push(self.graph.values[v.0 as usize]);
        }
        let want = output_types(&node.op, &types, &self.graph.weights, &self.graph.caches)
            .map_err(|e| located(e, &node.label))?;
        if want.len() != node.outputs.len() {
            let detail = format!("{} outputs, expected {}", node.outputs.len(), want.len());
            return Err(broken("graph", "output-count", at(), detail));
        }
        if let Some(have) = experts_of(&node.op, &types) {
            let maker = self.defined[node.inputs[1].0 as usize].map(|i| &self.graph.nodes[i].op);
            let routed = match maker {
                Some(Op::Route(spec)) => Some(spec.experts),
                _ => None,
            };
            same_experts("graph", &at(), routed, have)?;
        }
        for (v, ty) in node.outputs.iter().zip(want) {
            if self.defined[v.0 as usize].replace(i).is_some() {
                let detail = format!("%{} is made twice", v.0);
                return Err(broken("graph", "single-assignment", at(), detail));
            }
            let have = self.graph.values[v.0 as usize];
            if have != ty {
                let detail = format!("%{} is declared {have}, the op makes {ty}", v.0);
                return Err(broken("graph", "output-type", at(), detail));
            }
            if let ValueType::Tensor(t) = ty {
                bounded(&t.shape).map_err(|d| broken("graph", "output-type", at(), d))?;
            }
        }
        if let Op::Cache(id) = node.op {
            if self.cache_sources.contains(&id) {
                return Err(broken(
                    "graph",
                    "cache-source",
                    at(),
                    "a cache is named by one node",
                ));
            }
            self.cache_sources.push(id);
        }
        Ok(())
    }
}

/// How many experts the weights of an op of experts stack, by the types of its inputs.
fn experts_of(op: &Op, inputs: &[ValueType]) -> Option<usize> {
    if !matches!(op, Op::ExpertGlu(_) | Op::ExpertDown) {
        return None;
    }
    match inputs.last() {
        Some(ValueType::Tensor(t)) if t.shape.rank() == 3 => Some(t.shape.rows().bind(0, 0)),
        _ => Some(1),
    }
}

/// Rule `expert-ids`: ids come from a router of as many experts as the weights have, so that every id names one.
fn same_experts(what: &'static str, at: &str, routed: Option<usize>, have: usize) -> Result<()> {
    match routed {
        Some(n) if n == have => Ok(()),
        Some(n) => {
            let detail = format!("ids of {n} experts for weights of {have}");
            Err(broken(what, "expert-ids", at, detail))
        }
        None => Err(broken(what, "expert-ids", at, "input 1 was not made by `route`")),
    }
}

/// Whether a shape's fixed part is small enough for byte counts never to overflow.
pub(crate) fn bounded(shape: &Shape) -> Result<(), String> {
    let mut n = 1usize;
    for d in shape.dims() {
        if let Dim::Fixed(k) = d {
            n = n
                .checked_mul(*k)
                .filter(|n| *n > 0 && *n <= MAX_ELEMENTS)
                .ok_or_else(|| format!("{shape} is empty or has more than {MAX_ELEMENTS} elements"))?;
        }
    }
    Ok(())
}

fn writes_cache(op: &Op) -> bool {
    matches!(op, Op::KvWrite | Op::Fused(FusedOp::RopeKvWrite(_)))
}

/// The rules about versions of caches: each version is replaced at most once and not read afterwards.
fn versions(graph: &Graph) -> Result<()> {
    let mut replaced = vec![false; graph.values.len()];
    let mut written = vec![false; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        let at = || format!("node {i} `{}` ({})", node.label, node.op.name());
        for v in &node.inputs {
            let v = v.0 as usize;
            if !matches!(graph.values[v], ValueType::Cache(_)) {
                continue;
            }
            if replaced[v] {
                let detail = format!("%{v} is an old version: the cache has been written since");
                return Err(broken("graph", "cache-version", at(), detail));
            }
            if matches!(node.op, Op::Attention(_)) && !written[v] {
                let detail = format!("%{v} was not made by a write of this step");
                return Err(broken("graph", "attention-reads-written", at(), detail));
            }
            if writes_cache(&node.op) {
                replaced[v] = true;
            }
        }
        if writes_cache(&node.op) {
            for v in &node.outputs {
                written[v.0 as usize] = true;
            }
        }
    }
    Ok(())
}

fn logits(graph: &Graph) -> Result<()> {
    let bad = |detail: String| Err(broken("graph", "logits", "logits", detail));
    let Some(ValueId(v)) = graph.logits else {
        return bad("the graph has no result".to_string());
    };
    match graph.values.get(v as usize) {
        Some(ValueType::Tensor(t)) if is_logits(t) => Ok(()),
        Some(other) => bad(format!("%{v} is {other}, expected F32[R, V]")),
        None => bad(format!("%{v} does not exist")),
    }
}

fn is_logits(t: &TensorType) -> bool {
    t.dtype == DType::F32 && t.shape.rank() == 2 && t.shape.rows() == Dim::Outputs
}

/// Checks a plan against the alignment of its target.
///
/// # Errors
/// [`Error::Invalid`] with the first rule broken; [`Error::BadInput`] where a step's inputs break its op's shape rule.
pub fn plan(plan: &Plan, alignment: usize) -> Result<()> {
    declarations("plan", &plan.weights, &plan.caches)?;
    let Limits {
        max_tokens,
        max_seqs,
        max_outputs,
    } = plan.limits;
    let top = 1 << 30;
    if ![max_tokens, max_seqs, max_outputs]
        .iter()
        .all(|n| (1..=top).contains(n))
    {
        return Err(broken(
            "plan",
            "limits",
            "limits",
            format_args!("{:?}: each is 1 to 2^30", plan.limits),
        ));
    }
    let mut check = PlanCheck {
        plan,
        alignment,
        live: Vec::new(),
        routed: Vec::new(),
        cache_written: vec![false; plan.caches.len()],
    };
    for (i, step) in plan.steps.iter().enumerate() {
        check.step(i, step)?;
    }
    match &plan.logits {
        Operand::Arena { ty, .. } if is_logits(ty) => check.read(&plan.logits, &"logits"),
        other => Err(broken(
            "plan",
            "logits",
            "logits",
            format_args!("{other}, expected F32[R, V] in the arena"),
        )),
    }
}

struct PlanCheck<'a> {
    plan: &'a Plan,
    alignment: usize,
    /// Byte ranges (start, end) of the arena that hold a whole value.
    live: Vec<(usize, usize)>,
    /// Which of them hold ids of experts, and of how many.
    routed: Vec<((usize, usize), usize)>,
    cache_written: Vec<bool>,
}

impl PlanCheck<'_> {
    fn step(&mut self, i: usize, step: &Step) -> Result<()> {
        let at = format!("step {i} `{}` ({})", step.label, step.op.name());
        if step.op.is_source() {
            return Err(broken(
                "plan",
                "no-source-step",
                at,
                "a source is an operand, not a step",
            ));
        }
        let mut inputs = Vec::with_capacity(step.inputs.len());
        for operand in &step.inputs {
            inputs.push(self.operand_type(operand, &at)?);
            self.read(operand, &at)?;
        }
        let want = output_types(&step.op, &inputs, &self.plan.weights, &self.plan.caches)
            .map_err(|e| located(e, &step.label))?;
        let mut have = Vec::with_capacity(step.outputs.len());
        for operand in &step.outputs {
            have.push(self.operand_type(operand, &at)?);
        }
        if want != have {
            let detail = format!("outputs {}, the op makes {}", join(&have), join(&want));
            return Err(broken("plan", "operand-type", at, detail));
        }
        if let Some(have) = experts_of(&step.op, &inputs) {
            let range = self.range(&step.inputs[1]);
            let routed = self.routed.iter().find(|(r, _)| Some(*r) == range);
            same_experts("plan", &at, routed.map(|(_, experts)| *experts), have)?;
        }
        self.caches(step, &at)?;
        let read: Vec<(usize, usize)> = step.inputs.iter().filter_map(|o| self.range(o)).collect();
        let mut made: Vec<(usize, usize)> = Vec::new();
        for operand in &step.outputs {
            let Some(range) = self.range(operand) else {
                continue;
            };
            if let Some(other) = read.iter().chain(&made).find(|r| overlap(**r, range)) {
                let detail = format!("output bytes {range:?} overlap {other:?} of the same step");
                return Err(broken("plan", "arena-overlap", at, detail));
            }
            made.push(range);
        }
        self.live.retain(|l| !made.iter().any(|m| overlap(*l, *m)));
        self.routed.retain(|(r, _)| !made.iter().any(|m| overlap(*r, *m)));
        if let (Op::Route(spec), Some(ids)) = (&step.op, made.first()) {
            self.routed.push((*ids, spec.experts));
        }
        self.live.extend(made);
        Ok(())
    }

    fn operand_type(&self, operand: &Operand, at: &str) -> Result<ValueType> {
        let bad = |detail: String| broken("plan", "operand-type", at, detail);
        if let Operand::Arena { ty, offset } = operand {
            bounded(&ty.shape).map_err(bad)?;
            if !offset.is_multiple_of(self.alignment) {
                let detail = format!("offset {offset} is no multiple of {}", self.alignment);
                return Err(broken("plan", "arena-alignment", at, detail));
            }
            let end = ty.bytes(self.plan.limits.max_tokens, self.plan.limits.max_outputs);
            let end = end.and_then(|n| n.checked_add(*offset)).unwrap_or(usize::MAX);
            if end > self.plan.arena_bytes {
                let detail = format!("bytes {offset}..{end} of an arena of {}", self.plan.arena_bytes);
                return Err(broken("plan", "arena-bounds", at, detail));
            }
        }
        self.plan
            .operand_type(operand)
            .ok_or_else(|| bad(format!("{operand} is not declared")))
    }

    fn range(&self, operand: &Operand) -> Option<(usize, usize)> {
        let Operand::Arena { offset, ty } = operand else {
            return None;
        };
        let bytes = ty.bytes(self.plan.limits.max_tokens, self.plan.limits.max_outputs)?;
        Some((*offset, offset + bytes))
    }

    /// An arena operand must be exactly what was last written there.
    fn read(&self, operand: &Operand, at: &dyn std::fmt::Display) -> Result<()> {
        match self.range(operand) {
            Some(range) if !self.live.contains(&range) => {
                let detail = format!("bytes {range:?} do not hold a value that is still whole");
                Err(broken("plan", "arena-defined", at, detail))
            }
            _ => Ok(()),
        }
    }

    fn caches(&mut self, step: &Step, at: &str) -> Result<()> {
        for operand in &step.inputs {
            let Operand::Cache(CacheId(c)) = operand else {
                continue;
            };
            let c = *c as usize;
            if matches!(step.op, Op::Attention(_)) && !self.cache_written[c] {
                let detail = format!("c{c} was not written by a step before");
                return Err(broken("plan", "attention-reads-written", at, detail));
            }
            if writes_cache(&step.op) {
                if self.cache_written[c] {
                    return Err(broken(
                        "plan",
                        "cache-version",
                        at,
                        format_args!("c{c} is written twice"),
                    ));
                }
                self.cache_written[c] = true;
            }
        }
        Ok(())
    }
}

fn overlap(a: (usize, usize), b: (usize, usize)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

fn join(types: &[ValueType]) -> String {
    types.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ")
}

/// Sizes of the paged cache that a batch is checked against.
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a> {
    /// Tokens per block.
    pub block_tokens: usize,
    /// Blocks in the pool of each cache group.
    pub blocks: &'a [usize],
    /// Window of each cache group.
    pub windows: &'a [Option<u32>],
    /// Rows of the embedding table.
    pub vocab_size: usize,
}

/// Checks that a batch can be executed: a device that has checked it may index without fear.
///
/// Rules: `batch-limits`, `batch-rows`, `batch-token`, `batch-position`, `batch-seqs`, `batch-tables`, `batch-blocks`,
/// `batch-outputs`.
///
/// # Errors
/// [`Error::Invalid`] with the first rule broken.
pub fn batch(meta: &BatchMeta, limits: &Limits, pools: &Pools<'_>) -> Result<()> {
    let bad = |rule, at: String, detail: String| Err(broken("batch", rule, at, detail));
    let (t, s, r) = (meta.tokens.len(), meta.seqs.len(), meta.output_rows.len());
    if t == 0 || t > limits.max_tokens || s > limits.max_seqs || r > limits.max_outputs {
        return bad(
            "batch-limits",
            "sizes".into(),
            format!("{t} tokens, {s} sequences, {r} outputs; {limits:?}"),
        );
    }
    if meta.positions.len() != t {
        return bad(
            "batch-rows",
            "positions".into(),
            format!("{} for {t} tokens", meta.positions.len()),
        );
    }
    if let Some(i) = meta.tokens.iter().position(|id| *id as usize >= pools.vocab_size) {
        return bad(
            "batch-token",
            format!("row {i}"),
            format!("id {} of {}", meta.tokens[i], pools.vocab_size),
        );
    }
    let mut next = 0usize;
    for (i, seq) in meta.seqs.iter().enumerate() {
        let (first, rows, context) = (
            seq.first_row as usize,
            seq.rows as usize,
            seq.context_len as usize,
        );
        if first != next || rows == 0 || rows > context || first + rows > t {
            return bad(
                "batch-seqs",
                format!("sequence {i}"),
                format!("{seq:?} after row {next} of {t}"),
            );
        }
        next = first + rows;
        for row in first..next {
            let want = context - (next - row);
            if meta.positions[row] as usize != want {
                let detail = format!("position {}, expected {want}", meta.positions[row]);
                return bad("batch-position", format!("row {row}"), detail);
            }
        }
    }
    if next != t {
        return bad(
            "batch-seqs",
            "sequences".into(),
            format!("cover {next} of {t} rows"),
        );
    }
    let ascending = meta.output_rows.windows(2).all(|w| w[0] < w[1]);
    if !ascending || meta.output_rows.last().is_some_and(|r| *r as usize >= t) {
        return bad(
            "batch-outputs",
            "output rows".into(),
            "are not ascending rows of the step".into(),
        );
    }
    if meta.tables.len() != pools.blocks.len() {
        let detail = format!(
            "{} tables for {} cache groups",
            meta.tables.len(),
            pools.blocks.len()
        );
        return bad("batch-tables", "tables".into(), detail);
    }
    (0..pools.blocks.len()).try_for_each(|g| batch_table(meta, pools, g))
}

fn batch_table(meta: &BatchMeta, pools: &Pools<'_>, group: usize) -> Result<()> {
    let table = &meta.tables[group];
    let bad = |rule, detail: String| {
        Err(broken(
            "batch",
            rule,
            format_args!("table of cache group {group}"),
            detail,
        ))
    };
    let s = meta.seqs.len();
    let shape = table.first.len() == s + 1
        && table.start.len() == s
        && table.first.windows(2).all(|w| w[0] <= w[1])
        && table
            .first
            .last()
            .is_some_and(|n| *n as usize <= table.blocks.len());
    if !shape {
        return bad("batch-tables", format!("does not describe {s} sequences"));
    }
    let used = table
        .blocks
        .iter()
        .chain(table.copies.iter().flat_map(|(a, b)| [a, b]));
    if let Some(b) = used.into_iter().find(|b| b.0 as usize >= pools.blocks[group]) {
        return bad(
            "batch-blocks",
            format!("block {} of {}", b.0, pools.blocks[group]),
        );
    }
    for (i, seq) in meta.seqs.iter().enumerate() {
        let count = (table.first[i + 1] - table.first[i]) as usize;
        let (start, context) = (table.start[i] as usize, seq.context_len as usize);
        let first_position = context - seq.rows as usize;
        let oldest = match pools.windows.get(group).copied().flatten() {
            Some(w) => (first_position + 1).saturating_sub(w as usize),
            None => 0,
        };
        let holds = start.is_multiple_of(pools.block_tokens) && start <= oldest;
        if !holds || start + count * pools.block_tokens < context {
            let detail = format!(
                "sequence {i}: {count} blocks from position {start} do not hold positions {oldest} to {}",
                context - 1
            );
            return bad("batch-tables", detail);
        }
    }
    Ok(())
}

/// Type of a weight operand; for callers that check operands themselves.
pub(crate) fn declared(weights: &[WeightDecl], id: u32) -> Option<ValueType> {
    weights
        .get(id as usize)
        .map(|w| ValueType::Tensor(weight_type(w)))
}
