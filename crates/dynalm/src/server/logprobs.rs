//! The two shapes in which OpenAI's API reports log-probabilities.

use serde_json::{Map, Value, json};

use crate::engine::TokenLogprobs;
use crate::sample::params::TokenId;
use crate::text::Tokenizer;

/// Stands for minus infinity, which JSON cannot say; OpenAI's own value.
const LOWEST: f32 = -9999.0;

fn number(logprob: f32) -> Value {
    Value::from(f64::from(logprob.max(LOWEST)))
}

/// A token's text; if its bytes are not text by themselves, they are written out as `bytes:\xe2\x82`.
pub(super) fn token_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes
            .iter()
            .fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}")),
    }
}

/// A token's bytes; none for an id outside the vocabulary (a padded output row).
pub(super) fn bytes_of(tokenizer: &Tokenizer, token: TokenId) -> &[u8] {
    tokenizer.token_bytes(token).unwrap_or_default()
}

fn chat_token(tokenizer: &Tokenizer, token: TokenId, logprob: f32) -> Map<String, Value> {
    let bytes = bytes_of(tokenizer, token);
    let mut map = Map::new();
    map.insert("token".into(), token_text(bytes).into());
    map.insert("logprob".into(), number(logprob));
    map.insert("bytes".into(), bytes.into());
    map
}

/// One entry of a chat choice's `logprobs.content`.
pub(super) fn chat_entry(tokenizer: &Tokenizer, logprobs: &TokenLogprobs) -> Value {
    let mut entry = chat_token(tokenizer, logprobs.token, logprobs.logprob);
    let top = logprobs
        .top
        .iter()
        .map(|&(token, logprob)| chat_token(tokenizer, token, logprob).into());
    entry.insert("top_logprobs".into(), Value::Array(top.collect()));
    Value::Object(entry)
}

/// A chat choice's `logprobs`.
pub(super) fn chat(content: Vec<Value>) -> Value {
    json!({ "content": content, "refusal": null })
}

/// A completion choice's `logprobs`, being collected.
#[derive(Debug, Clone, Default)]
pub(super) struct Legacy {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
}

impl Legacy {
    /// Adds a token whose text starts `offset` characters into the choice's text. `None`: the first token of a prompt,
    /// which nothing precedes.
    pub(super) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: TokenId,
        logprobs: Option<&TokenLogprobs>,
        offset: usize,
    ) {
        self.tokens.push(token_text(bytes_of(tokenizer, token)).into());
        self.token_logprobs
            .push(logprobs.map_or(Value::Null, |lp| number(lp.logprob)));
        self.top_logprobs.push(logprobs.map_or(Value::Null, |lp| {
            // Two tokens of equal text keep the likelier one's value, as they come best first.
            let mut map = Map::new();
            for &(token, logprob) in &lp.top {
                map.entry(token_text(bytes_of(tokenizer, token)))
                    .or_insert_with(|| number(logprob));
            }
            Value::Object(map)
        }));
        self.text_offset.push(offset.into());
    }

    /// The value of `logprobs`.
    pub(super) fn finish(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_characters_are_written_as_bytes() {
        assert_eq!(token_text("né".as_bytes()), "né");
        assert_eq!(token_text(&[0xe2, 0x82]), "bytes:\\xe2\\x82");
        assert_eq!(number(f32::NEG_INFINITY), json!(-9999.0));
    }
}
