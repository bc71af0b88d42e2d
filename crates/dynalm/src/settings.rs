//! Settings: defaults < configuration file < `DYNALM_*` environment < flags, each value with its origin.
//!
//! This is the only module that reads the environment. Every setting is one row of [`SETTINGS`]: its key in the file
//! (`server.port`), the variable derived from it (`DYNALM_SERVER_PORT`), its default and what it accepts. A key, value
//! or variable nobody knows is an error with file, line and the nearest known key, never ignored.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The command that started this program, word by word, for records that say how they came about.
pub fn command_line() -> Vec<String> {
    std::env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect()
}

/// Operating system and architecture of this build, as Rust names them.
pub fn platform() -> (&'static str, &'static str) {
    (std::env::consts::OS, std::env::consts::ARCH)
}

/// What a setting accepts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number in a range.
    Integer(u64, u64),
    /// `auto` or a whole number in a range.
    AutoOrInteger(u64, u64),
    /// A number of seconds, 0 or more.
    Seconds,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Any text; empty is none.
    Text,
    /// Texts separated by commas (in the file also an array).
    List,
    /// A file or folder; empty is none. `~/` is the home folder.
    Path,
    /// Text that is never printed.
    Secret,
}

/// One row of the table of settings.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Key in the file: `section.name` or `name`.
    pub key: &'static str,
    /// What it accepts.
    pub kind: Kind,
    /// Default in the text form.
    pub default: &'static str,
    /// One line for people.
    pub help: &'static str,
}

impl Setting {
    /// The environment variable that sets it: `DYNALM_` and the key in capitals, dots as underscores. Two have the
    /// shorter names they are known by.
    pub fn variable(&self) -> String {
        match self.key {
            "log_level" => "DYNALM_LOG".to_owned(),
            key => format!("DYNALM_{}", key.to_uppercase().replace('.', "_")),
        }
    }
}

const fn row(key: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Setting {
    Setting {
        key,
        kind,
        default,
        help,
    }
}

/// Every setting.
pub const SETTINGS: &[Setting] = &[
    row(
        "log_level",
        Kind::Choice(&["error", "warn", "info", "debug", "trace"]),
        "warn",
        "how much is logged",
    ),
    row(
        "models_dir",
        Kind::Path,
        "~/.dynalm/models",
        "where pulled models are kept",
    ),
    row("offline", Kind::Bool, "false", "never touch the network"),
    row(
        "backend",
        Kind::Choice(&["auto", "cpu"]),
        "auto",
        "which device runs the model; this build has the CPU device only",
    ),
    row(
        "mode",
        Kind::Choice(&["auto", "exact", "safe"]),
        "auto",
        "kernel choice: fastest, bit-exact, plain fp32",
    ),
    row(
        "threads",
        Kind::AutoOrInteger(1, 1024),
        "auto",
        "worker threads; auto: one per fast physical core this process may use",
    ),
    row(
        "ctx",
        Kind::AutoOrInteger(16, 16_777_216),
        "auto",
        "context window in tokens; auto: the model's, if it fits",
    ),
    row(
        "kv",
        Kind::Choice(&["f16", "f32", "q8_0"]),
        "f16",
        "element type of the key and value cache",
    ),
    row(
        "kv_tokens",
        Kind::AutoOrInteger(16, 1_073_741_824),
        "auto",
        "tokens the cache holds for all requests",
    ),
    row(
        "batch_tokens",
        Kind::Integer(16, 65_536),
        "512",
        "most tokens of one step",
    ),
    row(
        "max_seqs",
        Kind::Integer(1, 4096),
        "64",
        "most requests in one step",
    ),
    row(
        "prefix_cache",
        Kind::Bool,
        "true",
        "keep finished prompts' cache pages for requests that share them",
    ),
    row("server.host", Kind::Text, "127.0.0.1", "address to listen on"),
    row(
        "server.port",
        Kind::Integer(0, 65_535),
        "8000",
        "port to listen on; 0 takes a free one",
    ),
    row(
        "server.api_keys",
        Kind::Secret,
        "",
        "keys a client must send one of, separated by commas",
    ),
    row(
        "server.api_key_file",
        Kind::Path,
        "",
        "file with one key per line",
    ),
    row(
        "server.cors_origins",
        Kind::List,
        "",
        "origins whose pages may call the server",
    ),
    row(
        "server.allowed_hosts",
        Kind::List,
        "",
        "names besides this machine's own that a loopback server answers to",
    ),
    row(
        "server.queue",
        Kind::Integer(1, 1_000_000),
        "256",
        "most waiting requests before 429",
    ),
    row(
        "server.body_limit",
        Kind::Integer(1024, 1_073_741_824),
        "16777216",
        "largest request body in bytes",
    ),
    row(
        "server.drain",
        Kind::Seconds,
        "30",
        "how long running requests may go on after SIGTERM, seconds",
    ),
    row("hub.endpoint", Kind::Text, "", "model hub to ask (HF_ENDPOINT)"),
    row(
        "hub.token",
        Kind::Secret,
        "",
        "token for the model hub (HF_TOKEN)",
    ),
    row(
        "pypi.index",
        Kind::Text,
        "",
        "package index for models on PyPI (pip's configuration)",
    ),
];

/// Where a value came from.
#[derive(Debug, Clone, PartialEq)]
pub enum Origin {
    /// The table.
    Default,
    /// The configuration file.
    File {
        /// The file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
    },
    /// An environment variable.
    Environment(String),
    /// A command-line flag.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Environment(name) => write!(f, "{name}"),
            Origin::Flag(name) => write!(f, "--{name}"),
        }
    }
}

