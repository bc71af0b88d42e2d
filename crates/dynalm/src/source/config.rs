//! What fetching depends on besides the name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::settings::{Environment, Settings};

/// The index asked where nothing else is configured.
const PUBLIC_INDEX: &str = "https://pypi.org/simple";

/// How to reach servers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Proxy {
    /// As HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY say; the HTTP library reads them.
    #[default]
    Environment,
    /// Directly.
    None,
    /// Through this one.
    Url(String),
}

/// All settings of this module.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// Folder of the store (`DYNALM_MODELS_DIR`).
    pub models_dir: PathBuf,
    /// Hub address (`HF_ENDPOINT`).
    pub hub_endpoint: String,
    /// Hub token (`HF_TOKEN`); sent to the hub only.
    pub hub_token: Option<String>,
    /// The Hugging Face cache whose files are used in place (`HF_HOME`/hub).
    pub hub_cache: Option<PathBuf>,
    /// No network at all (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Package indexes, in the order in which they are asked (`PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`; none with
    /// `PIP_NO_INDEX`; pip.conf alike).
    pub indexes: Vec<String>,
    /// Folders and pages that hold wheels, asked before the indexes (`PIP_FIND_LINKS`, pip.conf `find-links`).
    pub find_links: Vec<String>,
    /// Certificates trusted for the package index instead of the system's (`PIP_CERT`, pip.conf `cert`).
    pub index_cert: Option<PathBuf>,
    /// How to reach servers.
    pub proxy: Proxy,
    /// Fetch even what is on disk.
    pub force: bool,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest wait for the next bytes.
    pub stall_timeout: Duration,
    /// Pause before a transfer that made no progress is tried again.
    pub retry_pause: Duration,
}

impl Default for SourceConfig {
    /// Public servers, a store in the current folder.
    fn default() -> SourceConfig {
        SourceConfig {
            models_dir: PathBuf::from("models"),
            hub_endpoint: "https://huggingface.co".into(),
            hub_token: None,
            hub_cache: None,
            offline: false,
            indexes: vec![PUBLIC_INDEX.into()],
            find_links: Vec::new(),
            index_cert: None,
            proxy: Proxy::Environment,
            force: false,
            connect_timeout: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(60),
            retry_pause: Duration::from_secs(1),
        }
    }
}

impl SourceConfig {
    /// The settings that environment variables and pip's configuration files give.
    ///
    /// # Errors
    /// If a configuration file of pip's that is there cannot be read.
    pub fn from_environment(environment: &Environment) -> Result<SourceConfig> {
        let var = |name: &str| environment.get(name).map(str::to_owned);
        let mut config = SourceConfig::default();
        let home = environment.home().unwrap_or_else(|| PathBuf::from("."));
        config.models_dir =
            var("DYNALM_MODELS_DIR").map_or_else(|| home.join(".dynalm").join("models"), PathBuf::from);
        if let Some(endpoint) = var("HF_ENDPOINT") {
            config.hub_endpoint = endpoint.trim_end_matches('/').to_owned();
        }
        config.hub_token = var("HF_TOKEN");
        let hub_home = environment
            .path("HF_HOME")
            .map_or_else(|| home.join(".cache").join("huggingface"), Path::to_owned);
        let hub_cache = environment.path("HF_HUB_CACHE");
        config.hub_cache = Some(hub_cache.map_or_else(|| hub_home.join("hub"), Path::to_owned));
        config.offline = var("HF_HUB_OFFLINE").is_some_and(|v| is_true(&v));
        let mut pip = PipConfig::default();
        for path in pip_files(environment, &home) {
            match std::fs::read(&path) {
                Ok(bytes) => pip.read(&String::from_utf8_lossy(&bytes)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(Error::Io {
                        what: format!("reading pip's configuration `{}`", path.display()),
                        source,
                    });
                }
            }
        }
        let no_index = var("PIP_NO_INDEX").or(pip.no_index).is_some_and(|v| is_true(&v));
        config.indexes = if no_index {
            Vec::new()
        } else {
            let main = var("PIP_INDEX_URL").or(pip.index_url);
            let extra = var("PIP_EXTRA_INDEX_URL").or(pip.extra_index_url);
            let main = main.unwrap_or_else(|| PUBLIC_INDEX.to_owned());
            std::iter::once(main)
                .chain(words(extra))
                .map(|url| index_address(&url))
                .collect()
        };
        config.find_links = words(var("PIP_FIND_LINKS").or(pip.find_links)).collect();
        let cert = environment.path("PIP_CERT").map(Path::to_owned);
        config.index_cert = cert.or(pip.cert.map(PathBuf::from));
        if let Some(url) = var("PIP_PROXY").or(pip.proxy) {
            config.proxy = Proxy::Url(url);
        }
        Ok(config)
    }

