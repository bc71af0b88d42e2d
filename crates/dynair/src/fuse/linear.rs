//! Products that share their left operand.
//!
//! `glu(linear(x, g), linear(x, u))` → `linear_glu(x, g, u)`, where neither product has a bias or another reader.
//!
//! Several `linear` of one `x` → one `linear_group`: q, k and v, or gate and up where they could not become a
//! `linear_glu`. Members may have a bias or none. If the target does not take the whole group (mixed weight types),
//! members of one weight type are tried together.

use super::{Uses, replace, types};
use crate::graph::{Graph, Node, ValueId};
use crate::op::{FusedOp, Op};
use crate::plan::Target;

pub(super) fn glu(graph: &mut Graph, target: &dyn Target) {
    let uses = Uses::of(graph);
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    let product = |v: ValueId| {
        let at = uses.sole(v)?;
        let node = &graph.nodes[at];
        (node.op == Op::Linear && node.inputs.len() == 2).then_some((at, node))
    };
    for (at, node) in graph.nodes.iter().enumerate() {
        let Op::Glu(act) = node.op else {
            continue;
        };
        let (Some((gate_at, gate)), Some((up_at, up))) = (product(node.inputs[0]), product(node.inputs[1]))
        else {
            continue;
        };
        if gate.inputs[0] != up.inputs[0] {
            continue;
        }
        let op = Op::Fused(FusedOp::LinearGlu(act));
        let inputs = vec![gate.inputs[0], gate.inputs[1], up.inputs[1]];
        if !target.supports(&op, &types(graph, &inputs)) {
            continue;
        }
        let fused = Node {
            op,
            inputs,
            outputs: node.outputs.clone(),
            label: node.label.clone(),
        };
        replace(&mut nodes, at, &[gate_at, up_at, at], fused);
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}

pub(super) fn group(graph: &mut Graph, target: &dyn Target) {
    let uses = Uses::of(graph);
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    let mut by_input: Vec<(ValueId, Vec<usize>)> = Vec::new();
    let source = |v: &ValueId| uses.maker[v.0 as usize].is_some_and(|i| graph.nodes[i].op.is_source());
    for (at, node) in graph.nodes.iter().enumerate() {
        if node.op != Op::Linear || !node.inputs[1..].iter().all(source) {
            continue;
        }
        match by_input.iter_mut().find(|(x, _)| *x == node.inputs[0]) {
            Some((_, members)) => members.push(at),
            None => by_input.push((node.inputs[0], vec![at])),
        }
    }
    for (_, members) in by_input {
        if let Some(fused) = grouped(graph, target, &members) {
            replace(&mut nodes, members[0], &members, fused);
            continue;
        }
        let mut rest = members;
        while let Some(first) = rest.first() {
            let ty = weight_dtype(graph, *first);
            let (same, other): (Vec<usize>, Vec<usize>) =
                rest.iter().partition(|i| weight_dtype(graph, **i) == ty);
            if let Some(fused) = grouped(graph, target, &same) {
                replace(&mut nodes, same[0], &same, fused);
            }
            rest = other;
        }
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}

fn weight_dtype(graph: &Graph, node: usize) -> Option<crate::dtype::DType> {
    match graph.values[graph.nodes[node].inputs[1].0 as usize] {
        crate::ty::ValueType::Tensor(t) => Some(t.dtype),
        _ => None,
    }
}

/// The group of these `linear` nodes, if there are several and the target takes them.
fn grouped(graph: &Graph, target: &dyn Target, members: &[usize]) -> Option<Node> {
    if members.len() < 2 {
        return None;
    }
    let first = &graph.nodes[members[0]];
    let mut inputs = vec![first.inputs[0]];
    let (mut outputs, mut bias, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for i in members {
        let node = &graph.nodes[*i];
        inputs.extend(&node.inputs[1..]);
        outputs.extend(&node.outputs);
        bias.push(node.inputs.len() == 3);
        labels.push(node.label.as_str());
    }
    let op = Op::Fused(FusedOp::LinearGroup { bias });
    if !target.supports(&op, &types(graph, &inputs)) {
        return None;
    }
    Some(Node {
        op,
        inputs,
        outputs,
        label: labels.join("+"),
    })
}