/// Prefix of this program's own variables.
const OWN: &str = "DYNALM_";
/// Variables for tests carry their own prefix and configure no setting.
const FOR_TESTS: &str = "DYNALM_TEST_";
/// Variables of other tools that are read as text; those of the proxies by the HTTP library.
const TEXTS: &[&str] = &[
    "ALL_PROXY",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_COLOR",
    "NO_PROXY",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_NO_INDEX",
    "PIP_PROXY",
    "TERM",
    "all_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
];
/// Variables of other tools that are read as paths, which need not be UTF-8.
const PATHS: &[&str] = &[
    "APPDATA",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HOME",
    "PIP_CERT",
    "PIP_CONFIG_FILE",
    "USERPROFILE",
    "XDG_CONFIG_HOME",
];

/// The variables of the process that are read, or what a test puts in their place.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    texts: BTreeMap<String, String>,
    paths: BTreeMap<String, PathBuf>,
}

impl Environment {
    /// The variables of this process.
    ///
    /// # Errors
    /// If one that is read as text is not UTF-8.
    pub fn of_process() -> Result<Environment> {
        Environment::from_vars(std::env::vars_os())
    }

    fn from_vars(vars: impl Iterator<Item = (OsString, OsString)>) -> Result<Environment> {
        let mut all = Environment::default();
        for (name, value) in vars {
            let name = name.to_string_lossy().into_owned();
            if PATHS.contains(&name.as_str()) {
                all.paths.insert(name, PathBuf::from(value));
            } else if is_text(&name) {
                let value = value.into_string().map_err(|value| {
                    let shown = if is_secret(&name) {
                        String::new()
                    } else {
                        format!(" (`{}`)", value.display())
                    };
                    Error::Settings(format!(
                        "environment variable `{name}`: its value is not UTF-8{shown}; set it to a text or unset it"
                    ))
                })?;
                all.texts.insert(name, value);
            }
        }
        Ok(all)
    }

    /// Exactly these variables.
    pub fn of(vars: &[(&str, &str)]) -> Environment {
        let vars = vars.iter().map(|(k, v)| (OsString::from(k), OsString::from(v)));
        Environment::from_vars(vars).unwrap_or_default() // a `str` is UTF-8
    }

