//! Names, the store, and transfers against a server that misbehaves. No real network.

mod server;
mod transfers;

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use dynair::DType;
use tempfile::TempDir;

use self::server::{Resource, Server, sha256};
use super::config::PipConfig;
use super::*;
use crate::format::{GgufLayout, GgufWriter};
use crate::settings::Environment;

/// Events of a pull, for looking at.
#[derive(Default)]
struct Recorder(Vec<Event>);

impl Progress for Recorder {
    fn event(&mut self, event: Event) {
        self.0.push(event);
    }
}

impl Recorder {
    fn notes(&self) -> Vec<&str> {
        self.0
            .iter()
            .filter_map(|e| {
                if let Event::Note(n) = e {
                    Some(n.as_str())
                } else {
                    None
                }
            })
            .collect()
    }
}

/// A store in a temporary folder and a configuration that reaches loopback only.
fn setup(server: &Server) -> (TempDir, SourceConfig) {
    let dir = TempDir::new().unwrap();
    let config = SourceConfig {
        models_dir: dir.path().join("models"),
        hub_endpoint: server.url.clone(),
        indexes: vec![format!("{}/simple", server.url)],
        proxy: Proxy::None,
        retry_pause: Duration::ZERO,
        ..SourceConfig::default()
    };
    (dir, config)
}

/// A small model; `n` numbers make it larger.
fn model_bytes(n: usize) -> Vec<u8> {
    let mut layout = GgufLayout::new();
    layout.set_str("general.architecture", "llama");
    layout.tensor("t", DType::F32, &[n]).unwrap();
    let mut w = GgufWriter::new(Vec::new(), &layout).unwrap();
    let data: Vec<u8> = (0..n * 4).map(|i| (i * 7 + i / 251) as u8).collect();
    w.write(&data).unwrap();
    w.finish().unwrap()
}

