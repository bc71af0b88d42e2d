//! Bar charts as SVG: panels below each other, groups of bars, whiskers, axes and a legend.

use std::fmt::Write;

use super::drive::{Measured, Point};
use super::report::{Series, number};

const WIDTH: f64 = 860.0;
const PANEL: f64 = 260.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 56.0;
/// Around the bars of a panel, above and below.
const PANEL_TOP: f64 = 34.0;
const PANEL_BOTTOM: f64 = 40.0;
/// Colours that people with colour blindness can tell apart (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999",
];

/// A bar: its height, and the ends of its whisker.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Bar {
    value: f64,
    low: f64,
    high: f64,
}

/// A panel: its title, what stands under each group, and the bars by group and engine.
#[derive(Debug, Clone, PartialEq)]
struct Panel {
    title: String,
    groups: Vec<(String, Vec<Option<Bar>>)>,
}

/// `text` as content of an element or a value of an attribute; what XML cannot hold is left out.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// The next of 1, 2, 2.5, 5, 10, … times a power of ten.
fn round_up(x: f64) -> f64 {
    if x <= 0.0 || !x.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf(x.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|v| *v >= x * (1.0 - 1e-12))
        .unwrap_or(10.0 * power)
}

/// A speed: the median of the rounds, whiskers from the smallest to the largest.
fn rate(s: &Series<'_>) -> Option<Bar> {
    let r = s.spread(|m| m.tokens_per_s)?;
    Some(Bar {
        value: r.median,
        low: r.min,
        high: r.max,
    })
}

/// A time: one quantile, the whisker up to a higher one.
fn time(
    s: &Series<'_>,
    low: fn(&Measured) -> Option<f64>,
    high: fn(&Measured) -> Option<f64>,
) -> Option<Bar> {
    let value = s.median(low)?;
    Some(Bar {
        value,
        low: value,
        high: s.median(high)?,
    })
}

/// A kind of panel: its title, which figures it shows, and the bar of each.
type Kind = (&'static str, fn(&Point) -> bool, fn(&Series<'_>) -> Option<Bar>);

const KINDS: [Kind; 5] = [
    (
        "Prefill: prompt tokens per second",
        |p| matches!(p, Point::Prefill { .. }),
        rate,
    ),
    (
        "Decode, one user: tokens per second",
        |p| matches!(p, Point::Decode { .. }),
        rate,
    ),
    (
        "Several users: output tokens per second, total",
        Point::is_load,
        rate,
    ),
    (
        "Several users: time to first token, ms (bar: median; whisker: up to 95 %)",
        Point::is_load,
        |s| time(s, |m| Some(m.ttft_ms.p50), |m| Some(m.ttft_ms.p95)),
    ),
    (
        "Several users: gap between tokens, ms (bar: median; whisker: up to 99 %)",
        Point::is_load,
        |s| time(s, |m| m.gap_ms.map(|g| g.p50), |m| m.gap_ms.map(|g| g.p99)),
    ),
];

fn panels(series: &[Series<'_>], engines: &[&str]) -> Vec<Panel> {
    let mut all = Vec::new();
    for (title, shows, bar) in KINDS {
        let mut groups: Vec<(String, Vec<Option<Bar>>)> = Vec::new();
        for s in series.iter().filter(|s| shows(s.point)) {
            let (name, engine) = (s.point.title(), engines.iter().position(|e| *e == s.engine));
            let at = groups.iter().position(|(n, _)| *n == name).unwrap_or_else(|| {
                groups.push((name, vec![None; engines.len()]));
                groups.len() - 1
            });
            if let Some(engine) = engine {
                groups[at].1[engine] = bar(s);
            }
        }
        if groups.iter().any(|(_, bars)| bars.iter().any(Option::is_some)) {
            all.push(Panel {
                title: title.to_owned(),
                groups,
            });
        }
    }
    all
}

/// The figures as a picture; `title` and `subtitle` stand above.
pub(super) fn chart(title: &str, subtitle: &str, series: &[Series<'_>]) -> String {
    let mut engines: Vec<&str> = Vec::new();
    for s in series {
        if !engines.contains(&s.engine) {
            engines.push(s.engine);
        }
    }
    let panels = panels(series, &engines);
    let legend = 18.0 * engines.len() as f64 + 8.0;
    let height = TOP + legend + PANEL * panels.len() as f64 + 10.0;
    let mut out = String::new();
    let mut put = |line: std::fmt::Arguments<'_>| {
        out.write_fmt(line).expect("writing to a string cannot fail");
        out.push('\n');
    };
    put(format_args!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">"
    ));
    put(format_args!(
        "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>"
    ));
    put(format_args!(
        "<text x=\"12\" y=\"24\" font-size=\"16\" font-weight=\"bold\">{}</text>",
        escape(title)
    ));
    put(format_args!(
        "<text x=\"12\" y=\"43\" fill=\"#555555\">{}</text>",
        escape(subtitle)
    ));
    for (i, engine) in engines.iter().enumerate() {
        let y = TOP + 18.0 * i as f64;
        let colour = COLOURS[i % COLOURS.len()];
        put(format_args!(
            "<rect x=\"12\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
        ));
        put(format_args!(
            "<text x=\"30\" y=\"{}\">{}</text>",
            y + 10.0,
            escape(engine)
        ));
    }
    for (i, panel) in panels.iter().enumerate() {
        draw(&mut put, panel, TOP + legend + PANEL * i as f64);
    }
    put(format_args!("</svg>"));
    out
}

