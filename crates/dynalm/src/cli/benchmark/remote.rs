//! A server, ours or another, as its clients meet it: over HTTP, streaming, with the server's own token counts.

use std::time::Duration;

use dynacore::cpu::peak_resident_bytes;
use serde_json::{Value, json};

use super::drive::{Engine, Prompt, Random, Trace};
use crate::cli::Usage;
use crate::client::{Ask, Client, Route};

/// Words that prompts are made of; in most vocabularies each is one token with the space before it.
const WORDS: [&str; 64] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
];
/// Closer parts may have lain in one packet, or waited together for this client.
const LEAST_SPAN: Duration = Duration::from_millis(1);
/// Words of the two prompts that tell how many tokens a word takes.
const SHORT: usize = 4;
const LONG: usize = 36;

/// How a server is asked.
#[derive(Debug, Clone)]
pub(super) struct RemoteOptions {
    pub(super) key: Option<String>,
    pub(super) timeout: Duration,
    pub(super) route: Route,
    pub(super) ignore_eos: bool,
    /// Its name for the model; by default the only one it lists.
    pub(super) model: Option<String>,
    /// The process whose memory is reported.
    pub(super) pid: Option<u32>,
}

/// A server.
pub(super) struct Remote {
    label: String,
    client: Client,
    options: RemoteOptions,
    model: String,
    /// What the server says of the model, and its name.
    entry: Value,
    server: Option<String>,
    /// Tokens of a prompt: `fixed + per_word · words`.
    fixed: f64,
    per_word: f64,
}

/// `NAME=URL` or `URL`; without a name the host is it.
pub(super) fn named(text: &str) -> (String, &str) {
    match text.split_once('=') {
        Some((name, url)) if !name.contains(['/', ':']) && !name.is_empty() => (name.to_owned(), url),
        _ => {
            let rest = text.split("://").nth(1).unwrap_or(text);
            (rest.split('/').next().unwrap_or(rest).to_owned(), text)
        }
    }
}

/// The model to ask for.
fn choose(base: &str, models: &[Value], wanted: Option<&str>) -> anyhow::Result<Value> {
    let id = |m: &Value| m["id"].as_str().unwrap_or_default().to_owned();
    let names = || models.iter().map(id).collect::<Vec<_>>().join(", ");
    match (wanted, models) {
        (Some(name), _) => models
            .iter()
            .find(|m| id(m) == name)
            .cloned()
            .ok_or_else(|| Usage(format!("--model-name {name}: {base} serves {}", names())).into()),
        (None, [one]) => Ok(one.clone()),
        (None, []) => anyhow::bail!("{base} lists no model"),
        (None, _) => Err(Usage(format!("{base} serves {}; choose one with --model-name", names())).into()),
    }
}

impl Remote {
    /// Asks the server what it serves and learns how many tokens a word takes.
    pub(super) fn open(
        named_url: &str,
        options: &RemoteOptions,
        random: &mut Random,
    ) -> anyhow::Result<Remote> {
        let (label, url) = named(named_url);
        let client = Client::new(url, options.key.clone(), options.timeout)?;
        let (models, server) = client.models()?;
        let entry = choose(client.base(), &models, options.model.as_deref())?;
        let mut remote = Remote {
            label,
            client,
            options: options.clone(),
            model: entry["id"].as_str().unwrap_or_default().to_owned(),
            entry,
            server,
            fixed: 0.0,
            per_word: 1.0,
        };
        let count = |random: &mut Random, n: usize| -> anyhow::Result<f64> {
            let trace = remote.ask(Prompt::Text(words(random, n)), 1)?;
            Ok(trace.prompt_tokens as f64)
        };
        let (short, long) = (count(random, SHORT)?, count(random, LONG)?);
        let per_word = (long - short) / (LONG - SHORT) as f64;
        anyhow::ensure!(
            per_word > 0.0,
            "{}: {SHORT} words are {short} tokens and {LONG} words {long}: the server's count of prompt tokens cannot be \
             trusted, so nothing is measured",
            remote.client.base()
        );
        remote.per_word = per_word;
        remote.fixed = short - per_word * SHORT as f64;
        Ok(remote)
    }
}

