//! A sequence's reply never depends on its company: with the real engine on the real CPU device, tokens drawn (greedy
//! and seeded), their log-probabilities to the bit, the prompt's scores and the text are the same alone and in a full
//! batch with random arrivals, whatever the chunk size and thread count, with prefixes found in the cache or not, and
//! after preemption, for every element type of the cache.
//!
//! Requests are submitted from event callbacks, that is on the engine's own thread: who arrives at which step follows
//! from a seed and nothing else.
//!
//! The same body runs on a real model: `DYNALM_TEST_MODEL=model.gguf cargo test --release --test exact`.

use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};

use dynacore::KvType;
use dynacore::cpu::{CpuDevice, CpuOptions, Mode};
use dynalm::engine::{EngineConfig, EngineHandle, EngineModel, Event, FinishReason, Request, TokenLogprobs};
use dynalm::load::{self, LoadOptions};
use dynalm::metrics::Metrics;
use dynalm::sample::params::{SamplingParams, TokenId};
use dynalm::text::{Piece, Tokenizer};
use testkit::random::Random;

/// Requests of a round, and the most sequences of a step.
const REQUESTS: usize = 16;
/// Window of a request, tokens.
const CONTEXT: usize = 256;
/// Tokens for which a cache need not preempt anybody.
const ROOMY: usize = 4 * CONTEXT * REQUESTS;

/// What prompts are cut from.
const TEXT: &str = "Once upon a time there was a little girl who lived in a village near the river with her mother and \
    father. Every morning she counted the boats, and every evening she told the lazy dog how many had come back. The \
    dog, who was no fool, asked where the others were; nobody knew. \"Write it down,\" he said, \"small functions, \
    clear names, and a test for what you have written.\" fn main() { let mut value = 1; while value < 100 { value = \
    value * 2; } return value; } The answer to the question is not known to us all yet.";

/// One request, without its listener.
#[derive(Clone)]
struct Case {
    prompt: Vec<TokenId>,
    params: SamplingParams,
    max_tokens: usize,
    prompt_logprobs: Option<u32>,
    ignore_eos: bool,
}

/// Everything a request was told, numbers as bits.
#[derive(Debug, Clone, Default, PartialEq)]
struct Reply {
    tokens: Vec<TokenId>,
    text: String,
    scores: Vec<Option<Scored>>,
    prompt_scores: Vec<Option<Scored>>,
    reason: Option<FinishReason>,
}

#[derive(Debug, Clone, PartialEq)]
struct Scored {
    token: TokenId,
    logprob: u32,
    top: Vec<(TokenId, u32)>,
}

fn scored(p: Option<TokenLogprobs>) -> Option<Scored> {
    p.map(|p| Scored {
        token: p.token,
        logprob: p.logprob.to_bits(),
        top: p.top.iter().map(|(t, l)| (*t, l.to_bits())).collect(),
    })
}

/// Requests of all kinds; half of the prompts begin alike.
fn cases(tokenizer: &Tokenizer, seed: u64) -> Vec<Case> {
    let all = tokenizer
        .encode(&[Piece::Text(TEXT)])
        .expect("the text has tokens");
    let longest = all.len().min(CONTEXT * 2 / 5);
    let mut random = Random::named(seed, "cases");
    (0..REQUESTS)
        .map(|i| {
            let length = 1 + random.below(longest);
            let start = if i % 2 == 0 {
                0
            } else {
                random.below(all.len() - length + 1)
            };
            let drawn = i % 4 >= 2;
            Case {
                prompt: all[start..start + length].to_vec(),
                params: SamplingParams {
                    temperature: if drawn { 0.9 } else { 0.0 },
                    top_k: if i % 8 >= 4 { 50 } else { 0 },
                    top_p: 0.95,
                    min_p: 0.01,
                    repetition_penalty: if i % 3 == 0 { 1.1 } else { 1.0 },
                    presence_penalty: if i % 5 == 0 { 0.5 } else { 0.0 },
                    seed: random.bits(),
                    logprobs: Some((i % 5) as u32),
                    ..SamplingParams::default()
                },
                max_tokens: 24 + random.below(CONTEXT / 2 - 24),
                prompt_logprobs: (i % 6 == 1).then_some(2),
                ignore_eos: i % 3 != 2,
            }
        })
        .collect()
}

/// How a round is run.
#[derive(Debug, Clone)]
struct Setup {
    kv: KvType,
    threads: usize,
    batch_tokens: usize,
    kv_tokens: usize,
    prefix_cache: bool,
    /// Most requests at once.
    together: usize,
    /// How often the requests are sent, one round right after the other.
    rounds: usize,
    arrivals: u64,
}

