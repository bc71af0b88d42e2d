//! From text to token ids, by the vocabulary's own rules, in time linear in the text (merging: n log n).
//!
//! Text is first cut at special tokens: control tokens only where a template wrote them, user-defined ones anywhere.
//! What lies between is one run, whatever pieces it came from, and is encoded by byte-level BPE or SentencePiece BPE.

mod bpe;
mod merge;
mod split;
mod spm;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use unicode_normalization::{UnicodeNormalization, is_nfc};

use self::bpe::Bpe;
use self::merge::Merger;
use self::split::Splitter;
use self::spm::Spm;
use super::vocab::{TokenId, TokenKind, Vocab, VocabSource};
use crate::{Error, Result};

/// A stretch of a prompt and who wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Written by a template or another trusted hand: control tokens in it are recognised. One that lies across the
    /// border of two pieces is not.
    Template(&'a str),
    /// Written by a user: control tokens in it are plain text.
    Text(&'a str),
}

/// Which tokens are put around an encoded text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AddSpecial {
    /// Put the begin-of-text token first, unless the text already begins with it.
    pub bos: bool,
    /// Put the end-of-text token last, unless the text already ends with it.
    pub eos: bool,
}

/// Where SentencePiece puts the space it adds before text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SpacePrefix {
    Never,
    /// Before the text, unless it begins with a space.
    First,
    /// Before the text and after each special token.
    EveryRun,
}

#[derive(Debug)]
enum Model {
    Bpe { bpe: Box<Bpe>, splitter: Splitter },
    Spm { spm: Spm, prefix: SpacePrefix },
}

/// A loaded tokenizer. Immutable; share it with `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Arc<Vocab>,
    model: Model,
    control: Specials,
    user_defined: Specials,
    /// White space after special tokens is dropped.
    strips_after: bool,
    defaults: AddSpecial,
}

/// Special tokens to look for: leftmost first, the longest of those that start there.
#[derive(Debug)]
struct Specials {
    automaton: Option<AhoCorasick>,
    ids: Vec<TokenId>,
    /// The texts, sorted; and the length of the longest.
    sorted: Vec<Box<[u8]>>,
    longest: usize,
}

impl Specials {
    fn new(vocab: &Vocab, wanted: impl Fn(TokenKind) -> bool) -> Result<Self> {
        let mut ids = Vec::new();
        let mut texts: Vec<&[u8]> = Vec::new();
        for id in 0..vocab.len() as TokenId {
            let text = vocab.bytes(id).unwrap_or_default();
            if vocab.kind(id).is_some_and(&wanted) && !text.is_empty() {
                ids.push(id);
                texts.push(text);
            }
        }
        if texts.is_empty() {
            return Ok(Specials {
                automaton: None,
                ids,
                sorted: Vec::new(),
                longest: 0,
            });
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts)
            .map_err(|error| {
                Error::Tokenizer(format!("the special tokens cannot be searched for: {error}"))
            })?;
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
        let mut sorted: Vec<Box<[u8]>> = texts.into_iter().map(Into::into).collect();
        sorted.sort();
        Ok(Specials {
            automaton: Some(automaton),
            ids,
            sorted,
            longest,
        })
    }

    /// Whether a special token begins with `text` and goes on.
    fn begins(&self, text: &str) -> bool {
        let text = text.as_bytes();
        let at = self.sorted.partition_point(|special| special.as_ref() <= text);
        self.sorted
            .get(at)
            .is_some_and(|special| special.starts_with(text))
    }

    /// Calls `text` and `token` for the stretches of `input` in order.
    fn partition<'a, C>(
        &self,
        input: &'a str,
        context: &mut C,
        mut text: impl FnMut(&mut C, &'a str) -> Result<()>,
        mut token: impl FnMut(&mut C, TokenId) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        if let Some(automaton) = &self.automaton {
            for found in automaton.find_iter(input) {
                if found.start() > at {
                    text(context, &input[at..found.start()])?;
                }
                token(context, self.ids[found.pattern().as_usize()])?;
                at = found.end();
            }
        }
        if at < input.len() {
            text(context, &input[at..])?;
        }
        Ok(())
    }
}

/// State of one encoding.
#[derive(Default)]
struct Encoding {
    run: String,
    strip: bool,
    merger: Merger,
    words: Vec<std::ops::Range<usize>>,
    ids: Vec<TokenId>,
}

