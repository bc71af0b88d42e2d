//! What a request says about how its tokens are drawn.

use crate::error::{Error, Result};

/// A token id.
pub type TokenId = u32;

/// Sampling of one sequence, all fields resolved: the defaults here are those of an engine without a model.
///
/// Order of application: penalties → bias → mask → temperature → top-k → typical → top-p → min-p → draw.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy. In `0..=100`.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p; 1 keeps all, 0 only the most likely.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Locally typical sampling (Meister et al. 2022, arXiv:2202.00666); 1 is off.
    pub typical_p: f32,
    /// Divides (multiplies) positive (negative) logits of tokens seen in the window (Keskar et al. 2019); 1
    /// is off.
    pub repetition_penalty: f32,
    /// Tokens of prompt and reply the repetition penalty looks back over; 0 is all of them.
    pub repetition_window: u32,
    /// Subtracted from the logit of each token already in the reply.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence in the reply.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Seed of the draw.
    pub seed: u64,
    /// `Some(n)`: report the log-probability of each token and of the n most likely.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            repetition_window: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Checks every field against its range, for a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// [`Error::Request`] naming the field, what was found and what is allowed.
    pub fn validate(&self, vocab: usize) -> Result<()> {
        let range = |field: &str, value: f32, ok: bool, expected: &str| {
            if ok {
                Ok(())
            } else {
                Err(refusal(field, format!("is {value}, expected {expected}")))
            }
        };
        let within = |value: f32, low: f32, high: f32| (low..=high).contains(&value);
        let t = self.temperature;
        range("temperature", t, within(t, 0.0, 100.0), "a number from 0 to 100")?;
        range(
            "top_p",
            self.top_p,
            within(self.top_p, 0.0, 1.0),
            "a number from 0 to 1",
        )?;
        range(
            "min_p",
            self.min_p,
            within(self.min_p, 0.0, 1.0),
            "a number from 0 to 1",
        )?;
        let typical = self.typical_p;
        range(
            "typical_p",
            typical,
            typical > 0.0 && typical <= 1.0,
            "a number above 0, at most 1",
        )?;
        let repetition = self.repetition_penalty;
        range(
            "repetition_penalty",
            repetition,
            repetition > 0.0 && repetition <= 10.0,
            "a number above 0, at most 10",
        )?;
        for (field, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            range(field, value, within(value, -2.0, 2.0), "a number from -2 to 2")?;
        }
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab {
                let detail = format!("names token {token}, but the vocabulary has {vocab} tokens");
                return Err(refusal("logit_bias", detail));
            }
            if !within(bias, -100.0, 100.0) {
                let detail = format!("of token {token} is {bias}, expected a number from -100 to 100");
                return Err(refusal("logit_bias", detail));
            }
        }
        if let Some(count) = self.logprobs
            && count as usize > vocab
        {
            return Err(refusal(
                "top_logprobs",
                format!("is {count}, but the vocabulary has {vocab} tokens"),
            ));
        }
        Ok(())
    }
}

fn refusal(field: &str, detail: String) -> Error {
    Error::Request {
        param: Some(field.to_owned()),
        code: None,
        message: format!("`{field}` {detail}"),
    }
}
