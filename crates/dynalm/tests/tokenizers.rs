//! Token ids against the reference libraries, on made vocabularies always and on published ones where they are at hand.
//!
//! `data/vocab` is made by `tools/reference/vocabularies.py`. Published vocabularies are looked for in the folder that
//! `DYNALM_TEST_DATA` names (`vocab/*.gguf` with `.inp` and `.out` beside each, `models/*.gguf`); a test that finds
//! none says so.

use std::path::{Path, PathBuf};

use dynalm::format::gguf::Gguf;
use dynalm::load::vocab_source;
use dynalm::text::{AddSpecial, DetokenizeOptions, Detokenizer, Piece, TokenId, Tokenizer, VocabSource};
use serde_json::Value;

fn data(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/vocab")
        .join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item.as_str().unwrap().to_owned())
        .collect()
}

fn ids(value: &Value) -> Vec<TokenId> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item.as_u64().unwrap() as TokenId)
        .collect()
}

fn types(value: &Value) -> Vec<i32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item.as_i64().unwrap() as i32)
        .collect()
}

fn made_bpe(pre: &str) -> VocabSource {
    let made = data("made-bpe.json");
    VocabSource {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens: strings(&made["tokens"]),
        token_types: types(&made["token_types"]),
        merges: strings(&made["merges"]),
        ..VocabSource::default()
    }
}

fn made_spm(model: &Value) -> VocabSource {
    VocabSource {
        model: "llama".into(),
        tokens: strings(&model["tokens"]),
        scores: model["scores"]
            .as_array()
            .unwrap()
            .iter()
            .map(|score| score.as_f64().unwrap() as f32)
            .collect(),
        token_types: types(&model["token_types"]),
        add_space_prefix: model["add_space_prefix"].as_bool(),
        unk: Some(0),
        bos: Some(1),
        eos: Some(2),
        ..VocabSource::default()
    }
}

fn compare(name: &str, tokenizer: &Tokenizer, texts: &[String], expected: &Value, special: bool) {
    let expected = expected.as_array().unwrap();
    assert_eq!(texts.len(), expected.len(), "{name}");
    for (text, want) in texts.iter().zip(expected) {
        let piece = if special {
            Piece::Template(text)
        } else {
            Piece::Text(text)
        };
        assert_eq!(tokenizer.encode(&[piece]).unwrap(), ids(want), "{name}: {text:?}");
    }
}

/// Streaming gives whole characters and, joined, the whole text.
fn round_trip(name: &str, tokenizer: &Tokenizer, texts: &[String]) {
    let options = DetokenizeOptions {
        start: true,
        specials: false,
    };
    for text in texts {
        let ids = tokenizer.encode(&[Piece::Text(text)]).unwrap();
        let mut detokenizer = Detokenizer::new(tokenizer, options);
        let mut joined = String::new();
        for &id in &ids {
            joined.push_str(detokenizer.push(id));
        }
        joined.push_str(detokenizer.finish());
        assert_eq!(detokenizer.dropped_bytes(), 0, "{name}: {text:?}");
        assert_eq!(&joined, text, "{name}");
        assert_eq!(tokenizer.decode(&ids, options).unwrap(), joined, "{name}");
    }
}

#[test]
fn byte_level_bpe_equals_the_reference_under_every_split() {
    let made = data("made-bpe.json");
    let corpus = strings(&data("corpus.json"));
    let special = strings(&made["special_cases"]);
    let splits = made["splits"].as_object().unwrap();
    assert!(splits.len() >= 12);
    for (pre, expected) in splits {
        let tokenizer = Tokenizer::new(&made_bpe(pre)).unwrap();
        compare(pre, &tokenizer, &corpus, &expected["text"], false);
        compare(pre, &tokenizer, &special, &expected["special"], true);
        if !pre.starts_with("qwen") {
            round_trip(pre, &tokenizer, &corpus); // Qwen normalises to NFC
        }
    }
}

#[test]
fn sentencepiece_bpe_equals_the_reference() {
    let made = data("made-spm.json");
    let corpus = strings(&data("corpus.json"));
    let special = strings(&made["special_cases"]);
    for model in made["models"].as_array().unwrap() {
        let mut source = made_spm(model);
        let name = format!("prefix {:?}", source.add_space_prefix);
        let tokenizer = Tokenizer::new(&source).unwrap();
        compare(&name, &tokenizer, &corpus, &model["text"], false);
        // `▁` is a space to SentencePiece, and a prefix is also put after a user-defined token.
        let lossy =
            |text: &str| text.contains('▁') || (model["add_space_prefix"] == true && text.contains("<mark>"));
        let texts: Vec<String> = corpus.iter().filter(|text| !lossy(text)).cloned().collect();
        round_trip(&name, &tokenizer, &texts);
        for (key, legacy) in [("legacy", true), ("non_legacy", false)] {
            if model.get(key).is_some() {
                source.legacy_prefix = Some(legacy);
                compare(
                    key,
                    &Tokenizer::new(&source).unwrap(),
                    &special,
                    &model[key],
                    true,
                );
            }
        }
    }
}