    /// The value of a variable; an empty one counts as not set.
    pub fn get(&self, name: &str) -> Option<&str> {
        debug_assert!(is_text(name), "`{name}` is not among the variables that are read");
        self.texts.get(name).map(String::as_str).filter(|v| !v.is_empty())
    }

    /// The path that a variable holds; an empty one counts as not set.
    pub fn path(&self, name: &str) -> Option<&Path> {
        debug_assert!(
            PATHS.contains(&name),
            "`{name}` is not among the variables that are read"
        );
        self.paths
            .get(name)
            .map(PathBuf::as_path)
            .filter(|v| !v.as_os_str().is_empty())
    }

    /// The user's home folder.
    pub fn home(&self) -> Option<PathBuf> {
        self.path("HOME")
            .or_else(|| self.path("USERPROFILE"))
            .map(Path::to_owned)
    }

    /// Where the configuration file is looked for.
    pub fn config_path(&self) -> Option<PathBuf> {
        let base = match self.path("XDG_CONFIG_HOME") {
            Some(dir) => dir.to_owned(),
            None => self.home()?.join(".config"),
        };
        Some(base.join("dynalm").join("config.toml"))
    }
}

fn is_text(name: &str) -> bool {
    TEXTS.contains(&name) || name.starts_with(OWN) && !name.starts_with(FOR_TESTS)
}

fn is_secret(name: &str) -> bool {
    let is = |s: &Setting| s.kind == Kind::Secret && s.variable() == name;
    name == "HF_TOKEN" || SETTINGS.iter().any(is)
}

/// All settings with their values and origins.
#[derive(Debug, Clone)]
pub struct Settings {
    values: Vec<(String, Origin)>, // parallel to SETTINGS
    environment: Environment,
}

impl Settings {
    /// Merges the layers. `file` is `--config`; without it the usual place is read if a file is there. `flags` are
    /// (key, value as text, name of the flag).
    ///
    /// # Errors
    /// If the file cannot be read or parsed, or any layer holds an unknown key or a value its setting does not accept.
    pub fn load(
        file: Option<&Path>,
        environment: Environment,
        flags: &[(&str, String, &str)],
    ) -> Result<Settings> {
        let values = SETTINGS
            .iter()
            .map(|s| (s.default.to_owned(), Origin::Default))
            .collect();
        let mut settings = Settings { values, environment };
        match file {
            Some(path) => settings.read_file(path)?,
            None => {
                if let Some(path) = settings.environment.config_path().filter(|p| p.is_file()) {
                    settings.read_file(&path)?;
                }
            }
        }
        settings.read_environment()?;
        for (key, value, flag) in flags {
            settings.set(key, value, Origin::Flag((*flag).to_owned()))?;
        }
        Ok(settings)
    }

