//! The `tojson` filter as chat templates know it: Python's `json.dumps` with `ensure_ascii=False` by default.
//!
//! Keeps the order of keys, escapes no HTML, and takes `indent`, `separators`, `sort_keys` and `ensure_ascii`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Deepest nesting written; what a request can carry is far below.
const MAX_DEPTH: usize = 200;

struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

/// `value | tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = match ensure_ascii {
        Some(yes) => yes,
        None => kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(invalid("`separators` must be two strings")),
    };
    let mut writer = Writer {
        out: String::new(),
        ensure_ascii,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item: item.to_owned(),
        key: key.to_owned(),
        indent,
    };
    kwargs.assert_all_used()?;
    writer.value(state, value, 0)?;
    Ok(Value::from(writer.out))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

impl Writer {
    fn value(&mut self, state: &State, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!(
                "a value nested deeper than {MAX_DEPTH} cannot be written as JSON"
            )));
        }
        let before = self.out.len();
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                let mut any = false;
                for item in value.try_iter()? {
                    self.next(any, depth + 1);
                    any = true;
                    self.value(state, &item, depth + 1)?;
                }
                self.close(any, depth, ']');
            }
            ValueKind::Map => self.map(state, value, depth)?,
            kind => {
                return Err(invalid(format!(
                    "a value of type {kind} cannot be written as JSON"
                )));
            }
        }
        // What a filter creates is charged by the engine only when it returns.
        state.consume_fuel(1 + (self.out.len() - before) as u64 / 64)
    }

    fn map(&mut self, state: &State, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        self.out.push('{');
        let any = !keys.is_empty();
        for (at, key) in keys.iter().enumerate() {
            self.next(at > 0, depth + 1);
            match key.kind() {
                ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                    self.out.push('"');
                    self.value(state, key, depth + 1)?;
                    self.out.push('"');
                }
                kind => return Err(invalid(format!("a key of type {kind} cannot be written as JSON"))),
            }
            self.out.push_str(&self.key);
            self.value(state, &value.get_item(key)?, depth + 1)?;
        }
        self.close(any, depth, '}');
        Ok(())
    }

    fn next(&mut self, after_another: bool, depth: usize) {
        if after_another {
            self.out.push_str(&self.item);
        }
        self.line(depth);
    }

    fn close(&mut self, any: bool, depth: usize, bracket: char) {
        if any {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
            return Ok(());
        }
        self.out.push_str(&python_float(f64::try_from(value.clone())?));
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A float as Python's `repr` writes it: the shortest digits that round-trip, an exponent below 1e-4 and from 1e16.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        };
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::python_float;

    #[test]
    fn floats_are_pythons() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }
}
