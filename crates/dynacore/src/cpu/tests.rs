//! The device as a whole: plans executed alone, batched, in chunks and by other numbers of threads.

use dynair::{BatchMeta, BlockId};

use super::*;
use crate::device::{Logits, TakeRow, Ticket};
use crate::kv::KvType;
use crate::self_test::cases::Rng;
use crate::self_test::decoder::{Decoder, Tables};
use crate::self_test::{Case, cases, compile, execute, run, short};

fn device(isa: Isa, threads: usize) -> CpuDevice {
    device_in(Mode::Exact, isa, threads)
}

fn device_in(mode: Mode, isa: Isa, threads: usize) -> CpuDevice {
    CpuDevice::new(&CpuOptions {
        threads: Some(threads),
        mode,
        isa: Some(isa.name().to_owned()),
    })
    .expect("a device can be made")
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

fn check(device: &CpuDevice, case: &Case, fused: bool) {
    let result = run(device, case, fused);
    assert!(result.passed(), "{result:?}: allowed because {}", case.reason);
}

/// In this crate's own tests the ledgers of shared memory are on: these cases also hold the drivers to the rule that
/// makes their views sound.
#[test]
fn the_short_self_test_passes_on_every_table_fused_and_plain() {
    for isa in isas() {
        let device = device(isa, 3);
        for case in short() {
            check(&device, &case, true);
            check(&device, &case, false);
        }
    }
    assert!(self_test().iter().all(SelfTestResult::passed));
}

#[test]
fn attention_is_bit_equal_whatever_the_number_of_workers() {
    for isa in isas() {
        for window in [None, Some(40)] {
            let case = cases::attention(&cases::Attention {
                window,
                ..cases::Attention::default()
            });
            let alone = execute(&device(isa, 1), &case, true).expect("the case runs");
            for threads in [2, 3, 8] {
                assert_eq!(
                    execute(&device(isa, threads), &case, true).expect("the case runs"),
                    alone
                );
            }
        }
    }
}

/// Logits by sequence and position.
type All = Vec<Vec<Vec<f32>>>;

struct Model {
    case: Case,
    windows: Vec<Option<u32>>,
}

const BLOCK_TOKENS: usize = 16;
const BLOCKS: usize = 64;

impl Model {
    fn new(decoder: &Decoder, kind: KvType) -> Model {
        let (graph, tensors) = decoder.build(7);
        let windows = vec![decoder.window, None];
        let geometry = crate::self_test::geometry(&graph, kind, BLOCK_TOKENS, BLOCKS);
        let name = "decoder".to_owned();
        let case = Case {
            name,
            graph,
            tensors,
            steps: Vec::new(),
            geometry,
            tolerance: 0.0,
            reason: "",
        };
        Model { case, windows }
    }

    /// Runs `schedule`: per step, sequences and how many of their tokens they take.
    fn run(&self, device: &CpuDevice, seqs: &[Vec<u32>], schedule: &[Vec<(usize, usize)>], seed: u64) -> All {
        let limits = dynair::Limits {
            max_tokens: 256,
            max_seqs: 8,
            max_outputs: 256,
        };
        let mut executor = compile(device, &self.case, true, limits).expect("the decoder compiles");
        let mut tables = Tables::new(&self.windows, BLOCK_TOKENS, BLOCKS, seqs.len(), seed);
        let (mut all, mut logits) = (vec![Vec::new(); seqs.len()], Logits::default());
        for rows in schedule {
            let rows: Vec<(usize, &[u32])> = rows
                .iter()
                .map(|&(s, n)| {
                    (
                        s,
                        &seqs[s][tables.past(s)..(tables.past(s) + n).min(seqs[s].len())],
                    )
                })
                .filter(|(_, tokens)| !tokens.is_empty())
                .collect();
            if rows.is_empty() {
                continue;
            }
            let batch = tables.step(&rows);
            let ticket = executor.submit(&batch).expect("the step is valid");
            executor.wait(ticket, &mut logits).expect("the step runs");
            let mut row = 0;
            for (s, tokens) in rows {
                for _ in tokens {
                    all[s].push(logits.row(row).to_vec());
                    row += 1;
                }
            }
        }
        for (s, seq) in seqs.iter().enumerate() {
            assert_eq!(all[s].len(), seq.len(), "the schedule takes every token");
        }
        all
    }
}

#[test]
fn a_sequence_gets_the_same_bits_alone_batched_chunked_and_with_other_workers() {
    let mut rng = Rng::new(3);
    let seqs: Vec<Vec<u32>> = [70, 33, 9, 1]
        .iter()
        .map(|n| (0..*n).map(|_| rng.below(80) as u32).collect())
        .collect();
    let whole: Vec<Vec<(usize, usize)>> = (0..4).map(|s| vec![(s, 70)]).collect();
    // Experts whose columns are whole groups, and such that share groups with their neighbours.
    let moe = Decoder {
        experts: Some((5, 2)),
        ..Decoder::small()
    };
    let odd = Decoder {
        experts: Some((7, 3)),
        dtype: dynair::DType::F16,
        ffn_size: 40,
        hidden_size: 72,
        ..Decoder::small()
    };
    for isa in isas() {
        for (decoder, kind) in [
            (Decoder::small(), KvType::F16),
            (Decoder::small(), KvType::Q8_0),
            (moe.clone(), KvType::F16),
            (odd.clone(), KvType::F32),
        ] {
            let model = Model::new(&decoder, kind);
            let truth = model.run(&device(isa, 1), &seqs, &whole, 1);
            let one_by_one: Vec<_> = (0..70).map(|_| (0..4).map(|s| (s, 1)).collect()).collect();
            assert!(
                model.run(&device(isa, 2), &seqs, &one_by_one, 2) == truth,
                "decoded together, {isa} {kind}"
            );
            for round in 0..3 {
                let chunks: Vec<Vec<(usize, usize)>> = (0..200)
                    .map(|_| {
                        let mut rows: Vec<_> = (0..4).map(|s| (s, 1 + rng.below(19))).collect();
                        rows.retain(|_| rng.below(3) > 0);
                        rows
                    })
                    .collect();
                let found = model.run(&device(isa, 1 + round), &seqs, &chunks, 10 + round as u64);
                assert!(found == truth, "random chunks, {isa} {kind} round {round}");
            }
        }
    }
}

#[test]
fn a_long_context_splits_over_workers_and_keeps_its_bits() {
    let mut rng = Rng::new(5);
    let seqs = vec![(0..700).map(|_| rng.below(80) as u32).collect::<Vec<_>>()];
    let schedule: Vec<Vec<(usize, usize)>> = [256, 200, 235, 1, 1, 1, 3, 1, 1, 1]
        .iter()
        .map(|n| vec![(0, *n)])
        .collect();
    for isa in isas() {
        let model = Model::new(
            &Decoder {
                window: Some(300),
                ..Decoder::small()
            },
            KvType::F16,
        );
        let truth = model.run(&device(isa, 1), &seqs, &schedule, 1);
        for threads in [2, 3, 5] {
            assert!(
                model.run(&device(isa, threads), &seqs, &schedule, threads as u64) == truth,
                "{isa} {threads}"
            );
        }
    }
}

#[test]
fn the_decoder_is_what_the_evaluator_says() {
    let model = Model::new(&Decoder::small(), KvType::F32);
    let mut tables = Tables::new(&model.windows, BLOCK_TOKENS, BLOCKS, 2, 9);
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 80).collect();
    let steps = vec![
        tables.step(&[(0, &tokens[..30]), (1, &tokens[3..5])]),
        tables.step(&[(1, &tokens[5..40]), (0, &tokens[30..31])]),
    ];
    for isa in isas() {
        let reason = "two layers of 14-bit activations";
        let case = Case {
            steps: steps.clone(),
            tolerance: 2e-3,
            reason,
            ..model.case.clone()
        };
        check(&device(isa, 2), &case, true);
        check(&device(isa, 2), &case, false);
        let auto = Case {
            tolerance: 0.1,
            reason: "where there are tiles: seven products in a row of 3e-3 each, behind norms that multiply by up to 10",
            ..case
        };
        check(&device_in(Mode::Auto, isa, 2), &auto, true);
    }
    let safe = CpuDevice::new(&CpuOptions {
        mode: Mode::Safe,
        threads: Some(2),
        isa: None,
    })
    .expect("a device");
    check(
        &safe,
        &Case {
            steps,
            tolerance: 2e-5,
            reason: "f32 throughout",
            ..model.case.clone()
        },
        true,
    );
}

