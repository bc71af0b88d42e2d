//! The sampling chain against sorting, plain loops and the documented distributions.

use proptest::prelude::*;

use super::chain::{GREEDY_BELOW, SampleError, Sampler, TokenMask};
use super::math::{self, Candidate};
use super::params::SamplingParams;
use super::{logprobs, rng};

/// A row with a few likely tokens in a long tail.
fn row(vocab: usize, seed: u64) -> Vec<f32> {
    (0..vocab as u64)
        .map(|i| {
            let u = (rng::bits(seed, i) >> 40) as f32 / (1u64 << 24) as f32;
            12.0 * u.powi(8) - 3.0
        })
        .collect()
}

fn params(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams::default();
    change(&mut params);
    params
}

fn draw(params: &SamplingParams, logits: &[f32]) -> u32 {
    Sampler::new(params.clone(), &[])
        .sample(&mut logits.to_vec(), None)
        .unwrap()
        .token
}

/// How often each token comes in `n` draws.
fn frequencies(params: &SamplingParams, logits: &[f32], n: u64) -> Vec<f64> {
    let mut counts = vec![0.0; logits.len()];
    for seed in 0..n {
        counts[draw(
            &SamplingParams {
                seed,
                ..params.clone()
            },
            logits,
        ) as usize] += 1.0 / n as f64;
    }
    counts
}

/// The distribution the documented order of filters leaves, by sorting and f64.
fn naive(params: &SamplingParams, logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut all: Vec<(usize, f64)> = logits
        .iter()
        .enumerate()
        .map(|(i, &x)| (i, (f64::from(x - max) / f64::from(params.temperature)).exp()))
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if params.top_k > 0 {
        all.truncate(params.top_k as usize);
    }
    let cut = |set: &mut Vec<(usize, f64)>, p: f64| {
        let total: f64 = set.iter().map(|x| x.1).sum();
        let mut mass = 0.0;
        let mut more = |x: &&(usize, f64)| {
            let enough = mass >= p * total;
            mass += x.1;
            !enough
        };
        let kept = set.iter().take_while(&mut more).count();
        set.truncate(kept.max(1));
    };
    if params.typical_p < 1.0 {
        let total: f64 = all.iter().map(|x| x.1).sum();
        let entropy: f64 = all.iter().map(|x| x.1 / total).map(|p| -p * p.ln()).sum();
        all.sort_by(|a, b| {
            let distance = |x: f64| (-(x / total).ln() - entropy).abs();
            distance(a.1).total_cmp(&distance(b.1)).then(a.0.cmp(&b.0))
        });
        cut(&mut all, f64::from(params.typical_p));
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    }
    if params.top_p < 1.0 {
        cut(&mut all, f64::from(params.top_p));
    }
    let best = all[0].1;
    all.retain(|x| x.1 >= f64::from(params.min_p) * best);
    let total: f64 = all.iter().map(|x| x.1).sum();
    let mut out = vec![0.0; logits.len()];
    all.iter().for_each(|x| out[x.0] = x.1 / total);
    out
}

#[test]
fn draws_follow_the_documented_distribution() {
    let logits = row(40, 5);
    let cases = [
        params(|_| {}),
        params(|p| p.temperature = 0.6),
        params(|p| p.top_k = 5),
        params(|p| p.top_p = 0.8),
        params(|p| p.min_p = 0.1),
        params(|p| p.typical_p = 0.7),
        params(|p| (p.temperature, p.top_k, p.typical_p, p.top_p, p.min_p) = (1.5, 20, 0.9, 0.9, 0.05)),
        params(|p| (p.temperature, p.top_p) = (3.0, 0.95)),
    ];
    for case in cases {
        let want = naive(&case, &logits);
        let got = frequencies(&case, &logits, 4000);
        for (i, (want, got)) in want.iter().zip(&got).enumerate() {
            assert!(
                (want == &0.0) == (got == &0.0) || *want < 2e-3,
                "{case:?}: token {i}: {got} for {want}"
            );
            // Four standard deviations of 4000 draws.
            assert!(
                (want - got).abs() < 4.0 * (want / 4000.0).sqrt() + 1e-3,
                "{case:?}: token {i}: {got} for {want}"
            );
        }
    }
}

