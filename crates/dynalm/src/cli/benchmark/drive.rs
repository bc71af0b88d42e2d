//! Driving an engine: the figures, their load, and what the times of one round say.
//!
//! An engine is anything that continues prompts: ours in this process ([`super::local`]) or a server
//! ([`super::remote`]). All figures are taken from the times at which its tokens arrive, in the same way for both.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::reading::{Read, Reading};
use super::stats::{quantile, sorted};
use crate::sample::params::TokenId;

/// A figure and its size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "figure", rename_all = "snake_case")]
pub(super) enum Point {
    /// One user, a prompt of so many tokens: its tokens over the time to the first token.
    Prefill { tokens: usize },
    /// One user, so many tokens after a prompt of `context`: tokens over the time from the first to the last.
    Decode { context: usize, tokens: usize },
    /// Closed loop: each user sends a request when the one before is answered.
    Users {
        users: usize,
        requests: usize,
        context: usize,
        tokens: usize,
    },
    /// Open loop: requests arrive on their own at `rate` a second on average, exponentially distributed.
    Rate {
        rate: f64,
        requests: usize,
        context: usize,
        tokens: usize,
    },
}

impl Point {
    /// Prompt and reply of one request, tokens.
    pub(super) fn lengths(&self) -> (usize, usize) {
        match *self {
            Point::Prefill { tokens } => (tokens, 1),
            // One more than is timed: the first token belongs to the prompt.
            Point::Decode { context, tokens } => (context.max(1), tokens + 1),
            Point::Users { context, tokens, .. } | Point::Rate { context, tokens, .. } => {
                (context.max(1), tokens)
            }
        }
    }

    /// Requests of a round.
    pub(super) fn requests(&self) -> usize {
        match *self {
            Point::Prefill { .. } | Point::Decode { .. } => 1,
            Point::Users { users, requests, .. } => users * requests,
            Point::Rate { requests, .. } => requests,
        }
    }

    /// Whether several requests run together.
    pub(super) fn is_load(&self) -> bool {
        matches!(self, Point::Users { .. } | Point::Rate { .. })
    }

    /// For people.
    pub(super) fn title(&self) -> String {
        match self {
            Point::Prefill { tokens } => format!("prefill {tokens}"),
            Point::Decode { context, tokens } => format!("decode {tokens} at {context}"),
            Point::Users {
                users,
                requests,
                context,
                tokens,
            } => {
                let each = if *requests == 1 {
                    String::new()
                } else {
                    format!(" × {requests}")
                };
                format!("{users} users{each}, {context} + {tokens}")
            }
            Point::Rate {
                rate,
                requests,
                context,
                tokens,
            } => format!("{rate}/s × {requests}, {context} + {tokens}"),
        }
    }
}

/// A prompt in the form its engine takes.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Prompt {
    Tokens(Vec<TokenId>),
    Text(String),
}

/// One request as it went.
#[derive(Debug, Clone)]
pub(super) struct Trace {
    /// When it was sent.
    pub(super) sent: Instant,
    /// When parts of the reply arrived; in this process one a token.
    pub(super) events: Vec<Instant>,
    /// The engine's counts.
    pub(super) prompt_tokens: usize,
    pub(super) output_tokens: usize,
    pub(super) cached_tokens: Option<usize>,
}

/// What is measured.
pub(super) trait Engine: Sync {
    /// Its name in tables and records.
    fn label(&self) -> &str;
    /// A prompt of about `tokens` tokens unlike all others, or like them in its first `shared` tokens.
    fn prompt(&self, random: &mut Random, tokens: usize, shared: usize) -> Prompt;
    /// Continues a prompt greedily.
    fn ask(&self, prompt: Prompt, max_tokens: usize) -> anyhow::Result<Trace>;
    /// Peak resident memory of the process so far, bytes, where it can be told.
    fn peak_resident(&self) -> Option<u64>;
    /// Facts for the summary: what it is, by its own report.
    fn describe(&self) -> serde_json::Value;
    /// What arrives within this time arrived together: when its parts were made cannot be told.
    fn least_span(&self) -> Duration {
        Duration::ZERO
    }
    /// What its decoding reads, where that can be told: in this process.
    fn reading(&self) -> Option<&Reading> {
        None
    }
}