fn draw(put: &mut impl FnMut(std::fmt::Arguments<'_>), panel: &Panel, top: f64) {
    let (from, to) = (top + PANEL_TOP, top + PANEL - PANEL_BOTTOM);
    let bars = panel.groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
    let most = round_up(bars.map(|b| b.high.max(b.value)).fold(0.0, f64::max));
    let y = |v: f64| to - (to - from) * (v / most).clamp(0.0, 1.0);
    put(format_args!(
        "<text x=\"12\" y=\"{}\" font-weight=\"bold\">{}</text>",
        top + 18.0,
        escape(&panel.title)
    ));
    for i in 0..=4 {
        let value = most * f64::from(i) / 4.0;
        let at = y(value);
        put(format_args!(
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>",
            WIDTH - RIGHT
        ));
        put(format_args!(
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555555\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            number(value)
        ));
    }
    let group = (WIDTH - LEFT - RIGHT) / panel.groups.len() as f64;
    for (g, (name, bars)) in panel.groups.iter().enumerate() {
        let x = LEFT + group * g as f64;
        let width = (group * 0.8 / bars.len() as f64).min(60.0);
        let first = x + (group - width * bars.len() as f64) / 2.0;
        for (i, bar) in bars.iter().enumerate() {
            let Some(bar) = bar else { continue };
            let (left, middle) = (first + width * i as f64, first + width * (i as f64 + 0.5));
            put(format_args!(
                "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
                y(bar.value),
                width * 0.9,
                to - y(bar.value),
                COLOURS[i % COLOURS.len()]
            ));
            put(format_args!(
                "<line x1=\"{middle:.1}\" x2=\"{middle:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#333333\"/>",
                y(bar.low),
                y(bar.high)
            ));
            put(format_args!(
                "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"11\">{}</text>",
                y(bar.high) - 4.0,
                number(bar.value)
            ));
        }
        put(format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x + group / 2.0,
            to + 18.0,
            escape(name)
        ));
    }
    put(format_args!(
        "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{to}\" y2=\"{to}\" stroke=\"#333333\"/>",
        WIDTH - RIGHT
    ));
    put(format_args!(
        "<line x1=\"{LEFT}\" x2=\"{LEFT}\" y1=\"{from}\" y2=\"{to}\" stroke=\"#333333\"/>"
    ));
}

#[cfg(test)]
mod tests {
    use super::super::drive::Quantiles;
    use super::super::report::RoundRecord;
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(
            escape("<a href='x'>&\"\u{1}"),
            "&lt;a href=&apos;x&apos;&gt;&amp;&quot; "
        );
    }

    #[test]
    fn axes_end_at_round_numbers() {
        for (x, end) in [
            (0.0, 1.0),
            (0.7, 1.0),
            (1.0, 1.0),
            (1.1, 2.0),
            (23.0, 25.0),
            (260.0, 500.0),
            (999.0, 1000.0),
        ] {
            assert!((round_up(x) - end).abs() < 1e-9 * end, "{x}: {}", round_up(x));
        }
    }

    #[test]
    fn every_engine_and_figure_has_its_bar() {
        let record = |engine: &str, point: Point, rate: f64| RoundRecord {
            record: "round".into(),
            engine: engine.into(),
            round: 1,
            point,
            measured: Measured {
                tokens_per_s: Some(rate),
                steady_tokens_per_s: None,
                ttft_ms: Quantiles {
                    p50: 10.0,
                    p95: 20.0,
                    p99: 30.0,
                },
                gap_ms: None,
                seconds: 1.0,
                prompt_tokens: 1,
                output_tokens: 1,
                cached_tokens: None,
                read: None,
                events: 1,
            },
            peak_resident_bytes: None,
        };
        let users = Point::Users {
            users: 2,
            requests: 1,
            context: 8,
            tokens: 4,
        };
        let all = [
            record("a<b", Point::Prefill { tokens: 8 }, 50.0),
            record("c", Point::Prefill { tokens: 8 }, 100.0),
            record("a<b", users, 7.0),
        ];
        let picture = chart("t & t", "s", &Series::of(&all));
        assert!(picture.starts_with("<svg ") && picture.trim_end().ends_with("</svg>"));
        assert!(picture.contains("a&lt;b") && picture.contains("t &amp; t") && !picture.contains("a<b"));
        // Background, a legend entry for each engine, two bars of prefill, one of users, one of their first token.
        assert_eq!(picture.matches("<rect ").count(), 1 + 2 + 2 + 1 + 1, "{picture}");
        // Half as fast is half as high.
        let heights: Vec<f64> = picture
            .lines()
            .filter(|l| l.starts_with("<rect x=") && !l.contains("width=\"12\""))
            .filter_map(|l| l.split("height=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert!((heights[0] * 2.0 - heights[1]).abs() < 0.2, "{heights:?}");
    }
}