#[test]
fn tiny_temperatures_are_greedy() {
    let mut logits = row(1000, 1);
    logits[321] = 9.5;
    logits[322] = 9.499;
    for temperature in [0.0, 1e-30, 1e-5, 3e-4, GREEDY_BELOW / 2.0, f32::MIN_POSITIVE] {
        for seed in 0..20 {
            assert_eq!(
                draw(
                    &params(|p| (p.temperature, p.seed) = (temperature, seed)),
                    &logits
                ),
                321
            );
        }
    }
}

#[test]
fn edges_mean_off_or_greedy() {
    let logits = row(500, 2);
    let greedy = draw(&params(|p| p.temperature = 0.0), &logits);
    for seed in 0..50 {
        let with = |change: fn(&mut SamplingParams)| {
            draw(
                &params(|p| {
                    p.seed = seed;
                    change(p);
                }),
                &logits,
            )
        };
        let plain = with(|_| {});
        assert_eq!(with(|p| p.top_k = 500), plain);
        assert_eq!(with(|p| p.top_k = 1_000_000_000), plain);
        assert_eq!(with(|p| p.top_p = 1.0), plain);
        assert_eq!(with(|p| p.top_k = 1), greedy);
        assert_eq!(with(|p| p.top_p = 0.0), greedy);
        assert_eq!(with(|p| p.top_p = 1e-9), greedy);
        assert_eq!(with(|p| p.min_p = 1.0), greedy);
    }
}

#[test]
fn the_lowest_id_wins_a_tie() {
    let mut logits = vec![0.0; 3000];
    logits[2999] = 5.0;
    logits[1024] = 5.0;
    logits[1500] = 5.0;
    assert_eq!(math::argmax(&logits), Some((1024, 5.0)));
    assert_eq!(draw(&params(|p| p.top_k = 1), &logits), 1024);
    let top = logprobs::score(&logits, 0, 3).unwrap().top;
    assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1024, 1500, 2999]);
}

#[test]
fn a_seed_gives_the_same_draws_everywhere() {
    // Made by an independent program from the documented formulas, with Python's integers and doubles.
    let logits: Vec<f32> = (0..64u16).map(|i| f32::from((i * 37) % 64) / 16.0).collect();
    let mut sampler = Sampler::new(params(|p| p.seed = 42), &[]);
    let mut drawn = Vec::new();
    for _ in 0..8 {
        let token = sampler.sample(&mut logits.clone(), None).unwrap().token;
        assert_eq!(
            sampler.sample(&mut logits.clone(), None).unwrap().token,
            token,
            "not accepted: not moved on"
        );
        sampler.accept(token);
        drawn.push(token);
    }
    assert_eq!(rng::bits(0, 0), EXPECTED_BITS);
    assert_eq!(drawn, EXPECTED_DRAWS);
}

const EXPECTED_BITS: u64 = 5_197_578_548_964_807_871;
const EXPECTED_DRAWS: [u32; 8] = [43, 22, 61, 31, 5, 43, 5, 13];

#[test]
fn seeds_and_positions_give_different_draws() {
    let logits = vec![0.0; 10_000];
    let mut seen = std::collections::HashSet::new();
    for seed in 0..50 {
        let mut sampler = Sampler::new(params(|p| p.seed = seed), &[]);
        for _ in 0..20 {
            let token = sampler.sample(&mut logits.clone(), None).unwrap().token;
            sampler.accept(token);
            seen.insert(token);
        }
    }
    assert!(seen.len() > 900, "{} of 1000 draws differ", seen.len());
}

