//! Rewrite rules that put several plain ops into one [`FusedOp`], and their expansions.
//!
//! | rule | pattern | replacement | why |
//! |---|---|---|---|
//! | [`linear`] `glu` | `glu(linear(x, g), linear(x, u))` | `linear_glu` | `[T, ffn]` gate and up never reach memory, and x is prepared once |
//! | [`attention`] | `kv_write(c, rope(k), v)` | `rope_kv_write` | k goes from the projection into the cache in one pass |
//! | [`norm`] | `s = add(a, b)`, `rms_norm(s)` | `add_rms_norm` | the residual is read and written once, and one barrier is saved |
//! | [`linear`] `group` | several `linear` of one x | `linear_group` | x is quantised or packed once for q, k and v; one barrier instead of three |
//!
//! A rule fires only where the values it makes vanish have no other reader, and where the target supports the fused
//! op for the very types at hand. Each fused op has an expansion ([`expand`]) into plain ops, which is its meaning.

mod attention;
mod linear;
mod norm;
#[cfg(test)]
mod tests;

use crate::graph::{Graph, Node, ValueId};
use crate::op::{FusedOp, Op};
use crate::plan::{Target, compact};
use crate::ty::ValueType;

/// Applies every rule wherever it fits, and drops what nothing needs before and after, so that dead readers prevent no
/// fusion. The graph must be valid; the result is.
pub fn fuse(graph: Graph, target: &dyn Target) -> Graph {
    let mut graph = compact(graph);
    sources_first(&mut graph);
    linear::glu(&mut graph, target);
    attention::rope_kv_write(&mut graph, target);
    norm::add_rms_norm(&mut graph, target);
    linear::group(&mut graph, target);
    compact(graph)
}

/// Sources depend on nothing, so they may stand first; a fused node can then take the place of its first member
/// whichever weights it reads.
fn sources_first(graph: &mut Graph) {
    graph.nodes.sort_by_key(|n| !n.op.is_source());
}

/// Which node makes each value and how many inputs read it; the result counts as one reader.
struct Uses {
    maker: Vec<Option<usize>>,
    readers: Vec<usize>,
}

impl Uses {
    fn of(graph: &Graph) -> Uses {
        let mut uses = Uses {
            maker: vec![None; graph.values.len()],
            readers: vec![0; graph.values.len()],
        };
        for (i, node) in graph.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|v| uses.readers[v.0 as usize] += 1);
            node.outputs
                .iter()
                .for_each(|v| uses.maker[v.0 as usize] = Some(i));
        }
        if let Some(v) = graph.logits {
            uses.readers[v.0 as usize] += 1;
        }
        uses
    }

    /// The node that makes `v`, if `v` has exactly one reader.
    fn sole(&self, v: ValueId) -> Option<usize> {
        if self.readers[v.0 as usize] == 1 {
            self.maker[v.0 as usize]
        } else {
            None
        }
    }
}

fn types(graph: &Graph, inputs: &[ValueId]) -> Vec<ValueType> {
    inputs.iter().map(|v| graph.values[v.0 as usize]).collect()
}

/// Replaces the nodes at `dead` (which `new` stands for) by `new` at position `at`, which is one of them.
fn replace(nodes: &mut [Option<Node>], at: usize, dead: &[usize], new: Node) {
    for i in dead {
        nodes[*i] = None;
    }
    nodes[at] = Some(new);
}

/// The plain nodes a fused node stands for, in order. `fresh` makes a value of a given type for each intermediate
/// result. A node that is not fused is its own expansion.
pub fn expand(
    node: &Node,
    types: &dyn Fn(ValueId) -> ValueType,
    fresh: &mut dyn FnMut(ValueType) -> ValueId,
) -> Vec<Node> {
    let make = |op: Op, inputs: &[ValueId], output: ValueId| Node {
        op,
        inputs: inputs.to_vec(),
        outputs: vec![output],
        label: node.label.clone(),
    };
    let (i, o) = (&node.inputs, &node.outputs);
    match &node.op {
        Op::Fused(FusedOp::LinearGroup { bias }) => {
            let mut at = 1;
            let members = bias.iter().zip(o).map(|(has_bias, out)| {
                let n = 1 + usize::from(*has_bias);
                let mut inputs = vec![i[0]];
                inputs.extend(&i[at..at + n]);
                at += n;
                make(Op::Linear, &inputs, *out)
            });
            members.collect()
        }
        Op::Fused(FusedOp::LinearGlu(act)) => {
            let (gate, up) = (fresh(types(o[0])), fresh(types(o[0])));
            vec![
                make(Op::Linear, &[i[0], i[1]], gate),
                make(Op::Linear, &[i[0], i[2]], up),
                make(Op::Glu(*act), &[gate, up], o[0]),
            ]
        }
        Op::Fused(FusedOp::AddRmsNorm { eps }) => vec![
            make(Op::Add, &[i[0], i[1]], o[0]),
            make(Op::RmsNorm { eps: *eps }, &[o[0], i[2]], o[1]),
        ],
        Op::Fused(FusedOp::RopeKvWrite(spec)) => {
            let k = fresh(types(i[1]));
            let mut rope = vec![i[1], i[4]];
            rope.extend(i.get(5));
            vec![
                make(Op::Rope(*spec), &rope, k),
                make(Op::KvWrite, &[i[0], k, i[2], i[3]], o[0]),
            ]
        }
        _ => vec![node.clone()],
    }
}

/// The graph with every fused node replaced by its expansion.
pub fn expand_graph(graph: &Graph) -> Graph {
    let mut out = graph.clone();
    out.nodes.clear();
    let mut values = graph.values.clone();
    for node in &graph.nodes {
        let known = |v: ValueId| graph.values[v.0 as usize];
        let nodes = expand(node, &known, &mut |ty| {
            values.push(ty);
            ValueId(values.len() as u32 - 1)
        });
        out.nodes.extend(nodes);
    }
    out.values = values;
    out
}
