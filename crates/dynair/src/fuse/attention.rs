//! `kv_write(c, rope(k, positions), v, batch)` → `rope_kv_write(c, k, v, batch, positions)`.
//!
//! Only where nothing else reads the turned keys. A key norm before the rope (Qwen3, Gemma 3) stays in front.

use super::{Uses, replace, types};
use crate::graph::{Graph, Node};
use crate::op::{FusedOp, Op};
use crate::plan::Target;

pub(super) fn rope_kv_write(graph: &mut Graph, target: &dyn Target) {
    let uses = Uses::of(graph);
    let mut nodes: Vec<Option<Node>> = graph.nodes.iter().cloned().map(Some).collect();
    for (at, write) in graph.nodes.iter().enumerate() {
        if write.op != Op::KvWrite {
            continue;
        }
        let Some(rope_at) = uses.sole(write.inputs[1]) else {
            continue;
        };
        let rope = &graph.nodes[rope_at];
        let Op::Rope(spec) = rope.op else {
            continue;
        };
        let op = Op::Fused(FusedOp::RopeKvWrite(spec));
        let mut inputs = vec![write.inputs[0], rope.inputs[0], write.inputs[2], write.inputs[3]];
        inputs.extend(&rope.inputs[1..]);
        if !target.supports(&op, &types(graph, &inputs)) {
            continue;
        }
        let fused = Node {
            op,
            inputs,
            outputs: write.outputs.clone(),
            label: write.label.clone(),
        };
        replace(&mut nodes, at, &[rope_at, at], fused);
    }
    graph.nodes = nodes.into_iter().flatten().collect();
}
