//! Which nodes of a graph become steps, and what their operands are.
//!
//! Nodes already stand in a valid order, and fusion keeps it. What remains is to drop nodes that nothing needs, and
//! with them weights and values; a write to a cache is always needed, since later steps read it.

use crate::error::{Error, Result};
use crate::graph::{Graph, ValueId, WeightId};
use crate::op::{FusedOp, Op};
use crate::plan::Operand;
use crate::plan::memory::Places;
use crate::ty::ValueType;

/// The graph without dead nodes, weights and values, renumbered in order of first definition.
pub(crate) fn compact(mut graph: Graph) -> Graph {
    let mut needed = vec![false; graph.values.len()];
    if let Some(v) = graph.logits {
        needed[v.0 as usize] = true;
    }
    let mut keep = vec![false; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().rev() {
        let writes = matches!(node.op, Op::KvWrite | Op::Fused(FusedOp::RopeKvWrite(_)));
        keep[i] = writes || node.outputs.iter().any(|v| needed[v.0 as usize]);
        if keep[i] {
            node.inputs.iter().for_each(|v| needed[v.0 as usize] = true);
        }
    }
    let mut kept = keep.iter();
    graph.nodes.retain(|_| *kept.next().expect("one flag per node"));
    renumber(&mut graph);
    graph
}

fn renumber(graph: &mut Graph) {
    let mut value_map = vec![None; graph.values.len()];
    let mut weight_map = vec![None; graph.weights.len()];
    let (mut values, mut weights) = (Vec::new(), Vec::new());
    for node in &mut graph.nodes {
        for v in &mut node.inputs {
            *v = value_map[v.0 as usize].expect("a value is made before it is read");
        }
        for v in &mut node.outputs {
            let new = ValueId(values.len() as u32);
            values.push(graph.values[v.0 as usize]);
            value_map[v.0 as usize] = Some(new);
            *v = new;
        }
        if let Op::Weight(id) = &mut node.op {
            let old = id.0 as usize;
            *id = *weight_map[old].get_or_insert_with(|| {
                weights.push(graph.weights[old].clone());
                WeightId(weights.len() as u32 - 1)
            });
        }
    }
    graph.logits = graph.logits.and_then(|v| value_map[v.0 as usize]);
    graph.values = values;
    graph.weights = weights;
}

/// Where steps find value `v`.
pub(crate) fn operand(graph: &Graph, places: &Places, v: ValueId) -> Result<Operand> {
    let place = &places.of[v.0 as usize];
    match (place, graph.values[v.0 as usize]) {
        (Some(Operand::Arena { offset, .. }), ValueType::Tensor(ty)) => {
            Ok(Operand::Arena { offset: *offset, ty })
        }
        (Some(operand), _) => Ok(operand.clone()),
        (None, ty) => Err(Error::Invalid {
            what: "graph",
            rule: "place",
            at: format!("%{}", v.0),
            detail: format!("a value of type {ty} has no place"),
        }),
    }
}
