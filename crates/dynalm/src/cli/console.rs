//! What people see: messages on stderr, progress, sizes. No colour or escape codes unless stderr is a terminal.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::settings::Settings;

/// How often progress is told where no terminal shows it.
const PLAIN_PROGRESS: Duration = Duration::from_secs(3);

/// Starts logging to stderr at the level of the settings.
pub(super) fn start_logging(settings: &Settings) {
    let level = settings.text("log_level");
    // Libraries are noisy below `info`; ours are what the user asks about.
    let filter = format!(
        "{},dynalm={level},dynacore={level}",
        if level == "trace" { "debug" } else { "warn" }
    );
    let colour = colour(settings);
    let result = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .with_ansi(colour)
        .with_target(false)
        .try_init();
    if let Err(e) = result {
        note(format_args!("logging could not be started: {e}"));
    }
}

/// Whether stderr may carry escape codes.
pub(super) fn colour(settings: &Settings) -> bool {
    std::io::stderr().is_terminal()
        && settings.environment().get("NO_COLOR").is_none()
        && settings.environment().get("TERM") != Some("dumb")
}

/// A line for people. A closed stderr is nobody's failure.
pub(super) fn note(message: impl Display) {
    let _ = writeln!(std::io::stderr(), "{message}");
}

/// The error that ends the program.
pub(super) fn error(error: &anyhow::Error) {
    let mut text = format!("dynalm: {error}");
    let mut last = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // Our errors already contain their causes.
        if !last.contains(&cause) {
            text.push_str(&format!(": {cause}"));
            last = cause;
        }
    }
    note(text);
}

/// A size in the unit people use.
pub(super) fn bytes(n: u64) -> String {
    let n = n as f64;
    if n < 1e6 {
        format!("{:.0} kB", n / 1e3)
    } else if n < 1e9 {
        format!("{:.1} MB", n / 1e6)
    } else {
        format!("{:.2} GB", n / 1e9)
    }
}

/// A count of parameters as people say it.
pub(super) fn parameters(n: u64) -> String {
    let n = n as f64;
    if n < 1e9 {
        format!("{:.0} M", n / 1e6)
    } else {
        format!("{:.2} B", n / 1e9)
    }
}

/// Rows as a table with two spaces between columns.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|s| s.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            line.push_str(cell);
            line.push_str(&" ".repeat(widths[c] - cell.chars().count() + 2));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Progress of something with a known size in bytes: a bar on a terminal, a line now and then elsewhere.
pub(super) struct ByteProgress {
    bar: Option<ProgressBar>,
    quiet: bool,
    label: String,
    total: u64,
    last: Instant,
    last_tenth: u64,
}

impl ByteProgress {
    /// Starts at 0 of `total` (0: unknown).
    pub(super) fn new(settings: &Settings, label: &str, total: u64) -> ByteProgress {
        let quiet = settings.text("log_level") == "error";
        let bar = (colour(settings) && !quiet).then(|| {
            let bar = ProgressBar::new(total);
            let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            if let Ok(style) = ProgressStyle::with_template(style) {
                bar.set_style(style);
            }
            bar.set_message(label.to_owned());
            bar
        });
        ByteProgress {
            bar,
            quiet,
            label: label.to_owned(),
            total,
            last: Instant::now(),
            last_tenth: 0,
        }
    }

    /// `done` bytes are there.
    pub(super) fn at(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            return;
        }
        let tenth = (done * 10).checked_div(self.total).unwrap_or(0);
        if !self.quiet && tenth > self.last_tenth && self.last.elapsed() >= PLAIN_PROGRESS {
            note(format_args!(
                "{}: {} of {}",
                self.label,
                bytes(done),
                bytes(self.total)
            ));
            self.last = Instant::now();
            self.last_tenth = tenth;
        }
    }

    /// Nothing more comes.
    pub(super) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_and_have_no_trailing_spaces() {
        let rows = vec![vec!["a".into(), "bb".into()], vec!["ccc".into(), "d".into()]];
        assert_eq!(table(&rows), "a    bb\nccc  d\n");
    }

    #[test]
    fn sizes_read_as_people_say_them() {
        assert_eq!(bytes(98_362_432), "98.4 MB");
        assert_eq!(bytes(1_641_000_000), "1.64 GB");
        assert_eq!(parameters(134_515_008), "135 M");
        assert_eq!(parameters(1_543_714_304), "1.54 B");
    }
}