/// Forms and kernels are chosen by the number of rows of a step, or of an expert; who computes them changes nothing.
#[test]
fn in_auto_mode_the_number_of_workers_changes_no_bit() {
    let mut rng = Rng::new(6);
    // Positions on both sides of 256 and 512, where chunks of the context end, in one step; another sequence beside.
    let seqs: Vec<Vec<u32>> = [550, 60]
        .iter()
        .map(|n| (0..*n).map(|_| rng.below(80) as u32).collect())
        .collect();
    let schedule = [
        vec![(0, 200)],
        vec![(0, 17), (1, 60)],
        vec![(0, 180)],
        vec![(0, 152)],
        vec![(0, 1)],
    ];
    // The first and the last layer have products of one form only.
    let plain = Decoder {
        layers: 3,
        ..Decoder::small()
    };
    let experts = Decoder {
        experts: Some((4, 2)),
        ..plain.clone()
    };
    for (isa, decoder) in isas().flat_map(|isa| [(isa, &plain), (isa, &experts)]) {
        let model = Model::new(decoder, KvType::F16);
        let truth = model.run(&device_in(Mode::Auto, isa, 1), &seqs, &schedule, 1);
        for threads in [2, 3, 5] {
            let found = model.run(&device_in(Mode::Auto, isa, threads), &seqs, &schedule, 2);
            assert!(found == truth, "{isa} {threads} {:?}", decoder.experts);
        }
    }
}

