//! What all routes share: the phase of the server's life, the served models, the counters.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::{Semaphore, watch};

use super::ServerConfig;
use super::error::ApiError;
use crate::engine::EngineHandle;
use crate::metrics::Metrics;
use crate::sample::params::SamplingParams;
use crate::text::{ChatTemplate, Tokenizer};

/// Requests parsed, rendered and encoded at one time; more wait. It keeps hostile bodies from adding up in memory.
const MAX_PREPARING: usize = 4;

/// Where the server stands in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The model is not there yet.
    Loading,
    /// Requests are answered.
    Ready,
    /// No new requests; those running finish.
    Draining,
    /// The model could not be loaded or the engine broke.
    Failed(String),
}

impl Phase {
    /// The phase's name in replies.
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Loading => "loading",
            Phase::Ready => "ready",
            Phase::Draining => "draining",
            Phase::Failed(_) => "failed",
        }
    }
}

/// What is said about a model.
#[derive(Debug, Clone, Default)]
pub struct ModelInfo {
    /// Architecture, e.g. `llama`.
    pub architecture: String,
    /// Quantisation, e.g. `Q4_K_M`.
    pub quantization: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Size of its files, bytes.
    pub file_bytes: u64,
}

/// A model that answers requests.
#[derive(Debug)]
pub struct ServedModel {
    /// The name in requests and replies.
    pub name: String,
    /// Other names it answers to.
    pub aliases: Vec<String>,
    /// When it became ready, seconds since 1970.
    pub created: u64,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, if it is a chat model.
    pub template: Option<Arc<ChatTemplate>>,
    /// Its published sampling defaults over the engine's.
    pub defaults: SamplingParams,
    /// Rows of its output.
    pub vocab_size: usize,
    /// Most tokens of prompt and reply.
    pub max_context: usize,
    /// Facts for `/v1/models`.
    pub info: ModelInfo,
    /// Its engine.
    pub engine: EngineHandle,
}

/// Shared by all routes; cheap to clone.
#[derive(Debug, Clone)]
pub struct AppState(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: ServerConfig,
    loopback: bool,
    phase: watch::Sender<Phase>,
    models: RwLock<BTreeMap<String, Arc<ServedModel>>>,
    metrics: Arc<Metrics>,
    in_flight: Arc<AtomicUsize>,
    preparing: Semaphore,
    stop: watch::Sender<bool>,
}

/// Counts a request as in flight for as long as it lives.
#[derive(Debug)]
pub(super) struct InFlight(Arc<AtomicUsize>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl AppState {
    /// A server that is loading. `loopback`: it is bound to an address of this machine only.
    pub(super) fn new(config: ServerConfig, loopback: bool, metrics: Arc<Metrics>) -> AppState {
        AppState(Arc::new(Inner {
            config,
            loopback,
            phase: watch::Sender::new(Phase::Loading),
            models: RwLock::default(),
            metrics,
            in_flight: Arc::default(),
            preparing: Semaphore::new(MAX_PREPARING),
            stop: watch::Sender::new(false),
        }))
    }

    /// The configuration.
    pub fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    /// Whether only this machine can reach the server.
    pub fn loopback(&self) -> bool {
        self.0.loopback
    }

    /// The counters.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.0.metrics
    }

    /// The phase.
    pub fn phase(&self) -> Phase {
        self.0.phase.borrow().clone()
    }

    /// Follows the phase.
    pub fn watch_phase(&self) -> watch::Receiver<Phase> {
        self.0.phase.subscribe()
    }

    /// Enters a phase. A failure is final, and draining ends only in failure.
    pub(super) fn set_phase(&self, next: Phase) {
        self.0.phase.send_if_modified(|phase| {
            let allowed = match phase {
                Phase::Failed(_) => false,
                Phase::Draining => matches!(next, Phase::Failed(_)),
                Phase::Loading | Phase::Ready => true,
            };
            if allowed {
                *phase = next;
            }
            allowed
        });
    }

    /// Asks the server to drain and end.
    pub fn request_stop(&self) {
        self.0.stop.send_replace(true);
    }

    /// Follows the wish to end.
    pub(super) fn watch_stop(&self) -> watch::Receiver<bool> {
        self.0.stop.subscribe()
    }

    /// Adds a model.
    pub(super) fn add_model(&self, model: ServedModel) {
        let mut models = self.0.models.write().expect("no holder of the model list panics");
        models.insert(model.name.clone(), Arc::new(model));
    }

    /// All models, by name.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.0
            .models
            .read()
            .expect("no holder of the model list panics")
            .values()
            .cloned()
            .collect()
    }

    /// Whether generation is possible now.
    ///
    /// # Errors
    /// 503 while loading or draining, 500 after a failure.
    pub(super) fn ready(&self) -> Result<(), ApiError> {
        match self.phase() {
            Phase::Ready => Ok(()),
            Phase::Loading => Err(ApiError::unavailable(
                "the model is still loading; try again later",
            )),
            Phase::Draining => Err(ApiError::unavailable("the server is shutting down")),
            Phase::Failed(why) => Err(ApiError::internal(format!("the engine has failed: {why}"))),
        }
    }

    /// The model of that name; the only one, or the first, if the request names none.
    ///
    /// # Errors
    /// 404 with the names served.
    pub(super) fn model(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let models = self.models();
        let found = match name {
            None => models.first(),
            Some(name) => models
                .iter()
                .find(|model| model.name == name || model.aliases.iter().any(|a| a == name)),
        };
        found.cloned().ok_or_else(|| {
            let short: String = name.unwrap_or_default().chars().take(128).collect();
            let served: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
            ApiError::model_not_found(&short, &served)
        })
    }

    /// Counts a request as in flight.
    pub(super) fn enter(&self) -> InFlight {
        self.0.in_flight.fetch_add(1, Ordering::AcqRel);
        InFlight(Arc::clone(&self.0.in_flight))
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight.load(Ordering::Acquire)
    }

    /// Runs work of some milliseconds (parsing, templates, encoding) away from the threads that answer `/health`.
    ///
    /// # Errors
    /// The work's own, and 500 if it panicked.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _permit = self
            .0
            .preparing
            .acquire()
            .await
            .expect("the semaphore is never closed");
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
            Err(ApiError::internal(format!(
                "preparing the request failed: {error}"
            )))
        })
    }
}

/// Now, seconds since 1970.
pub(super) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
