//! Which special tokens of a rendered prompt the template wrote, and which a user typed.
//!
//! Idea: if no string of the request contains a special token, the template wrote all there are. Otherwise the
//! conversation is rendered a second time with the users' special tokens overwritten, character by character, by others
//! of the same width. Both renders are then equally long and differ exactly where a user's special token went, however
//! the template trimmed or cut the text around it. Nothing is put into the text, so nothing can be forged or get in the
//! way of a template that looks at the text.
//!
//! A template that asks for a special token in the text (`'</think>' in content`) renders differently without it. Such
//! a token is left as it is; the prompt is accepted only if all its occurrences are the template's, and refused otherwise.

use std::ops::Range;

use serde_json::Value;

use super::Context;
use crate::text::tokenizer::{Piece, Tokenizer};
use crate::{Error, Result};

/// A rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    /// Byte ranges a user wrote special tokens in, ascending, apart.
    user: Vec<Range<usize>>,
}

impl Prompt {
    /// A prompt without a template: all of it is a user's.
    pub fn from_user(text: String) -> Self {
        let all = 0..text.len();
        Prompt {
            text,
            user: vec![all],
        }
    }

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text in stretches, for [`Tokenizer::encode`].
    pub fn pieces(&self) -> Vec<Piece<'_>> {
        let mut pieces = Vec::with_capacity(2 * self.user.len() + 1);
        let mut at = 0;
        for range in &self.user {
            if range.start > at {
                pieces.push(Piece::Template(&self.text[at..range.start]));
            }
            pieces.push(Piece::Text(&self.text[range.clone()]));
            at = range.end;
        }
        if at < self.text.len() {
            pieces.push(Piece::Template(&self.text[at..]));
        }
        pieces
    }

    /// Ends the prompt right after the last occurrence of `content`, the last message's text.
    pub(super) fn cut_after(&mut self, content: &str) -> Result<()> {
        let trimmed = content.trim();
        let start = self.text.rfind(trimmed).ok_or_else(|| Error::Request {
            param: Some("continue_final_message".into()),
            code: None,
            message: "the chat template does not write the last message as it is, so it cannot be continued"
                .into(),
        })?;
        let mut end = start + trimmed.len();
        // Trailing white space stays if the template kept it.
        let tail = &content[content.trim_end().len()..];
        if self.text[end..].starts_with(tail) {
            end += tail.len();
        }
        self.text.truncate(end);
        self.user.retain(|range| range.start < end);
        if let Some(last) = self.user.last_mut() {
            last.end = last.end.min(end);
        }
        Ok(())
    }
}

/// Most different special tokens in the text that a template may react to, each costing two renders.
const MAX_STRUCTURAL: usize = 8;

/// Renders `context` and finds the users' special tokens in the result.
pub(super) fn render(
    context: &Context,
    tokenizer: &Tokenizer,
    render: impl Fn(&Context) -> Result<String>,
) -> Result<Prompt> {
    let text = render(context)?;
    let mut typed = Vec::new();
    let masked = masked(context, tokenizer, &[], &mut typed);
    if typed.is_empty() {
        return Ok(Prompt {
            text,
            user: Vec::new(),
        });
    }
    typed.sort();
    typed.dedup();
    if let Ok(other) = render(&masked)
        && let Some(user) = differing(&text, &other, tokenizer)
    {
        return Ok(Prompt { text, user });
    }
    // Some of them mean something to the template: find out which.
    let mut structural = Vec::new();
    for token in typed.iter().take(MAX_STRUCTURAL + 1) {
        let others: Vec<String> = typed.iter().filter(|other| *other != token).cloned().collect();
        let masked = self::masked(context, tokenizer, &others, &mut Vec::new());
        if render(&masked)
            .ok()
            .and_then(|other| differing(&text, &other, tokenizer))
            .is_none()
        {
            structural.push(token.clone());
        }
    }
    let refuse = || {
        Error::Template(format!(
            "a message contains the special token `{}` as text, and the chat template's result depends on it; remove it",
            structural.first().or(typed.first()).map_or("", String::as_str)
        ))
    };
    if structural.len() > MAX_STRUCTURAL {
        return Err(refuse());
    }
    for token in &structural {
        let mut without = context.clone();
        for_strings(&mut without, &mut |string| {
            if string.contains(token.as_str()) {
                *string = string.replace(token.as_str(), "");
            }
        });
        let own = render(&without)
            .map_err(|_| refuse())?
            .matches(token.as_str())
            .count();
        if text.matches(token.as_str()).count() != own {
            return Err(refuse());
        }
    }
    let masked = self::masked(context, tokenizer, &structural, &mut Vec::new());
    let other = render(&masked).map_err(|_| refuse())?;
    let user = differing(&text, &other, tokenizer).ok_or_else(refuse)?;
    Ok(Prompt { text, user })
}