/// A value that is not finite reaches whoever sees its token, and nobody else, from tiles as from vectors.
#[test]
fn a_broken_value_stays_with_those_that_see_it() {
    let mut case = cases::attention(&cases::Attention {
        steps: &[[40, 3], [30, 1]],
        window: Some(25),
        ..cases::Attention::default()
    });
    let width = 2 * 64;
    let mut values = Rng::new(4).values(64 * width, cases::Values::Normal);
    // Beyond binary16.
    values[63 * width + 5] = 1e6;
    case.tensors.add("v.weight", dynair::DType::F32, 64, &values);
    for step in &mut case.steps {
        step.tokens.iter_mut().for_each(|t| *t %= 63);
    }
    case.steps[0].tokens[20] = 63;
    for isa in isas() {
        let finite = |mode| {
            let (found, cols) = execute(&device_in(mode, isa, 2), &case, true).expect("the case runs");
            let rows = found.chunks(cols).map(|row| row.iter().all(|v| v.is_finite()));
            rows.collect::<Vec<_>>()
        };
        let truth = finite(Mode::Exact);
        assert!(truth.contains(&true) && truth.contains(&false), "{truth:?}");
        assert_eq!(finite(Mode::Auto), truth, "{isa}");
    }
}

#[test]
fn batches_that_break_a_rule_are_refused_and_change_nothing() {
    let model = Model::new(&Decoder::small(), KvType::F16);
    let device = device(Isa::Portable, 2);
    let limits = dynair::Limits {
        max_tokens: 16,
        max_seqs: 2,
        max_outputs: 16,
    };
    let mut executor = compile(&device, &model.case, true, limits).expect("the decoder compiles");
    let good = Tables::new(&model.windows, BLOCK_TOKENS, BLOCKS, 2, 1).step(&[(0, &[1, 2, 3]), (1, &[4])]);
    let mut expected = Logits::default();
    let ticket = executor.submit(&good).expect("valid");
    executor.wait(ticket, &mut expected).expect("runs");
    type Break = fn(&mut BatchMeta);
    let breaks: [(&str, Break); 8] = [
        ("batch-token", |b| b.tokens[1] = 80),
        ("batch-position", |b| b.positions[2] = 5),
        ("batch-rows", |b| b.positions.truncate(2)),
        ("batch-outputs", |b| b.output_rows = vec![9]),
        ("batch-tables", |b| b.tables.truncate(1)),
        ("batch-blocks", |b| b.tables[0].blocks[0] = BlockId(BLOCKS as u32)),
        ("written-blocks", |b| {
            b.tables[1].blocks[1] = b.tables[1].blocks[0]
        }),
        ("batch-limits", |b| b.tokens.clear()),
    ];
    for (rule, spoil) in breaks {
        let mut bad = good.clone();
        spoil(&mut bad);
        let error = executor.submit(&bad).expect_err(rule).to_string();
        assert!(error.contains(rule), "expected rule {rule}, found: {error}");
    }
    let ticket = executor.submit(&good).expect("still valid");
    assert!(executor.submit(&good).is_err(), "one step in flight at a time");
    let mut again = Logits::default();
    assert!(executor.wait(Ticket(99), &mut again).is_err());
    executor.wait(ticket, &mut again).expect("runs");
    assert_eq!(again.data, expected.data);
}

