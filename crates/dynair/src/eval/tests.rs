//! Known values and limits of the evaluator.

use super::*;
use crate::graph::CacheDecl;
use crate::op::{Activation, AttnSpec, ExpertWeights, RopeScaling, RopeStyle, RouterSpec};
use crate::testing::{Rng, caches, steps};

fn eval(op: Op, inputs: &[Arg<'_>]) -> Vec<f32> {
    let batch = steps(1).remove(0);
    let mut ctx = Context {
        batch: &batch,
        caches: &mut Caches { layers: Vec::new() },
    };
    eval_op(&op, inputs, &mut ctx).expect("evaluates").remove(0).data
}

fn close(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() <= 1e-9 * expected.abs().max(1e-6),
        "found {found}, expected {expected}"
    );
}

#[test]
fn activations_have_their_known_values() {
    close(activate(Activation::Silu, 1.0), 0.731_058_578_630_004_9);
    close(activate(Activation::Gelu, 1.0), 0.841_344_746_068_542_9);
    close(activate(Activation::Gelu, -3.0), -0.004_049_694_094_890_3);
    close(activate(Activation::GeluTanh, 1.0), 0.841_191_990_608_306_5);
    close(activate(Activation::Relu, -2.0), 0.0);
    assert_eq!(activate(Activation::Gelu, 40.0), 40.0);
    assert_eq!(activate(Activation::Gelu, -40.0), 0.0);
}

#[test]
fn linear_is_a_product_with_the_transposed_weight() {
    let x = Array::new(&[2, 3], vec![1.0, 2.0, 3.0, -1.0, 0.0, 0.5]);
    let w = Array::new(&[2, 3], vec![1.0, 0.0, -1.0, 2.0, 2.0, 2.0]);
    let b = Array::new(&[2], vec![10.0, -10.0]);
    assert_eq!(
        eval(Op::Linear, &[Arg::Array(&x), Arg::Array(&w)]),
        [-2.0, 12.0, -1.5, -1.0]
    );
    let with_bias = eval(Op::Linear, &[Arg::Array(&x), Arg::Array(&w), Arg::Array(&b)]);
    assert_eq!(with_bias, [8.0, 2.0, 8.5, -11.0]);
}

#[test]
fn a_sum_that_f32_would_lose_is_kept() {
    let x = Array::new(&[1, 3], vec![1e8, 1.0, -1e8]);
    let w = Array::new(&[3], vec![1.0, 1.0, 1.0]);
    assert_eq!(eval(Op::Linear, &[Arg::Array(&x), Arg::Array(&w)]), [1.0]);
}

#[test]
fn rms_norm_divides_by_the_root_of_the_mean_square() {
    let x = Array::new(&[1, 4], vec![2.0, -2.0, 2.0, -2.0]);
    let w = Array::new(&[4], vec![1.0, 1.0, 3.0, 0.0]);
    let out = eval(Op::RmsNorm { eps: 0.0 }, &[Arg::Array(&x), Arg::Array(&w)]);
    assert_eq!(out, [1.0, -1.0, 3.0, 0.0]);
}

#[test]
fn rope_turns_the_right_pairs_and_leaves_the_rest() {
    let spec = |style| RopeSpec {
        style,
        dims: 4,
        theta: 100.0,
        scaling: RopeScaling::None,
    };
    // Positions of the step's first sequence are 0, 1, ..; row 1 has position 1. Frequencies 1 and 0.1.
    let mut x = vec![0.0; 10 * 5];
    x[5..10].copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0]);
    let x = Array::new(&[10, 1, 5], x);
    let turn = |a: f64, b: f64, angle: f64| {
        (
            (a * angle.cos() - b * angle.sin()) as f32,
            (a * angle.sin() + b * angle.cos()) as f32,
        )
    };
    let ((a, b), (c, d)) = (turn(1.0, 2.0, 1.0), turn(3.0, 4.0, 0.1));
    let out = eval(
        Op::Rope(spec(RopeStyle::Interleaved)),
        &[Arg::Array(&x), Arg::Positions],
    );
    assert_eq!(out[5..10], [a, b, c, d, 5.0]);
    let ((a, c), (b, d)) = (turn(1.0, 3.0, 1.0), turn(2.0, 4.0, 0.1));
    let out = eval(Op::Rope(spec(RopeStyle::Half)), &[Arg::Array(&x), Arg::Positions]);
    assert_eq!(out[5..10], [a, b, c, d, 5.0]);
}