#[test]
fn bias_is_added() {
    let logits = row(300, 3);
    let greedy = draw(&params(|p| p.temperature = 0.0), &logits);
    let banned = params(|p| (p.temperature, p.logit_bias) = (0.0, vec![(greedy, -100.0)]));
    assert_ne!(draw(&banned, &logits), greedy);
    let forced = params(|p| p.logit_bias = vec![(299, 100.0)]);
    assert_eq!(draw(&forced, &logits), 299);
    let shifted = params(|p| (p.temperature, p.logprobs, p.logit_bias) = (0.0, Some(2), vec![(greedy, 0.5)]));
    let before = logprobs::score(&logits, greedy, 0).unwrap().logprob;
    let sampled = Sampler::new(shifted, &[])
        .sample(&mut logits.clone(), None)
        .unwrap();
    let after = sampled.logprobs.unwrap().logprob;
    // log p changes by 0.5 − log(1 + p (e^0.5 − 1)).
    let expected = 0.5 - (before.exp() * (0.5f32.exp() - 1.0)).ln_1p();
    assert!(
        (after - before - expected).abs() < 1e-4,
        "{before} {after} {expected}"
    );
}

#[test]
fn penalties_follow_the_history() {
    let p = params(|p| {
        (
            p.repetition_penalty,
            p.repetition_window,
            p.presence_penalty,
            p.frequency_penalty,
        ) = (2.0, 3, 0.5, 0.25);
    });
    let mut penalties = super::penalty::Penalties::new(&p, &[0, 1]);
    [2, 2, 3].into_iter().for_each(|token| penalties.accept(token));
    // The window holds 2, 2, 3; the reply too; 0 and 1 have left the window and were never in the reply.
    let mut logits = vec![4.0, 4.0, 4.0, -4.0, 4.0];
    penalties.apply(&mut logits);
    assert_eq!(logits, [4.0, 4.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 4.0]);
    assert!(super::penalty::Penalties::new(&SamplingParams::default(), &[1, 2]).is_off());
}

#[test]
fn a_mask_excludes_and_logprobs_stay_those_of_the_model() {
    let logits = row(100, 4);
    let mut words = [0u32; 4];
    words[1] = 1 << 5;
    let p = params(|p| p.logprobs = Some(1));
    let sampled = Sampler::new(p.clone(), &[])
        .sample(&mut logits.clone(), Some(TokenMask(&words)))
        .unwrap();
    assert_eq!(sampled.token, 37);
    assert_eq!(
        sampled.logprobs.unwrap(),
        logprobs::score(&logits, 37, 1).unwrap()
    );
    let nothing = Sampler::new(p, &[]).sample(&mut logits.clone(), Some(TokenMask(&[])));
    assert_eq!(nothing, Err(SampleError::NothingAllowed));
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let refused = |field: &str, p: SamplingParams| {
        let error = p.validate(1000).unwrap_err();
        assert!(
            matches!(&error, crate::Error::Request { param: Some(param), .. } if param == field),
            "{error}"
        );
    };
    for value in [-1.0, 5e8, f32::NAN, f32::INFINITY] {
        refused("temperature", params(|p| p.temperature = value));
        refused("top_p", params(|p| p.top_p = value));
        refused("min_p", params(|p| p.min_p = value));
        refused("typical_p", params(|p| p.typical_p = value));
        refused("repetition_penalty", params(|p| p.repetition_penalty = value));
        refused("presence_penalty", params(|p| p.presence_penalty = value * 3.0));
        refused("frequency_penalty", params(|p| p.frequency_penalty = value * 3.0));
        refused("logit_bias", params(|p| p.logit_bias = vec![(0, value * 1000.0)]));
    }
    refused("logit_bias", params(|p| p.logit_bias = vec![(1000, 0.0)]));
    refused("typical_p", params(|p| p.typical_p = 0.0));
    refused("top_logprobs", params(|p| p.logprobs = Some(1001)));
    let many = params(|p| p.logit_bias = (0..5000).map(|i| (i % 1000, 1.0)).collect());
    assert!(many.validate(1000).is_ok());
    assert!(SamplingParams::default().validate(1000).is_ok());
}

