//! What a benchmark says: records for programs, tables for people, and comparisons.

use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::drive::{Measured, Point, Quantiles};
use super::stats::{self, Spread, Verdict};
use crate::cli::{Usage, console, text};

/// One figure of one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RoundRecord {
    /// `round`.
    pub(super) record: String,
    pub(super) engine: String,
    pub(super) round: usize,
    #[serde(flatten)]
    pub(super) point: Point,
    #[serde(flatten)]
    pub(super) measured: Measured,
    /// Of the engine's process since it began, where it can be told.
    pub(super) peak_resident_bytes: Option<u64>,
}

/// Records of one engine and figure, by round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Series<'a> {
    pub(super) engine: &'a str,
    pub(super) point: &'a Point,
    all: &'a [RoundRecord],
}

impl<'a> Series<'a> {
    /// Every series of `records`: figures in the order of their first record, engines within them in theirs.
    pub(super) fn of(records: &'a [RoundRecord]) -> Vec<Series<'a>> {
        let mut engines: Vec<&str> = Vec::new();
        let mut points: Vec<&Point> = Vec::new();
        for r in records {
            if !engines.contains(&r.engine.as_str()) {
                engines.push(&r.engine);
            }
            if !points.contains(&&r.point) {
                points.push(&r.point);
            }
        }
        let all = points.iter().flat_map(|point| {
            engines.iter().map(|engine| Series {
                engine,
                point,
                all: records,
            })
        });
        all.filter(|s| s.rounds().next().is_some()).collect()
    }

    pub(super) fn rounds(&self) -> impl Iterator<Item = &'a RoundRecord> + use<'a> {
        let (engine, point) = (self.engine, self.point);
        let of = move |r: &&RoundRecord| r.engine == engine && r.point == *point;
        self.all.iter().filter(of)
    }

    /// Smallest, median and largest of a value over the rounds; `None` if a round lacks it.
    pub(super) fn spread(&self, value: impl Fn(&Measured) -> Option<f64>) -> Option<Spread> {
        let all: Option<Vec<f64>> = self.rounds().map(|r| value(&r.measured)).collect();
        Spread::of(all?)
    }

    /// Median over the rounds of a value.
    pub(super) fn median(&self, value: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
        self.spread(value).map(|s| s.median)
    }

    fn quantiles(&self, of: impl Fn(&Measured) -> Option<Quantiles>) -> Option<Quantiles> {
        Some(Quantiles {
            p50: self.median(|m| of(m).map(|q| q.p50))?,
            p95: self.median(|m| of(m).map(|q| q.p95))?,
            p99: self.median(|m| of(m).map(|q| q.p99))?,
        })
    }

    /// For the summary record.
    pub(super) fn json(&self) -> Value {
        let rate = self.spread(|m| m.tokens_per_s);
        let mut value = serde_json::to_value(self.point).expect("a point is JSON");
        value["rounds"] = self.rounds().count().into();
        value["tokens_per_s"] = json!(rate);
        value["variation"] = json!(rate.map(|s| s.variation()));
        value["steady_tokens_per_s"] = json!(self.spread(|m| m.steady_tokens_per_s));
        value["ttft_ms"] = json!(self.quantiles(|m| Some(m.ttft_ms)));
        value["gap_ms"] = json!(self.quantiles(|m| m.gap_ms));
        if let Some(bytes) = self.median(|m| m.read.map(|r| r.read_bytes_per_token)) {
            value["read_bytes_per_token"] = json!(bytes);
            value["read_bytes_per_s"] = json!(self.spread(|m| m.read.map(|r| r.read_bytes_per_s)));
            value["stream_bytes_per_s"] = json!(self.spread(|m| m.read.map(|r| r.stream_bytes_per_s)));
            value["read_share"] = json!(self.spread(|m| m.read.map(|r| r.read_share)));
        }
        value["cached_tokens"] = json!(self.rounds().filter_map(|r| r.measured.cached_tokens).max());
        value
    }
}

/// Reads the rounds of an earlier run.
///
/// # Errors
/// If the file cannot be read, a line is no record, or there is no round.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<RoundRecord>> {
    let content = text::read_file(path)?;
    let mut records: Vec<RoundRecord> = Vec::new();
    for (i, line) in content.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let at = || format!("{}:{}", path.display(), i + 1);
        let value: Value = serde_json::from_str(line).with_context(|| format!("{}: no JSON record", at()))?;
        match value.get("record").and_then(Value::as_str) {
            Some("round") => records.push(
                serde_json::from_value(value)
                    .with_context(|| format!("{}: not a round of `benchmark`", at()))?,
            ),
            Some(_) => {}
            None => anyhow::bail!(
                "{}: a line without `record`; expected what `benchmark --json` writes",
                at()
            ),
        }
    }
    if records.is_empty() {
        anyhow::bail!(
            "{}: no measured round; expected what `benchmark --json` writes",
            path.display()
        );
    }
    Ok(records)
}