impl Tokenizer {
    /// Builds the tokenizer of a vocabulary.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the metadata is inconsistent, or asks for a kind of tokenizer or a splitting rule that is
    /// not supported; the message lists what is.
    pub fn new(source: &VocabSource) -> Result<Self> {
        let vocab = Arc::new(Vocab::new(source)?);
        let is_spm = source.model == "llama";
        let model = if is_spm {
            let prefix = match (
                source.add_space_prefix.unwrap_or(true),
                source.legacy_prefix.unwrap_or(true),
            ) {
                (false, _) => SpacePrefix::Never,
                (true, true) => SpacePrefix::EveryRun,
                (true, false) => SpacePrefix::First,
            };
            Model::Spm {
                spm: Spm::new(source, &vocab)?,
                prefix,
            }
        } else {
            let splitter = Splitter::new(source.pre.as_deref())?;
            Model::Bpe {
                bpe: Box::new(Bpe::new(source, &vocab, splitter.ignore_merges)?),
                splitter,
            }
        };
        let bos_by_default = match &model {
            Model::Spm { .. } => true,
            Model::Bpe { splitter, .. } => splitter.add_bos,
        };
        let defaults = AddSpecial {
            bos: source.add_bos.unwrap_or(bos_by_default) && vocab.bos().is_some(),
            eos: source.add_eos.unwrap_or(false) && vocab.eos().is_some(),
        };
        Ok(Tokenizer {
            control: Specials::new(&vocab, |kind| {
                matches!(kind, TokenKind::Control | TokenKind::Unknown)
            })?,
            user_defined: Specials::new(&vocab, |kind| kind == TokenKind::UserDefined)?,
            strips_after: is_spm && source.architecture.as_deref() == Some("phi3"),
            vocab,
            model,
            defaults,
        })
    }

    /// The vocabulary.
    pub fn vocab(&self) -> &Arc<Vocab> {
        &self.vocab
    }

    /// What the vocabulary says is put around a text (`add_bos_token`, `add_eos_token`).
    pub fn default_special(&self) -> AddSpecial {
        self.defaults
    }

