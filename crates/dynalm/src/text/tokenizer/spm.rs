//! SentencePiece BPE (Kudo and Richardson 2018, arXiv:1808.06226): characters merge into whichever neighbouring pair is
//! the best scored piece of the vocabulary; what is no piece is written as bytes.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::merge::Merger;
use crate::text::vocab::{TokenId, TokenKind, Vocab, VocabSource};
use crate::{Error, Result};

/// Symbol that is a single character whose token is looked up at the end.
const CHARACTER: u32 = u32::MAX;

/// The tables of one SentencePiece vocabulary.
#[derive(Debug)]
pub(super) struct Spm {
    /// Piece text (with `▁` for a space) -> id. Control and byte tokens are not pieces: no text may become one.
    pieces: HashMap<Box<str>, TokenId, RandomState>,
    /// Rank of each id: the order of its score, smaller is better.
    ranks: Vec<u32>,
    unused: Vec<bool>,
    longest: usize,
    byte_ids: Option<Box<[TokenId; 256]>>,
    unk: Option<TokenId>,
}

impl Spm {
    pub(super) fn new(source: &VocabSource, vocab: &Vocab) -> Result<Self> {
        if source.scores.len() != source.tokens.len() {
            return Err(Error::Tokenizer(format!(
                "a `llama` vocabulary needs one score a token: `tokenizer.ggml.scores` has {} entries for {} tokens",
                source.scores.len(),
                source.tokens.len()
            )));
        }
        let mut pieces: HashMap<Box<str>, TokenId, RandomState> =
            HashMap::with_capacity_and_hasher(source.tokens.len(), RandomState::default());
        let mut bytes = [None; 256];
        let mut longest = 0;
        for (id, text) in source.tokens.iter().enumerate() {
            let id = id as TokenId;
            match vocab.kind(id) {
                Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused) if !text.is_empty() => {
                    // User-defined tokens may be written with plain spaces.
                    let text = text.replace(' ', "▁");
                    longest = longest.max(text.len());
                    pieces.entry(text.into_boxed_str()).or_insert(id);
                }
                Some(TokenKind::Byte) => {
                    if let Some(&[byte]) = vocab.bytes(id) {
                        bytes[byte as usize] = Some(id);
                    }
                }
                _ => {}
            }
        }
        let byte_ids = if bytes.iter().all(Option::is_none) {
            if vocab.unk().is_none() {
                return Err(Error::Tokenizer(
                    "the vocabulary has neither byte tokens nor an unknown token, so not every text can be encoded".into(),
                ));
            }
            None
        } else {
            let mut all = Box::new([0; 256]);
            for (byte, (slot, id)) in all.iter_mut().zip(bytes).enumerate() {
                *slot = id.ok_or_else(|| {
                    Error::Tokenizer(format!(
                        "the vocabulary has byte tokens, but none for byte {byte:#04x}"
                    ))
                })?;
            }
            Some(all)
        };
        let unused = (0..vocab.len() as u32)
            .map(|id| vocab.kind(id) == Some(TokenKind::Unused))
            .collect();
        Ok(Spm {
            pieces,
            ranks: ranks(&source.scores),
            unused,
            longest,
            byte_ids,
            unk: vocab.unk(),
        })
    }

    /// Appends the tokens of `text`, in which spaces already are `▁`.
    pub(super) fn encode(&self, text: &str, merger: &mut Merger, out: &mut Vec<TokenId>) -> Result<()> {
        merger.clear();
        for (at, c) in text.char_indices() {
            merger.push(CHARACTER, at, at + c.len_utf8());
        }
        // Where an unused piece would be made, how it was made: it is taken apart again at the end.
        let mut halves: HashMap<(u32, u32), u32> = HashMap::new();
        merger.run(|left, right| {
            if (right.end - left.start) as usize > self.longest {
                return None;
            }
            let id = *self.pieces.get(&text[left.start as usize..right.end as usize])?;
            if self.unused[id as usize] {
                halves.insert((left.start, right.end), left.end);
            }
            Some((self.ranks[id as usize], id))
        });
        let mut unknown = false;
        let mut stack = Vec::new();
        for symbol in merger.symbols() {
            stack.push((symbol.start, symbol.end));
            while let Some((start, end)) = stack.pop() {
                let piece = &text[start as usize..end as usize];
                let id = self.pieces.get(piece).copied();
                let is_unused = id.is_some_and(|id| self.unused[id as usize]);
                match (id, halves.get(&(start, end))) {
                    (Some(_), Some(&middle)) if is_unused => stack.extend([(middle, end), (start, middle)]),
                    (Some(id), _) if !is_unused => {
                        out.push(id);
                        unknown = false;
                    }
                    _ => self.fall_back(piece, &mut unknown, out)?,
                }
            }
        }
        Ok(())
    }

    /// A piece that is not in the vocabulary: its bytes, or one unknown token for the whole run.
    fn fall_back(&self, piece: &str, unknown: &mut bool, out: &mut Vec<TokenId>) -> Result<()> {
        match (&self.byte_ids, self.unk) {
            (Some(ids), _) => out.extend(piece.bytes().map(|byte| ids[byte as usize])),
            (None, Some(unk)) => {
                if !*unknown {
                    out.push(unk);
                }
                *unknown = true;
            }
            (None, None) => {
                return Err(Error::Internal(
                    "a vocabulary without bytes and unknown token was accepted".into(),
                ));
            }
        }
        Ok(())
    }
}

/// Dense ranks of the scores, best first; equal scores share a rank, so that the leftmost pair wins.
fn ranks(scores: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
    let mut ranks = vec![0; scores.len()];
    let mut rank = 0;
    for (at, &id) in order.iter().enumerate() {
        if at > 0 && scores[order[at - 1] as usize] != scores[id as usize] {
            rank = at as u32;
        }
        ranks[id as usize] = rank;
    }
    ranks
}
