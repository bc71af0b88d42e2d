//! Reading a stream of server-sent events: when each token arrived, and what the server counted.

use std::io::{BufRead, BufReader, Read};
use std::time::Instant;

use serde_json::Value;

/// Longest line of a stream, bytes.
const MAX_LINE: u64 = 1 << 20;

/// A completion as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Streamed {
    /// When the request was sent.
    pub sent: Instant,
    /// When each event with a part of the reply arrived; a server may put several tokens into one. Those that one read
    /// brought have one time: how long this program took to get to them is none of the server's.
    pub events: Vec<Instant>,
    /// The server's count of the prompt's tokens.
    pub prompt_tokens: usize,
    /// The server's count of the reply's tokens.
    pub completion_tokens: usize,
    /// Prompt tokens the server says it had cached, if it says so.
    pub cached_tokens: Option<usize>,
    /// Why the reply ended, in the server's words.
    pub finish_reason: Option<String>,
}

/// What a server's error says: `{"error": {"message": …}}`, `{"error": "…"}`, or `{"message": …}`.
pub(super) fn error_message(value: &Value) -> Option<String> {
    let error = value.get("error").unwrap_or(value);
    let text = error.get("message").unwrap_or(error).as_str()?;
    Some(text.to_owned())
}

/// Whether an event's choice carries a part of the reply. The opening chunk of a chat (its role) and the closing one (its
/// reason) do not; a token whose bytes are not yet a character arrives as an empty text and does.
fn is_token(choice: &Value) -> bool {
    let ends = choice.get("finish_reason").is_some_and(|r| !r.is_null());
    let carries = |text: Option<&Value>, opens: bool| match text.and_then(Value::as_str) {
        Some("") => !ends && !opens,
        Some(_) => true,
        None => false,
    };
    match choice.get("delta") {
        Some(delta) => {
            let opens = delta.get("role").is_some();
            carries(delta.get("content"), opens)
                || ["reasoning_content", "reasoning"]
                    .iter()
                    .any(|key| carries(delta.get(*key), true))
        }
        None => carries(choice.get("text"), false),
    }
}

/// Lines of a stream.
struct Lines<R> {
    reader: BufReader<R>,
    /// The last, with its end.
    line: Vec<u8>,
    /// When the read that completed it returned.
    arrived: Instant,
}

impl<R: Read> Lines<R> {
    /// Reads the next line; `false` at the end. `events` have been read.
    fn next(&mut self, events: usize) -> Result<bool, String> {
        self.line.clear();
        let is_here = self.reader.buffer().contains(&b'\n');
        let mut bounded = self.reader.by_ref().take(MAX_LINE);
        let n = bounded.read_until(b'\n', &mut self.line);
        if !is_here {
            self.arrived = Instant::now();
        }
        match n {
            Ok(_) if self.line.len() as u64 == MAX_LINE => {
                Err(format!("a line of the stream is longer than {MAX_LINE} bytes"))
            }
            Ok(n) => Ok(n > 0),
            Err(e) => Err(format!("the stream broke off after {events} events: {e}")),
        }
    }
}

/// Reads a stream to its end.
///
/// # Errors
/// Why it is no complete stream with counts.
pub(super) fn read(reader: impl Read, sent: Instant) -> Result<Streamed, String> {
    let mut lines = Lines {
        reader: BufReader::new(reader),
        line: Vec::new(),
        arrived: sent,
    };
    let mut streamed = Streamed {
        sent,
        events: Vec::new(),
        prompt_tokens: 0,
        completion_tokens: 0,
        cached_tokens: None,
        finish_reason: None,
    };
    let (mut counted, mut ended, mut is_error) = (false, false, false);
    while lines.next(streamed.events.len())? {
        let text = String::from_utf8_lossy(&lines.line);
        let text = text.trim_end_matches(['\r', '\n']);
        if let Some(name) = text.strip_prefix("event:") {
            is_error = name.trim() == "error";
            continue;
        }
        let Some(data) = text.strip_prefix("data:") else {
            continue;
        };
        let data = data.trim();
        if data == "[DONE]" {
            ended = true;
            break;
        }
        let event: Value =
            serde_json::from_str(data).map_err(|e| format!("an event of the stream is no JSON: {e}"))?;
        if is_error || event.get("error").is_some_and(|e| !e.is_null()) {
            let why = error_message(&event).unwrap_or_else(|| data.to_owned());
            return Err(format!(
                "the stream ends with an error: {}",
                super::printable(&why)
            ));
        }
        counted |= take_usage(&event, &mut streamed)?;
        let choice = event.get("choices").and_then(|c| c.get(0));
        if let Some(choice) = choice {
            if is_token(choice) {
                streamed.events.push(lines.arrived);
            }
            if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
                streamed.finish_reason = Some(reason.to_owned());
            }
        }
    }
    if !ended && streamed.finish_reason.is_none() {
        return Err(format!(
            "the stream ended early, after {} events",
            streamed.events.len()
        ));
    }
    if !counted {
        return Err(
            "the server gives no token counts (`usage`), although `stream_options.include_usage` asked for \
                    them; without them a speed in tokens would be a guess, so it is not measured"
                .to_owned(),
        );
    }
    Ok(streamed)
}

