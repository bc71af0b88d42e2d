//! From token ids to text, one token at a time.
//!
//! A token is bytes, not characters: the bytes of a character that is not complete are held back until it is. Bytes
//! that can never become a character are left out (and counted), also at the end, so that a stream and a whole text
//! never differ and neither holds a replacement character the model did not write.

use std::sync::Arc;

use super::tokenizer::Tokenizer;
use super::vocab::{TokenId, TokenKind, Vocab};

/// How tokens are rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DetokenizeOptions {
    /// Render control tokens by name; otherwise they render as nothing.
    pub specials: bool,
    /// These tokens begin a text, so the space SentencePiece put before it is taken off again. Set it for whole texts
    /// and chat replies; not where the tokens continue a text.
    pub start: bool,
}

/// The text of a growing sequence of tokens.
#[derive(Debug)]
pub struct Detokenizer {
    vocab: Arc<Vocab>,
    specials: bool,
    /// A leading space is still to be taken off.
    at_start: bool,
    /// Bytes of a character that is not complete: at most 3.
    pending: Vec<u8>,
    out: String,
    dropped: usize,
}

impl Detokenizer {
    /// Starts a sequence.
    pub fn new(tokenizer: &Tokenizer, options: DetokenizeOptions) -> Self {
        let vocab = Arc::clone(tokenizer.vocab());
        Detokenizer {
            at_start: options.start && vocab.space_prefix,
            vocab,
            specials: options.specials,
            pending: Vec::new(),
            out: String::new(),
            dropped: 0,
        }
    }

    /// Adds a token and returns the characters it completes, often none. An id out of range is nothing.
    pub fn push(&mut self, id: TokenId) -> &str {
        self.out.clear();
        if self.vocab.is_control(id) && !self.specials {
            return &self.out;
        }
        let mut bytes = self.vocab.bytes(id).unwrap_or_default();
        if self.at_start && !bytes.is_empty() && !self.vocab.is_control(id) {
            self.at_start = false;
            // A user-defined token has no space put before it.
            if self.vocab.kind(id) == Some(TokenKind::Normal) {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        self.take();
        &self.out
    }

    /// Ends the sequence. The bytes of a character that was cut off are left out, so this is empty; it exists so that
    /// both the streaming and the whole-text caller end in the same way.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.dropped += self.pending.len();
        self.pending.clear();
        &self.out
    }

    /// Whether bytes of an incomplete character are held back.
    pub fn is_inside_character(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Bytes left out so far because they are no character.
    pub fn dropped_bytes(&self) -> usize {
        self.dropped
    }

    /// Moves whole characters from `pending` to `out`.
    fn take(&mut self) {
        let mut from = 0;
        loop {
            let rest = &self.pending[from..];
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.out.push_str(text);
                    self.pending.clear();
                    return;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    self.out.push_str(&String::from_utf8_lossy(&rest[..valid]));
                    from += valid;
                    match error.error_len() {
                        Some(bad) => {
                            self.dropped += bad;
                            from += bad;
                        }
                        None => {
                            self.pending.drain(..from);
                            return;
                        }
                    }
                }
            }
        }
    }
}
