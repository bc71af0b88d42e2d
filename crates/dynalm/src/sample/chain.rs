//! The sampling chain of one sequence.
//!
//! Order: penalties → bias → mask → temperature → top-k → typical → top-p → min-p → draw. Each filter sees
//! the distribution that the one before left, renormalised; none removes the last candidate.
//!
//! A temperature below [`GREEDY_BELOW`] is greedy: the largest logit, of equals the lowest id, found in one
//! pass. Top-k 1 is greedy too, and top-p 0 or min-p 1 are unless typical sampling comes before them.
//! Otherwise probabilities become integer weights relative to the most likely token (see
//! [`math::Candidate`]), and all sums, cuts and the draw are integer arithmetic. No pass sorts the
//! vocabulary: top-k keeps a small buffer, the others work on candidates near the top and halve ranges.

use super::logprobs::{Distribution, TokenLogprobs};
use super::math::{self, Candidate};
use super::params::{SamplingParams, TokenId};
use super::penalty::Penalties;
use super::rng;

/// Temperatures below this are 0: at 10⁻³ a logit 0.01 short of the best already has only e⁻¹⁰ of its
/// probability.
pub const GREEDY_BELOW: f32 = 1e-3;

/// How far below the largest logit, in units of the temperature, candidates for top-p are looked for before
/// all are taken: the first nearly always suffices on peaked rows.
const TOP_P_REACH: [f32; 3] = [4.0, 9.0, 20.0];

/// Added to the reach of min-p when candidates are collected; the cut itself is by exact weights.
const MIN_P_SLACK: f32 = 0.01;

/// Room for candidates that a sampler keeps from draw to draw.
const KEPT_CANDIDATES: usize = 1 << 12;

/// A row no token can be drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The model gave NaN, +∞ or nothing but −∞.
    #[error("the model's logits are not finite; the request was stopped")]
    NotFinite,
    /// A mask or a bias excludes every token.
    #[error("no token is allowed here: the mask and `logit_bias` exclude the whole vocabulary")]
    NothingAllowed,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Its log-probabilities, if [`SamplingParams::logprobs`] asks for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Which tokens are allowed: bit `id % 32` of word `id / 32`; ids beyond the last word are not.
#[derive(Debug, Clone, Copy)]
pub struct TokenMask<'a>(pub &'a [u32]);