fn wheel(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    for (name, bytes) in members {
        zip.start_file(*name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// Names of all files below the store, without locks.
fn files(config: &SourceConfig) -> Vec<String> {
    let mut found = Vec::new();
    for folder in std::fs::read_dir(&config.models_dir)
        .into_iter()
        .flatten()
        .flatten()
    {
        for file in std::fs::read_dir(folder.path()).unwrap().flatten() {
            found.push(file.file_name().into_string().unwrap());
        }
    }
    found.retain(|f| f != ".lock");
    found.sort();
    found
}

#[track_caller]
fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn names_are_understood() {
    let canonical = |name: &str| ModelSource::parse(name).unwrap().to_string();
    assert_eq!(canonical("SmolLM2:135M"), "smollm2:135m");
    assert_eq!(canonical("smollm2"), "smollm2:135m");
    for (name, hub) in [
        ("hf:o/r", "hf:o/r"),
        ("hf:o/r:Q4_K_M", "hf:o/r:Q4_K_M"),
        ("hf:o/r:sub/m.gguf@v1", "hf:o/r:sub/m.gguf@v1"),
        ("https://huggingface.co/o/r", "hf:o/r"),
        ("huggingface.co/o/r/", "hf:o/r"),
        ("https://hf.co/o/r?x=1", "hf:o/r"),
        ("https://huggingface.co/o/r/tree/dev", "hf:o/r@dev"),
        (
            "https://huggingface.co/o/r/blob/main/sub/m.gguf",
            "hf:o/r:sub/m.gguf",
        ),
        (
            "https://huggingface.co/o/r/resolve/abc/m.gguf?download=true",
            "hf:o/r:m.gguf@abc",
        ),
    ] {
        assert!(
            matches!(ModelSource::parse(name).unwrap(), ModelSource::Hub(_)),
            "{name}"
        );
        assert_eq!(canonical(name), hub);
    }
    assert_eq!(canonical("pypi:p==1.0/a/b.gguf"), "pypi:p==1.0/a/b.gguf");
    let link = format!("https://example.org/m.gguf#sha256={}", "AB".repeat(32));
    match ModelSource::parse(&link).unwrap() {
        ModelSource::Url(url, Some(sha)) => assert_eq!(
            (url.as_str(), sha),
            ("https://example.org/m.gguf", "ab".repeat(32))
        ),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        ModelSource::parse("./x.gguf").unwrap(),
        ModelSource::Path(_)
    ));
}

#[test]
fn names_that_are_not_understood_are_refused_with_advice() {
    let message = |name: &str| ModelSource::parse(name).unwrap_err().to_string();
    assert_says(&message("smolm2:135"), &["`smollm2:135m`", "catalogue"]);
    assert_says(&message("owner/repo"), &["`hf:owner/repo`"]);
    assert_says(&message("http://example.org/m.gguf"), &["https"]);
    assert_says(&message("https://example.org/page"), &[".gguf"]);
    assert_says(
        &message("https://example.org/m.gguf#sha256=12"),
        &["64 hexadecimal"],
    );
    for bad in [
        "hf:o",
        "hf:o/../r",
        "hf:o/r:../../etc/passwd",
        "hf:o/r:a\nb",
        "hf:o/r@a b/..",
        "pypi:p/x",
        "pypi:p==1/../x",
        "",
    ] {
        message(bad);
    }
}

#[test]
fn the_catalogue_is_sound() {
    let mut seen = std::collections::HashSet::new();
    for entry in catalog() {
        assert!(!entry.origins.is_empty());
        for name in entry.aliases.iter().chain([&entry.name]) {
            assert!(seen.insert(*name), "`{name}` stands twice");
            assert_eq!(ModelSource::parse(name).unwrap().to_string(), entry.name);
        }
        for origin in &entry.origins {
            match origin {
                Origin::Hub(_) => assert!(ModelSource::parse(&origin.to_string()).is_ok(), "{origin}"),
                Origin::Pypi { pieces, sha256, .. } => {
                    assert!(pieces.iter().all(|p| ModelSource::parse(&p.to_string()).is_ok()));
                    assert_eq!(sha256.as_ref().unwrap().len(), 64);
                }
                Origin::Url { .. } => {}
            }
        }
    }
    for name in [
        "qwen3:0.6b",
        "qwen2.5:7b",
        "llama3.1:8b",
        "llama3.2:1b",
        "gemma3:270m",
        "granite3.1-moe:1b",
        "phi3.5",
    ] {
        assert!(seen.contains(name), "{name}");
    }
}

#[test]
fn quantisations_are_chosen_by_whole_words() {
    let paths: Vec<String> = [
        "m-Q4_K.gguf",
        "m-Q4_K_M.gguf",
        "m-q8_0-00001-of-00002.gguf",
        "m-q8_0-00002-of-00002.gguf",
    ]
    .iter()
    .map(|s| s.to_string())
    .chain(["mmproj-F16.gguf".into(), "README.md".into()])
    .collect();
    let choose = |wanted| hub::choose(&paths, wanted);
    assert_eq!(choose(None).unwrap(), ["m-Q4_K_M.gguf"]);
    assert_eq!(choose(Some("q4_k")).unwrap(), ["m-Q4_K.gguf"]);
    assert_eq!(
        choose(Some("Q8_0")).unwrap(),
        ["m-q8_0-00001-of-00002.gguf", "m-q8_0-00002-of-00002.gguf"]
    );
    assert_says(&choose(Some("Q2_K")).unwrap_err(), &["`Q2_K`", "`m-Q4_K.gguf`"]);
    assert!(hub::choose(&["README.md".into()], None).is_err());
    let twice: Vec<String> = vec!["a/m-Q8_0.gguf".into(), "b/m-Q8_0.gguf".into()];
    assert_says(&hub::choose(&twice, Some("Q8_0")).unwrap_err(), &["several"]);
    assert_eq!(
        hub::choose(&twice, Some("b/m-Q8_0.gguf")).unwrap(),
        ["b/m-Q8_0.gguf"]
    );
}

#[test]
fn links_are_resolved_against_their_page() {
    let join = |link| store::join_url("https://h:8/a/b/?q", link);
    assert_eq!(join("https://x/y"), "https://x/y");
    assert_eq!(join("//x/y"), "https://x/y");
    assert_eq!(join("/y#f"), "https://h:8/y#f");
    assert_eq!(join("c.whl"), "https://h:8/a/b/c.whl");
    assert_eq!(join("../../c/../d.whl?x=../z"), "https://h:8/d.whl?x=../z");
    assert_eq!(join("../../../../d"), "https://h:8/d");
}

#[test]
fn index_pages_are_read_in_both_forms() {
    let html = r#"<!DOCTYPE html><body><a href="../../packages/a_b-1.0-py3-none-any.whl#sha256=AA&amp;x=1"
        data-requires-python="&gt;=3">a_b</a><a class="x" href='https://f/a_b-1.0.tar.gz'>s</a><a>no link</a></body>"#;
    let wheels = pypi::parse_page("https://h/simple/a-b/", html, "text/html").unwrap();
    assert_eq!(wheels.len(), 2);
    let piece = Piece {
        package: "A.b".into(),
        version: "1.0".into(),
        member: "m".into(),
    };
    let wheel = pypi::find_wheel(&piece, wheels).unwrap();
    assert_eq!(wheel.url, "https://h/packages/a_b-1.0-py3-none-any.whl");
    assert_eq!(wheel.sha256.as_deref(), Some("aa"));
    let other = Piece {
        version: "1".into(),
        ..piece
    };
    assert_eq!(pypi::find_wheel(&other, vec![wheel]), None);
    assert!(pypi::parse_page("https://h/", "{", "application/json").is_err());
    assert_eq!(pypi::normalise("Gemma3_270M..q4"), "gemma3-270m-q4");
}

#[test]
fn the_environment_and_pips_files_are_honoured() {
    let dir = TempDir::new().unwrap();
    let pip = dir.path().join("pip.conf");
    let text = "[global]\n# index-url = no\nindex-url = https://mirror/simple/\ncert: /c.pem\n\
                extra-index-url =\n    https://a/simple/\n    # no\n    https://b/simple\nfind-links = /w\n\
                [list]\nproxy = no\n";
    std::fs::write(&pip, text).unwrap();
    let pip = pip.to_str().unwrap();
    let vars = [
        ("HOME", "/h"),
        ("PIP_CONFIG_FILE", pip),
        ("HF_ENDPOINT", "https://hub/"),
        ("HF_TOKEN", "t"),
        ("HF_HUB_OFFLINE", "1"),
    ];
    let config = SourceConfig::from_environment(&Environment::of(&vars)).unwrap();
    assert_eq!(config.models_dir, Path::new("/h/.dynalm/models"));
    assert_eq!(
        config.indexes,
        ["https://mirror/simple", "https://a/simple", "https://b/simple"]
    );
    assert_eq!(config.find_links, ["/w"]);
    assert_eq!(config.index_cert.as_deref(), Some(Path::new("/c.pem")));
    assert_eq!(config.proxy, Proxy::Environment);
    assert_eq!(
        (config.hub_endpoint.as_str(), config.offline),
        ("https://hub", true)
    );
    assert_eq!(
        config.hub_cache.as_deref(),
        Some(Path::new("/h/.cache/huggingface/hub"))
    );
    // A variable replaces what the files say of the same key.
    let with = |name, value| {
        let mut vars = vars.to_vec();
        vars.push((name, value));
        SourceConfig::from_environment(&Environment::of(&vars)).unwrap()
    };
    assert_eq!(
        with("PIP_EXTRA_INDEX_URL", "https://x/ https://y").indexes,
        ["https://mirror/simple", "https://x", "https://y"]
    );
    assert_eq!(
        with("PIP_FIND_LINKS", "/v https://l/").find_links,
        ["/v", "https://l/"]
    );
    assert!(with("PIP_NO_INDEX", "true").indexes.is_empty());
    let unreadable = Environment::of(&[("PIP_CONFIG_FILE", dir.path().to_str().unwrap())]);
    let message = SourceConfig::from_environment(&unreadable)
        .unwrap_err()
        .to_string();
    assert_says(&message, &["pip's configuration", dir.path().to_str().unwrap()]);
    let mut pip = PipConfig::default();
    pip.read("[install]\nindex_url = https://a\nproxy = http://p:1\n");
    assert_eq!(
        (pip.index_url.as_deref(), pip.proxy.as_deref()),
        (Some("https://a"), Some("http://p:1"))
    );
}

#[test]
fn times_are_written_in_utc() {
    assert_eq!(store::rfc3339(0), "1970-01-01T00:00:00Z");
    assert_eq!(store::rfc3339(951_782_399), "2000-02-28T23:59:59Z");
    assert_eq!(store::rfc3339(951_782_400), "2000-02-29T00:00:00Z");
    assert_eq!(store::rfc3339(4_107_542_400), "2100-03-01T00:00:00Z");
}

#[test]
fn paths_and_folders_lead_to_models() {
    let dir = TempDir::new().unwrap();
    let config = SourceConfig {
        models_dir: dir.path().join("models"),
        ..SourceConfig::default()
    };
    let local = |p: &Path| find_local(p.to_str().unwrap(), &config);
    assert_says(&local(dir.path()).unwrap_err().to_string(), &["no .gguf file"]);
    let one = dir.path().join("m.gguf");
    std::fs::write(&one, model_bytes(1)).unwrap();
    assert_eq!(
        local(dir.path()).unwrap().unwrap().paths,
        std::slice::from_ref(&one)
    );
    assert_eq!(local(&one).unwrap().unwrap().path(), one);
    let parts = [
        dir.path().join("s-00001-of-00002.gguf"),
        dir.path().join("s-00002-of-00002.gguf"),
    ];
    parts.iter().for_each(|p| std::fs::write(p, b"x").unwrap());
    assert_says(
        &local(dir.path()).unwrap_err().to_string(),
        &["2 models", "m.gguf", "s-00001-of-00002.gguf"],
    );
    assert_eq!(local(&parts[1]).unwrap().unwrap().paths, parts);
    assert_says(
        &local(&dir.path().join("no.gguf")).unwrap_err().to_string(),
        &["no such file"],
    );
    assert_says(
        &remove(one.to_str().unwrap(), &config).unwrap_err().to_string(),
        &["not in the store"],
    );
}

#[test]
fn the_hugging_face_cache_is_used_in_place() {
    let dir = TempDir::new().unwrap();
    let root = dir.path().join("hub/models--o--r");
    std::fs::create_dir_all(root.join("refs")).unwrap();
    std::fs::create_dir_all(root.join("snapshots/c0ffee")).unwrap();
    std::fs::write(root.join("refs/main"), "c0ffee\n").unwrap();
    let file = root.join("snapshots/c0ffee/m-Q8_0.gguf");
    std::fs::write(&file, model_bytes(2)).unwrap();
    // A closed port: any network use would fail.
    let config = SourceConfig {
        models_dir: dir.path().join("models"),
        hub_cache: Some(dir.path().join("hub")),
        hub_endpoint: "http://127.0.0.1:1".into(),
        ..SourceConfig::default()
    };
    let found = pull("hf:o/r:Q8_0", &config, &mut ()).unwrap();
    assert_eq!(found.paths, [file]);
    assert!(found.origin.contains("Hugging Face cache"));
    assert!(find_local("hf:o/r:Q4_0", &config).unwrap().is_none());
}