    fn read_file(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
            what: format!("cannot read the configuration file `{}`", path.display()),
            source,
        })?;
        let fail =
            |line: usize, detail: String| Error::Settings(format!("{}:{line}: {detail}", path.display()));
        let table = toml::de::DeTable::parse(&text).map_err(|e| {
            fail(
                line_of(&text, e.span().map_or(0, |s| s.start)),
                e.message().to_owned(),
            )
        })?;
        let mut entries = Vec::new();
        for (key, value) in table.get_ref() {
            let name = key.get_ref().as_ref();
            match value.get_ref() {
                toml::de::DeValue::Table(section) => {
                    for (inner, value) in section {
                        entries.push((format!("{name}.{}", inner.get_ref()), inner.span().start, value));
                    }
                }
                _ => entries.push((name.to_owned(), key.span().start, value)),
            }
        }
        for (key, at, value) in entries {
            let line = line_of(&text, at);
            let value = file_value(value.get_ref()).ok_or_else(|| {
                fail(
                    line,
                    format!("`{key}`: expected a text, number, boolean or array of texts"),
                )
            })?;
            self.set(
                &key,
                &value,
                Origin::File {
                    path: path.to_owned(),
                    line,
                },
            )?;
        }
        Ok(())
    }

    fn read_environment(&mut self) -> Result<()> {
        let set: Vec<(String, String)> = self
            .environment
            .texts
            .iter()
            .filter(|(k, v)| k.starts_with(OWN) && !v.is_empty())
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        for (name, value) in set {
            let Some(setting) = SETTINGS.iter().find(|s| s.variable() == name) else {
                let known = SETTINGS.iter().map(Setting::variable).collect::<Vec<_>>();
                let near = nearest(&name, known.iter().map(String::as_str));
                return Err(Error::Settings(format!(
                    "environment variable `{name}` is not known{near}"
                )));
            };
            self.set(setting.key, &value, Origin::Environment(name))?;
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str, origin: Origin) -> Result<()> {
        let place = match &origin {
            Origin::File { path, line } => format!("{}:{line}: ", path.display()),
            Origin::Environment(name) => format!("environment variable {name}: "),
            Origin::Flag(name) => format!("--{name}: "),
            Origin::Default => String::new(),
        };
        let Some(index) = SETTINGS.iter().position(|s| s.key == key) else {
            let near = nearest(key, SETTINGS.iter().map(|s| s.key));
            return Err(Error::Settings(format!("{place}unknown key `{key}`{near}")));
        };
        if let Err(expected) = check(SETTINGS[index].kind, value) {
            let found = if SETTINGS[index].kind == Kind::Secret {
                "a secret"
            } else {
                value
            };
            return Err(Error::Settings(format!(
                "{place}`{key}`: found `{found}`, expected {expected}"
            )));
        }
        self.values[index] = (value.to_owned(), origin);
        Ok(())
    }

    fn entry(&self, key: &str) -> (&'static Setting, &(String, Origin)) {
        let index = SETTINGS
            .iter()
            .position(|s| s.key == key)
            .expect("code asks only for keys of the table");
        (&SETTINGS[index], &self.values[index])
    }

    /// The value as text.
    pub fn text(&self, key: &str) -> &str {
        &self.entry(key).1.0
    }

    /// The value as a flag.
    pub fn flag(&self, key: &str) -> bool {
        self.text(key) == "true"
    }

    /// The value as a number; `None` is `auto`.
    pub fn integer(&self, key: &str) -> Option<usize> {
        self.text(key).parse().ok()
    }

    /// The value in seconds; `None` is 0.
    pub fn seconds(&self, key: &str) -> Option<f64> {
        self.text(key).parse().ok().filter(|s| *s > 0.0)
    }

    /// The parts of a list.
    pub fn list(&self, key: &str) -> Vec<String> {
        self.text(key)
            .split(',')
            .map(str::trim)
            .filter(|s| !s.is_empty())
            .map(str::to_owned)
            .collect()
    }

    /// The value as a path with `~/` resolved; `None` is empty.
    pub fn path(&self, key: &str) -> Option<PathBuf> {
        let text = self.text(key);
        if text.is_empty() {
            return None;
        }
        match (text.strip_prefix("~/"), self.environment.home()) {
            (Some(rest), Some(home)) => Some(home.join(rest)),
            _ => Some(PathBuf::from(text)),
        }
    }

    /// Where the value came from.
    pub fn origin(&self, key: &str) -> &Origin {
        &self.entry(key).1.1
    }

    /// Every setting with its value (secrets masked) and origin.
    pub fn rows(&self) -> Vec<(&'static Setting, String, String)> {
        SETTINGS
            .iter()
            .zip(&self.values)
            .map(|(s, (value, origin))| {
                let shown = match s.kind {
                    Kind::Secret if !value.is_empty() => "(set)".to_owned(),
                    _ => value.clone(),
                };
                (s, shown, origin.to_string())
            })
            .collect()
    }

    /// The environment these settings were read from.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }
}