/// Numbers without pattern, the same for the same seed (SplitMix64), and a count.
#[derive(Debug, Clone)]
pub(super) struct Random {
    state: u64,
    serial: usize,
}

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random {
            state: seed,
            serial: 0,
        }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// 0, 1, 2, …: no two calls give the same.
    pub(super) fn serial(&mut self) -> usize {
        self.serial += 1;
        self.serial - 1
    }

    /// A waiting time with mean 1.
    fn exponential(&mut self) -> f64 {
        let uniform = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        -(1.0 - uniform).ln()
    }
}

/// Milliseconds at some quantiles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Quantiles {
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
}

impl Quantiles {
    fn of_seconds(values: impl IntoIterator<Item = f64>) -> Option<Quantiles> {
        let all = sorted(values.into_iter().map(|s| s * 1e3));
        Some(Quantiles {
            p50: quantile(&all, 0.50)?,
            p95: quantile(&all, 0.95)?,
            p99: quantile(&all, 0.99)?,
        })
    }
}

/// A figure of one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// What the figure is named for: prompt tokens (prefill) or reply tokens (the rest) a second. `None` of a decoding
    /// whose tokens arrived together.
    #[serde(deserialize_with = "Option::deserialize")]
    pub(super) tokens_per_s: Option<f64>,
    /// Reply tokens a second while every user was receiving some: the pure decoding of a batch. Closed loop only, and
    /// only if there was such a time, long enough to be told.
    pub(super) steady_tokens_per_s: Option<f64>,
    /// From sending a request to its first token.
    pub(super) ttft_ms: Quantiles,
    /// Between two parts of the same reply.
    pub(super) gap_ms: Option<Quantiles>,
    /// From the first request to the last token.
    pub(super) seconds: f64,
    pub(super) prompt_tokens: usize,
    pub(super) output_tokens: usize,
    /// Prompt tokens the engine found in its cache, where it says.
    pub(super) cached_tokens: Option<usize>,
    /// Parts the replies arrived in.
    pub(super) events: usize,
    /// Decoding in this process only, and only where there is memory to read beside.
    #[serde(flatten)]
    pub(super) read: Option<Read>,
}

/// One round of `point` on `engine`; prompts are made before the clock starts.
pub(super) fn round(
    engine: &dyn Engine,
    point: &Point,
    random: &mut Random,
    shared: usize,
) -> anyhow::Result<Measured> {
    let (prompt, reply) = point.lengths();
    let shared = if point.is_load() { shared } else { 0 };
    let prompts: Vec<Prompt> = (0..point.requests())
        .map(|_| engine.prompt(random, prompt, shared))
        .collect();
    let reading = engine.reading().filter(|_| matches!(point, Point::Decode { .. }));
    let before = reading.and_then(Reading::stream);
    let traces = match *point {
        Point::Prefill { .. } | Point::Decode { .. } => prompts
            .into_iter()
            .map(|p| engine.ask(p, reply))
            .collect::<anyhow::Result<Vec<_>>>()?,
        Point::Users { requests, .. } => closed_loop(engine, &prompts, requests, reply)?,
        Point::Rate { rate, .. } => open_loop(engine, &prompts, rate, reply, random)?,
    };
    let after = reading.and_then(Reading::stream);
    let mut measured = measure(engine.label(), point, &traces, engine.least_span())?;
    if let (Some(reading), Some(before), Some(after), Some(rate)) =
        (reading, before, after, measured.tokens_per_s)
    {
        let (prompt, timed) = (measured.prompt_tokens, measured.output_tokens - 1);
        // The step that makes the second token is fed the first one, and attends to it as well.
        let bytes = reading.bytes_per_token(prompt + 1..prompt + 1 + timed);
        measured.read = Some(Read::new(bytes, rate, [before, after]));
    }
    Ok(measured)
}

