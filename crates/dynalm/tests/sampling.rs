//! The rows of a step are sampled by the device's workers, and nothing shows it: the same tokens and log-probabilities, to
//! the bit, as one row after another gives, whatever the number of workers; and a row that fails leaves the others alone.

use std::sync::{Arc, Mutex};

use dynacore::cpu::{CpuDevice, CpuOptions};
use dynacore::self_test::decoder::{Decoder, Tables};
use dynacore::self_test::geometry;
use dynacore::{Device, Executor, KvType, Logits, TakeRow, WeightBytes, weight_usage};
use dynair::{BatchMeta, Limits};
use dynalm::sample::params::{SamplingParams, TokenId};
use dynalm::sample::{RowError, RowOutcome, RowTask, RowsFault, SampleError, Sampler, StepRows};

/// Rows of a step, one of each sequence.
const ROWS: usize = 12;
/// Steps.
const STEPS: usize = 6;
const BLOCK_TOKENS: usize = 16;
/// The row whose mask allows nothing.
const NOTHING: usize = 3;
/// The row whose sampler panics: parameters that validation refuses have none of its promises.
const BROKEN: usize = 7;
/// The row nobody needs.
const UNNEEDED: usize = 9;

type Outcome = Option<Result<RowOutcome, RowError>>;

/// A random decoder on a CPU device of `threads` workers.
fn executor(threads: usize) -> Box<dyn Executor> {
    let device = CpuDevice::new(&CpuOptions {
        threads: Some(threads),
        ..CpuOptions::default()
    })
    .expect("a CPU");
    let (graph, tensors) = Decoder {
        window: None,
        ..Decoder::small()
    }
    .build(7);
    let limits = Limits {
        max_tokens: ROWS,
        max_seqs: ROWS,
        max_outputs: ROWS,
    };
    let plan = dynair::plan(graph.clone(), &device, limits).expect("the device has every op");
    let weights = plan.weights.iter().zip(weight_usage(&plan)).map(|(decl, usage)| {
        let bytes = WeightBytes::Owned(tensors.bytes(decl));
        device.load_weight(decl, &bytes, usage).expect("memory")
    });
    let weights = weights.collect();
    let kv = device
        .alloc_kv(&plan.caches, &geometry(&graph, KvType::F16, BLOCK_TOKENS, ROWS))
        .expect("memory");
    device.compile(plan, weights, kv).expect("the plan compiles")
}

/// Samplers of all kinds, one per row.
fn samplers() -> Vec<Arc<Mutex<Sampler>>> {
    let params = |row: usize| SamplingParams {
        temperature: match row {
            BROKEN => f32::NAN,
            row if row % 3 == 0 => 0.0,
            _ => 0.9,
        },
        top_k: if row % 4 == 1 { 20 } else { 0 },
        top_p: if row.is_multiple_of(2) { 0.9 } else { 1.0 },
        repetition_penalty: if row.is_multiple_of(5) { 1.2 } else { 1.0 },
        seed: row as u64,
        logprobs: row.is_multiple_of(2).then_some(3),
        ..SamplingParams::default()
    };
    (0..ROWS)
        .map(|row| Arc::new(Mutex::new(Sampler::new(params(row), &[row as u32]))))
        .collect()
}

fn tasks(samplers: &[Arc<Mutex<Sampler>>]) -> Vec<Option<RowTask>> {
    let task = |row: usize| match row {
        UNNEEDED => None,
        // Scores the prompt.
        5 => Some(RowTask::Score { token: 11, top: 4 }),
        _ => Some(RowTask::Draw {
            sampler: Arc::clone(&samplers[row]),
            excluded: row.is_multiple_of(3).then(|| Arc::from([0, 1, 2, 3])),
            mask: match row {
                NOTHING => Some(Arc::from([])),
                // Every third token.
                row if row % 4 == 2 => Some(Arc::from([0x4924_9249, 0x9249_2492, 0x2492_4924])),
                _ => None,
            },
        }),
    };
    (0..ROWS).map(task).collect()
}

/// One step of a token for every sequence; the tokens of the rows that drew none are made up.
fn batch(tables: &mut Tables, tokens: &[TokenId]) -> BatchMeta {
    let rows: Vec<(usize, &[u32])> = (0..ROWS).map(|s| (s, &tokens[s..s + 1])).collect();
    tables.step(&rows)
}

/// What comes of all rows of some steps, each fed with the tokens the step before gave. `sample` runs a step.
fn outcomes(mut sample: impl FnMut(&BatchMeta, Arc<StepRows>)) -> Vec<Vec<Outcome>> {
    let samplers = samplers();
    let mut tables = Tables::new(&[None], BLOCK_TOKENS, ROWS, ROWS, 1);
    let mut tokens: Vec<TokenId> = (0..ROWS as u32).collect();
    let mut steps = Vec::new();
    for _ in 0..STEPS {
        let rows = Arc::new(StepRows::new(Decoder::small().vocab_size, tasks(&samplers)));
        sample(&batch(&mut tables, &tokens), Arc::clone(&rows));
        let step: Vec<Outcome> = (0..ROWS).map(|row| rows.outcome(row)).collect();
        for (token, outcome) in tokens.iter_mut().zip(&step) {
            if let Some(Ok(RowOutcome::Drawn(drawn))) = outcome {
                *token = drawn.token;
            }
        }
        steps.push(step);
    }
    steps
}