    /// The settings of this run: [`SourceConfig::from_environment`], overridden by those the user has set as DynaLM's
    /// own.
    ///
    /// # Errors
    /// As [`SourceConfig::from_environment`].
    pub fn from_settings(settings: &Settings) -> Result<SourceConfig> {
        let mut config = SourceConfig::from_environment(settings.environment())?;
        if let Some(folder) = settings.path("models_dir") {
            config.models_dir = folder;
        }
        config.offline |= settings.flag("offline");
        let set = |key: &str| {
            Some(settings.text(key))
                .filter(|t| !t.is_empty())
                .map(str::to_owned)
        };
        if let Some(endpoint) = set("hub.endpoint") {
            config.hub_endpoint = endpoint.trim_end_matches('/').to_owned();
        }
        config.hub_token = set("hub.token").or(config.hub_token);
        if let Some(index) = set("pypi.index") {
            config.indexes = vec![index_address(&index)];
            config.find_links = Vec::new();
        }
        Ok(config)
    }
}

/// The words of a list in pip's configuration.
fn words(text: Option<String>) -> impl Iterator<Item = String> {
    let words: Vec<String> = text
        .iter()
        .flat_map(|text| text.split_whitespace())
        .map(str::to_owned)
        .collect();
    words.into_iter()
}

fn index_address(url: &str) -> String {
    url.trim_end_matches('/').to_owned()
}

fn is_true(value: &str) -> bool {
    ["1", "true", "yes", "on"]
        .iter()
        .any(|t| value.eq_ignore_ascii_case(t))
}

/// pip's configuration files, the later overriding the earlier.
fn pip_files(environment: &Environment, home: &Path) -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/pip.conf"), home.join(".pip").join("pip.conf")];
    let config = environment
        .path("XDG_CONFIG_HOME")
        .map_or_else(|| home.join(".config"), Path::to_owned);
    files.push(config.join("pip").join("pip.conf"));
    if let Some(roaming) = environment.path("APPDATA") {
        files.push(roaming.join("pip").join("pip.ini"));
    }
    files.extend(environment.path("PIP_CONFIG_FILE").map(Path::to_owned));
    files
}

/// The keys of pip's configuration that matter here.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PipConfig {
    pub(super) index_url: Option<String>,
    pub(super) extra_index_url: Option<String>,
    pub(super) find_links: Option<String>,
    pub(super) no_index: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) proxy: Option<String>,
}

impl PipConfig {
    /// Takes over what an ini file says in `[global]`, `[install]` and `[download]`.
    pub(super) fn read(&mut self, text: &str) {
        let mut section = "";
        let mut key = String::new();
        for line in text.lines() {
            // An indented line goes on with the value of the key above.
            let goes_on = line.starts_with([' ', '\t']) && !key.is_empty();
            let line = line.trim();
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                section = name.trim();
                key.clear();
                continue;
            }
            if !["global", "install", "download"].contains(&section) {
                continue;
            }
            if goes_on {
                if let Some(slot) = self.slot(&key) {
                    let value = slot.get_or_insert_default();
                    value.push(' ');
                    value.push_str(line);
                }
                continue;
            }
            let Some((name, value)) = line.split_once(['=', ':']) else {
                continue;
            };
            key = name.trim().replace('_', "-");
            if let Some(slot) = self.slot(&key) {
                *slot = Some(value.trim().to_owned()).filter(|v| !v.is_empty());
            }
        }
    }

    fn slot(&mut self, key: &str) -> Option<&mut Option<String>> {
        Some(match key {
            "index-url" => &mut self.index_url,
            "extra-index-url" => &mut self.extra_index_url,
            "find-links" => &mut self.find_links,
            "no-index" => &mut self.no_index,
            "cert" => &mut self.cert,
            "proxy" => &mut self.proxy,
            _ => return None,
        })
    }
}
