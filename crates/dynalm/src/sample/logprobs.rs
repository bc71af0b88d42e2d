//! Log-probabilities: of the distribution after penalties and bias, before masks, temperature and filters.

use super::math;
use super::params::TokenId;

/// Log-probabilities at one position, natural logarithm.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token that stands there.
    pub token: TokenId,
    /// Its log-probability.
    pub logprob: f32,
    /// The most likely tokens, best first; of equals, the lower id first.
    pub top: Vec<(TokenId, f32)>,
}

/// A row's normaliser and its most likely tokens; the token that stands there may become known later.
#[derive(Debug, Clone)]
pub struct Distribution {
    /// log Σ e^x.
    log_sum: f64,
    top: Vec<(TokenId, f32)>,
}

impl Distribution {
    /// Of a row of logits, with its `count` most likely tokens; `None` if the row has a NaN or +∞ or nothing
    /// above −∞.
    pub fn new(logits: &[f32], count: usize) -> Option<Self> {
        let (_, max) = math::argmax(logits)?;
        let log_sum = f64::from(max) + math::sum_exp(logits, max).ln();
        let mut best = Vec::new();
        math::top_k(logits, count.min(logits.len()), &mut best);
        best.sort_unstable_by(math::by_logit);
        let top = best
            .iter()
            .map(|c| (c.id, (f64::from(c.logit) - log_sum) as f32))
            .collect();
        Some(Distribution { log_sum, top })
    }

    /// With the token that stands there and its logit in the same row.
    pub fn of(self, token: TokenId, logit: f32) -> TokenLogprobs {
        TokenLogprobs {
            token,
            logprob: (f64::from(logit) - self.log_sum) as f32,
            top: self.top,
        }
    }
}

/// Log-probability of `token` in a row of raw logits, e.g. to score a prompt; `None` as in
/// [`Distribution::new`] or if the row has no such token.
pub fn score(logits: &[f32], token: TokenId, count: usize) -> Option<TokenLogprobs> {
    let logit = *logits.get(token as usize)?;
    Some(Distribution::new(logits, count)?.of(token, logit))
}