impl Setup {
    /// One request at a time, no reuse, whole prompts in one step.
    fn alone(kv: KvType) -> Setup {
        Setup {
            kv,
            threads: 1,
            batch_tokens: 512,
            kv_tokens: ROOMY,
            prefix_cache: false,
            together: 1,
            rounds: 1,
            arrivals: 0,
        }
    }
}

/// Submits requests one after another as events come in, and gathers what they are told.
struct Driver {
    engine: EngineHandle,
    cases: Vec<Case>,
    total: usize,
    next: usize,
    running: usize,
    together: usize,
    /// Events until the next request arrives.
    countdown: usize,
    random: Random,
    replies: Vec<Reply>,
    done: Sender<Result<(), String>>,
}

impl Driver {
    /// Submits what is due.
    fn advance(this: &Arc<Mutex<Driver>>, driver: &mut Driver) {
        while driver.next < driver.total
            && driver.running < driver.together
            && (driver.running == 0 || driver.countdown == 0)
        {
            let number = driver.next;
            let case = driver.cases[number % driver.cases.len()].clone();
            let listener = Arc::clone(this);
            let request = Request {
                prompt: case.prompt,
                params: case.params,
                max_tokens: Some(case.max_tokens),
                stop: Vec::new(),
                ignore_eos: case.ignore_eos,
                starts_text: false,
                prompt_logprobs: case.prompt_logprobs,
                cache_prompt: true,
                priority: 0,
                deadline: None,
                events: Box::new(move |event| {
                    let mut driver = listener.lock().expect("a listener panicked");
                    driver.take(number, event);
                    Driver::advance(&listener, &mut driver);
                    true
                }),
            };
            driver.next += 1;
            driver.running += 1;
            // Often several at once, sometimes after a pause.
            driver.countdown = driver.random.below(8).saturating_sub(3);
            if let Err(e) = driver.engine.submit(request) {
                driver.end(Err(format!("request {number}: {e}")));
            }
        }
        if driver.next == driver.total && driver.running == 0 {
            driver.end(Ok(()));
        }
    }

    fn take(&mut self, number: usize, event: Event) {
        self.countdown = self.countdown.saturating_sub(1);
        let reply = &mut self.replies[number];
        match event {
            Event::Admitted { .. } => {}
            Event::PromptLogprobs(all) => reply.prompt_scores = all.into_iter().map(scored).collect(),
            Event::Token {
                token,
                text,
                logprobs,
            } => {
                reply.tokens.push(token);
                reply.text.push_str(&text);
                reply.scores.push(scored(logprobs));
            }
            Event::Finished { reason, text, .. } => {
                reply.text.push_str(&text);
                reply.reason = Some(reason);
                self.running -= 1;
            }
            Event::Failed(error) => {
                self.running -= 1;
                self.end(Err(format!("request {number}: {error}")));
            }
        }
    }

    fn end(&self, result: Result<(), String>) {
        // After the first failure nobody listens.
        let _ = self.done.send(result);
    }
}

/// What a run of requests gave, and what happened on the way.
struct Round {
    replies: Vec<Reply>,
    preemptions: u64,
    hits: u64,
}

/// Loads the model as `setup` says and sends the requests that `make` gives for its vocabulary.
fn run(path: &Path, setup: &Setup, seed: u64) -> Round {
    let options = CpuOptions {
        threads: Some(setup.threads),
        mode: Mode::Exact,
        isa: None,
    };
    let device = CpuDevice::new(&options).expect("a CPU");
    let load = LoadOptions {
        ctx: Some(CONTEXT),
        kv: setup.kv,
        kv_tokens: Some(setup.kv_tokens),
        batch_tokens: setup.batch_tokens,
        max_seqs: REQUESTS,
        template: None,
    };
    let model = load::load(path, &device, &load).unwrap_or_else(|e| panic!("{setup:?}: {e}"));
    let cases = cases(&model.tokenizer, seed);
    let metrics = Arc::new(Metrics::default());
    let config = EngineConfig {
        prefix_cache: setup.prefix_cache,
        ..EngineConfig::default()
    };
    let model = EngineModel {
        executor: model.executor,
        geometry: model.geometry,
        windows: model.windows,
        limits: model.limits,
        max_context: model.max_context,
        vocab_size: model.vocab_size,
        tokenizer: model.tokenizer,
    };
    let (engine, thread) =
        EngineHandle::spawn(model, &config, Arc::clone(&metrics), |_| {}).expect("the engine starts");
    let (done, end) = mpsc::channel();
    let total = cases.len() * setup.rounds;
    let driver = Arc::new(Mutex::new(Driver {
        engine: engine.clone(),
        cases,
        total,
        next: 0,
        running: 0,
        together: setup.together,
        countdown: 0,
        random: Random::named(setup.arrivals, "arrivals"),
        replies: vec![Reply::default(); total],
        done,
    }));
    Driver::advance(&driver, &mut driver.lock().expect("nothing has panicked yet"));
    end.recv()
        .expect("the driver reports")
        .unwrap_or_else(|e| panic!("{setup:?}: {e}"));
    engine.shutdown();
    thread.join().expect("the engine's thread ends");
    let replies = std::mem::take(&mut driver.lock().expect("no listener panicked").replies);
    Round {
        replies,
        preemptions: metrics.preemptions.get(),
        hits: metrics.prefix_hits.get(),
    }
}

