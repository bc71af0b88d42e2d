//! What fetching depends on besides the name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::settings::Settings;

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
    /// Package index (`PIP_INDEX_URL`, pip.conf `index-url`).
    pub index_url: String,
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
            index_url: "https://pypi.org/simple".into(),
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
    /// The settings that environment variables (through `var`) and pip's configuration files give.
    ///
    /// Read are `DYNALM_MODELS_DIR`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`,
    /// `PIP_INDEX_URL`, `PIP_CERT`, `PIP_PROXY`, `PIP_CONFIG_FILE`, `XDG_CONFIG_HOME`, `APPDATA`, and `HOME` or
    /// `USERPROFILE`.
    pub fn from_environment(var: &dyn Fn(&str) -> Option<String>) -> SourceConfig {
        let var = |name: &str| var(name).filter(|v| !v.is_empty());
        let mut config = SourceConfig::default();
        let home = var("HOME").or_else(|| var("USERPROFILE")).map(PathBuf::from);
        let home = home.unwrap_or_else(|| PathBuf::from("."));
        config.models_dir =
            var("DYNALM_MODELS_DIR").map_or_else(|| home.join(".dynalm").join("models"), PathBuf::from);
        if let Some(endpoint) = var("HF_ENDPOINT") {
            config.hub_endpoint = endpoint.trim_end_matches('/').to_owned();
        }
        config.hub_token = var("HF_TOKEN");
        let hub_home = var("HF_HOME").map_or_else(|| home.join(".cache").join("huggingface"), PathBuf::from);
        config.hub_cache = Some(var("HF_HUB_CACHE").map_or_else(|| hub_home.join("hub"), PathBuf::from));
        config.offline = var("HF_HUB_OFFLINE").is_some_and(|v| is_true(&v));
        let mut pip = PipConfig::default();
        for path in pip_files(&var, &home) {
            if let Ok(text) = std::fs::read_to_string(&path) {
                pip.read(&text);
            }
        }
        if let Some(url) = var("PIP_INDEX_URL").or(pip.index_url) {
            config.index_url = url.trim_end_matches('/').to_owned();
        }
        config.index_cert = var("PIP_CERT").or(pip.cert).map(PathBuf::from);
        if let Some(url) = var("PIP_PROXY").or(pip.proxy) {
            config.proxy = Proxy::Url(url);
        }
        config
    }

    /// The settings of this run: [`SourceConfig::from_environment`], overridden by those the user has set as DynaLM's
    /// own.
    pub fn from_settings(settings: &Settings) -> SourceConfig {
        let environment = settings.environment();
        let mut config = SourceConfig::from_environment(&|name| environment.get(name).map(str::to_owned));
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
            config.index_url = index.trim_end_matches('/').to_owned();
        }
        config
    }
}

fn is_true(value: &str) -> bool {
    ["1", "true", "yes", "on"]
        .iter()
        .any(|t| value.eq_ignore_ascii_case(t))
}

/// pip's configuration files, the later overriding the earlier.
fn pip_files(var: &dyn Fn(&str) -> Option<String>, home: &Path) -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/pip.conf"), home.join(".pip").join("pip.conf")];
    let config = var("XDG_CONFIG_HOME").map_or_else(|| home.join(".config"), PathBuf::from);
    files.push(config.join("pip").join("pip.conf"));
    if let Some(roaming) = var("APPDATA") {
        files.push(Path::new(&roaming).join("pip").join("pip.ini"));
    }
    files.extend(var("PIP_CONFIG_FILE").map(PathBuf::from));
    files
}

/// The keys of pip's configuration that matter here.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PipConfig {
    pub(super) index_url: Option<String>,
    pub(super) cert: Option<String>,
    pub(super) proxy: Option<String>,
}

impl PipConfig {
    /// Takes over what an ini file says in `[global]`, `[install]` and `[download]`.
    pub(super) fn read(&mut self, text: &str) {
        let mut section = "";
        for line in text.lines() {
            let line = line.trim();
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                section = name.trim();
                continue;
            }
            if line.starts_with(['#', ';']) || !["global", "install", "download"].contains(&section) {
                continue;
            }
            let Some((key, value)) = line.split_once(['=', ':']) else {
                continue;
            };
            let value = Some(value.trim().to_owned()).filter(|v| !v.is_empty());
            match key.trim().replace('_', "-").as_str() {
                "index-url" => self.index_url = value,
                "cert" => self.cert = value,
                "proxy" => self.proxy = value,
                _ => {}
            }
        }
    }
}
