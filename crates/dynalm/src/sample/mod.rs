//! From logits to a token.

pub mod params;