#[test]
fn rows_of_logits_are_taken_once_each_where_they_lie_and_a_panic_ends_the_executor() {
    let model = Model::new(&Decoder::small(), KvType::F16);
    let limits = dynair::Limits {
        max_tokens: 16,
        max_seqs: 2,
        max_outputs: 16,
    };
    let batch = Tables::new(&model.windows, BLOCK_TOKENS, BLOCKS, 2, 1).step(&[(0, &[1, 2, 3]), (1, &[4])]);
    for threads in [1, 3] {
        let device = device(Isa::Portable, threads);
        let mut executor = compile(&device, &model.case, true, limits).expect("the decoder compiles");
        let mut expected = Logits::default();
        let ticket = executor.submit(&batch).expect("valid");
        executor.wait(ticket, &mut expected).expect("runs");
        let found = Arc::new(Mutex::new(vec![None; 4]));
        let keep = Arc::clone(&found);
        let take: Arc<TakeRow> = Arc::new(move |row, logits: &mut [f32]| {
            let kept = keep.lock().expect("nobody panics")[row].replace(logits.to_vec());
            assert_eq!(kept, None, "each row once");
            // Takers may change what they are given.
            logits.fill(f32::NAN);
        });
        assert!(executor.wait_rows(Ticket(99), &take).is_err());
        for _ in 0..2 {
            let ticket = executor.submit(&batch).expect("valid");
            executor.wait_rows(ticket, &take).expect("runs");
            let rows = std::mem::replace(&mut *found.lock().expect("nobody panics"), vec![None; 4]);
            let rows: Vec<f32> = rows.into_iter().flat_map(|r| r.expect("every row")).collect();
            assert_eq!(rows, expected.data, "{threads} threads");
        }
        let panics: Arc<TakeRow> = Arc::new(|row, _: &mut [f32]| assert!(row != 2, "told to panic"));
        let ticket = executor.submit(&batch).expect("valid");
        let error = executor
            .wait_rows(ticket, &panics)
            .expect_err("a row panics")
            .to_string();
        assert!(error.contains("told to panic"), "{error}");
        let error = executor
            .submit(&batch)
            .expect_err("the executor is done for")
            .to_string();
        assert!(error.contains("told to panic"), "{error}");
    }
}