/// `context` with the special tokens in its strings overwritten, except those in `keep`; `typed` gets their texts.
fn masked(context: &Context, tokenizer: &Tokenizer, keep: &[String], typed: &mut Vec<String>) -> Context {
    let mut masked = context.clone();
    for_strings(&mut masked, &mut |string| {
        let ranges: Vec<Range<usize>> = tokenizer.special_ranges(string);
        if ranges.is_empty() {
            return;
        }
        let mut out = String::with_capacity(string.len());
        let mut at = 0;
        for range in ranges {
            let token = &string[range.clone()];
            typed.push(token.to_owned());
            out.push_str(&string[at..range.start]);
            if keep.iter().any(|kept| kept == token) {
                out.push_str(token);
            } else {
                out.extend(token.chars().map(other_of_same_width));
            }
            at = range.end;
        }
        out.push_str(&string[at..]);
        *string = out;
    });
    masked
}

/// A character that is another one, as wide in UTF-8, and neither white space nor part of JSON.
fn other_of_same_width(c: char) -> char {
    match c.len_utf8() {
        1 if c == 'x' => 'y',
        1 => 'x',
        2 if c == 'ß' => 'þ',
        2 => 'ß',
        3 if c == '一' => '丁',
        3 => '一',
        _ if c == '𐀀' => '𐀁',
        _ => '𐀀',
    }
}

/// Where `text` and `other` differ, widened to whole special tokens of `text`; `None` if their structure differs.
fn differing(text: &str, other: &str, tokenizer: &Tokenizer) -> Option<Vec<Range<usize>>> {
    if text.len() != other.len() {
        return None;
    }
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut others = other.chars();
    for (at, c) in text.char_indices() {
        let o = others.next()?;
        if c == o {
            continue;
        }
        if o != other_of_same_width(c) {
            return None;
        }
        let end = at + c.len_utf8();
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end = end,
            _ => ranges.push(at..end),
        }
    }
    // A special token put together from what a user typed and what stood beside it is the user's.
    for token in tokenizer.special_ranges(text) {
        if ranges
            .iter()
            .any(|range| range.start < token.end && token.start < range.end)
        {
            ranges.push(token);
        }
    }
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    Some(joined)
}

/// Every string a request gave, except roles: templates build special tokens from those.
fn for_strings(context: &mut Context, change: &mut impl FnMut(&mut String)) {
    if let Value::Array(messages) = &mut context.messages {
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            for (key, value) in message.iter_mut() {
                if key != "role" {
                    walk(value, change);
                }
            }
        }
    }
    walk(&mut context.tools, change);
    context.kwargs.values_mut().for_each(|value| walk(value, change));
}

fn walk(value: &mut Value, change: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(string) => change(string),
        Value::Array(items) => items.iter_mut().for_each(|item| walk(item, change)),
        Value::Object(map) => {
            let entries = std::mem::take(map);
            for (mut key, mut item) in entries {
                change(&mut key);
                walk(&mut item, change);
                map.insert(key, item);
            }
        }
        _ => {}
    }
}
