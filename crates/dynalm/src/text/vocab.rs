//! What a vocabulary is: the metadata it comes from, what each token is, and the bytes it stands for.
//!
//! Owns validation of the vocabulary metadata, the table from ids to raw bytes, and the set of end-of-generation
//! tokens. How text is cut into tokens is in [`super::tokenizer`].

use std::collections::HashMap;

use crate::{Error, Result};

/// A token id.
pub type TokenId = u32;

/// Tokenizer metadata as a checkpoint gives it. The comment at each field names its GGUF key.
///
/// A field that is `None` was absent in the checkpoint; the default each one then has is stated here.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VocabSource {
    /// `tokenizer.ggml.model`: `gpt2` is byte-level BPE, `llama` is SentencePiece BPE.
    pub model: String,
    /// `tokenizer.ggml.pre`: how text is split before BPE. Needed for `gpt2`, unused for `llama`.
    pub pre: Option<String>,
    /// `general.architecture`; only to know that Phi-3 special tokens swallow the white space after them.
    pub architecture: Option<String>,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`, by id; needed for `llama`.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`, by id; empty: all are normal.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`, best first, each `left right`; needed for `gpt2`.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<TokenId>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<TokenId>,
    /// `tokenizer.ggml.eot_token_id`: end of turn.
    pub eot: Option<TokenId>,
    /// `tokenizer.ggml.eom_token_id`: end of message, where a tool call is to be run.
    pub eom: Option<TokenId>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<TokenId>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<TokenId>,
    /// `tokenizer.ggml.add_bos_token`. Default: true for `llama` and for the `llama-bpe` and `tekken` splits.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`. Default: false.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`. Default: true for `llama`; has no meaning for `gpt2`.
    pub add_space_prefix: Option<bool>,
    /// Hugging Face's `legacy`: the space prefix is also put after each special token. Default: true. GGUF has no key.
    pub legacy_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// What kind of token an id is (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// 1: ordinary text.
    Normal,
    /// 2: stands for text the vocabulary cannot express.
    Unknown,
    /// 3: structure, never text: found only where a template wrote it, not rendered.
    Control,
    /// 4: found in any text before the splitting rules apply; rendered as text.
    UserDefined,
    /// 5: never made by the tokenizer.
    Unused,
    /// 6: one raw byte, written `<0xNN>`.
    Byte,
}

/// Token texts and attributes of a loaded model. Cheap to share (`Arc`).
#[derive(Debug)]
pub struct Vocab {
    kinds: Vec<TokenKind>,
    bytes: Vec<u8>,
    ends: Vec<u32>,
    eog: Vec<TokenId>,
    specials: HashMap<String, TokenId>,
    /// Whether the space prefix rule of SentencePiece applies to these tokens.
    pub(super) space_prefix: bool,
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    unk: Option<TokenId>,
    pad: Option<TokenId>,
}

/// Texts that end a turn or a text in the published vocabularies, whatever the metadata says.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|endoftext|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<|EOT|>",
    "<EOT>",
    "</s>",
    "<eos>",
];

impl Vocab {
    /// Validates `source` and builds the tables.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the lists do not fit together, a token type is unknown, or a special id is out of range.
    pub fn new(source: &VocabSource) -> Result<Self> {
        let count = source.tokens.len();
        if count == 0 {
            return Err(Error::Tokenizer(
                "the vocabulary is empty: `tokenizer.ggml.tokens` has no entries".into(),
            ));
        }
        if u32::try_from(count).is_err() {
            return Err(Error::Tokenizer(format!(
                "{count} tokens are more than an id can name"
            )));
        }
        let kinds = kinds(source)?;
        let byte_level = match source.model.as_str() {
            "gpt2" => true,
            "llama" => false,
            other => {
                return Err(Error::Tokenizer(format!(
                    "`tokenizer.ggml.model` is `{other}`; supported are `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE)"
                )));
            }
        };
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(count);
        let mut specials = HashMap::new();
        for (id, (text, kind)) in source.tokens.iter().zip(&kinds).enumerate() {
            match kind {
                // SentencePiece writes the spaces of its own user-defined tokens like those of any piece.
                TokenKind::UserDefined if !byte_level && text.contains('▁') => {
                    let text = text.replace('▁', " ");
                    bytes.extend_from_slice(text.as_bytes());
                    specials.entry(text).or_insert(id as TokenId);
                }
                TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown => {
                    if !text.is_empty() {
                        specials.entry(text.clone()).or_insert(id as TokenId);
                    }
                    bytes.extend_from_slice(text.as_bytes());
                }
                TokenKind::Byte => bytes.push(parse_byte(id, text)?),
                TokenKind::Normal | TokenKind::Unused if byte_level => match byte_level_decode(text) {
                    Some(raw) => bytes.extend_from_slice(&raw),
                    None => bytes.extend_from_slice(text.as_bytes()),
                },
                TokenKind::Normal | TokenKind::Unused => {
                    bytes.extend_from_slice(text.replace('▁', " ").as_bytes())
                }
            }
            ends.push(
                u32::try_from(bytes.len())
                    .map_err(|_| Error::Tokenizer("the token texts exceed 4 GiB".into()))?,
            );
        }
        for (key, id) in [
            ("bos", source.bos),
            ("eos", source.eos),
            ("eot", source.eot),
            ("eom", source.eom),
            ("unknown", source.unk),
            ("padding", source.pad),
        ] {
            if let Some(id) = id.filter(|&id| id as usize >= count) {
                return Err(Error::Tokenizer(format!(
                    "`tokenizer.ggml.{key}_token_id` is {id}, but the vocabulary ends at {}",
                    count - 1
                )));
            }
        }
        Ok(Vocab {
            eog: eog(source, &kinds, &specials),
            kinds,
            bytes,
            ends,
            specials,
            space_prefix: !byte_level && source.add_space_prefix.unwrap_or(true),
            bos: source.bos,
            eos: source.eos,
            unk: source.unk,
            pad: source.pad,
        })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Never true for a vocabulary made by [`Vocab::new`].
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// What `id` is; `None` if it is out of range.
    pub fn kind(&self, id: TokenId) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The raw bytes `id` stands for: part of a UTF-8 character, several, or a special token's name. `None` if `id` is
    /// out of range.
    pub fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        let index = id as usize;
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 {
            0
        } else {
            self.ends[index - 1] as usize
        };
        Some(&self.bytes[start..end])
    }

    /// Whether `id` is structure and not text: a control token or the unknown token.
    pub fn is_control(&self, id: TokenId) -> bool {
        matches!(self.kind(id), Some(TokenKind::Control | TokenKind::Unknown))
    }

    /// Whether generation ends with `id`.
    pub fn is_eog(&self, id: TokenId) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// All tokens that end generation, ascending.
    pub fn eog_tokens(&self) -> &[TokenId] {
        &self.eog
    }

    /// The control or user-defined token with this text.
    pub fn special_id(&self, text: &str) -> Option<TokenId> {
        self.specials.get(text).copied()
    }

    /// Text of the token that begins a text, for templates; empty if there is none.
    pub fn bos_text(&self) -> &str {
        self.text_of(self.bos)
    }

    /// Text of the token that ends a text, for templates; empty if there is none.
    pub fn eos_text(&self) -> &str {
        self.text_of(self.eos)
    }

    /// Id of the token that begins a text.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Id of the token that ends a text.
    pub fn eos(&self) -> Option<TokenId> {
        self.eos
    }

    /// Id of the unknown token.
    pub fn unk(&self) -> Option<TokenId> {
        self.unk
    }

    /// Id of the padding token.
    pub fn pad(&self) -> Option<TokenId> {
        self.pad
    }

    fn text_of(&self, id: Option<TokenId>) -> &str {
        id.and_then(|id| self.bytes(id))
            .and_then(|raw| std::str::from_utf8(raw).ok())
            .unwrap_or("")
    }
}