/// Every user in a thread of its own, `requests` prompts each.
fn closed_loop(
    engine: &dyn Engine,
    prompts: &[Prompt],
    requests: usize,
    reply: usize,
) -> anyhow::Result<Vec<Trace>> {
    let users = prompts.chunks(requests);
    let start = Barrier::new(users.len());
    thread::scope(|scope| {
        let threads: Vec<_> = users
            .map(|own| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    own.iter()
                        .map(|p| engine.ask(p.clone(), reply))
                        .collect::<anyhow::Result<Vec<_>>>()
                })
            })
            .collect();
        gather(threads.into_iter().map(thread::ScopedJoinHandle::join))
    })
}

/// Every request in a thread of its own that sleeps until its time comes.
fn open_loop(
    engine: &dyn Engine,
    prompts: &[Prompt],
    rate: f64,
    reply: usize,
    random: &mut Random,
) -> anyhow::Result<Vec<Trace>> {
    let mut due = 0.0;
    let begin = Instant::now();
    thread::scope(|scope| {
        let threads: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let at = begin + Duration::from_secs_f64(due);
                due += random.exponential() / rate;
                scope.spawn(move || {
                    thread::sleep(at.saturating_duration_since(Instant::now()));
                    engine.ask(prompt.clone(), reply).map(|trace| vec![trace])
                })
            })
            .collect();
        gather(threads.into_iter().map(thread::ScopedJoinHandle::join))
    })
}

/// All traces, or the first failure.
fn gather(
    ended: impl Iterator<Item = thread::Result<anyhow::Result<Vec<Trace>>>>,
) -> anyhow::Result<Vec<Trace>> {
    let mut all = Vec::new();
    for user in ended {
        all.extend(user.unwrap_or_else(|_| Err(anyhow::anyhow!("a user's thread panicked")))?);
    }
    Ok(all)
}

/// What the times of a round say. No rate comes of tokens that arrived within `least` of each other.
fn measure(label: &str, point: &Point, traces: &[Trace], least: Duration) -> anyhow::Result<Measured> {
    let (_, reply) = point.lengths();
    for trace in traces {
        anyhow::ensure!(
            trace.output_tokens > 0 && !trace.events.is_empty(),
            "{label}: a reply without a token; nothing can be measured"
        );
        anyhow::ensure!(
            trace.output_tokens < 8 || trace.events.len() > 1,
            "{label}: {} tokens arrived in one piece, so the server does not stream them; when they were made cannot be \
             measured",
            trace.output_tokens
        );
        anyhow::ensure!(
            !matches!(point, Point::Decode { .. }) || trace.output_tokens > 1,
            "{label}: the reply ended after {} of {reply} tokens; to measure decoding it must go on",
            trace.output_tokens
        );
    }
    let first = traces.iter().map(|t| t.sent).min();
    let last = traces.iter().filter_map(|t| t.events.last()).max();
    let (Some(first), Some(last)) = (first, last) else {
        anyhow::bail!("{label}: a round without requests");
    };
    let seconds = span(first, *last);
    let sum = |of: fn(&Trace) -> usize| traces.iter().map(of).sum::<usize>();
    let output_tokens = sum(|t| t.output_tokens);
    let cached = |t: &Trace| t.cached_tokens.unwrap_or(0).min(t.prompt_tokens);
    let one = &traces[0];
    let tokens_per_s = match point {
        Point::Prefill { .. } => {
            Some((one.prompt_tokens - cached(one)) as f64 / span(one.sent, one.events[0]))
        }
        Point::Decode { .. } => {
            arrivals(one.events[0], *last, least).map(|seconds| (one.output_tokens - 1) as f64 / seconds)
        }
        Point::Users { .. } | Point::Rate { .. } => Some(output_tokens as f64 / seconds),
    };
    let gaps = traces
        .iter()
        .flat_map(|t| t.events.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()));
    let ttft = Quantiles::of_seconds(traces.iter().map(|t| span(t.sent, t.events[0])));
    Ok(Measured {
        tokens_per_s,
        steady_tokens_per_s: match point {
            Point::Users { requests: 1, .. } => steady(traces, least),
            _ => None,
        },
        ttft_ms: ttft.expect("there is at least one request"),
        gap_ms: Quantiles::of_seconds(gaps),
        seconds,
        prompt_tokens: sum(|t| t.prompt_tokens),
        output_tokens,
        cached_tokens: traces.iter().map(|t| t.cached_tokens).sum(),
        events: sum(|t| t.events.len()),
        read: None,
    })
}

