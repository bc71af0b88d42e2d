//! Places of intermediate values in one arena.
//!
//! A value lives from the node that makes it to the last node that reads it or a view of it; the result lives to the
//! end. Values are placed largest first, each at the lowest offset where it overlaps no placed value of a lifetime
//! that meets its own ("greedy by size", Pisarchyk and Lee 2020, arXiv:2001.03288). Sizes are those at the limits; a
//! smaller step leaves the rest of each place unused.

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::op::Op;
use crate::plan::{Limits, Operand};
use crate::ty::ValueType;

/// The place of every value, and the arena's size.
pub(crate) struct Places {
    /// By value; `None` only for values no node makes.
    pub(crate) of: Vec<Option<Operand>>,
    /// Bytes.
    pub(crate) arena_bytes: usize,
}

struct Life {
    value: usize,
    bytes: usize,
    first: usize,
    last: usize,
    offset: usize,
}

/// Gives every value of the graph its place.
///
/// # Errors
/// If a value is too large to count its bytes, or a source is viewed.
pub(crate) fn place(graph: &Graph, alignment: usize, limits: &Limits) -> Result<Places> {
    assert!(
        alignment.is_power_of_two(),
        "a target's alignment is a power of two"
    );
    let mut of: Vec<Option<Operand>> = vec![None; graph.values.len()];
    // The value whose place a value has: itself unless it is a view.
    let mut root: Vec<usize> = (0..graph.values.len()).collect();
    let mut lives: Vec<Life> = Vec::new();
    let mut life_of: Vec<Option<usize>> = vec![None; graph.values.len()];
    let too_large = |v: usize| Error::Invalid {
        what: "graph",
        rule: "size",
        at: format!("%{v}"),
        detail: format!("{} at {limits:?} is too large", graph.values[v]),
    };
    for (i, node) in graph.nodes.iter().enumerate() {
        for v in &node.inputs {
            if let Some(life) = life_of[root[v.0 as usize]] {
                lives[life].last = i;
            }
        }
        for v in &node.outputs {
            let v = v.0 as usize;
            match (&node.op, graph.values[v]) {
                (Op::Weight(id), _) => of[v] = Some(Operand::Weight(*id)),
                (Op::Tokens, _) => of[v] = Some(Operand::Tokens),
                (Op::Positions, _) => of[v] = Some(Operand::Positions),
                (_, ValueType::Batch) => of[v] = Some(Operand::Batch),
                (_, ValueType::Cache(id)) => of[v] = Some(Operand::Cache(id)),
                (Op::View(_), _) => {
                    root[v] = root[node.inputs[0].0 as usize];
                    if life_of[root[v]].is_none() {
                        return Err(Error::BadInput {
                            op: format!("view `{}`", node.label),
                            what: "input 0".into(),
                            found: "a source".into(),
                            expected: "a value made by a step".into(),
                        });
                    }
                }
                (_, ValueType::Tensor(ty)) => {
                    let bytes = ty.bytes(limits.max_tokens, limits.max_outputs);
                    let bytes = bytes
                        .and_then(|n| n.checked_next_multiple_of(alignment))
                        .filter(|n| *n <= isize::MAX as usize / 2)
                        .ok_or_else(|| too_large(v))?;
                    life_of[v] = Some(lives.len());
                    lives.push(Life {
                        value: v,
                        bytes,
                        first: i,
                        last: i,
                        offset: 0,
                    });
                }
            }
        }
    }
    if let Some(life) = graph.logits.and_then(|v| life_of[root[v.0 as usize]]) {
        lives[life].last = graph.nodes.len();
    }
    let arena_bytes = pack(&mut lives).ok_or_else(|| too_large(0))?;
    for life in &lives {
        if let ValueType::Tensor(ty) = graph.values[life.value] {
            of[life.value] = Some(Operand::Arena {
                offset: life.offset,
                ty,
            });
        }
    }
    for v in 0..root.len() {
        if root[v] != v {
            of[v] = of[root[v]].clone();
        }
    }
    Ok(Places { of, arena_bytes })
}

/// Sets the offsets; gives the end of the highest place.
fn pack(lives: &mut [Life]) -> Option<usize> {
    let mut order: Vec<usize> = (0..lives.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(lives[*i].bytes), lives[*i].first));
    let mut placed: Vec<usize> = Vec::new(); // by offset
    let mut arena = 0usize;
    for i in order {
        let (first, last, bytes) = (lives[i].first, lives[i].last, lives[i].bytes);
        let mut offset = 0usize;
        for p in &placed {
            let other = &lives[*p];
            if other.first > last || other.last < first {
                continue;
            }
            if offset.checked_add(bytes)? <= other.offset {
                break;
            }
            offset = offset.max(other.offset + other.bytes);
        }
        lives[i].offset = offset;
        arena = arena.max(offset.checked_add(bytes)?);
        let at = placed.partition_point(|p| lives[*p].offset <= offset);
        placed.insert(at, i);
    }
    Some(arena)
}
