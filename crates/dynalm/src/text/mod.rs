//! Text in, tokens out, and back: vocabularies, tokenizers, detokenizing, chat templates.
//!
//! The loader fills a [`VocabSource`] from a checkpoint's metadata; everything else is derived from it. Nothing here
//! reads files, knows a model's weights or speaks HTTP.

pub mod detokenize;
pub mod template;
pub mod tokenizer;
pub mod vocab;

pub use detokenize::{DetokenizeOptions, Detokenizer};
pub use template::{ChatTemplate, Message, Prompt, RenderOptions, ToolCall};
pub use tokenizer::{AddSpecial, Piece, Tokenizer};
pub use vocab::{TokenId, TokenKind, Vocab, VocabSource};
