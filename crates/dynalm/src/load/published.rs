//! The sampling values that a checkpoint publishes: `general.sampling.*`, with the meaning they have in llama.cpp, whose
//! converter writes them.
//!
//! A value is applied, or named as not applied (by the log when the model is loaded, and by `inspect`): a model must
//! not become unusable because its publisher likes a sampler this build lacks, and nobody may believe it is in use.

use crate::error::{Error, Result};
use crate::format::value::{KeyValues, Value};
use crate::sample::params::SamplingParams;

const PREFIX: &str = "general.sampling.";

/// What a checkpoint says about sampling.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedSampling {
    /// Its values over the engine's defaults.
    pub params: SamplingParams,
    /// Keys of the values that are applied.
    pub applied: Vec<String>,
    /// The others: key and value.
    pub not_applied: Vec<(String, Value)>,
}

/// Reads the sampling values of a checkpoint.
///
/// # Errors
/// If a value is out of range or of another type.
pub fn published_sampling(values: &KeyValues) -> Result<PublishedSampling> {
    let mut params = SamplingParams::default();
    let mut applied = Vec::new();
    let mut number = |name: &str, set: &mut dyn FnMut(f32)| -> Result<()> {
        let key = format!("{PREFIX}{name}");
        if let Some(value) = values.get::<f32>(&key)? {
            set(value);
            applied.push(key);
        }
        Ok(())
    };
    // Greedy from 0 down.
    number("temp", &mut |v| params.temperature = v.max(0.0))?;
    // Negative counts mean "all".
    number("top_k", &mut |v| params.top_k = v.max(0.0) as u32)?;
    number("top_p", &mut |v| params.top_p = v)?;
    number("min_p", &mut |v| params.min_p = v)?;
    number("penalty_repeat", &mut |v| params.repetition_penalty = v)?;
    let mut looks_back = true;
    number("penalty_last_n", &mut |v| {
        // 0 switches the penalty off there; here it is the whole text, which is −1 there.
        looks_back = v != 0.0;
        params.repetition_window = v.max(0.0) as u32;
    })?;
    if !looks_back {
        params.repetition_penalty = SamplingParams::default().repetition_penalty;
        params.repetition_window = SamplingParams::default().repetition_window;
    }
    // Samplers that are switched off change nothing, whatever their other values are.
    for (switch, family) in [
        (
            "mirostat",
            &["mirostat", "mirostat_tau", "mirostat_eta"] as &[&str],
        ),
        ("xtc_probability", &["xtc_probability", "xtc_threshold"]),
    ] {
        let on = values.get::<f32>(&format!("{PREFIX}{switch}"))?.unwrap_or(0.0) > 0.0;
        let keys = family.iter().map(|name| format!("{PREFIX}{name}"));
        applied.extend(keys.filter(|key| !on && values.value(key).is_some()));
    }
    let not_applied = values
        .iter()
        .filter(|(key, _)| key.starts_with(PREFIX) && !applied.iter().any(|k| k == key))
        .map(|(key, value)| (key.to_owned(), value.clone()))
        .collect();
    params.validate(usize::MAX).map_err(|e| Error::Format {
        path: values.path().to_owned(),
        detail: format!("{PREFIX}*: {e}"),
    })?;
    Ok(PublishedSampling {
        params,
        applied,
        not_applied,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(entries: &[(&str, Value)]) -> Result<PublishedSampling> {
        let mut values = KeyValues::default();
        for (name, value) in entries {
            values.set(&format!("{PREFIX}{name}"), value.clone());
        }
        published_sampling(&values)
    }

    #[test]
    fn known_values_become_defaults() {
        let found = published(&[
            ("temp", Value::F32(0.6)),
            ("top_k", Value::I32(-1)),
            ("top_p", Value::F32(0.95)),
            ("penalty_repeat", Value::F32(1.1)),
            ("penalty_last_n", Value::I32(-1)),
        ])
        .expect("in range");
        let expected = SamplingParams {
            temperature: 0.6,
            top_p: 0.95,
            repetition_penalty: 1.1,
            repetition_window: 0,
            ..SamplingParams::default()
        };
        assert_eq!((found.params, found.applied.len()), (expected, 5));
        assert!(found.not_applied.is_empty());
        let message = published(&[("top_p", Value::F32(1.5))])
            .expect_err("above 1")
            .to_string();
        assert!(message.contains("top_p") && message.contains("1.5"), "{message}");
    }

    #[test]
    fn a_penalty_that_looks_back_over_nothing_is_off() {
        let found = published(&[
            ("penalty_repeat", Value::F32(1.3)),
            ("penalty_last_n", Value::I32(0)),
            ("temp", Value::F32(-1.0)),
        ])
        .expect("in range");
        let expected = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        assert_eq!(found.params, expected);
    }

    #[test]
    fn samplers_this_build_lacks_are_named_unless_they_are_off() {
        let off = published(&[
            ("mirostat", Value::I32(0)),
            ("mirostat_tau", Value::F32(5.0)),
            ("xtc_threshold", Value::F32(0.1)),
        ])
        .expect("in range");
        assert!(off.not_applied.is_empty(), "{off:?}");
        let on = published(&[
            ("mirostat", Value::I32(2)),
            ("mirostat_tau", Value::F32(5.0)),
            ("sequence", Value::Str("kpt".into())),
            ("top_k", Value::I32(20)),
        ])
        .expect("in range");
        let named: Vec<&str> = on.not_applied.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(
            named,
            [
                "general.sampling.mirostat",
                "general.sampling.mirostat_tau",
                "general.sampling.sequence"
            ]
        );
        assert_eq!(on.applied, ["general.sampling.top_k"]);
    }
}
