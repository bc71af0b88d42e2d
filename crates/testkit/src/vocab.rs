//! A small vocabulary made on the spot: byte-level BPE whose merges are learned from a paragraph of text.
//!
//! It owns the `tokenizer.*` metadata of a checkpoint. Real vocabularies come from files; see
//! [`Vocab::from_metadata`].

use std::collections::{BTreeMap, HashMap};

use crate::checkpoint::Meta;

/// Token types of GGUF (`tokenizer.ggml.token_type`).
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;

/// What merges are learned from: common English words and a little code, so that tests and prompts tokenise into
/// pieces of several letters.
const TEXT: &str = "the quick brown fox jumps over the lazy dog and then the dog runs after the fox in the forest \
    a language model reads a prompt and writes one token after another until it has said what there is to say \
    how many tokens are there in this line and where do they come from nobody knows but the reader can count them \
    give me three tips for clean code write small functions choose clear names and test what you have written \
    once upon a time there was a little girl who lived in a village near the river with her mother and father \
    fn main let mut value = if else for while return self struct impl use type the answer to the question is not \
    known to us all yet hello world my name is tell me about your work day year people number water sound";

/// Marks of the built-in chat format.
const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// The built-in chat template, ChatML with no default system message.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
    message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// The tokenizer of a checkpoint, as metadata.
#[derive(Debug, Clone, PartialEq)]
pub struct Vocab {
    /// Keys below `tokenizer.`, with that prefix.
    pub metadata: Vec<(String, Meta)>,
    /// Number of tokens.
    pub size: usize,
}

impl Vocab {
    /// The number of tokens [`Vocab::small`] has when not padded.
    pub const SMALL: usize = 384;

    /// Byte-level BPE: 256 bytes, then learned merges, then `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`, then
    /// unused tokens up to `size`. `pre` is the name of the split rule, `tokenizer.ggml.pre`.
    ///
    /// # Panics
    /// If `size` is less than [`Vocab::SMALL`].
    pub fn small(pre: &str, size: usize) -> Vocab {
        assert!(
            size >= Vocab::SMALL,
            "the built-in vocabulary has {} tokens, not {size}",
            Vocab::SMALL
        );
        let merges = learn_merges(Vocab::SMALL - 256 - SPECIALS.len());
        let bytes: Vec<String> = (0..=255).map(|b| byte_char(b).to_string()).collect();
        let mut tokens = bytes;
        tokens.extend(merges.iter().map(|(a, b)| format!("{a}{b}")));
        let mut types = vec![NORMAL; tokens.len()];
        let first_special = tokens.len() as u32;
        tokens.extend(SPECIALS.map(String::from));
        types.resize(tokens.len(), CONTROL);
        tokens.extend((tokens.len()..size).map(|i| format!("[PAD{i}]")));
        types.resize(size, UNUSED);
        let (end_of_text, end_of_turn) = (first_special, first_special + 2);
        let key = |name: &str, value| (format!("tokenizer.{name}"), value);
        let metadata = vec![
            key("ggml.model", Meta::Str("gpt2".into())),
            key("ggml.pre", Meta::Str(pre.into())),
            key("ggml.tokens", Meta::Strings(tokens)),
            key("ggml.token_type", Meta::I32s(types)),
            key(
                "ggml.merges",
                Meta::Strings(merges.into_iter().map(|(a, b)| format!("{a} {b}")).collect()),
            ),
            key("ggml.bos_token_id", Meta::U32(end_of_text)),
            key("ggml.eos_token_id", Meta::U32(end_of_turn)),
            key("ggml.padding_token_id", Meta::U32(end_of_text)),
            key("ggml.add_bos_token", Meta::Bool(false)),
            key("chat_template", Meta::Str(CHAT_TEMPLATE.into())),
        ];
        Vocab { metadata, size }
    }

    /// The tokenizer among the metadata of another file: its `tokenizer.*` keys.
    ///
    /// # Errors
    /// If there is no `tokenizer.ggml.tokens`.
    pub fn from_metadata(all: impl IntoIterator<Item = (String, Meta)>) -> Result<Vocab, String> {
        let metadata: Vec<_> = all
            .into_iter()
            .filter(|(k, _)| k.starts_with("tokenizer."))
            .collect();
        let size = metadata.iter().find_map(|(k, v)| match v {
            Meta::Strings(tokens) if k == "tokenizer.ggml.tokens" => Some(tokens.len()),
            _ => None,
        });
        match size {
            Some(size) if size > 0 => Ok(Vocab { metadata, size }),
            _ => {
                Err("found no tokens under `tokenizer.ggml.tokens`, expected a file with a vocabulary".into())
            }
        }
    }
}