/// One engine held against another in one value of one figure.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Comparison<'a> {
    pub(super) engine: &'a str,
    pub(super) against: &'a str,
    pub(super) point: &'a Point,
    pub(super) value: &'static str,
    pub(super) verdict: Verdict,
}

/// The values that are compared: name, whether only where several requests run together, and how to get it.
type Value64 = fn(&Measured) -> Option<f64>;
const COMPARED: [(&str, bool, Value64); 4] = [
    ("tokens_per_s", false, |m| m.tokens_per_s),
    ("steady_tokens_per_s", true, |m| m.steady_tokens_per_s),
    ("ttft_ms.p50", true, |m| Some(m.ttft_ms.p50)),
    ("gap_ms.p50", true, |m| m.gap_ms.map(|g| g.p50)),
];

/// Compares `engine` with every other one, in every figure that both have, by rounds of one number.
pub(super) fn comparisons<'a>(series: &[Series<'a>], engine: &str) -> Vec<Comparison<'a>> {
    let mut all = Vec::new();
    for ours in series.iter().filter(|s| s.engine == engine) {
        let others = series
            .iter()
            .filter(|s| s.engine != engine && s.point == ours.point);
        for theirs in others {
            for (value, load_only, get) in COMPARED {
                if load_only && !ours.point.is_load() {
                    continue;
                }
                let pairs: Vec<(f64, f64)> = ours
                    .rounds()
                    .filter_map(|a| {
                        let b = theirs.rounds().find(|b| b.round == a.round)?;
                        Some((get(&a.measured)?, get(&b.measured)?))
                    })
                    .collect();
                let (a, b): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
                if let Some(verdict) = stats::compare(&a, &b) {
                    all.push(Comparison {
                        engine: ours.engine,
                        against: theirs.engine,
                        point: ours.point,
                        value,
                        verdict,
                    });
                }
            }
        }
    }
    all
}

impl Comparison<'_> {
    pub(super) fn json(&self) -> Value {
        let mut value = json!({"record": "comparison", "engine": self.engine, "against": self.against});
        let point = serde_json::to_value(self.point).expect("a point is JSON");
        for (key, part) in point.as_object().into_iter().flatten() {
            value[key] = part.clone();
        }
        value["value"] = self.value.into();
        value["ratio"] = json!(self.verdict.ratio);
        value["confirmed"] = self.verdict.confirmed.into();
        value["reason"] = self.verdict.reason.clone().into();
        value
    }
}

/// A number with three significant digits, or whole.
pub(super) fn number(x: f64) -> String {
    match x.abs() {
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 10.0 => format!("{x:.1}"),
        _ => format!("{x:.2}"),
    }
}

fn list(values: &[f64]) -> String {
    values.iter().map(|v| number(*v)).collect::<Vec<_>>().join(" / ")
}

