//! Which products keep whole records, where the mode may choose short ones.
//!
//! Errors of activations of 8 bits weigh differently by where they happen. Measured as KL from f32 on two models (see
//! docs/decisions/DD-017-activations-of-eight-bits.md), these cost most for their share of the work:
//!
//! - what queries, keys and values are made by, since scores are exponentiated;
//! - what a router decides by;
//! - the output head, whose errors nothing evens out;
//! - the first layer, whose errors all others inherit, and the last.
//!
//! Told from the plan's form alone: no name is looked at.

use dynair::{Dim, FusedOp, Op, Operand, Plan, Step};

/// For each step of the plan, whether its products must be made from whole records.
pub fn whole_products(plan: &Plan) -> Vec<bool> {
    let attends = |step: &&Step| matches!(step.op, Op::Attention(_));
    let layers = plan.steps.iter().filter(attends).count();
    let mut layer = 0;
    let mut whole = before_scores(plan);
    for (step, whole) in plan.steps.iter().zip(&mut whole) {
        layer += usize::from(attends(&step));
        let first_or_last = layers > 0 && (layer <= 1 || layer == layers);
        *whole |= first_or_last || is_head(plan, step);
    }
    whole
}

/// Whether a step treats the rows whose logits are wanted.
fn is_head(plan: &Plan, step: &Step) -> bool {
    let rows = step.inputs.first().and_then(|x| match plan.operand_type(x) {
        Some(dynair::ValueType::Tensor(t)) => Some(t.shape.rows()),
        _ => None,
    });
    rows == Some(Dim::Outputs)
}

/// For each step, whether what it gives reaches attention, a cache or a router without another product between.
fn before_scores(plan: &Plan) -> Vec<bool> {
    // Places of the arena whose values are wanted; a place is named by its first byte.
    let mut wanted: Vec<usize> = Vec::new();
    let place = |operand: &Operand| match operand {
        Operand::Arena { offset, .. } => Some(*offset),
        _ => None,
    };
    let mut reach = vec![false; plan.steps.len()];
    for (step, reach) in plan.steps.iter().zip(&mut reach).rev() {
        let outputs: Vec<usize> = step.outputs.iter().filter_map(place).collect();
        *reach = outputs.iter().any(|at| wanted.contains(at));
        wanted.retain(|at| !outputs.contains(at));
        let sink = matches!(
            step.op,
            Op::Attention(_) | Op::KvWrite | Op::Route(_) | Op::Fused(FusedOp::RopeKvWrite(_))
        );
        if sink || *reach && !is_product(step) {
            wanted.extend(step.inputs.iter().filter_map(place));
        }
    }
    reach
}

fn is_product(step: &Step) -> bool {
    matches!(
        step.op,
        Op::Linear
            | Op::ExpertGlu(_)
            | Op::ExpertDown
            | Op::Fused(FusedOp::LinearGroup { .. } | FusedOp::LinearGlu(_))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, CpuOptions};
    use crate::self_test::Unfused;
    use crate::self_test::decoder::Decoder;
    use dynair::{Limits, Target};

    /// Labels of products that may be made from short records.
    fn short(target: &dyn Target, layers: usize) -> Vec<String> {
        let decoder = Decoder {
            layers,
            ..Decoder::small()
        };
        let limits = Limits {
            max_tokens: 8,
            max_seqs: 2,
            max_outputs: 2,
        };
        let plan = dynair::plan(decoder.build(1).0, target, limits).expect("the decoder is valid");
        let whole = whole_products(&plan);
        let steps = plan.steps.iter().zip(whole);
        let short = steps.filter(|(step, whole)| is_product(step) && !whole);
        short.map(|(step, _)| step.label.to_string()).collect()
    }

    #[test]
    fn inner_layers_may_be_short_but_for_what_scores_are_made_of() {
        let device = CpuDevice::new(&CpuOptions::default()).expect("a device can be made");
        for target in [&device as &dyn Target, &Unfused(&device)] {
            let all = short(target, 4);
            assert!(
                all.iter()
                    .all(|l| l.starts_with("blk.1.") || l.starts_with("blk.2.")),
                "{all:?}"
            );
            let of = |what: &str| all.iter().filter(|l| l.contains(what)).count();
            for sensitive in ["attn_q", "attn_k", "attn_v", "token_embd", "output."] {
                assert_eq!(of(sensitive), 0, "{all:?}");
            }
            assert_eq!([of("attn_output"), of("ffn_down")], [2, 2], "{all:?}");
            assert_eq!(short(target, 2), Vec::<String>::new());
        }
    }
}