/// One row after another, on this thread.
fn serial() -> Vec<Vec<Outcome>> {
    let mut executor = executor(1);
    let mut logits = Logits::default();
    outcomes(|batch, rows| {
        let ticket = executor.submit(batch).expect("a valid step");
        executor.wait(ticket, &mut logits).expect("the step runs");
        // Backwards: the order must not matter.
        let all = logits.data.chunks_exact_mut(logits.vocab).enumerate();
        all.rev().for_each(|(row, logits)| rows.take(row, logits));
    })
}

#[test]
fn workers_draw_what_one_row_after_another_draws() {
    let expected = serial();
    for threads in [1, 2, 3, 8] {
        let mut executor = executor(threads);
        let found = outcomes(|batch, rows| {
            let ticket = executor.submit(batch).expect("a valid step");
            let taken = Arc::clone(&rows);
            let take: Arc<TakeRow> = Arc::new(move |row, logits: &mut [f32]| rows.take(row, logits));
            executor
                .wait_rows(ticket, &take)
                .expect("the step runs, and no row fails it");
            taken.check().expect("every row came as it should");
        });
        assert_eq!(found, expected, "{threads} threads");
    }
}

#[test]
fn a_row_that_fails_leaves_the_others_alone() {
    for step in serial() {
        assert_eq!(
            step[NOTHING],
            Some(Err(RowError::Sample(SampleError::NothingAllowed)))
        );
        assert!(
            matches!(step[BROKEN], Some(Err(RowError::Panic(_)))),
            "{:?}",
            step[BROKEN]
        );
        assert_eq!(step[UNNEEDED], None);
        assert!(matches!(step[5], Some(Ok(RowOutcome::Scored(_)))));
        let drawn = step
            .iter()
            .filter(|o| matches!(o, Some(Ok(RowOutcome::Drawn(_)))));
        assert_eq!(drawn.count(), ROWS - 4);
    }
}

#[test]
fn rows_that_are_not_finite_or_not_asked_for_give_no_token() {
    let tasks = tasks(&samplers());
    let rows = StepRows::new(64, tasks);
    rows.take(0, &mut [0.0; 63]);
    assert_eq!(rows.outcome(0), None, "a row of another length is not taken");
    rows.take(0, &mut [f32::NAN; 64]);
    rows.take(5, &mut [f32::INFINITY; 64]);
    rows.take(ROWS, &mut [0.0; 64]);
    let broken = Some(Err(RowError::Sample(SampleError::NotFinite)));
    assert_eq!((rows.outcome(0), rows.outcome(5)), (broken.clone(), broken));
    assert_eq!((rows.outcome(1), rows.outcome(ROWS)), (None, None));
}

#[test]
fn a_sampler_draws_once_in_a_step_or_not_at_all() {
    let logits: Vec<f32> = (0..64).map(|i| (i * 37 % 64) as f32).collect();
    let samplers = samplers();
    let of = |samplers: &[Arc<Mutex<Sampler>>]| tasks(samplers)[..3].to_vec();
    let mut shared = of(&samplers);
    // Another row of the sequence of row 0.
    shared[1] = shared[0].clone();
    let draw = |tasks: Vec<Option<RowTask>>| {
        let rows = StepRows::new(64, tasks);
        (0..3).rev().for_each(|row| rows.take(row, &mut logits.clone()));
        rows.check().expect("all rows were given");
        [0, 1, 2].map(|row| rows.outcome(row).expect("an outcome"))
    };
    let both = Err(RowError::SharedSampler(2));
    let [a, b, c] = draw(shared);
    assert_eq!((a, b), (both.clone(), both));
    assert!(c.is_ok(), "{c:?}");
    // The sampler has drawn nothing: its next draw is the first of one that was never shared.
    assert_eq!(draw(of(&samplers))[0], draw(of(&self::samplers()))[0]);
}

#[test]
fn a_device_that_gives_other_rows_than_asked_for_is_found_out() {
    let given = |rows: &[(usize, usize)]| {
        let step = StepRows::new(64, tasks(&samplers())[..3].to_vec());
        rows.iter()
            .for_each(|&(row, columns)| step.take(row, &mut vec![1.0; columns]));
        step.check()
    };
    assert_eq!(given(&[(2, 64), (0, 64), (1, 64)]), Ok(()));
    for (rows, fault, said) in [
        (
            &[(0, 64), (2, 64)][..],
            RowsFault::Missing {
                given: 2,
                rows: 3,
                row: 1,
            },
            "2 of 3 output rows; the first that is missing is row 1",
        ),
        (
            &[(0, 64), (1, 63), (2, 64)],
            RowsFault::Size {
                row: 1,
                found: 63,
                expected: 64,
            },
            "63 logits in output row 1, where the vocabulary has 64",
        ),
        (
            &[(0, 64), (1, 64), (2, 64), (3, 64)],
            RowsFault::Unknown { row: 3, rows: 3 },
            "output row 3 of a step with 3",
        ),
        (
            &[(0, 64), (1, 64), (2, 64), (1, 64)],
            RowsFault::Twice { row: 1 },
            "output row 1 twice",
        ),
    ] {
        assert!(fault.to_string().contains(said), "{fault}");
        assert_eq!(given(rows), Err(fault));
    }
}