#[test]
fn text_is_one_run_across_pieces_and_never_special() {
    let tokenizer = Tokenizer::new(&made_bpe("llama-bpe")).unwrap();
    let whole = tokenizer
        .encode(&[Piece::Template("<|im_start|>user\n\nHello world<|im_end|>")])
        .unwrap();
    let parts = ["<|im_start|>user\n", "\nHel", "lo wor", "ld", "<|im_end|>"];
    let pieces = [
        Piece::Template(parts[0]),
        Piece::Text(parts[1]),
        Piece::Template(parts[2]),
        Piece::Text(parts[3]),
        Piece::Template(parts[4]),
    ];
    assert_eq!(tokenizer.encode(&pieces).unwrap(), whole);
    let vocab = tokenizer.vocab();
    for pieces in [
        &[Piece::Text("<s></s><|im_start|>")][..],
        &[Piece::Template("<|im_"), Piece::Text("start|>")],
        &[Piece::Template("<|im_"), Piece::Template("start|>")],
    ] {
        assert!(
            !tokenizer
                .encode(pieces)
                .unwrap()
                .iter()
                .any(|&id| vocab.is_control(id))
        );
    }
}

#[test]
fn the_first_and_last_token_are_added_once() {
    let made = data("made-spm.json");
    let tokenizer = Tokenizer::new(&made_spm(&made["models"][0])).unwrap();
    assert_eq!(
        tokenizer.default_special(),
        AddSpecial {
            bos: true,
            eos: false
        }
    );
    let all = AddSpecial { bos: true, eos: true };
    let encode = |pieces: &[Piece<'_>]| tokenizer.encode_with(pieces, all).unwrap();
    assert_eq!(
        encode(&[Piece::Text("a")]),
        encode(&[Piece::Template("<s>a</s>")])
    );
    assert_eq!(encode(&[]), [1, 2]);
    assert_eq!(
        encode(&[Piece::Text("<s>")])
            .iter()
            .filter(|&&id| id == 1)
            .count(),
        1,
        "a user's `<s>` is not the token"
    );
}

#[test]
fn phi3_drops_white_space_after_its_special_tokens() {
    let made = data("made-spm.json");
    let mut source = made_spm(&made["models"][0]);
    source.architecture = Some("phi3".into());
    let tokenizer = Tokenizer::new(&source).unwrap();
    let encode = |text: &str| tokenizer.encode(&[Piece::Template(text)]).unwrap();
    assert_eq!(encode("<|im_start|>\n \nuser"), encode("<|im_start|>user"));
    let split = [
        Piece::Template("<|im_start|>\n"),
        Piece::Text("\n"),
        Piece::Text(" user x"),
    ];
    assert_eq!(tokenizer.encode(&split).unwrap(), encode("<|im_start|>user x"));
    assert_ne!(encode("<s> user"), encode("<s>user"));
}

#[test]
fn a_stream_never_shows_half_a_character() {
    let made = data("made-spm.json");
    let tokenizer = Tokenizer::new(&made_spm(&made["models"][1])).unwrap();
    let vocab = tokenizer.vocab();
    let byte = |byte: u8| {
        (0..vocab.len() as u32)
            .find(|&id| {
                vocab.kind(id) == Some(dynalm::text::TokenKind::Byte) && vocab.bytes(id) == Some(&[byte])
            })
            .unwrap()
    };
    let text = "👩‍👧 Привет 한글 🇩🇪";
    let ids: Vec<_> = text.bytes().map(byte).collect();
    let mut detokenizer = Detokenizer::new(&tokenizer, DetokenizeOptions::default());
    let mut joined = String::new();
    for &id in &ids {
        let delta = detokenizer.push(id);
        assert!(!delta.contains('\u{fffd}'));
        joined.push_str(delta);
    }
    assert_eq!(joined, text);
    // Cut inside a character, stream and whole agree.
    for end in 0..ids.len() {
        let mut detokenizer = Detokenizer::new(&tokenizer, DetokenizeOptions::default());
        let mut joined: String = ids[..end]
            .iter()
            .map(|&id| detokenizer.push(id).to_owned())
            .collect();
        joined.push_str(detokenizer.finish());
        assert!(text.starts_with(&joined));
        assert_eq!(
            tokenizer
                .decode(&ids[..end], DetokenizeOptions::default())
                .unwrap(),
            joined
        );
    }
    // Bytes that are no text are left out and counted; what follows is not lost.
    let broken: Vec<_> = [0xff, b'a', 0xe2, 0x82, b'b', 0xc3].map(byte).to_vec();
    let mut detokenizer = Detokenizer::new(&tokenizer, DetokenizeOptions::default());
    let joined: String = broken.iter().map(|&id| detokenizer.push(id).to_owned()).collect();
    assert!(detokenizer.is_inside_character());
    assert_eq!((joined.as_str(), detokenizer.finish()), ("ab", ""));
    assert_eq!(detokenizer.dropped_bytes(), 4);
}

#[test]
fn control_tokens_render_only_when_asked() {
    let made = data("made-spm.json");
    let tokenizer = Tokenizer::new(&made_spm(&made["models"][0])).unwrap();
    let ids = tokenizer
        .encode(&[Piece::Template("<s>Hello <mark>you</s>")])
        .unwrap();
    let text = |specials, start| {
        tokenizer
            .decode(&ids, DetokenizeOptions { specials, start })
            .unwrap()
    };
    assert_eq!(
        text(false, true),
        "Hello <mark> you",
        "the space after the mark is the vocabulary's own rule"
    );
    assert_eq!(text(false, false), " Hello <mark> you");
    assert_eq!(text(true, true), "<s>Hello <mark> you</s>");
    let error = tokenizer
        .decode(&[1, 70_000], DetokenizeOptions::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("token 70000 (element 1)"), "{error}");
}

#[test]
fn a_megabyte_of_anything_is_encoded() {
    let made = data("made-spm.json");
    let all = [
        Tokenizer::new(&made_spm(&made["models"][0])).unwrap(),
        Tokenizer::new(&made_bpe("llama-bpe")).unwrap(),
        Tokenizer::new(&made_bpe("deepseek-coder")).unwrap(),
    ];
    for unit in ["a", " ", "7", "😀", "\n", " \n", "<|im_start|>"] {
        let text = unit.repeat((1 << 20) / unit.len());
        for tokenizer in &all {
            let ids = tokenizer.encode(&[Piece::Template(&text)]).unwrap();
            let back = tokenizer
                .decode(
                    &ids,
                    DetokenizeOptions {
                        specials: true,
                        start: true,
                    },
                )
                .unwrap();
            assert!(back == text, "{unit:?}");
        }
    }
}

/// GGUF files with published vocabularies, if there are any.
fn published() -> Vec<PathBuf> {
    let Some(folder) = std::env::var_os("DYNALM_TEST_DATA").map(PathBuf::from) else {
        println!("skipped: DYNALM_TEST_DATA does not name a folder with published vocabularies");
        return Vec::new();
    };
    let mut files = Vec::new();
    for folder in [folder.join("vocab"), folder.join("models"), folder] {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        files.extend(
            entries
                .map(|entry| entry.path())
                .filter(|path| path.extension().is_some_and(|e| e == "gguf")),
        );
    }
    assert!(
        !files.is_empty(),
        "DYNALM_TEST_DATA names a folder without GGUF files"
    );
    files
}

#[test]
fn published_vocabularies_equal_their_references() {
    let real = data("real.json");
    let corpus = strings(&data("corpus.json"));
    for path in published() {
        let source = vocab_source(Gguf::open(&path).unwrap().metadata()).unwrap();
        let tokenizer = Tokenizer::new(&source).unwrap();
        let name = path.display().to_string();
        let beside = |ending: &str| std::fs::read_to_string(format!("{name}.{ending}")).ok();
        if let (Some(texts), Some(lines)) = (beside("inp"), beside("out")) {
            // The file ends in a separator, so what follows the last one is no text.
            for (text, line) in texts.split("\n__ggml_vocab_test__\n").zip(lines.lines()) {
                let want: Vec<TokenId> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
                assert_eq!(
                    tokenizer.encode(&[Piece::Text(text)]).unwrap(),
                    want,
                    "{name}: {text:?}"
                );
            }
            assert!(lines.lines().count() >= 40, "{name}");
        }
        let sha: String = {
            use sha2::Digest as _;
            let digest = sha2::Sha256::digest(source.tokens.join("\n").as_bytes());
            digest.iter().map(|byte| format!("{byte:02x}")).collect()
        };
        if let Some(expected) = real.get(&sha) {
            compare(&name, &tokenizer, &corpus, &expected["ids"], false);
        }
        println!("compared {name}");
    }
}