#[test]
fn yarn_keeps_fast_frequencies_and_stretches_slow_ones() {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 32768,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 1.0,
    };
    let spec = RopeSpec {
        style: RopeStyle::Half,
        dims: 128,
        theta: 1e6,
        scaling: yarn,
    };
    let plain = RopeSpec {
        scaling: RopeScaling::None,
        ..spec
    };
    let linear = RopeSpec {
        scaling: RopeScaling::Linear { factor: 4.0 },
        ..spec
    };
    let [ours, own, stretched] = [spec, plain, linear].map(|s| rope_angles(&s, None, 1));
    assert_eq!(ours[0], own[0]);
    assert_eq!(ours[63], stretched[63]);
    // In between: 128·ln(32768/(32·2π))/(2·ln 1e6) = 23.6 and 39.6, so pair 31 lies half way from 23 to 40.
    let share = (31.0 - 23.0) / (40.0 - 23.0);
    let angle = ours[31].1.atan2(ours[31].0);
    let expected = 1e6f64.powf(-62.0 / 128.0) * (share / 4.0 + 1.0 - share);
    close(angle, expected);
    // Frequency factors divide.
    let factors = vec![2.0; 64];
    let halved = rope_angles(&plain, Some(&factors), 2);
    assert_eq!(halved[5], own[5]);
}

#[test]
fn attention_of_equal_scores_averages_its_window() {
    let batch = steps(1).remove(0);
    let decl = CacheDecl::Kv {
        num_kv_heads: 1,
        head_dim: 2,
        window: Some(3),
        group: 0,
    };
    let mut caches = caches(&[decl]);
    let k = Array::new(&[10, 1, 2], vec![0.0; 20]);
    // Value of the token at position p of sequence s: (p, s).
    let v = (0..7)
        .map(|p| [p as f32, 0.0])
        .chain((0..3).map(|p| [p as f32, 1.0]))
        .flatten()
        .collect();
    let v = Array::new(&[10, 1, 2], v);
    let mut ctx = Context {
        batch: &batch,
        caches: &mut caches,
    };
    let write = [Arg::Cache(CacheId(0)), Arg::Array(&k), Arg::Array(&v), Arg::Batch];
    assert!(
        eval_op(&Op::KvWrite, &write, &mut ctx)
            .expect("evaluates")
            .is_empty()
    );
    let q = Rng(3).array(&[10, 2, 2]);
    let mut spec = AttnSpec {
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 2,
        scale: 1.0,
        sliding_window: Some(3),
        softcap: None,
    };
    let read = [Arg::Array(&q), Arg::Cache(CacheId(0)), Arg::Batch];
    let out = eval_op(&Op::Attention(spec), &read, &mut ctx)
        .expect("evaluates")
        .remove(0);
    let row = |out: &Array, r: usize| out.data[r * 4..r * 4 + 4].to_vec();
    assert_eq!(row(&out, 0), [0.0, 0.0, 0.0, 0.0]);
    assert_eq!(row(&out, 6), [5.0, 0.0, 5.0, 0.0]);
    assert_eq!(row(&out, 9), [1.0, 1.0, 1.0, 1.0]);
    spec.sliding_window = None;
    let out = eval_op(&Op::Attention(spec), &read, &mut ctx)
        .expect("evaluates")
        .remove(0);
    assert_eq!(row(&out, 6), [3.0, 0.0, 3.0, 0.0]);
}

fn routed(logits: &[f32], used: usize, weights: ExpertWeights) -> (Vec<f32>, Vec<f32>) {
    let batch = steps(1).remove(0);
    let mut ctx = Context {
        batch: &batch,
        caches: &mut Caches { layers: Vec::new() },
    };
    let spec = RouterSpec {
        experts: logits.len(),
        experts_used: used,
        weights,
    };
    let logits = Array::new(&[1, logits.len()], logits.to_vec());
    let mut out = eval_op(&Op::Route(spec), &[Arg::Array(&logits)], &mut ctx).expect("evaluates");
    let weights = out.remove(1).data;
    (out.remove(0).data, weights)
}

#[test]
fn a_router_takes_the_largest_logits_in_order() {
    let used = ExpertWeights::SoftmaxUsed;
    let ln = |x: f32| x.ln();
    let (ids, weights) = routed(&[ln(1.0), ln(4.0), ln(2.0), ln(1.0)], 2, used);
    assert_eq!(ids, [1.0, 2.0]);
    close(f64::from(weights[0]), f64::from(2.0f32 / 3.0));
    assert!((weights[0] + weights[1] - 1.0).abs() < 1e-6);
    let (_, weights) = routed(
        &[ln(1.0), ln(4.0), ln(2.0), ln(1.0)],
        2,
        ExpertWeights::SoftmaxAll,
    );
    assert!((weights[0] - 0.5).abs() < 1e-6 && (weights[1] - 0.25).abs() < 1e-6);
    // Equal logits: the lower number. NaN: last of all. Large logits do not overflow.
    assert_eq!(routed(&[3.0, 7.0, 7.0, 3.0], 3, used).0, [1.0, 2.0, 0.0]);
    assert_eq!(routed(&[f32::NAN, -1e30, 1e30], 2, used).0, [2.0, 1.0]);
    assert_eq!(routed(&[f32::NAN, -1e30, 1e30], 2, used).1, [1.0, 0.0]);
    assert_eq!(routed(&[5.0], 1, used), (vec![0.0], vec![1.0]));
}