/// A configuration file with every setting, its default and what it means, all commented out.
pub fn starter_file() -> String {
    let mut out = String::from(
        "# DynaLM configuration. Every value shown is the default; remove the # to change it.\n\
         # Order: defaults < this file < DYNALM_* environment variables < flags.\n",
    );
    let mut section = "";
    for s in SETTINGS {
        let (part, name) = s.key.split_once('.').unwrap_or(("", s.key));
        if part != section {
            section = part;
            out.push_str(&format!("\n[{section}]\n"));
        }
        let value = match s.kind {
            Kind::Bool | Kind::Integer(..) | Kind::Seconds => s.default.to_owned(),
            Kind::List => "[]".to_owned(),
            _ => format!("\"{}\"", s.default),
        };
        out.push_str(&format!("# {}\n# {name} = {value}\n", s.help));
    }
    out
}

fn file_value(value: &toml::de::DeValue<'_>) -> Option<String> {
    match value {
        toml::de::DeValue::String(s) => Some(s.to_string()),
        toml::de::DeValue::Integer(i) => Some(i.to_string()),
        toml::de::DeValue::Float(f) => Some(f.to_string()),
        toml::de::DeValue::Boolean(b) => Some(b.to_string()),
        toml::de::DeValue::Array(items) => {
            let mut parts = Vec::new();
            for item in items {
                let toml::de::DeValue::String(s) = item.get_ref() else {
                    return None;
                };
                parts.push(s.to_string());
            }
            Some(parts.join(","))
        }
        _ => None,
    }
}

fn line_of(text: &str, byte: usize) -> usize {
    text.as_bytes()[..byte.min(text.len())]
        .iter()
        .filter(|b| **b == b'\n')
        .count()
        + 1
}

/// `Err` says what would have been accepted.
fn check(kind: Kind, value: &str) -> Result<(), String> {
    let number = |low: u64, high: u64| value.parse::<u64>().is_ok_and(|n| (low..=high).contains(&n));
    match kind {
        Kind::Bool if !matches!(value, "true" | "false") => Err("`true` or `false`".to_owned()),
        Kind::Integer(low, high) if !number(low, high) => Err(format!("a whole number from {low} to {high}")),
        Kind::AutoOrInteger(low, high) if value != "auto" && !number(low, high) => {
            Err(format!("`auto` or a whole number from {low} to {high}"))
        }
        Kind::Seconds
            if !value
                .parse::<f64>()
                .is_ok_and(|s| s.is_finite() && (0.0..=1e9).contains(&s)) =>
        {
            Err("a number of seconds, 0 or more".to_owned())
        }
        Kind::Choice(words) if !words.contains(&value) => Err(format!("one of {}", words.join(", "))),
        _ => Ok(()),
    }
}

