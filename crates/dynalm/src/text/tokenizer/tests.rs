//! What needs a look inside: the cost of encoding, and vocabularies odd enough to be made by hand.

use super::*;

/// Byte-level vocabulary of all bytes and `merges`, given in plain ASCII.
fn bytes_and(merges: &[&str], extra: &[(&str, i32)]) -> VocabSource {
    let mut source = VocabSource {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        ..VocabSource::default()
    };
    for code in 0..0x144 {
        let c = char::from_u32(code).unwrap();
        if super::super::vocab::byte_of_char(c).is_some() {
            source.tokens.push(c.to_string());
        }
    }
    assert_eq!(source.tokens.len(), 256);
    for merge in merges {
        source.merges.push((*merge).to_owned());
        source.tokens.push(merge.replace(' ', ""));
    }
    source.token_types = vec![1; source.tokens.len()];
    for (text, kind) in extra {
        source.tokens.push((*text).to_owned());
        source.token_types.push(*kind);
    }
    source
}

fn sentence_pieces(pieces: &[(&str, f32, i32)]) -> VocabSource {
    let mut source = VocabSource {
        model: "llama".into(),
        unk: Some(0),
        add_space_prefix: Some(false),
        tokens: vec!["<unk>".into()],
        token_types: vec![2],
        scores: vec![0.0],
        ..VocabSource::default()
    };
    for (text, score, kind) in pieces {
        source.tokens.push((*text).to_owned());
        source.scores.push(*score);
        source.token_types.push(*kind);
    }
    source
}

#[test]
fn the_cost_is_linear_in_the_text() {
    let bpe = Tokenizer::new(&bytes_and(
        &["a a", "aa aa", "Ġ Ġ", "ĠĠ ĠĠ", "a b"],
        &[("<|x|>", 3), ("<mark>", 4)],
    ))
    .unwrap();
    let spm = Tokenizer::new(&sentence_pieces(&[
        ("a", -3.0, 1),
        ("▁", -3.5, 1),
        ("aa", -1.0, 1),
        ("aaaa", -2.0, 1),
        ("▁▁", -4.0, 1),
        ("▁▁▁▁", -5.0, 1),
        ("<|x|>", 0.0, 3),
        ("<mark>", 0.0, 4),
    ]))
    .unwrap();
    for unit in ["a", " ", "1", "😀", "ab", "<|x|>", "<mark>", "<|x|>hello\n"] {
        for tokenizer in [&bpe, &spm] {
            let work = |count: usize| {
                let text = unit.repeat(count);
                tokenizer
                    .encode_counted(&[Piece::Template(&text)])
                    .unwrap()
                    .1
                    .max(1) as f64
                    / count as f64
            };
            let (small, large) = (work(1_000), work(64_000));
            assert!(
                large < small * 1.1 + 1.0,
                "{unit:?}: {small} steps a unit in a short text, {large} in a long one"
            );
        }
    }
}

#[test]
fn merges_through_tokens_that_do_not_exist_end_as_bytes() {
    // `bc` is merged before `ab` could be, but is no token.
    let mut source = bytes_and(&["a b"], &[]);
    source.merges.insert(0, "b c".into());
    let tokenizer = Tokenizer::new(&source).unwrap();
    let id = |text: &str| source.tokens.iter().position(|token| token == text).unwrap() as TokenId;
    assert_eq!(
        tokenizer.encode(&[Piece::Text("abc")]).unwrap(),
        [id("a"), id("b"), id("c")]
    );
    assert_eq!(tokenizer.encode(&[Piece::Text("ab")]).unwrap(), [id("ab")]);
}

#[test]
fn no_text_merges_into_a_control_token() {
    let source = bytes_and(&["< s", "<s >"], &[]);
    let control = source.tokens.iter().position(|token| token == "<s>").unwrap();
    let mut source = source;
    source.token_types[control] = 3;
    let tokenizer = Tokenizer::new(&source).unwrap();
    assert_eq!(
        tokenizer.encode(&[Piece::Template("<s>")]).unwrap(),
        [control as TokenId]
    );
    assert_eq!(tokenizer.encode(&[Piece::Text("<s>")]).unwrap().len(), 3);
    let spm = Tokenizer::new(&sentence_pieces(&[
        ("<", -1.0, 1),
        ("s", -1.0, 1),
        (">", -1.0, 1),
        ("<s", -1.0, 1),
        ("<s>", 0.0, 3),
    ]))
    .unwrap();
    assert_eq!(spm.encode(&[Piece::Text("<s>")]).unwrap(), [4, 3]);
}