#[test]
fn experts_use_their_own_matrices() {
    // Two experts of inner size 1 on rows of 2.
    let x = Array::new(&[2, 2], vec![1.0, 2.0, 3.0, 4.0]);
    let ids = Array::new(&[2, 2], vec![1.0, 0.0, 0.0, 1.0]);
    let gate = Array::new(&[2, 1, 2], vec![1.0, 0.0, 0.0, 1.0]);
    let up = Array::new(&[2, 1, 2], vec![1.0, 1.0, 2.0, 0.0]);
    let glu = eval(
        Op::ExpertGlu(Activation::Relu),
        &[
            Arg::Array(&x),
            Arg::Array(&ids),
            Arg::Array(&gate),
            Arg::Array(&up),
        ],
    );
    assert_eq!(glu, [2.0 * 2.0, 1.0 * 3.0, 3.0 * 7.0, 4.0 * 6.0]);
    let h = Array::new(&[2, 2, 1], glu);
    let weights = Array::new(&[2, 2], vec![0.5, 0.25, 1.0, 0.0]);
    let down = Array::new(&[2, 2, 1], vec![1.0, -1.0, 10.0, 20.0]);
    let out = eval(
        Op::ExpertDown,
        &[
            Arg::Array(&h),
            Arg::Array(&ids),
            Arg::Array(&weights),
            Arg::Array(&down),
        ],
    );
    assert_eq!(out, [20.0 + 0.75, 40.0 - 0.75, 21.0, -21.0]);
}

#[test]
fn a_softcap_bounds_the_scores() {
    let batch = steps(1).remove(0);
    let decl = CacheDecl::Kv {
        num_kv_heads: 1,
        head_dim: 1,
        window: None,
        group: 0,
    };
    let mut caches = caches(&[decl]);
    let mut k = Array::new(&[10, 1, 1], vec![0.0; 10]);
    k.data[1] = 1000.0;
    let v = k.clone();
    let mut ctx = Context {
        batch: &batch,
        caches: &mut caches,
    };
    let write = [Arg::Cache(CacheId(0)), Arg::Array(&k), Arg::Array(&v), Arg::Batch];
    eval_op(&Op::KvWrite, &write, &mut ctx).expect("evaluates");
    let q = Array::new(&[10, 1, 1], vec![1.0; 10]);
    let spec = AttnSpec {
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 1,
        scale: 1.0,
        sliding_window: None,
        softcap: Some(2.0),
    };
    let read = [Arg::Array(&q), Arg::Cache(CacheId(0)), Arg::Batch];
    let out = eval_op(&Op::Attention(spec), &read, &mut ctx)
        .expect("evaluates")
        .remove(0);
    let expected = 1000.0 * 2f64.exp() / (2f64.exp() + 1.0);
    assert_eq!(out.data[1], expected as f32);
}

#[test]
fn wrong_inputs_are_errors() {
    let batch = steps(1).remove(0);
    let mut caches = Caches { layers: Vec::new() };
    let mut ctx = Context {
        batch: &batch,
        caches: &mut caches,
    };
    let (a, b) = (Array::new(&[2], vec![1.0, 2.0]), Array::new(&[3], vec![1.0; 3]));
    let mut fails = |op: Op, args: &[Arg<'_>]| {
        assert!(
            matches!(eval_op(&op, args, &mut ctx), Err(Error::BadInput { .. })),
            "{op:?}"
        );
    };
    fails(Op::Add, &[Arg::Array(&a), Arg::Array(&b)]);
    fails(Op::Add, &[Arg::Array(&a)]);
    fails(Op::Linear, &[Arg::Array(&a), Arg::Array(&b)]);
    fails(Op::RmsNorm { eps: 0.0 }, &[Arg::Array(&a), Arg::Array(&b)]);
    fails(Op::Tokens, &[]);
    fails(
        Op::KvWrite,
        &[Arg::Cache(CacheId(0)), Arg::Array(&a), Arg::Array(&a), Arg::Batch],
    );
}