impl TokenMask<'_> {
    /// Sets the logits of all other tokens to −∞.
    pub fn apply(self, logits: &mut [f32]) {
        for (w, chunk) in logits.chunks_mut(32).enumerate() {
            match self.0.get(w).copied().unwrap_or(0) {
                u32::MAX => {}
                0 => chunk.fill(f32::NEG_INFINITY),
                word => {
                    for (bit, logit) in chunk.iter_mut().enumerate() {
                        if word & (1 << bit) == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

/// Draws the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    penalties: Penalties,
    /// Tokens accepted: the number of the next draw.
    drawn: u64,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// For a sequence that begins with `prompt`. The parameters have been validated.
    pub fn new(params: SamplingParams, prompt: &[TokenId]) -> Self {
        Sampler {
            penalties: Penalties::new(&params, prompt),
            params,
            drawn: 0,
            candidates: Vec::new(),
        }
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Draws a token from a row of logits `[vocab]`, which is changed. The sequence has not moved on before
    /// [`Sampler::accept`]: drawing again from the same logits gives the same token.
    ///
    /// # Errors
    /// If the row is not finite or nothing is allowed; other rows are not concerned.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        mask: Option<TokenMask<'_>>,
    ) -> Result<Sampled, SampleError> {
        let plain = self.penalties.is_off() && self.params.logit_bias.is_empty() && mask.is_none();
        let mut best = math::argmax(logits).ok_or(SampleError::NotFinite)?;
        let mut distribution = None;
        if !plain {
            self.penalties.apply(logits);
            for &(token, bias) in &self.params.logit_bias {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit += bias;
                }
            }
        }
        if let Some(count) = self.params.logprobs {
            distribution = Distribution::new(logits, count as usize);
        }
        if !plain {
            if let Some(mask) = mask {
                mask.apply(logits);
            }
            best = math::argmax(logits).ok_or(SampleError::NothingAllowed)?;
        }
        let token = if self.is_greedy() {
            best.0 as TokenId
        } else {
            self.draw(logits, best.1)
        };
        // A mask leaves the logits of the tokens it allows as they were.
        let logprobs = distribution.map(|d| d.of(token, logits[token as usize]));
        Ok(Sampled { token, logprobs })
    }

    /// Takes note of the token that was drawn and kept.
    pub fn accept(&mut self, token: TokenId) {
        self.penalties.accept(token);
        self.drawn += 1;
    }

    fn is_greedy(&self) -> bool {
        let p = &self.params;
        let most_likely_only = p.top_p <= 0.0 || p.min_p >= 1.0;
        p.temperature < GREEDY_BELOW || p.top_k == 1 || (most_likely_only && p.typical_p >= 1.0)
    }

    fn draw(&mut self, logits: &[f32], max: f32) -> TokenId {
        let p = &self.params;
        let inverse = 1.0 / p.temperature;
        let k = p.top_k as usize;
        let some_k = k > 0 && k < logits.len();
        let typical = p.typical_p < 1.0;
        if !some_k && !typical && p.top_p >= 1.0 && p.min_p <= 0.0 {
            return self.draw_from_all(logits, max, inverse);
        }
        let candidates = &mut self.candidates;
        let mut total = 0;
        if some_k {
            math::top_k(logits, k, candidates);
        } else if typical {
            collect(logits, f32::NEG_INFINITY, candidates);
        } else if p.top_p >= 1.0 {
            // Min-p alone: a bound a little too low, so that rounding of the logarithm cannot matter.
            collect(logits, max - (MIN_P_SLACK - p.min_p.ln()) / inverse, candidates);
        } else {
            total = nucleus_candidates(logits, max, inverse, p.top_p, candidates);
        }
        if total == 0 {
            for candidate in candidates.iter_mut() {
                candidate.weight = math::weight((candidate.logit - max) * inverse);
            }
            total = sum(candidates);
        }
        if typical {
            keep_typical(candidates, max, inverse, total, p.typical_p);
            total = sum(candidates);
        }
        if p.top_p < 1.0 {
            let kept = math::reach(candidates, part(p.top_p, total), math::by_logit);
            candidates.truncate(kept);
        }
        if p.min_p > 0.0 {
            let heaviest = candidates
                .iter()
                .map(|candidate| candidate.weight)
                .max()
                .unwrap_or(0);
            let least = part(p.min_p, heaviest);
            candidates.retain(|candidate| candidate.weight >= least);
        }
        let at = rng::below(p.seed, self.drawn, sum(candidates));
        let chosen = math::reach(candidates, at + 1, |a, b| a.id.cmp(&b.id)) - 1;
        let token = candidates[chosen].id;
        if candidates.capacity() > KEPT_CANDIDATES {
            self.candidates = Vec::new();
        }
        token
    }

    /// Without any filter: two passes over the row and no copy of it.
    fn draw_from_all(&self, logits: &[f32], max: f32, inverse: f32) -> TokenId {
        const CHUNK: usize = 256;
        let weigh = |chunk: &[f32]| {
            let mut weights = [0u64; CHUNK];
            for (weight, &logit) in weights.iter_mut().zip(chunk) {
                *weight = math::weight((logit - max) * inverse);
            }
            weights
        };
        let sums: Vec<u64> = logits
            .chunks(CHUNK)
            .map(|chunk| weigh(chunk).iter().sum())
            .collect();
        let mut at = rng::below(self.params.seed, self.drawn, sums.iter().sum());
        for (c, &sum) in sums.iter().enumerate() {
            if at >= sum {
                at -= sum;
                continue;
            }
            for (i, weight) in weigh(&logits[c * CHUNK..logits.len().min((c + 1) * CHUNK)])
                .into_iter()
                .enumerate()
            {
                if at < weight {
                    return (c * CHUNK + i) as TokenId;
                }
                at -= weight;
            }
        }
        unreachable!("a number below the sum of all weights lies in one of them")
    }
}

/// All tokens whose logit is at least `least` and above −∞.
fn collect(logits: &[f32], least: f32, out: &mut Vec<Candidate>) {
    out.clear();
    let kept = logits
        .iter()
        .enumerate()
        .filter(|&(_, &logit)| logit >= least && logit > f32::NEG_INFINITY);
    out.extend(kept.map(|(id, &logit)| Candidate {
        id: id as TokenId,
        logit,
        weight: 0,
    }));
}

/// Candidates that are enough to reach `top_p`, with their weights; returns the weight of the whole row.
fn nucleus_candidates(logits: &[f32], max: f32, inverse: f32, top_p: f32, out: &mut Vec<Candidate>) -> u64 {
    let total: u64 = logits
        .iter()
        .map(|&logit| math::weight((logit - max) * inverse))
        .sum();
    let target = part(top_p, total);
    for reach in TOP_P_REACH.into_iter().chain([f32::INFINITY]) {
        collect(logits, max - reach / inverse, out);
        for candidate in out.iter_mut() {
            candidate.weight = math::weight((candidate.logit - max) * inverse);
        }
        if sum(out) >= target {
            break;
        }
    }
    total
}

/// Keeps the smallest set of tokens whose information content is nearest to the distribution's entropy and
/// whose probability reaches `p` (Meister et al. 2022). With z the scaled distance from the largest logit,
/// −log p − H is (Σ p z) − z: no logarithm is needed.
fn keep_typical(candidates: &mut Vec<Candidate>, max: f32, inverse: f32, total: u64, p: f32) {
    let scaled = |candidate: &Candidate| f64::from((candidate.logit - max) * inverse);
    candidates.sort_unstable_by_key(|candidate| candidate.id);
    let mean: f64 = candidates
        .iter()
        .map(|c| {
            if c.weight == 0 {
                0.0
            } else {
                c.weight as f64 * scaled(c)
            }
        })
        .sum::<f64>()
        / total as f64;
    let distance = |candidate: &Candidate| (scaled(candidate) - mean).abs();
    let kept = math::reach(candidates, part(p, total), |a, b| {
        distance(a).total_cmp(&distance(b)).then(a.id.cmp(&b.id))
    });
    candidates.truncate(kept);
}

fn sum(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

/// The part `p` of `total`, rounded up, at least 1.
fn part(p: f32, total: u64) -> u64 {
    ((f64::from(p) * total as f64).ceil() as u64).clamp(1, total.max(1))
}