/// The ways in which a batch may be run that must not show.
fn companies(kv: KvType, seed: u64) -> Vec<Setup> {
    let base = Setup {
        together: REQUESTS,
        arrivals: seed,
        ..Setup::alone(kv)
    };
    vec![
        Setup {
            threads: 2,
            ..base.clone()
        },
        Setup {
            batch_tokens: 64,
            prefix_cache: true,
            rounds: 2,
            ..base.clone()
        },
        Setup {
            batch_tokens: 16,
            prefix_cache: true,
            kv_tokens: CONTEXT,
            threads: 2,
            ..base.clone()
        },
        Setup {
            batch_tokens: 512,
            kv_tokens: CONTEXT,
            ..base
        },
    ]
}

/// Where two replies first differ.
fn difference(found: &Reply, alone: &Reply) -> String {
    if let Some(at) =
        (0..alone.prompt_scores.len()).find(|&i| found.prompt_scores.get(i) != alone.prompt_scores.get(i))
    {
        let (found, alone) = (found.prompt_scores.get(at), &alone.prompt_scores[at]);
        return format!("prompt score {at} is {found:?}, alone {alone:?}");
    }
    if let Some(at) = (0..alone.tokens.len())
        .find(|&i| (found.tokens.get(i), found.scores.get(i)) != (alone.tokens.get(i), alone.scores.get(i)))
    {
        let found = (found.tokens.get(at), found.scores.get(at));
        return format!(
            "token {at} is {found:?}, alone {:?}",
            (alone.tokens[at], &alone.scores[at])
        );
    }
    format!(
        "{} tokens, {:?}, text {:?}; alone {} tokens, {:?}, text {:?}",
        found.tokens.len(),
        found.reason,
        found.text,
        alone.tokens.len(),
        alone.reason,
        alone.text
    )
}

/// The property, for one model and one cache type.
fn hold(path: &Path, kv: KvType, seed: u64) {
    let alone = run(path, &Setup::alone(kv), seed);
    assert!(
        alone.replies.iter().all(|r| r.reason.is_some()),
        "{kv}: every request ends"
    );
    let drawn: usize = alone.replies.iter().map(|r| r.tokens.len()).sum();
    assert!(
        drawn > 8 * REQUESTS / 2,
        "{kv}: {drawn} tokens are too few to show anything"
    );
    for setup in companies(kv, seed) {
        let round = run(path, &setup, seed);
        for (i, found) in round.replies.iter().enumerate() {
            let expected = &alone.replies[i % REQUESTS];
            if found != expected {
                panic!(
                    "seed {seed}, {setup:?}, request {i}: {}",
                    difference(found, expected)
                );
            }
        }
        // The conditions that the property is about did occur.
        assert_eq!(
            round.preemptions > 0,
            setup.kv_tokens < ROOMY,
            "{setup:?}: {} preemptions",
            round.preemptions
        );
        if setup.prefix_cache {
            assert!(round.hits > 0, "{setup:?}: no prefix was found");
        } else {
            assert_eq!(round.hits, 0, "{setup:?}");
        }
    }
}

fn hold_tiny(family: &str, type_name: &str, seed: u64) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = modelkit::tiny_gguf(folder.path(), family, type_name, seed);
    for kv in [KvType::F16, KvType::F32, KvType::Q8_0] {
        hold(&path, kv, seed);
    }
    for more in [100, 200] {
        hold(&path, KvType::F16, seed + more);
    }
}

#[test]
fn llama_q4_k() {
    hold_tiny("llama", "Q4_K_M", 1);
}

#[test]
fn gemma3_with_windows() {
    hold_tiny("gemma3", "Q4_K_M", 2);
}

#[test]
fn qwen3_q8_0() {
    hold_tiny("qwen3", "Q8_0", 3);
}

#[test]
fn granite_with_experts() {
    hold_tiny("granitemoe", "Q4_K_M", 4);
}

#[test]
fn a_real_model() {
    let Some(path) = std::env::var_os("DYNALM_TEST_MODEL") else {
        println!("skipped: DYNALM_TEST_MODEL names no model");
        return;
    };
    hold(Path::new(&path), KvType::F16, 4);
    hold(Path::new(&path), KvType::Q8_0, 4);
}
