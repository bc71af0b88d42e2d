//! From drawn tokens to shown text: stop texts, and what must be held back because of them.
//!
//! A token's text is shown once it is certain that no stop text begins in it. Until then the token waits in a queue,
//! together with its log-probabilities, so that tokens and text always tell the same story: the shown tokens' texts,
//! joined, are the shown text. A stop text may begin and end anywhere, also in the middle of a token: then that token's
//! text is cut. Of several stop texts the one that begins first counts.

use std::collections::VecDeque;

use super::TokenLogprobs;
use crate::sample::params::TokenId;

/// A token whose text may be shown.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shown {
    pub(crate) token: TokenId,
    pub(crate) text: String,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// The stop texts of one request and the tokens held back because of them.
#[derive(Debug)]
pub(crate) struct StopFilter {
    stops: Vec<String>,
    /// Tokens not shown yet.
    held: VecDeque<Shown>,
    /// Their texts, joined.
    text: String,
}

impl StopFilter {
    pub(crate) fn new(stops: Vec<String>) -> StopFilter {
        StopFilter {
            stops,
            held: VecDeque::new(),
            text: String::new(),
        }
    }

    /// Adds a token. Appends to `out` what may be shown now; `true`: a stop text is complete, the reply ends here and
    /// everything before the stop text has been appended.
    pub(crate) fn push(&mut self, shown: Shown, out: &mut Vec<Shown>) -> bool {
        if self.stops.is_empty() {
            out.push(shown);
            return false;
        }
        self.text.push_str(&shown.text);
        self.held.push_back(shown);
        if let Some(at) = self
            .stops
            .iter()
            .filter_map(|stop| self.text.find(stop.as_str()))
            .min()
        {
            let left = self.release(at, out);
            // The token in which the stop text begins shows what stands before it.
            if left > 0
                && let Some(mut last) = self.held.pop_front()
            {
                last.text.truncate(left);
                out.push(last);
            }
            self.held.clear();
            self.text.clear();
            return true;
        }
        let certain = self.text.len() - self.possible_start();
        self.release(certain, out);
        false
    }

    /// Gives back everything held: the reply ended without a stop text.
    pub(crate) fn flush(&mut self, out: &mut Vec<Shown>) {
        self.text.clear();
        out.extend(self.held.drain(..));
    }

    /// Appends the tokens that end at or before byte `end` of the held text and forgets them. Gives how far `end` then
    /// reaches into the first token that stays.
    fn release(&mut self, end: usize, out: &mut Vec<Shown>) -> usize {
        let mut gone = 0;
        while let Some(first) = self.held.pop_front_if(|first| gone + first.text.len() <= end) {
            gone += first.text.len();
            out.push(first);
        }
        self.text.drain(..gone);
        end - gone
    }

    /// Length of the longest end of the held text with which a stop text may begin.
    fn possible_start(&self) -> usize {
        let longest = self
            .stops
            .iter()
            .map(String::len)
            .max()
            .unwrap_or(0)
            .saturating_sub(1);
        let from = self.text.len().saturating_sub(longest);
        (from..self.text.len())
            .filter(|&start| self.text.is_char_boundary(start))
            .find(|&start| {
                self.stops
                    .iter()
                    .any(|stop| stop.starts_with(&self.text[start..]))
            })
            .map_or(0, |start| self.text.len() - start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], tokens: &[&str]) -> (Vec<String>, bool) {
        let mut filter = StopFilter::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
        let mut out = Vec::new();
        let mut stopped = false;
        for (i, text) in tokens.iter().enumerate() {
            let shown = Shown {
                token: i as TokenId,
                text: (*text).to_owned(),
                logprobs: None,
            };
            stopped = filter.push(shown, &mut out);
            if stopped {
                break;
            }
        }
        if !stopped {
            filter.flush(&mut out);
        }
        (out.into_iter().map(|shown| shown.text).collect(), stopped)
    }

    #[test]
    fn stop_texts_end_the_reply_before_them() {
        let cases: &[(&[&str], &[&str], &str, bool)] = &[
            (&[], &["a", "b"], "ab", false),
            (
                &["tern mea"],
                &["copper", " lan", "tern", " mea", "dow"],
                "copper lan",
                true,
            ),
            (&["tern mea"], &["copper", " lantern meadow"], "copper lan", true),
            (&["cop"], &["copper"], "", true),
            (&["c"], &["", "copper"], "", true),
            (&["ab", "b"], &["xb"], "x", true),
            (&["bc", "abcd"], &["a", "b", "c"], "a", true),
            (&["aab"], &["a", "a", "a", "b"], "a", true),
            (&["aab"], &["a", "a"], "aa", false),
            (&["é!"], &["caf", "é", "!"], "caf", true),
            (&["é!"], &["caf", "é", "?"], "café?", false),
        ];
        for (stops, tokens, text, stopped) in cases {
            let (shown, ended) = run(stops, tokens);
            assert_eq!(
                (shown.concat().as_str(), ended),
                (*text, *stopped),
                "stops {stops:?}, tokens {tokens:?}"
            );
        }
    }

    #[test]
    fn nothing_is_held_longer_than_needed() {
        let mut filter = StopFilter::new(vec!["END".into()]);
        let mut out = Vec::new();
        let shown = |text: &str| Shown {
            token: 0,
            text: text.into(),
            logprobs: None,
        };
        assert!(!filter.push(shown("one"), &mut out));
        assert_eq!(out.len(), 1);
        assert!(!filter.push(shown(" E"), &mut out));
        assert_eq!(out.len(), 1, "` E` may begin a stop text");
        assert!(!filter.push(shown("x"), &mut out));
        assert_eq!(out.len(), 3);
    }

    proptest! {
        /// Whatever the cut into tokens, the shown text is what stands before the first stop text.
        #[test]
        fn equals_cutting_the_whole(
            tokens in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (shown, stopped) = run(&stops, &tokens);
            // The reply ends with the first token that completes any stop text.
            let mut whole = String::new();
            let mut expected = None;
            for token in &tokens {
                whole.push_str(token);
                if let Some(at) = stops.iter().filter_map(|stop| whole.find(stop)).min() {
                    expected = Some(whole[..at].to_owned());
                    break;
                }
            }
            prop_assert_eq!(stopped, expected.is_some());
            prop_assert_eq!(shown.concat(), expected.unwrap_or(whole));
        }
    }
}
