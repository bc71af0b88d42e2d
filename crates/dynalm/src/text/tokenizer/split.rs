//! How each family of byte-level vocabularies cuts text into words before merging.
//!
//! The rules are the regular expressions published with the vocabularies (`tokenizer.json`), applied in order, each to
//! the pieces the one before left; matched and unmatched stretches both become pieces. They are run by a finite
//! automaton, so the cost is linear in the text.
//!
//! The published rules end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that follows.
//! An automaton has no look-ahead, so rules here end in `\s+` and the last character is given back afterwards.

use std::ops::Range;

use regex_automata::Input;
use regex_automata::meta::Regex;

use crate::{Error, Result};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##;
/// Cased letters; those that NFC replaces by another character are written as escapes.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u{1f5f}-\u{1f7d}ᾀ-ᾴᾶ-ᾼ\u{1fbe}ῂ-ῄῆ-ῌῐ-\u{1fd3}ῖ-\u{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const CJK_HANGUL: &str = "[一-龥ࠀ-一가-\u{d7ff}]+";
const CLOSED_WORDS: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// One family of rules: the names in `tokenizer.ggml.pre` it serves and what it does.
struct Family {
    names: &'static [&'static str],
    steps: &'static [&'static str],
    /// A word that is a token is taken as it is, without merging.
    ignore_merges: bool,
    /// Default of `add_bos`.
    add_bos: bool,
    /// Text is brought to NFC first, as the published tokenizer does.
    nfc: bool,
}

const fn family(names: &'static [&'static str], steps: &'static [&'static str]) -> Family {
    Family {
        names,
        steps,
        ignore_merges: false,
        add_bos: false,
        nfc: false,
    }
}

const FAMILIES: &[Family] = &[
    Family {
        ignore_merges: true,
        add_bos: true,
        ..family(
            &[
                "llama-bpe",
                "llama3",
                "llama-v3",
                "falcon3",
                "falcon-h1",
                "pixtral",
                "midm-2.0",
                "lfm2",
            ],
            &[LLAMA3],
        )
    },
    family(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], &[LLAMA3]),
    Family {
        nfc: true,
        ..family(&["qwen2"], &[QWEN2])
    },
    family(
        &[
            "deepseek-r1-qwen",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[QWEN2],
    ),
    Family {
        nfc: true,
        ..family(&["qwen35"], &[QWEN35])
    },
    family(&["seed-coder"], &[SEED_CODER]),
    family(
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
        ],
        &[GPT2],
    ),
    family(
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        &[r"\p{N}", GPT2],
    ),
    family(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    family(
        &["deepseek-coder"],
        &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_HANGUL, r"\p{N}"],
    ),
    family(
        &["deepseek-llm"],
        &[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            CJK_HANGUL,
            r"\p{N}+",
        ],
    ),
    family(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3],
    ),
    Family {
        ignore_merges: true,
        add_bos: true,
        ..family(&["tekken"], &[TEKKEN])
    },
    family(&["gpt-4o", "llama4", "kanana2", "minimax-m2"], &[GPT4O]),
    family(&["bloom", "poro-chat", "gpt3-finnish"], &[CLOSED_WORDS]),
    family(&["viking"], &[CLOSED_WORDS, r"\p{N}"]),
];

/// Names of all supported rules.
pub(super) fn supported() -> Vec<&'static str> {
    let mut names: Vec<_> = FAMILIES.iter().flat_map(|family| family.names).copied().collect();
    names.sort_unstable();
    names
}

/// The rules of one vocabulary.
#[derive(Debug)]
pub(super) struct Splitter {
    steps: Vec<Step>,
    pub(super) ignore_merges: bool,
    pub(super) add_bos: bool,
    pub(super) nfc: bool,
}

#[derive(Debug)]
struct Step {
    regex: Regex,
    /// A run of white space gives its last character back.
    gives_back: bool,
    /// White space up to a line end is a piece of its own, so a run that ends in one gives nothing back.
    line_ends: bool,
}

