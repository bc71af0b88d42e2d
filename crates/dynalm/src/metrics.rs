//! What is counted, and its names: Prometheus counters, gauges and histograms (seconds).
//!
//! Values are atomics: the engine's thread and the HTTP threads write, a scrape reads; nobody waits for anybody.
//! Gauges that routers read exist a second time under vLLM's names.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Bounds of waits and whole requests, seconds.
const LONG_BUCKETS: [f64; 15] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0,
];
/// Bounds of gaps between tokens and of single steps, seconds.
const SHORT_BUCKETS: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0,
];

type FloatGauge = Gauge<f64, AtomicU64>;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "the variants' names are the label's values")]
pub enum Outcome {
    /// The model ended its turn or a stop text appeared.
    stop,
    /// The token limit or the window was reached.
    length,
    /// The client left.
    cancelled,
    /// It failed.
    error,
}

/// Which work a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "the variants' names are the label's values")]
pub enum StepPhase {
    /// Prompt chunks only.
    prefill,
    /// Generated tokens only.
    decode,
    /// Both.
    mixed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    reason: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    phase: StepPhase,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HttpLabels {
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheLabels {
    block_size: usize,
    num_gpu_blocks: usize,
    cache_dtype: String,
    enable_prefix_caching: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
    architecture: String,
    quantization: String,
    version: &'static str,
}

/// Everything that is counted.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    finished: Family<OutcomeLabels, Counter>,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: Counter,
    /// Tokens drawn.
    pub generation_tokens: Counter,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: Counter,
    /// Prompt tokens found there.
    pub prefix_hits: Counter,
    /// Sequences thrown out of the batch for want of pages.
    pub preemptions: Counter,
    /// Requests refused because the queue was full.
    pub rejected: Counter,
    /// Arrival to first token.
    pub time_to_first_token: Histogram,
    /// Gap between two tokens of a request.
    pub inter_token: Histogram,
    /// Arrival to end.
    pub end_to_end: Histogram,
    /// Arrival to admission.
    pub queue_time: Histogram,
    steps: Family<PhaseLabels, Histogram, fn() -> Histogram>,
    running: Gauge,
    waiting: Gauge,
    kv_used: Gauge,
    kv_total: Gauge,
    kv_usage: FloatGauge,
    cache_info: Family<CacheLabels, Gauge>,
    model_info: Family<ModelLabels, Gauge>,
    http: Family<HttpLabels, Counter>,
}

fn short() -> Histogram {
    Histogram::new(SHORT_BUCKETS)
}

fn long() -> Histogram {
    Histogram::new(LONG_BUCKETS)
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Metrics {
            registry: Registry::default(),
            finished: Family::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            preemptions: Counter::default(),
            rejected: Counter::default(),
            time_to_first_token: long(),
            inter_token: short(),
            end_to_end: long(),
            queue_time: long(),
            steps: Family::new_with_constructor(short as fn() -> Histogram),
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_used: Gauge::default(),
            kv_total: Gauge::default(),
            kv_usage: FloatGauge::default(),
            cache_info: Family::default(),
            model_info: Family::default(),
            http: Family::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        // The outcomes exist from the start, so that a rate over them is never missing.
        for reason in [Outcome::stop, Outcome::length, Outcome::cancelled, Outcome::error] {
            drop(self.finished.get_or_create(&OutcomeLabels { reason }));
        }
        self.register_counters();
        self.register_histograms();
        self.register_gauges();
    }

    fn register_counters(&mut self) {
        let r = &mut self.registry;
        r.register(
            "dynalm_requests_finished",
            "Requests that ended, by reason",
            self.finished.clone(),
        );
        r.register(
            "dynalm_http_requests",
            "HTTP requests, by route and status",
            self.http.clone(),
        );
        for (name, help, counter) in [
            (
                "dynalm_requests_rejected",
                "Requests refused, queue full",
                &self.rejected,
            ),
            (
                "dynalm_prompt_tokens",
                "Prompt tokens of admitted requests",
                &self.prompt_tokens,
            ),
            (
                "dynalm_generation_tokens",
                "Tokens drawn",
                &self.generation_tokens,
            ),
            (
                "dynalm_prefix_cache_queries",
                "Prompt tokens looked up",
                &self.prefix_queries,
            ),
            (
                "dynalm_prefix_cache_hits",
                "Prompt tokens reused",
                &self.prefix_hits,
            ),
            ("dynalm_preemptions", "Sequences preempted", &self.preemptions),
        ] {
            r.register(name, help, counter.clone());
        }
    }

    fn register_histograms(&mut self) {
        let r = &mut self.registry;
        for (name, help, histogram) in [
            (
                "dynalm_time_to_first_token",
                "Arrival to first token",
                &self.time_to_first_token,
            ),
            (
                "dynalm_inter_token_latency",
                "Gap between two tokens",
                &self.inter_token,
            ),
            ("dynalm_request_duration", "Arrival to end", &self.end_to_end),
            ("dynalm_queue_time", "Arrival to admission", &self.queue_time),
        ] {
            r.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let help = "Time of one engine step, by its work";
        r.register_with_unit("dynalm_step_duration", help, Unit::Seconds, self.steps.clone());
    }

    fn register_gauges(&mut self) {
        let r = &mut self.registry;
        for (name, help, gauge) in [
            ("dynalm_requests_running", "Requests in the batch", &self.running),
            ("dynalm_requests_waiting", "Requests in the queue", &self.waiting),
            ("dynalm_kv_pages_used", "Cache pages in use", &self.kv_used),
            ("dynalm_kv_pages_total", "Cache pages", &self.kv_total),
            (
                "vllm:num_requests_running",
                "Requests in the batch",
                &self.running,
            ),
            (
                "vllm:num_requests_waiting",
                "Requests in the queue",
                &self.waiting,
            ),
        ] {
            r.register(name, help, gauge.clone());
        }
        r.register("dynalm_model_info", "The served model", self.model_info.clone());
        r.register(
            "vllm:kv_cache_usage_perc",
            "Cache pages in use, 1 is all",
            self.kv_usage.clone(),
        );
        r.register(
            "vllm:cache_config_info",
            "Shape of the cache",
            self.cache_info.clone(),
        );
    }

    /// Counts a request's end.
    pub fn finish(&self, reason: Outcome) {
        self.finished.get_or_create(&OutcomeLabels { reason }).inc();
    }

    /// How many requests ended this way.
    pub fn finished(&self, reason: Outcome) -> u64 {
        self.finished.get_or_create(&OutcomeLabels { reason }).get()
    }

    /// Counts an engine step.
    pub fn step(&self, phase: StepPhase, time: Duration) {
        self.steps
            .get_or_create(&PhaseLabels { phase })
            .observe(time.as_secs_f64());
    }

    /// Counts an HTTP reply.
    pub fn http_reply(&self, route: &str, status: u16) {
        self.http
            .get_or_create(&HttpLabels {
                route: route.to_owned(),
                status,
            })
            .inc();
    }

    /// Sets the number of running and of waiting requests.
    pub fn set_load(&self, running: usize, waiting: usize) {
        self.running.set(running as i64);
        self.waiting.set(waiting as i64);
    }

    /// Sets the cache pages in use and in all.
    pub fn set_kv(&self, used: usize, total: usize) {
        self.kv_used.set(used as i64);
        self.kv_total.set(total as i64);
        self.kv_usage.set(if total == 0 {
            0.0
        } else {
            used as f64 / total as f64
        });
    }

    /// Requests running, requests waiting, pages used, pages in all, as last set.
    pub fn load(&self) -> (usize, usize, usize, usize) {
        let get = |gauge: &Gauge| gauge.get().max(0) as usize;
        (
            get(&self.running),
            get(&self.waiting),
            get(&self.kv_used),
            get(&self.kv_total),
        )
    }

    /// States the cache's shape.
    pub fn set_cache_info(&self, block_tokens: usize, blocks: usize, kind: &str, prefix_cache: bool) {
        let labels = CacheLabels {
            block_size: block_tokens,
            num_gpu_blocks: blocks,
            cache_dtype: kind.to_owned(),
            // Routers expect Python's spelling.
            enable_prefix_caching: if prefix_cache { "True" } else { "False" }.to_owned(),
        };
        self.cache_info.get_or_create(&labels).set(1);
    }

    /// States the served model.
    pub fn set_model_info(&self, model: &str, architecture: &str, quantization: &str) {
        let labels = ModelLabels {
            model: model.to_owned(),
            architecture: architecture.to_owned(),
            quantization: quantization.to_owned(),
            version: env!("CARGO_PKG_VERSION"),
        };
        self.model_info.get_or_create(&labels).set(1);
    }

    /// All values in the OpenMetrics text format.
    pub fn open_metrics(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string does not fail");
        text
    }

    /// All values in Prometheus' older text format: there a counter's `HELP` and `TYPE` lines carry the sample's full
    /// name, and neither units nor an end mark exist.
    pub fn classic_text(&self) -> String {
        let modern = self.open_metrics();
        let counters: Vec<&str> = modern
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
            .collect();
        let mut text = String::with_capacity(modern.len());
        for line in modern.lines() {
            let comment = line
                .strip_prefix("# HELP ")
                .or_else(|| line.strip_prefix("# TYPE "));
            match comment.and_then(|rest| rest.split_once(' ')) {
                Some((name, rest)) if counters.contains(&name) => {
                    text.push_str(&line[..7]);
                    text.push_str(name);
                    text.push_str("_total ");
                    text.push_str(rest);
                }
                _ if line.starts_with("# UNIT ") || line == "# EOF" => continue,
                _ => text.push_str(line),
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_hold_every_sample() {
        let metrics = Metrics::default();
        metrics.prompt_tokens.inc_by(7);
        metrics.set_kv(3, 12);
        metrics.time_to_first_token.observe(0.2);
        metrics.step(StepPhase::mixed, Duration::from_millis(3));
        metrics.set_cache_info(16, 12, "f16", true);
        let modern = metrics.open_metrics();
        let classic = metrics.classic_text();
        for text in [&modern, &classic] {
            assert!(text.contains("\ndynalm_prompt_tokens_total 7\n"), "{text}");
            assert!(text.contains("vllm:kv_cache_usage_perc 0.25\n"), "{text}");
            assert!(
                text.contains("dynalm_time_to_first_token_seconds_bucket{le=\"0.25\"} 1\n"),
                "{text}"
            );
            assert!(
                text.contains("dynalm_step_duration_seconds_count{phase=\"mixed\"} 1\n"),
                "{text}"
            );
            assert!(text.contains("block_size=\"16\""), "{text}");
        }
        assert!(modern.ends_with("# EOF\n"));
        assert!(
            classic.contains("# TYPE dynalm_prompt_tokens_total counter\n"),
            "{classic}"
        );
        assert!(
            !classic.contains("# EOF") && !classic.contains("# UNIT"),
            "{classic}"
        );
    }
}