#[test]
fn copied_blocks_serve_another_sequence() {
    let model = Model::new(
        &Decoder {
            window: None,
            ..Decoder::small()
        },
        KvType::F16,
    );
    let model = Model {
        windows: vec![None],
        ..model
    };
    let tokens: Vec<u32> = (0..20).collect();
    let limits = dynair::Limits {
        max_tokens: 32,
        max_seqs: 2,
        max_outputs: 32,
    };
    let device = device(Isa::Portable, 2);
    let mut executor = compile(&device, &model.case, true, limits).expect("the decoder compiles");
    let mut logits = Logits::default();
    let mut tables = Tables::new(&model.windows, BLOCK_TOKENS, BLOCKS, 1, 1);
    let mut step = |batch: &BatchMeta| {
        let ticket = executor.submit(batch).expect("valid");
        executor.wait(ticket, &mut logits).expect("runs");
        logits.data.clone()
    };
    step(&tables.step(&[(0, &tokens[..19])]));
    let next = tables.step(&[(0, &tokens[19..])]);
    let mut elsewhere = next.clone();
    let old = elsewhere.tables[0].blocks.clone();
    elsewhere.tables[0].blocks = vec![BlockId(62), BlockId(63)];
    elsewhere.tables[0].copies = vec![(old[0], BlockId(62)), (old[1], BlockId(63))];
    assert_eq!(step(&elsewhere), step(&next));
}

#[test]
fn options_are_honoured_or_refused() {
    assert_eq!(device(Isa::Portable, 3).info().units, 3);
    assert_eq!(device(Isa::Portable, 1).info().isa, "portable");
    for threads in [0, MAX_THREADS + 1] {
        let options = CpuOptions {
            threads: Some(threads),
            ..CpuOptions::default()
        };
        let error = CpuDevice::new(&options).expect_err("no such count").to_string();
        assert!(error.starts_with("threads: found `"), "{error}");
    }
    let options = CpuOptions {
        isa: Some("sse9".into()),
        ..CpuOptions::default()
    };
    assert!(CpuDevice::new(&options).is_err());
    let device = device(Isa::Portable, 1);
    let decl = CacheDecl::Kv {
        num_kv_heads: 1,
        head_dim: 80,
        window: None,
        group: 0,
    };
    let geometry = |kind, block_tokens, blocks| KvGeometry {
        kind,
        block_tokens,
        blocks: vec![blocks],
    };
    assert!(device.alloc_kv(&[decl], &geometry(KvType::F16, 16, 2)).is_ok());
    for (bad, word) in [
        (geometry(KvType::Q8_0, 16, 2), "head size 80"),
        (geometry(KvType::F16, 12, 2), "multiple of 16"),
        (geometry(KvType::F16, 16, usize::MAX / 64), "cannot allocate"),
    ] {
        let error = device.alloc_kv(&[decl], &bad).expect_err("refused").to_string();
        assert!(error.contains(word), "expected `{word}` in: {error}");
    }
}

#[test]
fn notes_of_steps_name_the_table_and_the_layout_that_loading_gives() {
    for isa in isas() {
        let device = device(isa, 1);
        for case in short() {
            let plan =
                dynair::plan(case.graph.clone(), &device, crate::self_test::limits(&case)).expect("it plans");
            let usage = crate::device::weight_usage(&plan);
            for step in &plan.steps {
                let note = device.step_note(&plan, step, &usage);
                assert!(note.kernel.ends_with(&format!("@{isa}")), "{note}");
                let matrices = step.inputs.iter().filter_map(|operand| match operand {
                    Operand::Weight(id) => Some(id.0 as usize),
                    _ => None,
                });
                for id in matrices.filter(|&id| usage[id].linear || usage[id].embed) {
                    let decl = &plan.weights[id];
                    let bytes = WeightBytes::Owned(case.tensors.bytes(decl));
                    let tensor = device.load_weight(decl, &bytes, usage[id]).expect("it loads");
                    assert_eq!(note.layout, Some(tensor.layout), "{}: {note}", step.label);
                }
            }
        }
    }
}
