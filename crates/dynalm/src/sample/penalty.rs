//! What a sequence's own tokens do to the next logits: repetition, presence and frequency penalties.
//!
//! Counts are kept as tokens come, so a draw costs time in proportion to the distinct tokens seen, never a
//! scan of the history.

use std::collections::{HashMap, VecDeque};

use super::params::{SamplingParams, TokenId};

/// Counts of a sequence's tokens, as far as its parameters ask for them.
#[derive(Debug, Clone, Default)]
pub struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// Length of the repetition window; 0: everything.
    window: usize,
    /// The window's tokens, oldest first; empty if it is unbounded.
    recent: VecDeque<TokenId>,
    /// Occurrences in the window, of prompt and reply.
    repeated: HashMap<TokenId, u32>,
    /// Occurrences in the reply.
    replied: HashMap<TokenId, u32>,
}

impl Penalties {
    /// Counts for a sequence that begins with `prompt`.
    pub fn new(params: &SamplingParams, prompt: &[TokenId]) -> Self {
        let mut penalties = Penalties {
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            window: params.repetition_window as usize,
            ..Penalties::default()
        };
        for &token in prompt {
            penalties.see(token);
        }
        penalties
    }

    /// Whether nothing changes any logit.
    pub fn is_off(&self) -> bool {
        !self.repeats() && !self.counts()
    }

    fn repeats(&self) -> bool {
        self.repetition != 1.0
    }

    fn counts(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }

    /// Takes note of a token of the reply.
    pub fn accept(&mut self, token: TokenId) {
        self.see(token);
        if self.counts() {
            *self.replied.entry(token).or_insert(0) += 1;
        }
    }

    fn see(&mut self, token: TokenId) {
        if !self.repeats() {
            return;
        }
        *self.repeated.entry(token).or_insert(0) += 1;
        if self.window == 0 {
            return;
        }
        self.recent.push_back(token);
        if self.recent.len() > self.window
            && let Some(old) = self.recent.pop_front()
            && let Some(count) = self.repeated.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.repeated.remove(&old);
            }
        }
    }

    /// Changes the logits: first the repetition penalty, then presence and frequency.
    pub fn apply(&self, logits: &mut [f32]) {
        for &token in self.repeated.keys() {
            if let Some(logit) = logits.get_mut(token as usize) {
                let changed = if *logit > 0.0 {
                    *logit / self.repetition
                } else {
                    *logit * self.repetition
                };
                // A tiny penalty must not make an infinity of a finite logit.
                *logit = changed.min(f32::MAX);
            }
        }
        for (&token, &count) in &self.replied {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= self.presence + self.frequency * count as f32;
            }
        }
    }
}