/// `"; did you mean `x`?"` for the known name with the fewest edits, if it is near at all.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    known
        .map(|k| (edits(name, k), k))
        .min()
        .filter(|(d, _)| *d <= name.len().max(3) / 2)
        .map_or_else(String::new, |(_, k)| format!("; did you mean `{k}`?"))
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let f = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(f.path(), text).expect("writable");
        f
    }

    #[test]
    fn layers_override_each_other_and_name_their_origin() {
        let f = file(
            "threads = 3\nkv = \"q8_0\"\n[server]\nport = 9000\ncors_origins = [\"http://a\", \"http://b\"]\n",
        );
        let env = Environment::of(&[("DYNALM_KV", "f32"), ("DYNALM_SERVER_PORT", "9001")]);
        let s = Settings::load(Some(f.path()), env, &[("server.port", "9002".to_owned(), "port")])
            .expect("valid");
        assert_eq!(s.integer("threads"), Some(3));
        assert_eq!(s.text("kv"), "f32");
        assert_eq!(s.integer("server.port"), Some(9002));
        assert_eq!(s.list("server.cors_origins"), ["http://a", "http://b"]);
        assert_eq!(
            s.origin("threads"),
            &Origin::File {
                path: f.path().to_owned(),
                line: 1
            }
        );
        assert_eq!(s.origin("kv"), &Origin::Environment("DYNALM_KV".to_owned()));
        assert_eq!(s.origin("server.port"), &Origin::Flag("port".to_owned()));
        assert_eq!(s.origin("mode"), &Origin::Default);
    }

    #[test]
    fn unknown_keys_name_file_line_and_nearest() {
        let f = file("\n\ntreads = 3\n");
        let e = Settings::load(Some(f.path()), Environment::default(), &[])
            .expect_err("unknown key")
            .to_string();
        assert!(
            e.contains(":3: unknown key `treads`; did you mean `threads`?"),
            "{e}"
        );
        let e = Settings::load(None, Environment::of(&[("DYNALM_TREADS", "3")]), &[])
            .expect_err("unknown")
            .to_string();
        assert!(
            e.contains("`DYNALM_TREADS` is not known; did you mean `DYNALM_THREADS`?"),
            "{e}"
        );
    }

    #[test]
    fn bad_values_say_what_is_accepted_and_never_show_secrets() {
        for (key, value, expected) in [
            ("threads", "0", "`auto` or a whole number from 1 to 1024"),
            ("server.port", "70000", "from 0 to 65535"),
            ("kv", "f8", "one of f16, f32, q8_0"),
            ("offline", "yes", "`true` or `false`"),
            ("server.drain", "-1", "seconds"),
        ] {
            let e =
                Settings::load(None, Environment::default(), &[(key, value.to_owned(), "x")]).expect_err(key);
            assert!(e.to_string().contains(expected), "{e}");
        }
        let s = Settings::load(None, Environment::of(&[("DYNALM_HUB_TOKEN", "hf_abc")]), &[]).expect("valid");
        assert!(s.rows().iter().all(|(_, shown, _)| !shown.contains("hf_abc")));
    }

    #[cfg(unix)]
    #[test]
    fn values_that_are_no_utf8_are_refused_by_name_unless_they_are_paths_or_not_read() {
        use std::os::unix::ffi::OsStringExt;
        let from = |name: &str| {
            let value = OsString::from_vec(b"a\xffb".to_vec());
            Environment::from_vars(std::iter::once((OsString::from(name), value)))
        };
        for name in ["DYNALM_KV", "HF_ENDPOINT", "PIP_INDEX_URL"] {
            let e = from(name).expect_err(name).to_string();
            assert!(
                e.contains(name) && e.contains("not UTF-8") && e.contains('a'),
                "{e}"
            );
        }
        for name in ["HF_TOKEN", "DYNALM_HUB_TOKEN"] {
            let e = from(name).expect_err(name).to_string();
            assert!(
                e.contains(name) && !e.contains("a\u{fffd}b") && !e.contains("xff"),
                "{e}"
            );
        }
        let home = from("HOME").expect("a path may be any bytes");
        assert_eq!(
            home.home(),
            Some(PathBuf::from(OsString::from_vec(b"a\xffb".to_vec())))
        );
        for name in ["DYNALM_TEST_DATA", "PS1"] {
            from(name).expect("not read here");
        }
    }

    #[test]
    fn the_starter_file_is_valid_and_changes_nothing() {
        let text = starter_file();
        let f = file(&text);
        let s = Settings::load(Some(f.path()), Environment::default(), &[]).expect("valid");
        assert!(SETTINGS.iter().all(|row| s.text(row.key) == row.default));
        let uncommented = text
            .lines()
            .map(|l| l.strip_prefix("# ").filter(|l| l.contains(" = ")).unwrap_or(l))
            .collect::<Vec<_>>()
            .join("\n");
        let f = file(&uncommented);
        Settings::load(Some(f.path()), Environment::default(), &[]).expect("every default is accepted");
    }
}