/// Takes the counts of an event that has some.
fn take_usage(event: &Value, into: &mut Streamed) -> Result<bool, String> {
    let Some(usage) = event.get("usage").filter(|u| !u.is_null()) else {
        return Ok(false);
    };
    let count = |key: &str| {
        let found = usage.get(key).and_then(Value::as_u64);
        found.map(|n| n as usize).ok_or_else(|| {
            format!(
                "`usage.{key}` is no count: {}",
                super::printable(&usage.to_string())
            )
        })
    };
    into.prompt_tokens = count("prompt_tokens")?;
    into.completion_tokens = count("completion_tokens")?;
    let cached = usage
        .get("prompt_tokens_details")
        .and_then(|d| d.get("cached_tokens"));
    into.cached_tokens = cached.and_then(Value::as_u64).map(|n| n as usize);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(text: &str) -> Result<Streamed, String> {
        read(text.as_bytes(), Instant::now())
    }

    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\
                         \"prompt_tokens_details\":{\"cached_tokens\":3}}}\n\n";

    #[test]
    fn events_with_text_are_counted_and_the_usage_is_the_servers() {
        let text = format!(
            ": comment\n\ndata: {{\"choices\":[{{\"text\":\"a\",\"finish_reason\":null}}]}}\r\n\r\n\
             data: {{\"choices\":[{{\"text\":\"\"}}]}}\n\n\
             data: {{\"choices\":[{{\"text\":\"\",\"finish_reason\":\"length\"}}]}}\n\n{USAGE}data: [DONE]\n\n"
        );
        let s = stream(&text).expect("a whole stream");
        assert_eq!(s.events.len(), 2);
        assert_eq!(
            (s.prompt_tokens, s.completion_tokens, s.cached_tokens),
            (7, 2, Some(3))
        );
        assert_eq!(s.finish_reason.as_deref(), Some("length"));
    }

    #[test]
    fn what_one_read_brought_arrived_at_one_time() {
        let token = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        let (first, then) = (token.repeat(3), format!("{token}{USAGE}data: [DONE]\n\n"));
        let sent = Instant::now();
        let s = read(first.as_bytes().chain(then.as_bytes()), sent).expect("a whole stream");
        assert_eq!(s.events.len(), 4);
        assert!(sent <= s.events[0] && s.events[..3].iter().all(|e| *e == s.events[0]));
        assert!(s.events[2] < s.events[3]);
    }

    #[test]
    fn a_chats_opening_and_closing_chunks_are_no_tokens() {
        let text = format!(
            "data: {{\"choices\":[{{\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}}}}]}}\n\n\
             data: {{\"choices\":[{{\"delta\":{{\"reasoning_content\":\"hm\"}}}}]}}\n\n\
             data: {{\"choices\":[{{\"delta\":{{\"content\":\"a\"}}}}]}}\n\n\
             data: {{\"choices\":[{{\"delta\":{{}},\"finish_reason\":\"stop\"}}]}}\n\n{USAGE}"
        );
        assert_eq!(stream(&text).expect("ends with a reason").events.len(), 2);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let token = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        for (text, part) in [
            (format!("{token}data: [DONE]\n"), "include_usage"),
            (token.to_owned(), "ended early, after 1 events"),
            (format!("{token}data: {{\n"), "no JSON"),
            (
                format!("{token}event: error\ndata: {{\"error\":{{\"message\":\"no memory\"}}}}\n\n"),
                "no memory",
            ),
            (format!("{token}data: {{\"error\":\"gone\"}}\n"), "gone"),
            (
                format!("{token}data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":-1}}}}\ndata: [DONE]\n"),
                "usage.prompt_tokens",
            ),
        ] {
            let error = stream(&text).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
        let long = format!("data: {}", "x".repeat(MAX_LINE as usize));
        assert!(stream(&long).expect_err("too long").contains("longer"));
    }
}