impl Splitter {
    /// The rules named `pre`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the name is unknown or absent: guessing would give wrong ids without anyone noticing.
    pub(super) fn new(pre: Option<&str>) -> Result<Self> {
        let Some(pre) = pre else {
            return Err(Error::Tokenizer(format!(
                "the checkpoint does not say how its vocabulary splits text (`tokenizer.ggml.pre` is absent); convert it anew \
                 with a current converter; supported are {}",
                supported().join(", ")
            )));
        };
        let family = FAMILIES
            .iter()
            .find(|family| family.names.contains(&pre))
            .ok_or_else(|| {
                Error::Tokenizer(format!(
                    "the splitting rule `{pre}` (`tokenizer.ggml.pre`) is not known; supported are {}",
                    supported().join(", ")
                ))
            })?;
        let steps = family
            .steps
            .iter()
            .map(|rule| {
                let regex = Regex::new(rule).map_err(|error| {
                    Error::Internal(format!("the splitting rule of `{pre}` does not compile: {error}"))
                })?;
                Ok(Step {
                    regex,
                    gives_back: rule.ends_with(r"|\s+"),
                    line_ends: rule.contains(r"|\s*[\r\n]+|"),
                })
            })
            .collect::<Result<_>>()?;
        Ok(Splitter {
            steps,
            ignore_merges: family.ignore_merges,
            add_bos: family.add_bos,
            nfc: family.nfc,
        })
    }

    /// Byte ranges of the words of `text`, in order; together they are all of `text`.
    pub(super) fn split(&self, text: &str, words: &mut Vec<Range<usize>>) {
        words.clear();
        words.push(0..text.len());
        let mut pieces = Vec::new();
        for step in &self.steps {
            std::mem::swap(&mut pieces, words);
            words.clear();
            for piece in pieces.drain(..) {
                step.split(&text[piece.clone()], piece.start, words);
            }
        }
        words.retain(|word| !word.is_empty());
    }
}

impl Step {
    fn split(&self, piece: &str, offset: usize, words: &mut Vec<Range<usize>>) {
        let mut at = 0;
        while at < piece.len() {
            let Some(found) = self.regex.find(Input::new(piece).range(at..)) else {
                break;
            };
            let end = found.start() + self.kept(&piece[found.range()], found.end() == piece.len());
            if found.start() > at {
                words.push(offset + at..offset + found.start());
            }
            words.push(offset + found.start()..offset + end);
            at = end;
        }
        if at < piece.len() {
            words.push(offset + at..offset + piece.len());
        }
    }

    /// How much of a match is kept.
    fn kept(&self, found: &str, at_end: bool) -> usize {
        let all = found.len();
        if !self.gives_back || at_end || !found.chars().all(char::is_whitespace) {
            return all;
        }
        if self.line_ends && found.ends_with(['\r', '\n']) {
            return all;
        }
        let last = found.chars().next_back().map_or(0, char::len_utf8);
        if last == all { all } else { all - last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'a>(pre: &str, text: &'a str) -> Vec<&'a str> {
        let mut ranges = Vec::new();
        Splitter::new(Some(pre)).unwrap().split(text, &mut ranges);
        ranges.into_iter().map(|range| &text[range]).collect()
    }

    #[test]
    fn white_space_leaves_its_last_character_to_the_word() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a\n\n b  "), ["a", "\n\n", " b", "  "]);
        assert_eq!(words("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(words("llama-bpe", "a \n\n  b"), ["a", " \n\n", " ", " b"]);
        assert_eq!(words("llama-bpe", "x\t\ty"), ["x", "\t", "\ty"]);
    }

    #[test]
    fn digits_follow_each_family() {
        assert_eq!(words("llama-bpe", "12345"), ["123", "45"]);
        assert_eq!(words("qwen2", "123"), ["1", "2", "3"]);
        assert_eq!(words("smollm", "a 12"), ["a", " ", "1", "2"]);
        assert_eq!(words("falcon", "1234567"), ["123", "456", "7"]);
        assert_eq!(words("gpt-2", "12345"), ["12345"]);
    }

    #[test]
    fn every_rule_compiles_and_loses_nothing() {
        let text = "I'LL go\r\n\r\n  \tto Ünïcode 東京 १२३ 12,345.6 \u{200d}👩‍👧 'S x_y<|z|>   ";
        for name in supported() {
            assert_eq!(words(name, text).concat(), text, "{name}");
            assert!(words(name, "").is_empty(), "{name}");
        }
    }

    #[test]
    fn an_unknown_rule_is_refused_with_the_list() {
        let message = Splitter::new(Some("default")).unwrap_err().to_string();
        assert!(
            message.contains("`default`") && message.contains("llama-bpe"),
            "{message}"
        );
        assert!(Splitter::new(None).unwrap_err().to_string().contains("absent"));
    }
}
