//! Each rule about plans and batches is broken once. The rules about graphs are in the file tests.

use super::*;
use crate::batch::BlockId;
use crate::plan::plan as make_plan;
use crate::testing::{LIMITS, Only, PLAIN, Small, steps};

fn made() -> Plan {
    let target = Only(|_: &FusedOp, _: &[ValueType]| true);
    make_plan(
        Small {
            window: Some(3),
            ..PLAIN
        }
        .graph(),
        &target,
        LIMITS,
    )
    .expect("plans")
}

fn rule(result: Result<()>) -> &'static str {
    match result {
        Ok(()) => "none",
        Err(Error::Invalid { rule, .. }) => rule,
        Err(e) => panic!("another error: {e}"),
    }
}

fn arena(operand: &mut Operand) -> &mut usize {
    match operand {
        Operand::Arena { offset, .. } => offset,
        other => panic!("{other} is not in the arena"),
    }
}

fn at(plan: &Plan, op: &str) -> usize {
    plan.steps
        .iter()
        .position(|s| s.op.name() == op)
        .expect("the plan has such a step")
}

#[test]
fn broken_plans_are_found() {
    let broken_by = |change: &dyn Fn(&mut Plan)| {
        let mut p = made();
        change(&mut p);
        rule(plan(&p, 64))
    };
    assert_eq!(broken_by(&|_| {}), "none");
    assert_eq!(broken_by(&|p| p.limits.max_tokens = 0), "limits");
    assert_eq!(broken_by(&|p| p.arena_bytes -= 1), "arena-bounds");
    assert_eq!(
        broken_by(&|p| *arena(&mut p.steps[0].outputs[0]) += 4),
        "arena-alignment"
    );
    assert_eq!(broken_by(&|p| p.steps[0].op = Op::Tokens), "no-source-step");
    assert_eq!(broken_by(&|p| p.logits = Operand::Tokens), "logits");
    assert_eq!(broken_by(&|p| p.caches.truncate(1)), "operand-type");
    assert_eq!(
        broken_by(&|p| {
            let i = at(p, "rope_kv_write");
            p.steps.remove(i);
        }),
        "attention-reads-written"
    );
    assert_eq!(
        broken_by(&|p| {
            let i = at(p, "rope_kv_write");
            p.steps.insert(i, p.steps[i].clone());
        }),
        "cache-version"
    );
    // An output over an input of its own step.
    assert_eq!(
        broken_by(&|p| {
            let i = at(p, "scale");
            let input = *arena(&mut p.steps[i].inputs[0]);
            *arena(&mut p.steps[i].outputs[0]) = input;
        }),
        "arena-overlap"
    );
    // A value written over while it is still to be read.
    assert_eq!(
        broken_by(&|p| {
            let (group, attention) = (at(p, "linear_group"), at(p, "attention"));
            let q = *arena(&mut p.steps[group].outputs[0]);
            let rope = at(p, "rope");
            assert!(group < rope && rope < attention);
            let spoiler = Step {
                op: Op::Scale(1.0),
                inputs: vec![p.steps[group].outputs[1].clone()],
                outputs: vec![Operand::Arena {
                    offset: q,
                    ty: TensorType::f32(&[Dim::Tokens, Dim::Fixed(16)]),
                }],
                label: "spoiler".into(),
            };
            p.steps.insert(group + 1, spoiler);
        }),
        "arena-defined"
    );
}

#[test]
fn broken_batches_are_found() {
    let pools = Pools {
        block_tokens: 4,
        blocks: &[16, 16],
        windows: &[Some(3), None],
        vocab_size: 50,
    };
    let broken_by = |change: &dyn Fn(&mut BatchMeta)| {
        let mut meta = steps(2).remove(1);
        change(&mut meta);
        rule(batch(&meta, &LIMITS, &pools))
    };
    assert_eq!(broken_by(&|_| {}), "none");
    assert_eq!(broken_by(&|m| *m = BatchMeta::default()), "batch-limits");
    assert_eq!(broken_by(&|m| m.tokens = vec![0; 17]), "batch-limits");
    assert_eq!(broken_by(&|m| m.output_rows = (0..9).collect()), "batch-limits");
    assert_eq!(
        broken_by(&|m| {
            m.positions.pop();
        }),
        "batch-rows"
    );
    assert_eq!(broken_by(&|m| m.tokens[3] = 50), "batch-token");
    assert_eq!(broken_by(&|m| m.positions[2] += 1), "batch-position");
    assert_eq!(broken_by(&|m| m.seqs[1].first_row = 2), "batch-seqs");
    assert_eq!(broken_by(&|m| m.seqs[1].rows = 0), "batch-seqs");
    assert_eq!(broken_by(&|m| m.seqs[0].context_len = 0), "batch-seqs");
    assert_eq!(broken_by(&|m| m.seqs.truncate(1)), "batch-seqs");
    assert_eq!(broken_by(&|m| m.output_rows = vec![3, 3]), "batch-outputs");
    assert_eq!(broken_by(&|m| m.output_rows = vec![7]), "batch-outputs");
    assert_eq!(broken_by(&|m| m.tables.truncate(1)), "batch-tables");
    assert_eq!(broken_by(&|m| m.tables[0].first = vec![0, 9, 5]), "batch-tables");
    assert_eq!(broken_by(&|m| m.tables[1].start[0] = 4), "batch-tables");
    assert_eq!(
        broken_by(&|m| m.tables[0].blocks[0] = BlockId(16)),
        "batch-blocks"
    );
    assert_eq!(
        broken_by(&|m| m.tables[0].copies = vec![(BlockId(1), BlockId(99))]),
        "batch-blocks"
    );
    // A windowed group may have let go of blocks that lie before its window, and only of those.
    let released = |blocks: usize| {
        broken_by(&move |m: &mut BatchMeta| {
            let table = &mut m.tables[0];
            table.blocks.drain(..blocks);
            table.first.iter_mut().skip(1).for_each(|f| *f -= blocks as u32);
            table.start[0] = 4 * blocks as u32;
        })
    };
    assert_eq!(released(1), "none");
    assert_eq!(released(2), "batch-tables");
}
