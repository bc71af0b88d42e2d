//! The scheduler against the scripted device.

#[expect(
    unreachable_pub,
    reason = "the fuzz target includes this file and uses its items"
)]
mod oracle;

use dynalm::sched::{NewSequence, SchedulerConfig};
use oracle::{END, Event, Harness, VOCAB, config, replay, sequence};
use proptest::prelude::*;

/// `len` tokens that depend on `seed`.
fn tokens(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (seed.wrapping_mul(7919).wrapping_add(i * (31 + seed)) >> 2) % VOCAB as u32)
        .collect()
}

/// A prompt of `shared` tokens common to all and `own` others.
fn with_tail(shared: usize, seed: u32, own: usize) -> Vec<u32> {
    let mut prompt = tokens(1000, shared);
    prompt.extend(tokens(seed, own));
    // The first own token differs between seeds, so that the shared part ends exactly there.
    if own > 0 {
        prompt[shared] = (60 + seed) % VOCAB as u32;
    }
    prompt
}

fn arrival() -> impl Strategy<Value = NewSequence> {
    let prompt = (0usize..40, 0u32..6, 0usize..30)
        .prop_map(|(shared, seed, own)| with_tail(shared, seed, own.max(usize::from(shared == 0))));
    (
        prompt,
        prop::option::weighted(0.97, 0usize..24),
        -1i32..2,
        prop::bool::weighted(0.85),
        prop::bool::weighted(0.15),
    )
        .prop_map(
            |(prompt, max_tokens, priority, cache, score_prompt)| NewSequence {
                prompt,
                max_tokens,
                priority,
                cache,
                score_prompt,
            },
        )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => arrival().prop_map(Event::Arrive),
        1 => (0usize..8).prop_map(Event::Abort),
        5 => (1usize..6).prop_map(Event::Steps),
        1 => (0usize..5, 0usize..5).prop_map(|(tokens, right)| Event::Drafts { tokens, right }),
        1 => Just(Event::Clear),
    ]
}