fn kinds(source: &VocabSource) -> Result<Vec<TokenKind>> {
    let count = source.tokens.len();
    if source.token_types.is_empty() {
        return Ok(vec![TokenKind::Normal; count]);
    }
    if source.token_types.len() != count {
        return Err(Error::Tokenizer(format!(
            "`tokenizer.ggml.token_type` has {} entries for {count} tokens",
            source.token_types.len()
        )));
    }
    source
        .token_types
        .iter()
        .enumerate()
        .map(|(id, &kind)| match kind {
            1 => Ok(TokenKind::Normal),
            2 => Ok(TokenKind::Unknown),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            6 => Ok(TokenKind::Byte),
            other => Err(Error::Tokenizer(format!(
                "token {id} has the unknown type {other}; types are 1 to 6"
            ))),
        })
        .collect()
}

fn parse_byte(id: usize, text: &str) -> Result<u8> {
    text.strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .filter(|hex| hex.len() == 2)
        .and_then(|hex| u8::from_str_radix(hex, 16).ok())
        .ok_or_else(|| {
            Error::Tokenizer(format!(
                "token {id} is a byte token but is written `{text}`, not `<0xNN>`"
            ))
        })
}

/// Tokens that end generation: those the metadata names, and those whose text is known to end a turn.
fn eog(source: &VocabSource, kinds: &[TokenKind], specials: &HashMap<String, TokenId>) -> Vec<TokenId> {
    let mut set: Vec<TokenId> = [source.eos, source.eot, source.eom]
        .into_iter()
        .flatten()
        .collect();
    // In the Harmony format `<|end|>` closes one message of a turn that goes on.
    let harmony = specials.contains_key("<|return|>") && specials.contains_key("<|call|>");
    for name in END_NAMES {
        if *name == "<|end|>" && harmony {
            continue;
        }
        if let Some(&id) = specials.get(*name) {
            // `</s>` and `<eos>` are HTML to some vocabularies, which then list them as user-defined.
            let plain = matches!(*name, "</s>" | "<eos>");
            if !plain || kinds[id as usize] == TokenKind::Control {
                set.push(id);
            }
        }
    }
    set.sort_unstable();
    set.dedup();
    set
}