#[test]
fn logprobs_are_a_stable_log_softmax() {
    let logits = [1e4, 1e4 - 1.0, -1e30, f32::NEG_INFINITY];
    let scored = logprobs::score(&logits, 1, 2).unwrap();
    let log_sum = (1.0 + (-1.0f64).exp()).ln();
    assert!((f64::from(scored.logprob) + 1.0 + log_sum).abs() < 1e-5);
    assert!((f64::from(scored.top[0].1) + log_sum).abs() < 1e-5);
    assert_eq!(scored.top.len(), 2);
}

proptest! {
    #[test]
    fn exp_is_close(x in -90.0f32..0.0) {
        let want = f64::from(x).exp();
        let got = f64::from(math::exp(x));
        prop_assert!((got - want).abs() <= 3e-7 * want + if x < -86.9 { 1e-37 } else { 0.0 }, "{got} for {want}");
    }

    #[test]
    fn top_k_equals_sorting(values in prop::collection::vec(-4i8..4, 1..3000), k in 1usize..50) {
        let row: Vec<f32> = values.iter().map(|&v| f32::from(v)).collect();
        let mut got = Vec::new();
        math::top_k(&row, k, &mut got);
        got.sort_by(math::by_logit);
        let mut want: Vec<(usize, f32)> = row.iter().copied().enumerate().collect();
        want.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        want.truncate(k);
        prop_assert_eq!(got.iter().map(|c| c.id as usize).collect::<Vec<_>>(), want.iter().map(|w| w.0).collect::<Vec<_>>());
    }

    #[test]
    fn argmax_equals_the_plain_loop(values in prop::collection::vec(-100i8..100, 1..3000), nan in prop::option::of(0usize..3000)) {
        let mut row: Vec<f32> = values.iter().map(|&v| f32::from(v)).collect();
        let broken = nan.filter(|&i| i < row.len());
        if let Some(i) = broken {
            row[i] = f32::NAN;
            prop_assert_eq!(math::argmax(&row), None);
        } else {
            let best = row.iter().copied().fold(f32::MIN, f32::max);
            prop_assert_eq!(math::argmax(&row), Some((row.iter().position(|&x| x == best).unwrap(), best)));
        }
    }

    #[test]
    fn reach_equals_sorting_and_adding(weights in prop::collection::vec(0u64..50, 1..200), target in 0u64..6000) {
        let mut all: Vec<Candidate> = weights
            .iter()
            .enumerate()
            .map(|(i, &weight)| Candidate { id: (i * 7919 % 200) as u32, logit: 0.0, weight })
            .collect();
        let mut sorted = all.clone();
        sorted.sort_by_key(|c| c.id);
        let mut mass = 0;
        let want = 1 + sorted.iter().position(|c| { mass += c.weight; mass >= target.max(1) }).unwrap_or(sorted.len() - 1);
        let got = math::reach(&mut all, target, |a, b| a.id.cmp(&b.id));
        prop_assert_eq!(got, want);
        prop_assert_eq!(all[got - 1], sorted[want - 1]);
    }

    #[test]
    fn a_draw_is_never_excluded(
        seed: u64, k in 0u32..60, top_p in 0.0f32..=1.0, min_p in 0.0f32..=1.0, typical in 0.01f32..=1.0, t in 0.0f32..5.0,
    ) {
        let logits = row(200, seed % 5);
        let p = params(|p| (p.seed, p.top_k, p.top_p, p.min_p, p.typical_p, p.temperature) = (seed, k, top_p, min_p, typical, t));
        let token = draw(&p, &logits) as usize;
        if t >= GREEDY_BELOW {
            // At the edge of a cut, f64 and integer weights may differ by one token: allow the neighbours of
            // the edge.
            let wider = params(|p| (p.top_k, p.top_p, p.min_p, p.typical_p, p.temperature) =
                (k, (top_p + 1e-4).min(1.0), (min_p - 1e-4).max(0.0), (typical + 1e-4).min(1.0), t));
            prop_assert!(naive(&p, &logits)[token] > 0.0 || naive(&wider, &logits)[token] > 0.0);
        }
    }
}