/// Seconds from sending to an arrival, above 0.
fn span(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64().max(1e-9)
}

/// Seconds between two arrivals, above 0; `None` of such as are no more than `least` apart or in the other order.
fn arrivals(from: Instant, to: Instant, least: Duration) -> Option<f64> {
    let apart = to.checked_duration_since(from)?;
    (apart > least).then_some(apart.as_secs_f64())
}

/// Tokens a second from the moment the last user has its first token until the first user has its last.
fn steady(traces: &[Trace], least: Duration) -> Option<f64> {
    let from = *traces.iter().filter_map(|t| t.events.first()).max()?;
    let to = *traces.iter().filter_map(|t| t.events.last()).min()?;
    let seconds = arrivals(from, to, least)?;
    // A part of a reply stands for its share of the reply's tokens.
    let within = |t: &Trace| {
        let events = t.events.iter().filter(|e| **e > from && **e <= to).count();
        events as f64 * t.output_tokens as f64 / t.events.len() as f64
    };
    Some(traces.iter().map(within).sum::<f64>() / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request sent `sent` ms after the start, with tokens at these ms.
    fn trace(start: Instant, sent: u64, events: &[u64], prompt: usize) -> Trace {
        let at = |ms: u64| start + Duration::from_millis(ms);
        Trace {
            sent: at(sent),
            events: events.iter().map(|ms| at(*ms)).collect(),
            prompt_tokens: prompt,
            output_tokens: events.len(),
            cached_tokens: Some(0),
        }
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-6 * b.abs().max(1.0)
    }

    fn is(a: Option<f64>, b: f64) -> bool {
        a.is_some_and(|a| near(a, b))
    }

    #[test]
    fn prefill_is_the_prompt_over_the_first_tokens_time() {
        let t = trace(Instant::now(), 0, &[250], 500);
        let m = measure("x", &Point::Prefill { tokens: 500 }, &[t], Duration::ZERO).expect("measured");
        assert!(is(m.tokens_per_s, 2000.0) && near(m.ttft_ms.p50, 250.0), "{m:?}");
        assert_eq!(m.gap_ms, None);
    }

    #[test]
    fn cached_prompt_tokens_are_no_speed() {
        let mut t = trace(Instant::now(), 0, &[250], 500);
        t.cached_tokens = Some(250);
        let m = measure("x", &Point::Prefill { tokens: 500 }, &[t], Duration::ZERO).expect("measured");
        assert!(is(m.tokens_per_s, 1000.0), "{m:?}");
    }

    #[test]
    fn decode_leaves_out_the_first_token() {
        let t = trace(Instant::now(), 0, &[500, 600, 700, 800], 1);
        let point = Point::Decode {
            context: 0,
            tokens: 3,
        };
        assert_eq!(point.lengths(), (1, 4));
        let m = measure("x", &point, &[t], Duration::ZERO).expect("measured");
        assert!(is(m.tokens_per_s, 10.0), "{m:?}");
        assert!(near(m.gap_ms.expect("three gaps").p99, 100.0), "{m:?}");
    }

    #[test]
    fn users_count_all_tokens_and_the_time_when_all_decode() {
        let start = Instant::now();
        let traces = [
            trace(start, 0, &[100, 200, 300, 400], 5),
            trace(start, 0, &[200, 300, 400, 500], 5),
        ];
        let point = Point::Users {
            users: 2,
            requests: 1,
            context: 5,
            tokens: 4,
        };
        let m = measure("x", &point, &traces, Duration::ZERO).expect("measured");
        assert!(is(m.tokens_per_s, 16.0), "{m:?}");
        assert!(is(m.steady_tokens_per_s, 20.0), "{m:?}");
        assert!(near(m.ttft_ms.p50, 150.0) && near(m.ttft_ms.p95, 195.0), "{m:?}");
        assert_eq!((m.prompt_tokens, m.output_tokens, m.events), (10, 8, 8));
        // One user's reply is over before the other's begins.
        let apart = [trace(start, 0, &[100, 200], 5), trace(start, 0, &[300, 400], 5)];
        let m = measure("x", &point, &apart, Duration::ZERO).expect("measured");
        assert_eq!(m.steady_tokens_per_s, None);
    }

    #[test]
    fn what_arrived_together_has_no_rate() {
        let start = Instant::now();
        let (prefill, decode) = (
            Point::Prefill { tokens: 5 },
            Point::Decode {
                context: 0,
                tokens: 3,
            },
        );
        let users = Point::Users {
            users: 1,
            requests: 1,
            context: 5,
            tokens: 4,
        };
        let with = |point: &Point, events: &[u64], least: u64| {
            let mut t = trace(start, 0, events, 5);
            t.output_tokens = 4;
            measure("x", point, &[t], Duration::from_millis(least)).expect("measured")
        };
        // One part, several at one moment, several that the client cannot tell apart.
        for (events, least) in [(&[500][..], 0), (&[500, 500], 0), (&[500, 501], 1)] {
            let m = with(&decode, events, least);
            assert_eq!((m.tokens_per_s, m.read), (None, None), "{events:?}");
            // What counts from the sending has one.
            let m = with(&users, events, least);
            assert!(m.tokens_per_s.is_some_and(|rate| rate < 8.1), "{m:?}");
            assert_eq!(m.steady_tokens_per_s, None, "{events:?}");
            assert!(is(with(&prefill, events, least).tokens_per_s, 10.0));
        }
        let m = with(&decode, &[500, 501], 0);
        assert!(is(m.tokens_per_s, 3000.0), "{m:?}");
    }

    #[test]
    fn what_was_not_streamed_or_ended_at_once_is_refused() {
        let start = Instant::now();
        let mut whole = trace(start, 0, &[500], 1);
        whole.output_tokens = 64;
        let point = Point::Decode {
            context: 0,
            tokens: 63,
        };
        let error = measure("peer", &point, &[whole], Duration::ZERO)
            .expect_err("one piece")
            .to_string();
        assert!(error.contains("peer") && error.contains("one piece"), "{error}");
        let error =
            measure("peer", &point, &[trace(start, 0, &[500], 1)], Duration::ZERO).expect_err("one token");
        assert!(error.to_string().contains("1 of 64"), "{error}");
    }

    #[test]
    fn points_survive_json() {
        let point = Point::Users {
            users: 2,
            requests: 1,
            context: 5,
            tokens: 4,
        };
        let text = serde_json::to_string(&point).expect("JSON");
        assert_eq!(
            text,
            r#"{"figure":"users","users":2,"requests":1,"context":5,"tokens":4}"#
        );
        assert_eq!(serde_json::from_str::<Point>(&text).expect("a point"), point);
    }

    #[test]
    fn waiting_times_have_mean_one() {
        let mut random = Random::new(1);
        let mean = (0..20_000).map(|_| random.exponential()).sum::<f64>() / 20_000.0;
        assert!((mean - 1.0).abs() < 0.03, "{mean}");
    }
}
