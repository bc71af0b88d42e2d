//! `s = add(a, b); n = rms_norm(s, w)` → `s, n = add_rms_norm(a, b, w)`.
//!
//! The residual stream is added to and normalised before every branch. Both results stay available, so it does not
//! matter who else reads the sum. With norms after each branch (Gemma) `b` is a normalised value; the pattern is the
//! same.

use super::{Uses, replace, types};
use crate::graph::{Graph, Node};
use crate::op::{FusedOp, Op};
use crate::plan::Target;

pub(super) fn add_rms_norm(graph: &mut Graph, target: &dyn Target) {
    let uses = Uses::of(graph);
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for (at, norm) in graph.nodes.iter().enumerate() {
        let Op::RmsNorm { eps } = norm.op else {
            continue;
        };
        let Some(sum) = uses.maker[norm.inputs[0].0 as usize] else {
            continue;
        };
        // Still there: another norm of the same sum may have taken it.
        let Some(add) = nodes[sum].as_ref().filter(|n| n.op == Op::Add) else {
            continue;
        };
        let op = Op::Fused(FusedOp::AddRmsNorm { eps });
        let inputs = vec![add.inputs[0], add.inputs[1], norm.inputs[1]];
        let weight_is_source =
            uses.maker[norm.inputs[1].0 as usize].is_some_and(|i| graph.nodes[i].op.is_source());
        if !weight_is_source || !target.supports(&op, &types(graph, &inputs)) {
            continue;
        }
        let fused = Node {
            op,
            inputs,
            outputs: vec![add.outputs[0], norm.outputs[0]],
            label: norm.label.clone(),
        };
        replace(&mut nodes, sum, &[sum, at], fused);
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}