fn any_config() -> impl Strategy<Value = SchedulerConfig> {
    let group = (4usize..40, prop::option::of(2u32..20));
    let limits = (1usize..8, 0usize..40, 0usize..12);
    (
        1usize..6,
        prop::collection::vec(group, 1..4),
        limits,
        1usize..12,
        0u32..4,
        20usize..120,
        any::<bool>(),
    )
        .prop_map(
            |(
                block_tokens,
                groups,
                (max_seqs, tokens, outputs),
                mixed,
                max_skips,
                max_context,
                prefix_cache,
            )| {
                let mut config = config(block_tokens, &groups);
                config.limits.max_seqs = max_seqs;
                config.limits.max_tokens = max_seqs + tokens;
                config.limits.max_outputs = max_seqs + outputs;
                config.mixed_prefill_tokens = mixed;
                config.max_skips = max_skips;
                config.max_context = max_context;
                config.prefix_cache = prefix_cache;
                config
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_reply_is_the_solo_reply(config in any_config(), events in prop::collection::vec(event(), 1..40)) {
        let mut harness = Harness::new(config);
        for event in events {
            harness.apply(event);
        }
        harness.finish();
    }

    #[test]
    fn bytes_of_the_fuzzer_replay(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        replay(&bytes);
    }
}

#[test]
fn shared_tokens_are_reused_to_the_token() {
    let mut harness = Harness::new(config(16, &[(400, None), (300, Some(64))]));
    for seed in 0..5 {
        harness.arrive(sequence(with_tail(2003, seed, 40), 12));
        while harness.step() {}
    }
    let cached: Vec<usize> = harness.started.iter().map(|&(_, cached)| cached).collect();
    assert_eq!(cached, [0, 2003, 2003, 2003, 2003]);
    harness.finish();
}

#[test]
fn an_identical_prompt_leaves_one_token_to_compute() {
    for len in [31, 32, 33, 64] {
        let mut harness = Harness::new(config(16, &[(40, None), (40, Some(24))]));
        for _ in 0..2 {
            harness.arrive(sequence(tokens(3, len), 4));
            while harness.step() {}
        }
        assert_eq!(harness.started[1].1, len - 1, "prompt of {len} tokens");
        harness.finish();
    }
}

#[test]
fn a_continued_chat_reuses_the_reply() {
    let mut harness = Harness::new(config(16, &[(60, None)]));
    let prompt = tokens(5, 50);
    harness.arrive(sequence(prompt.clone(), 9));
    while harness.step() {}
    let mut next = prompt.clone();
    next.extend(harness.device.reply(&prompt, 9));
    let spoken = next.len();
    next.extend(tokens(6, 20));
    harness.arrive(sequence(next, 3));
    while harness.step() {}
    // The last token of a reply is drawn but never computed.
    assert!(harness.started[1].1 >= spoken - 1 || harness.ended[0].completion_tokens < 9);
    harness.finish();
}

#[test]
fn equal_prompts_that_arrive_together_are_computed_once() {
    let mut harness = Harness::new(config(8, &[(200, None)]));
    for _ in 0..4 {
        harness.arrive(sequence(tokens(9, 200), 1));
    }
    while harness.step() {}
    // The last block is computed by all: nobody waits for less than a block, and the last token must be.
    assert!(harness.device.rows <= 200 + 3 * 8, "{} rows", harness.device.rows);
    harness.finish();
}

#[test]
fn prefill_takes_the_whole_budget_unless_somebody_decodes() {
    let mut harness = Harness::new(config(8, &[(100, None)]));
    harness.arrive(sequence(tokens(1, 100), 4));
    let sizes = |harness: &mut Harness| {
        let before = harness.device.rows;
        harness.step();
        harness.device.rows - before
    };
    assert_eq!(
        [
            sizes(&mut harness),
            sizes(&mut harness),
            sizes(&mut harness),
            sizes(&mut harness)
        ],
        [32, 32, 32, 4]
    );
    harness.arrive(sequence(tokens(2, 20), 4));
    assert_eq!([sizes(&mut harness), sizes(&mut harness)], [1 + 8, 1 + 8]);
    harness.finish();
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let mut harness = Harness::new(config(8, &[(200, None)]));
    let long = harness.arrive(sequence(tokens(1, 1000), 1)).unwrap();
    harness.step();
    let short = harness.arrive(sequence(tokens(2, 16), 1)).unwrap();
    harness.step();
    harness.step();
    assert!(
        harness.scheduler.sequence(short).is_none(),
        "the short one has ended"
    );
    assert!(
        harness
            .scheduler
            .sequence(long)
            .is_some_and(|seq| seq.computed() >= 64),
        "the long one went on"
    );
    harness.finish();
}

#[test]
fn a_prompt_that_never_fits_is_refused_with_both_numbers() {
    let mut harness = Harness::new(config(8, &[(10, None)]));
    let error = harness
        .scheduler
        .admit(sequence(tokens(1, 80), 1))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("80 tokens") && error.contains("holds 80 with at least 1"),
        "{error}"
    );
    assert!(
        harness.scheduler.admit(sequence(tokens(1, 80), 0)).is_ok(),
        "scoring needs no room for a reply"
    );
    assert!(harness.scheduler.admit(sequence(Vec::new(), 1)).is_err());
    harness.scheduler = dynalm::sched::Scheduler::new(config(8, &[(10, None)])).unwrap();
    harness.finish();
}

#[test]
fn an_abort_gives_the_blocks_back_at_once() {
    let mut harness = Harness::new(config(8, &[(100, None), (100, Some(16))]));
    let id = harness.arrive(sequence(tokens(1, 100), 50)).unwrap();
    for _ in 0..6 {
        harness.step();
    }
    assert!(harness.scheduler.stats().groups[0].held > 0);
    harness.abort(id);
    assert!(
        harness
            .scheduler
            .stats()
            .groups
            .iter()
            .all(|group| group.held == 0)
    );
    assert!(!harness.scheduler.abort(id), "it is gone");
    harness.finish();
}

#[test]
fn the_youngest_is_preempted_and_finishes_all_the_same() {
    // Four blocks of 8 for two sequences of 16 + 16 tokens.
    let mut harness = Harness::new(SchedulerConfig {
        prefix_cache: false,
        ..config(8, &[(6, None)])
    });
    let mut first = None;
    for seed in 0..40 {
        let new = sequence(tokens(seed, 15), 20);
        let replies_fully = !harness.device.reply(&new.prompt, 20).contains(&END);
        if replies_fully {
            let id = harness.arrive(new).unwrap();
            first.get_or_insert(id);
        }
    }
    harness.finish();
    assert!(harness.scheduler.stats().preemptions > 0);
    let oldest = harness
        .ended
        .iter()
        .find(|ended| Some(ended.seq) == first)
        .unwrap();
    assert_eq!(oldest.preemptions, 0, "the oldest is never preempted");
}

#[test]
fn higher_priority_starts_first() {
    let mut config = config(8, &[(100, None)]);
    config.limits.max_seqs = 1;
    let mut harness = Harness::new(config);
    let ids: Vec<_> = [0, -1, 5]
        .into_iter()
        .map(|priority| {
            harness
                .arrive(NewSequence {
                    priority,
                    ..sequence(tokens(priority as u32 & 7, 9), 2)
                })
                .unwrap()
        })
        .collect();
    harness.finish();
    let order: Vec<_> = harness.started.iter().map(|&(id, _)| id).collect();
    assert_eq!(order, [ids[2], ids[0], ids[1]]);
}

#[test]
fn a_blocked_sequence_is_passed_a_bounded_number_of_times() {
    let mut config = config(8, &[(20, None)]);
    config.prefix_cache = false;
    config.max_skips = 3;
    let mut harness = Harness::new(config);
    harness.arrive(sequence(tokens(1, 100), 40));
    harness.step();
    let big = harness.arrive(sequence(tokens(2, 120), 2)).unwrap();
    for seed in 10..40 {
        harness.arrive(sequence(tokens(seed, 9), 2));
    }
    harness.finish();
    let started = harness.started.iter().position(|&(id, _)| id == big).unwrap();
    assert!((1..=4).contains(&started), "started as number {started}");
}

#[test]
fn a_windowed_group_holds_its_window_only() {
    let mut harness = Harness::new(config(8, &[(200, None), (12, Some(20))]));
    let id = harness
        .arrive(NewSequence {
            cache: false,
            ..sequence(tokens(1, 300), 200)
        })
        .unwrap();
    while harness.scheduler.sequence(id).is_some() {
        harness.step();
        assert!(
            harness.scheduler.stats().groups[1].held <= 4,
            "20 tokens lie in at most 4 blocks"
        );
    }
    harness.finish();
}