/// The byte a character of byte-level BPE stands for. Printable Latin-1 stands for itself; the other bytes, in order,
/// are U+0100 and on (Radford et al. 2019, the GPT-2 encoder).
pub(super) fn byte_of_char(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The bytes a token of byte-level BPE stands for, or `None` if it is not written in that alphabet.
fn byte_level_decode(text: &str) -> Option<Vec<u8>> {
    text.chars().map(byte_of_char).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of_char) {
                assert!(!seen[byte as usize], "two characters stand for byte {byte:#x}");
                seen[byte as usize] = true;
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char('Ċ'), Some(b'\n'));
    }

    fn source(tokens: &[(&str, i32)]) -> VocabSource {
        VocabSource {
            model: "llama".into(),
            tokens: tokens.iter().map(|t| t.0.to_string()).collect(),
            token_types: tokens.iter().map(|t| t.1).collect(),
            scores: vec![0.0; tokens.len()],
            ..VocabSource::default()
        }
    }

    #[test]
    fn ends_of_generation_come_from_ids_and_names() {
        let mut s = source(&[
            ("a", 1),
            ("</s>", 4),
            ("<|im_end|>", 4),
            ("<end_of_turn>", 3),
            ("</x>", 3),
        ]);
        s.eos = Some(4);
        let vocab = Vocab::new(&s).unwrap();
        assert_eq!(vocab.eog_tokens(), [2, 3, 4]);
        assert!(!vocab.is_eog(1), "a user-defined `</s>` is HTML");
        let s = source(&[("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)]);
        assert_eq!(Vocab::new(&s).unwrap().eog_tokens(), [1, 2]);
    }

    #[test]
    fn broken_metadata_is_refused_by_name() {
        let says = |s: &VocabSource, part: &str| {
            let message = Vocab::new(s).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        };
        says(
            &VocabSource {
                model: "llama".into(),
                ..VocabSource::default()
            },
            "empty",
        );
        let mut s = source(&[("a", 1), ("b", 1)]);
        s.token_types.pop();
        says(&s, "`tokenizer.ggml.token_type` has 1 entries for 2 tokens");
        says(&source(&[("a", 9)]), "unknown type 9");
        says(&source(&[("<0xZZ>", 6)]), "`<0xZZ>`");
        let mut s = source(&[("a", 1)]);
        s.bos = Some(1);
        says(&s, "`tokenizer.ggml.bos_token_id` is 1");
        let mut s = source(&[("a", 1)]);
        s.model = "t5".into();
        says(&s, "`t5`");
    }
}
