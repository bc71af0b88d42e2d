//! Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): every byte is a symbol, merges are listed best first.
//!
//! Merges are kept as pairs of ids. A merge whose result is no token of the vocabulary gets an id beyond it, so that
//! merging goes on as the list says; what is left of such symbols at the end is written byte by byte.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::merge::Merger;
use crate::text::vocab::{TokenId, TokenKind, Vocab, VocabSource, byte_of_char};
use crate::{Error, Result};

/// The tables of one byte-level vocabulary.
#[derive(Debug)]
pub(super) struct Bpe {
    /// Token of each byte, if the vocabulary has it.
    byte_ids: [Option<TokenId>; 256],
    /// (left, right) -> (rank, merged).
    merges: HashMap<(TokenId, TokenId), (u32, TokenId), RandomState>,
    /// Whole words that are taken without merging (and, with ids beyond the vocabulary, what merges pass through);
    /// empty unless the vocabulary wants that.
    words: HashMap<Box<[u8]>, TokenId, RandomState>,
    vocab_len: u32,
    unk: Option<TokenId>,
}

impl Bpe {
    pub(super) fn new(source: &VocabSource, vocab: &Vocab, ignore_merges: bool) -> Result<Self> {
        if source.merges.is_empty() {
            return Err(Error::Tokenizer(
                "a `gpt2` vocabulary needs `tokenizer.ggml.merges`, which is absent or empty".into(),
            ));
        }
        let vocab_len = vocab.len() as u32;
        let mut ids: HashMap<Box<[u8]>, TokenId, RandomState> = HashMap::default();
        for id in 0..vocab_len {
            // Control tokens are structure: no text may become one by merging.
            if matches!(
                vocab.kind(id),
                Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte)
            ) {
                let raw = vocab.bytes(id).unwrap_or_default();
                if !raw.is_empty() {
                    ids.entry(raw.into()).or_insert(id);
                }
            }
        }
        let mut byte_ids = [None; 256];
        for (byte, slot) in byte_ids.iter_mut().enumerate() {
            *slot = ids.get([byte as u8].as_slice()).copied();
        }
        let mut merges = HashMap::with_capacity_and_hasher(source.merges.len(), RandomState::default());
        let mut next = vocab_len;
        let mut raw = Vec::new();
        for (rank, line) in source.merges.iter().enumerate() {
            let middle = split_merge(line, &mut raw).ok_or_else(|| {
                Error::Tokenizer(format!(
                    "merge {rank} is `{line}`, not two tokens with a space between"
                ))
            })?;
            let mut intern = |raw: &[u8]| -> Result<TokenId> {
                if let Some(&id) = ids.get(raw) {
                    return Ok(id);
                }
                let id = next;
                next = next
                    .checked_add(1)
                    .ok_or_else(|| Error::Tokenizer("too many merges".into()))?;
                ids.insert(raw.into(), id);
                Ok(id)
            };
            let merged = intern(&raw)?;
            let pair = (intern(&raw[..middle])?, intern(&raw[middle..])?);
            merges.entry(pair).or_insert((rank as u32, merged));
        }
        let words = if ignore_merges { ids } else { HashMap::default() };
        Ok(Bpe {
            byte_ids,
            merges,
            words,
            vocab_len,
            unk: vocab.unk(),
        })
    }

    /// Appends the tokens of `word`, one piece of the split text.
    pub(super) fn encode(&self, word: &[u8], merger: &mut Merger, out: &mut Vec<TokenId>) -> Result<()> {
        if let Some(&id) = self.words.get(word).filter(|&&id| id < self.vocab_len) {
            merger.work += 1;
            out.push(id);
            return Ok(());
        }
        merger.clear();
        for (at, &byte) in word.iter().enumerate() {
            // A byte without a token keeps a symbol that merges with nothing.
            merger.push(self.byte_ids[byte as usize].unwrap_or(u32::MAX), at, at + 1);
        }
        merger.run(|left, right| self.merges.get(&(left.id, right.id)).copied());
        for symbol in merger.symbols() {
            if symbol.id < self.vocab_len {
                out.push(symbol.id);
                continue;
            }
            for &byte in &word[symbol.start as usize..symbol.end as usize] {
                out.push(self.byte_ids[byte as usize].or(self.unk).ok_or_else(|| {
                    Error::Tokenizer(format!(
                        "the vocabulary has no token for byte {byte:#04x} and no unknown token, so the text cannot be encoded"
                    ))
                })?);
            }
        }
        Ok(())
    }
}

/// Splits `left right`: the bytes of both go to `raw`, the result says where the right one begins. A token may itself
/// be written with a leading space in odd vocabularies, never be empty.
fn split_merge(line: &str, raw: &mut Vec<u8>) -> Option<usize> {
    let skip = line.chars().next()?.len_utf8();
    let at = skip + line[skip..].find(' ')?;
    let (left, right) = (&line[..at], &line[at + 1..]);
    if right.is_empty() {
        return None;
    }
    raw.clear();
    append_decoded(left, raw);
    let middle = raw.len();
    append_decoded(right, raw);
    Some(middle)
}

/// The bytes of a token's text; one that is not written in the byte alphabet stands for itself.
fn append_decoded(text: &str, raw: &mut Vec<u8>) {
    let start = raw.len();
    for c in text.chars() {
        match byte_of_char(c) {
            Some(byte) => raw.push(byte),
            None => {
                raw.truncate(start);
                raw.extend_from_slice(text.as_bytes());
                return;
            }
        }
    }
}