/// The figures for people.
pub(super) fn table(series: &[Series<'_>]) -> String {
    let head = [
        "figure",
        "engine",
        "tokens/s min / median / max",
        "varies",
        "all decoding",
        "first token ms p50 / p95",
        "gap ms p50 / p95 / p99",
        "reads GB/s",
        "of a stream",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let dash = || "-".to_owned();
    for s in series {
        let rate = s.spread(|m| m.tokens_per_s);
        let steady = s.median(|m| m.steady_tokens_per_s);
        let ttft = s.quantiles(|m| Some(m.ttft_ms));
        let gap = s.quantiles(|m| m.gap_ms);
        let reads = s.median(|m| m.read.map(|r| r.read_bytes_per_s));
        let share = s.median(|m| m.read.map(|r| r.read_share));
        rows.push(vec![
            s.point.title(),
            s.engine.to_owned(),
            rate.map_or_else(dash, |r| list(&[r.min, r.median, r.max])),
            rate.map_or_else(dash, |r| format!("{:.0} %", 100.0 * r.variation())),
            steady.map_or_else(dash, number),
            ttft.map_or_else(dash, |q| list(&[q.p50, q.p95])),
            gap.map_or_else(dash, |q| list(&[q.p50, q.p95, q.p99])),
            reads.map_or_else(dash, |bytes| number(bytes / 1e9)),
            share.map_or_else(dash, |share| format!("{:.0} %", 100.0 * share)),
        ]);
    }
    console::table(&rows)
}

/// The comparisons for people.
pub(super) fn comparison_table(all: &[Comparison<'_>]) -> String {
    let head = ["figure", "value", "ratio min / median / max", "of", "difference"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for c in all {
        let r = &c.verdict.ratio;
        rows.push(vec![
            c.point.title(),
            c.value.to_owned(),
            list(&[r.min, r.median, r.max]),
            format!("{} / {}", c.engine, c.against),
            if c.verdict.confirmed {
                "confirmed".to_owned()
            } else {
                format!("not confirmed: {}", c.verdict.reason)
            },
        ]);
    }
    console::table(&rows)
}

/// Gives the engines of an earlier run names that this run's engines do not have.
pub(super) fn rename_apart(earlier: &mut [RoundRecord], now: &[&str], path: &Path) -> anyhow::Result<()> {
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned());
    let stem = stem.unwrap_or_else(|| "earlier".to_owned());
    for r in earlier {
        if now.contains(&r.engine.as_str()) {
            r.engine = format!("{} ({stem})", r.engine);
            if now.contains(&r.engine.as_str()) {
                return Err(Usage(format!(
                    "--label {}: {} holds an engine of that name",
                    r.engine,
                    path.display()
                ))
                .into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(engine: &str, round: usize, rate: f64) -> RoundRecord {
        RoundRecord {
            record: "round".into(),
            engine: engine.into(),
            round,
            point: Point::Prefill { tokens: 64 },
            measured: Measured {
                tokens_per_s: Some(rate),
                steady_tokens_per_s: None,
                ttft_ms: Quantiles {
                    p50: 1.0,
                    p95: 2.0,
                    p99: 3.0,
                },
                gap_ms: None,
                seconds: 1.0,
                prompt_tokens: 64,
                output_tokens: 1,
                cached_tokens: None,
                events: 1,
                read: None,
            },
            peak_resident_bytes: Some(7),
        }
    }

    #[test]
    fn rounds_survive_a_file_and_other_records_are_passed_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.jsonl");
        let r = record("dynalm", 1, 10.5);
        let line = serde_json::to_string(&r).expect("JSON");
        std::fs::write(&path, format!("{line}\n\n{{\"record\":\"summary\"}}\n")).expect("written");
        assert_eq!(read(&path).expect("records"), [r]);
        for (text, part) in [
            ("", "no measured round"),
            ("{\"figure\":\"decode\"}\n", ":1: a line without `record`"),
            ("{\"record\":\"round\"}\n", ":1: not a round"),
            ("tokens\n", ":1: no JSON"),
        ] {
            std::fs::write(&path, text).expect("written");
            let error = read(&path).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn rounds_of_one_number_are_compared() {
        let mut all: Vec<RoundRecord> = (1..=3).map(|n| record("a", n, 120.0)).collect();
        // In another order, and one round more.
        all.extend([4, 3, 2, 1].map(|n| record("b", n, if n == 4 { 1e9 } else { 100.0 })));
        let series = Series::of(&all);
        let found = comparisons(&series, "a");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].verdict.confirmed, "{found:?}");
        assert_eq!(found[0].json()["ratio"]["max"], 1.2);
        assert_eq!(found[0].json()["figure"], "prefill");
        assert!(comparison_table(&found).contains("a / b"));
    }

    #[test]
    fn a_figure_without_a_rate_says_so_and_is_not_compared() {
        let mut all = vec![record("a", 1, 1.0), record("b", 1, 1.0)];
        all[0].measured.tokens_per_s = None;
        let text = serde_json::to_value(&all[0]).expect("JSON");
        assert!(text["tokens_per_s"].is_null());
        assert_eq!(
            serde_json::from_value::<RoundRecord>(text).expect("a round"),
            all[0]
        );
        let series = Series::of(&all);
        assert!(series[0].json()["tokens_per_s"].is_null());
        assert_eq!(comparisons(&series, "a"), []);
        let table = table(&series[..1]);
        let row: Vec<&str> = table.lines().last().expect("a row").split_whitespace().collect();
        assert_eq!(row[..5], ["prefill", "64", "a", "-", "-"], "{table}");
    }

    #[test]
    fn an_earlier_run_of_the_same_engine_gets_a_name_of_its_own() {
        let mut earlier = [record("dynalm", 1, 1.0), record("peer", 1, 1.0)];
        rename_apart(&mut earlier, &["dynalm"], Path::new("/x/before.jsonl")).expect("renamed");
        assert_eq!(
            [&earlier[0].engine, &earlier[1].engine],
            ["dynalm (before)", "peer"]
        );
    }

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!(
            [123.4, 12.34, 1.234, 0.0].map(number),
            ["123", "12.3", "1.23", "0.00"]
        );
    }
}