#[test]
fn a_missing_byte_is_the_unknown_token_or_an_error() {
    let mut source = bytes_and(&["a b"], &[("<unk>", 2)]);
    let at = source.tokens.iter().position(|token| token == "z").unwrap();
    source.tokens[at] = "zz".into();
    let message = Tokenizer::new(&source)
        .unwrap()
        .encode(&[Piece::Text("z")])
        .unwrap_err()
        .to_string();
    assert!(message.contains("0x7a"), "{message}");
    source.unk = Some(source.tokens.len() as TokenId - 1);
    assert_eq!(
        Tokenizer::new(&source)
            .unwrap()
            .encode(&[Piece::Text("z")])
            .unwrap(),
        [source.unk.unwrap()]
    );
}

#[test]
fn unknown_characters_are_one_token_and_unused_pieces_are_taken_apart() {
    let spm = Tokenizer::new(&sentence_pieces(&[
        ("a", -1.0, 1),
        ("b", -1.0, 1),
        ("ab", -1.0, 5),
        ("abb", -2.0, 1),
    ]))
    .unwrap();
    let encode = |text: &str| spm.encode(&[Piece::Text(text)]).unwrap();
    assert_eq!(encode("aπσb"), [1, 0, 2]);
    assert_eq!(encode("ab"), [1, 2]);
    assert_eq!(encode("abb"), [4], "merging may pass through an unused piece");
}

#[test]
fn the_longest_special_token_wins() {
    let tokenizer = Tokenizer::new(&bytes_and(
        &["a b"],
        &[("<|x", 3), ("<|x|>", 3), ("<m>", 4), ("<m><m>", 4)],
    ))
    .unwrap();
    let first = tokenizer.vocab().special_id("<|x").unwrap();
    assert_eq!(
        tokenizer.encode(&[Piece::Template("<|x|><|x")]).unwrap(),
        [first + 1, first]
    );
    assert_eq!(
        tokenizer.encode(&[Piece::Text("<m><m><m>")]).unwrap(),
        [first + 3, first + 2]
    );
}

#[test]
fn special_ranges_include_one_begun_at_the_end() {
    let tokenizer = Tokenizer::new(&bytes_and(&["a b"], &[("<|x|>", 3), ("<|é|>", 3)])).unwrap();
    let ranges = |text: &str| -> Vec<_> {
        tokenizer
            .special_ranges(text)
            .into_iter()
            .map(|range| (range.start, range.end))
            .collect()
    };
    assert_eq!(ranges("a<|x|>b<|x|>"), [(1, 6), (7, 12)]);
    assert!(ranges("a < b").is_empty());
    assert_eq!(ranges("a<|é \n"), [(1, 5)]);
    assert_eq!(ranges("é<"), [(2, 3)]);
}

#[test]
fn inconsistent_vocabularies_are_refused() {
    let says = |source: &VocabSource, part: &str| {
        let message = Tokenizer::new(source).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    let mut source = bytes_and(&["a b"], &[]);
    source.merges.clear();
    says(&source, "`tokenizer.ggml.merges`");
    let mut source = bytes_and(&["a b"], &[]);
    source.merges[0] = "ab".into();
    says(&source, "merge 0 is `ab`");
    let mut source = bytes_and(&["a b"], &[]);
    source.pre = Some("nosuch".into());
    says(&source, "`nosuch`");
    let mut source = sentence_pieces(&[("a", 0.0, 1)]);
    source.scores.pop();
    says(&source, "`tokenizer.ggml.scores` has 1 entries for 2 tokens");
    let mut source = sentence_pieces(&[("a", 0.0, 1)]);
    source.unk = None;
    says(&source, "neither byte tokens nor an unknown token");
    says(&sentence_pieces(&[("<0x41>", 0.0, 6)]), "none for byte 0x00");
}
