//! Any template with any conversation renders or is refused: no panic, no hang, no unbounded output, and a user's text
//! never becomes a control token of a fixed template.
//!
//! `cargo fuzz run template -- -max_total_time=60 -rss_limit_mb=2048`

#![no_main]

use std::sync::OnceLock;

use dynalm::text::template::MAX_OUTPUT_BYTES;
use dynalm::text::{ChatTemplate, Message, RenderOptions, Tokenizer, VocabSource};
use libfuzzer_sys::fuzz_target;

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}";

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let mut source = VocabSource { model: "llama".into(), ..VocabSource::default() };
        source.tokens = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        source.token_types = vec![6; 256];
        source.tokens.extend(["<|im_start|>".into(), "<|im_end|>".into()]);
        source.token_types.extend([3, 3]);
        source.scores = vec![0.0; source.tokens.len()];
        Tokenizer::new(&source).expect("a vocabulary of all bytes is complete")
    })
}

fuzz_target!(|input: (&str, &str, &str)| {
    let (source, first, second) = input;
    let messages = [Message::new("user", first), Message::new("assistant", second)];
    let options = RenderOptions { now: Some(0), ..RenderOptions::default() };
    if let Ok(prompt) = ChatTemplate::new(source, "<s>", "</s>")
        .and_then(|template| template.render(&messages, None, &options, tokenizer()))
    {
        assert!(prompt.text().len() <= MAX_OUTPUT_BYTES);
        let _ = tokenizer().encode(&prompt.pieces());
    }
    let fixed = ChatTemplate::new(CHATML, "", "").expect("a valid template");
    let prompt = fixed.render(&messages, None, &options, tokenizer()).expect("it takes any text");
    let ids = tokenizer().encode(&prompt.pieces()).expect("every byte has a token");
    assert_eq!(ids.iter().filter(|&&id| tokenizer().vocab().is_control(id)).count(), 4);
});