    /// The raw bytes of a token, as `logprobs` reports them; `None` if `id` is out of range.
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.vocab.bytes(id)
    }

    /// Encodes `pieces` as one text, nothing added.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the text exceeds 1 GiB, or the vocabulary cannot express a byte of it.
    pub fn encode(&self, pieces: &[Piece<'_>]) -> Result<Vec<TokenId>> {
        self.encode_counted(pieces).map(|(ids, _)| ids)
    }

    /// As [`Tokenizer::encode`], with the tokens `add` asks for around it; never doubles one that is there already.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_with(&self, pieces: &[Piece<'_>], add: AddSpecial) -> Result<Vec<TokenId>> {
        let mut ids = self.encode(pieces)?;
        if let Some(bos) = self
            .vocab
            .bos()
            .filter(|&bos| add.bos && ids.first() != Some(&bos))
        {
            ids.insert(0, bos);
        }
        if let Some(eos) = self
            .vocab
            .eos()
            .filter(|&eos| add.eos && ids.last() != Some(&eos))
        {
            ids.push(eos);
        }
        Ok(ids)
    }

    /// The text of `ids`, as a stream of them through [`super::Detokenizer`] gives it.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the first id that is out of range.
    pub fn decode(&self, ids: &[TokenId], options: super::DetokenizeOptions) -> Result<String> {
        if let Some((at, id)) = ids
            .iter()
            .enumerate()
            .find(|(_, id)| self.vocab.kind(**id).is_none())
        {
            return Err(Error::Tokenizer(format!(
                "token {id} (element {at}) is out of range: the vocabulary has {} tokens",
                self.vocab.len()
            )));
        }
        let mut detokenizer = super::Detokenizer::new(self, options);
        let mut text = String::new();
        for &id in ids {
            text.push_str(detokenizer.push(id));
        }
        text.push_str(detokenizer.finish());
        Ok(text)
    }

    /// Where `text` holds control tokens, ascending and apart; also the start of one at the very end, which what follows
    /// might complete.
    pub(super) fn special_ranges(&self, text: &str) -> Vec<std::ops::Range<usize>> {
        let Some(automaton) = &self.control.automaton else {
            return Vec::new();
        };
        let mut ranges: Vec<_> = automaton.find_iter(text).map(|found| found.range()).collect();
        let end = text.trim_end().len();
        let from = ranges
            .last()
            .map_or(0, |last| last.end)
            .max(end.saturating_sub(self.control.longest));
        // Prefixes of one token are prefixes of the text from one place on: the longest is enough.
        if let Some(start) =
            (from..end).find(|&at| text.is_char_boundary(at) && self.control.begins(&text[at..end]))
        {
            ranges.push(start..end);
        }
        ranges
    }

    /// Encodes and counts the merging work, which tests hold to be linear.
    fn encode_counted(&self, pieces: &[Piece<'_>]) -> Result<(Vec<TokenId>, u64)> {
        const MAX_BYTES: usize = 1 << 30;
        let bytes: usize = pieces
            .iter()
            .map(|(Piece::Template(text) | Piece::Text(text))| text.len())
            .sum();
        if bytes > MAX_BYTES {
            return Err(Error::Tokenizer(format!(
                "a text of {bytes} bytes is too long to encode; at most {MAX_BYTES}"
            )));
        }
        let mut encoding = Encoding::default();
        for piece in pieces {
            match piece {
                Piece::Text(text) => encoding.append(text),
                Piece::Template(text) => self.control.partition(
                    text,
                    &mut encoding,
                    |encoding, text| {
                        encoding.append(text);
                        Ok(())
                    },
                    |encoding, id| {
                        self.flush(encoding)?;
                        encoding.ids.push(id);
                        encoding.strip = self.strips_after(id);
                        Ok(())
                    },
                )?,
            }
        }
        self.flush(&mut encoding)?;
        Ok((encoding.ids, encoding.merger.work))
    }

    /// Encodes the run of text gathered so far.
    fn flush(&self, encoding: &mut Encoding) -> Result<()> {
        let mut run = std::mem::take(&mut encoding.run);
        if matches!(self.model, Model::Spm { .. }) && run.contains('▁') {
            // To SentencePiece this character is a space, also where a token of several spaces is looked for.
            run = run.replace('▁', " ");
        }
        self.user_defined.partition(
            &run,
            encoding,
            |encoding, text| self.encode_run(text, encoding),
            |encoding, id| {
                encoding.ids.push(id);
                Ok(())
            },
        )?;
        encoding.run = run;
        encoding.run.clear();
        encoding.strip = false;
        Ok(())
    }

    fn encode_run(&self, text: &str, encoding: &mut Encoding) -> Result<()> {
        match &self.model {
            Model::Bpe { bpe, splitter } => {
                let text = if splitter.nfc && !is_nfc(text) {
                    Cow::Owned(text.nfc().collect())
                } else {
                    Cow::Borrowed(text)
                };
                splitter.split(&text, &mut encoding.words);
                for word in encoding.words.drain(..) {
                    bpe.encode(&text.as_bytes()[word], &mut encoding.merger, &mut encoding.ids)?;
                }
                Ok(())
            }
            Model::Spm { spm, prefix } => {
                let add = match prefix {
                    SpacePrefix::Never => false,
                    SpacePrefix::First => encoding.ids.is_empty() && !text.starts_with([' ', '▁']),
                    SpacePrefix::EveryRun => true,
                };
                let mut escaped = String::with_capacity(text.len() + text.len() / 4 + 3);
                if add {
                    escaped.push('▁');
                }
                for (at, part) in text.split(' ').enumerate() {
                    if at > 0 {
                        escaped.push('▁');
                    }
                    escaped.push_str(part);
                }
                spm.encode(&escaped, &mut encoding.merger, &mut encoding.ids)
            }
        }
    }

    /// Phi-3's published tokenizer drops white space after its special tokens, except the three it shares with Llama.
    fn strips_after(&self, id: TokenId) -> bool {
        self.strips_after && !matches!(self.vocab.bytes(id), Some(b"<unk>" | b"<s>" | b"<|endoftext|>"))
    }
}

impl Encoding {
    fn append(&mut self, text: &str) {
        let text = if self.strip { text.trim_start() } else { text };
        self.strip &= text.is_empty();
        self.run.push_str(text);
    }
}