/// The visible character that stands for a byte in byte-level vocabularies: printable Latin-1 characters stand for
/// themselves, the others follow from U+0100 on. Source: GPT-2's `bytes_to_unicode`.
pub fn byte_char(byte: u8) -> char {
    let visible = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if visible(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !visible(b)).count() as u32;
    char::from_u32(0x100 + before)
        .expect("at most 68 bytes are not visible, and U+0100 to U+0144 are letters")
}

/// Byte-pair encoding's training: again and again the most frequent neighbours within a word are joined; of equally
/// frequent pairs the first in alphabetical order.
fn learn_merges(count: usize) -> Vec<(String, String)> {
    let mut words: HashMap<Vec<String>, usize> = HashMap::new();
    for (i, word) in TEXT.split_whitespace().enumerate() {
        let spaced = if i == 0 {
            word.to_owned()
        } else {
            format!(" {word}")
        };
        *words
            .entry(spaced.bytes().map(|b| byte_char(b).to_string()).collect())
            .or_default() += 1;
    }
    let mut merges = Vec::new();
    while merges.len() < count {
        let mut pairs: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for (word, n) in &words {
            for pair in word.windows(2) {
                *pairs.entry((&pair[0], &pair[1])).or_default() += n;
            }
        }
        let most = *pairs
            .values()
            .max()
            .expect("the text has more pairs than merges are asked for");
        let (&(a, b), _) = pairs
            .iter()
            .find(|(_, n)| **n == most)
            .expect("the largest count is one of them");
        let (a, b) = (a.to_owned(), b.to_owned());
        words = words
            .into_iter()
            .map(|(word, n)| (join(word, &a, &b), n))
            .collect();
        merges.push((a, b));
    }
    merges
}

/// The word with every `a` that `b` follows joined with it.
fn join(word: Vec<String>, a: &str, b: &str) -> Vec<String> {
    let mut joined: Vec<String> = Vec::with_capacity(word.len());
    let mut open = false; // whether the last piece may still take a `b`
    for piece in word {
        match joined.last_mut() {
            Some(last) if open && piece == b => {
                last.push_str(b);
                open = false;
            }
            _ => {
                open = piece == a;
                joined.push(piece);
            }
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn strings<'a>(vocab: &'a Vocab, key: &str) -> &'a [String] {
        match vocab.metadata.iter().find(|(k, _)| k == key) {
            Some((_, Meta::Strings(v))) => v,
            other => panic!("{key}: {other:?}"),
        }
    }

    #[test]
    fn the_small_vocabulary_is_complete_and_consistent() {
        let vocab = Vocab::small("gpt-2", 400);
        let tokens = strings(&vocab, "tokenizer.ggml.tokens");
        assert_eq!((tokens.len(), vocab.size), (400, 400));
        let set: HashSet<&str> = tokens.iter().map(String::as_str).collect();
        assert_eq!(set.len(), 400, "no token stands twice");
        assert!((0..=255).all(|b| set.contains(byte_char(b).to_string().as_str())));
        for merge in strings(&vocab, "tokenizer.ggml.merges") {
            let (a, b) = merge.split_once(' ').unwrap();
            assert!(
                set.contains(a) && set.contains(b) && set.contains(format!("{a}{b}").as_str()),
                "{merge}"
            );
        }
        assert!(set.contains("Ġthe"), "a frequent word is one token");
        assert_eq!(tokens[383], "<|im_end|>");
        assert_eq!(tokens[384], "[PAD384]");
        assert_eq!(Vocab::small("gpt-2", 400), vocab, "made the same way each time");
    }

    #[test]
    fn bytes_have_their_characters() {
        assert_eq!(byte_char(b' '), 'Ġ');
        assert_eq!(byte_char(b'\n'), 'Ċ');
        assert_eq!(byte_char(0), 'Ā');
        assert_eq!(byte_char(0xad), 'Ń');
        assert_eq!(byte_char(b'a'), 'a');
    }

    #[test]
    fn joining_takes_pairs_from_the_left() {
        let word = |s: &str| s.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(join(word("a a a b"), "a", "a"), word("aa a b"));
        assert_eq!(join(word("a b a b c"), "a", "b"), word("ab ab c"));
    }

    #[test]
    fn a_vocabulary_needs_tokens() {
        assert!(Vocab::from_metadata([("tokenizer.ggml.model".into(), Meta::Str("gpt2".into()))]).is_err());
        let small = Vocab::small("gpt-2", Vocab::SMALL);
        let with_others = small
            .metadata
            .clone()
            .into_iter()
            .chain([("llama.block_count".into(), Meta::U32(1))]);
        assert_eq!(Vocab::from_metadata(with_others).unwrap(), small);
    }
}