/// So many words.
fn words(random: &mut Random, n: usize) -> String {
    let mut text = String::new();
    for i in 0..n {
        if i > 0 {
            text.push(' ');
        }
        text.push_str(WORDS[random.below(WORDS.len())]);
    }
    text
}

impl Engine for Remote {
    fn label(&self) -> &str {
        &self.label
    }

    fn prompt(&self, random: &mut Random, tokens: usize, shared: usize) -> Prompt {
        let count = |tokens: usize| ((tokens as f64 - self.fixed) / self.per_word).round().max(0.0) as usize;
        let all = count(tokens).max(1);
        let common = if shared == 0 { 0 } else { count(shared).min(all) };
        let mut text = words(&mut Random::new(0), common);
        if common > 0 && common < all {
            text.push(' ');
        }
        text.push_str(&words(random, all - common));
        Prompt::Text(text)
    }

    fn ask(&self, prompt: Prompt, max_tokens: usize) -> anyhow::Result<Trace> {
        let Prompt::Text(prompt) = prompt else {
            anyhow::bail!("internal error: a prompt of tokens for a server");
        };
        let streamed = self.client.stream(&Ask {
            route: self.options.route,
            model: &self.model,
            prompt: &prompt,
            max_tokens,
            ignore_eos: self.options.ignore_eos,
        })?;
        Ok(Trace {
            sent: streamed.sent,
            events: streamed.events,
            prompt_tokens: streamed.prompt_tokens,
            output_tokens: streamed.completion_tokens,
            cached_tokens: streamed.cached_tokens,
        })
    }

    fn peak_resident(&self) -> Option<u64> {
        peak_resident_bytes(Some(self.options.pid?))
    }

    fn least_span(&self) -> Duration {
        LEAST_SPAN
    }

    fn describe(&self) -> Value {
        json!({
            "kind": "server", "url": self.client.base(), "server": self.server, "route": self.options.route.path(),
            "ignore_eos": self.options.ignore_eos, "tokens_per_word": self.per_word,
            "model": {"name": self.model, "entry": self.entry},
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_may_be_given_a_name() {
        assert_eq!(named("http://h:1/v1"), ("h:1".into(), "http://h:1/v1"));
        assert_eq!(named("peer=http://h:1"), ("peer".into(), "http://h:1"));
        // An equals sign of the address itself.
        assert_eq!(named("http://h/a=b"), ("h".into(), "http://h/a=b"));
    }

    #[test]
    fn the_only_model_is_taken_and_of_several_one_must_be_named() {
        let models = [json!({"id": "a"}), json!({"id": "b"})];
        assert_eq!(choose("s", &models[..1], None).expect("one")["id"], "a");
        assert_eq!(choose("s", &models, Some("b")).expect("named")["id"], "b");
        let error = choose("s", &models, None).expect_err("two").to_string();
        assert!(
            error.contains("a, b") && error.contains("--model-name"),
            "{error}"
        );
        let error = choose("s", &models, Some("c")).expect_err("none").to_string();
        assert!(
            error.contains("--model-name c") && error.contains("a, b"),
            "{error}"
        );
        assert!(choose("s", &[], None).is_err());
    }

    #[test]
    fn prompts_differ_unless_they_share() {
        let mut random = Random::new(7);
        assert_ne!(words(&mut random, 16), words(&mut random, 16));
        assert_eq!(words(&mut Random::new(0), 16), words(&mut Random::new(0), 16));
        assert_eq!(words(&mut random, 3).split(' ').count(), 3);
        let distinct: std::collections::BTreeSet<&str> = WORDS.into_iter().collect();
        assert_eq!(distinct.len(), WORDS.len());
    }
}
