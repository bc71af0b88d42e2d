//! The HTTP server: OpenAI's API, and what operators need.
//!
//! The socket is bound before the model is loaded, so that `/health` answers from the first moment. HTTP runs on two
//! threads of its own; work of more than a moment (templates, encoding) goes to a small pool beside them. A request
//! meets the engine's thread twice per token and shares no lock with it.
//!
//! Only this module and its children know OpenAI's JSON.

mod app;
mod auth;
mod body;
mod chat;
mod completions;
mod error;
mod fields;
mod generation;
mod health;
mod logprobs;
mod messages;
mod models;
mod params;
mod reply;
mod state;
mod tokenize;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::{Extension, Router};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, oneshot, watch};

pub use auth::Keys;
pub use error::ApiError;
pub use state::{AppState, ModelInfo, Phase, ServedModel};

use crate::engine::{EngineConfig, EngineHandle, EngineModel};
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::sample::params::SamplingParams;
use crate::text::ChatTemplate;

/// Threads that answer HTTP.
const HTTP_THREADS: usize = 2;
/// Threads that parse, render and encode.
const PREPARE_THREADS: usize = 4;
/// How long a client may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest head of a request, bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// How long replies may take to reach their readers after the engine has ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a waiting shutdown looks again.
const POLL: Duration = Duration::from_millis(10);

/// How the server works.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Address to bind.
    pub host: IpAddr,
    /// Port to bind; 0 takes a free one.
    pub port: u16,
    /// Accepted API keys; without any, none is needed.
    pub keys: Keys,
    /// Origins whose pages may call the server; `*` is all. None by default.
    pub cors_origins: Vec<String>,
    /// Names besides this machine's own that a loopback server answers to.
    pub allowed_hosts: Vec<String>,
    /// Largest request body, bytes.
    pub max_body_bytes: usize,
    /// Most connections at one time; more wait to be accepted.
    pub max_connections: usize,
    /// How long running requests may take to finish after the wish to end.
    pub drain_timeout: Duration,
    /// The engine's part.
    pub engine: EngineConfig,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 8000,
            keys: Keys::default(),
            cors_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            max_body_bytes: 8 << 20,
            max_connections: 1024,
            drain_timeout: Duration::from_secs(30),
            engine: EngineConfig::default(),
        }
    }
}

/// A loaded model and what the server tells about it.
pub struct ModelToServe {
    /// The name in requests and replies.
    pub name: String,
    /// Other names it answers to.
    pub aliases: Vec<String>,
    /// What runs it.
    pub engine: EngineModel,
    /// Its chat template, if it is a chat model.
    pub template: Option<Arc<ChatTemplate>>,
    /// Its published sampling defaults over the engine's.
    pub defaults: SamplingParams,
    /// Facts for `/v1/models`.
    pub info: ModelInfo,
}

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// Every request was answered.
    Drained,
    /// The time to drain was over; what still ran was ended with an error.
    DeadlinePassed,
    /// A second signal came: at once.
    Forced,
}

/// The other end of a client's connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerAddress(pub(crate) SocketAddr);

/// A route that takes prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// Reads a body as `route` would for a model whose vocabulary has `vocab_size` tokens, up to the prompt's text.
///
/// # Errors
/// What the client would be told.
pub fn check_body(route: Route, body: &[u8], vocab_size: usize) -> Result<(), ApiError> {
    let mut fields = fields::parse_object(body)?;
    fields.string("model")?;
    let defaults = SamplingParams::default();
    match route {
        Route::Chat => chat::ChatRequest::take(fields, &defaults, vocab_size).map(drop),
        Route::Completions => completions::CompletionRequest::take(fields, &defaults, vocab_size).map(drop),
    }
}

/// Binds, loads the model on a thread of its own, serves until a signal, drains.
///
/// # Errors
/// If the address cannot be bound, the model cannot be loaded, or the engine breaks.
pub fn run(
    config: ServerConfig,
    load: impl FnOnce() -> Result<ModelToServe> + Send + 'static,
) -> Result<Stopped> {
    Server::bind(config)?.run(true, load)
}

/// A bound server.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: AppState,
}

impl Server {
    /// Binds the address. Clients can connect from now on; they are answered once [`Server::run`] is called.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn bind(config: ServerConfig) -> Result<Server> {
        let wanted = SocketAddr::new(config.host, config.port);
        let io = |source| Error::Io {
            what: format!("cannot listen on {wanted}"),
            source,
        };
        let listener = TcpListener::bind(wanted).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let loopback = address.ip().to_canonical().is_loopback();
        if !loopback && config.keys.is_empty() {
            tracing::warn!(
                "{address} can be reached from other machines and no API key is set; anybody may use it"
            );
        }
        let app = AppState::new(config, loopback, Arc::new(Metrics::default()));
        Ok(Server {
            listener,
            address,
            app,
        })
    }

    /// The address, with the port that was taken.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The state that the routes share, to follow the phase or to end the server.
    pub fn app(&self) -> AppState {
        self.app.clone()
    }

    /// Serves until the end is wished for: by a signal if `signals`, by `/admin/shutdown`, or by
    /// [`AppState::request_stop`].
    ///
    /// # Errors
    /// If the model cannot be loaded or the engine breaks.
    pub fn run(
        self,
        signals: bool,
        load: impl FnOnce() -> Result<ModelToServe> + Send + 'static,
    ) -> Result<Stopped> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(HTTP_THREADS)
            .max_blocking_threads(PREPARE_THREADS)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(|source| Error::Io {
                what: "cannot start the HTTP threads".into(),
                source,
            })?;
        let result = runtime.block_on(self.serve(signals, load));
        runtime.shutdown_background();
        result
    }

    async fn serve(
        self,
        signals: bool,
        load: impl FnOnce() -> Result<ModelToServe> + Send + 'static,
    ) -> Result<Stopped> {
        let Server {
            listener,
            address,
            app,
        } = self;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(|source| Error::Io {
            what: format!("cannot listen on {address}"),
            source,
        })?;
        let (forced, mut force) = watch::channel(false);
        if signals {
            watch_signals(app.clone(), forced.clone())?;
        }
        let (closing, close) = watch::channel(false);
        tokio::spawn(accept(
            listener,
            app::router(app.clone())?,
            app.config().max_connections,
            close,
        ));
        let loaded = start_loading(app.clone(), load)?;
        tracing::info!("listening on http://{address}");

        let mut stop = app.watch_stop();
        // A load that fails is told by `loaded`, with its own error.
        let engine = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => None,
            loaded = loaded => match loaded {
                Ok(Ok(engine)) => Some(engine),
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(Error::Internal("loading the model panicked".into())),
            },
        };
        let stopped = match engine {
            // The wish to end came while the model was loading: nothing runs yet.
            None => Stopped::Drained,
            Some(engine) => {
                let mut phase = app.watch_phase();
                tokio::select! {
                    _ = stop.wait_for(|stop| *stop) => {}
                    _ = phase.wait_for(|phase| matches!(phase, Phase::Failed(_))) => {}
                }
                tokio::select! {
                    stopped = drain(&app, engine) => stopped,
                    _ = force.wait_for(|forced| *forced) => Stopped::Forced,
                }
            }
        };
        closing.send_replace(true);
        if stopped != Stopped::Forced {
            // Connections hold a receiver each; the last one to go is the end.
            let _ = tokio::time::timeout(FLUSH_TIMEOUT, closing.closed()).await;
        }
        match app.phase() {
            Phase::Failed(why) => Err(Error::Internal(format!("the engine has failed: {why}"))),
            _ => Ok(stopped),
        }
    }
}

/// A running engine.
struct RunningEngine {
    handle: EngineHandle,
    thread: JoinHandle<()>,
}

/// Loads the model on a thread of its own and then starts the engine.
fn start_loading(
    app: AppState,
    load: impl FnOnce() -> Result<ModelToServe> + Send + 'static,
) -> Result<oneshot::Receiver<Result<RunningEngine>>> {
    let (sender, receiver) = oneshot::channel();
    let work = move || {
        let begin = Instant::now();
        let started = catch_unwind(AssertUnwindSafe(load))
            .unwrap_or_else(|_| Err(Error::Internal("loading the model panicked".into())))
            .and_then(|model| start_engine(&app, model));
        match &started {
            Ok(_) => {
                app.set_phase(Phase::Ready);
                tracing::info!("ready after {:.1} s", begin.elapsed().as_secs_f64());
            }
            Err(error) => app.set_phase(Phase::Failed(error.to_string())),
        }
        // If nobody waits any more, the server is ending.
        let _ = sender.send(started);
    };
    std::thread::Builder::new()
        .name("load".into())
        .spawn(work)
        .map_err(|source| Error::Io {
            what: "cannot start the loading thread".into(),
            source,
        })?;
    Ok(receiver)
}

fn start_engine(app: &AppState, model: ModelToServe) -> Result<RunningEngine> {
    let ModelToServe {
        name,
        aliases,
        engine,
        template,
        defaults,
        info,
    } = model;
    let (tokenizer, vocab_size, max_context) = (
        Arc::clone(&engine.tokenizer),
        engine.vocab_size,
        engine.max_context,
    );
    let failing = app.clone();
    let on_failure = move |why: &str| failing.set_phase(Phase::Failed(why.to_owned()));
    let (handle, thread) = EngineHandle::spawn(
        engine,
        &app.config().engine,
        Arc::clone(app.metrics()),
        on_failure,
    )?;
    app.metrics()
        .set_model_info(&name, &info.architecture, &info.quantization);
    let max_context = max_context.min(handle.max_context());
    app.add_model(ServedModel {
        name,
        aliases,
        created: state::unix_time(),
        tokenizer,
        template,
        defaults,
        vocab_size,
        max_context,
        info,
        engine: handle.clone(),
    });
    Ok(RunningEngine { handle, thread })
}

/// Refuses new requests, lets the running ones finish within the time, ends the engine.
async fn drain(app: &AppState, engine: RunningEngine) -> Stopped {
    app.set_phase(Phase::Draining);
    let limit = app.config().drain_timeout;
    tracing::info!(
        "draining: {} requests run; at most {} s",
        app.in_flight(),
        limit.as_secs()
    );
    let idle = async {
        while app.in_flight() > 0 {
            tokio::time::sleep(POLL).await;
        }
    };
    let drained = tokio::time::timeout(limit, idle).await.is_ok();
    engine.handle.shutdown();
    let ended = async {
        while app.in_flight() > 0 || !engine.thread.is_finished() {
            tokio::time::sleep(POLL).await;
        }
    };
    // A step that takes longer than this is left to the end of the process.
    let _ = tokio::time::timeout(FLUSH_TIMEOUT, ended).await;
    if drained {
        Stopped::Drained
    } else {
        Stopped::DeadlinePassed
    }
}

/// The first signal asks for the end, the second one forces it.
///
/// # Errors
/// If the handlers cannot be installed.
fn watch_signals(app: AppState, forced: watch::Sender<bool>) -> Result<()> {
    let io = |source| Error::Io {
        what: "cannot install the signal handlers".into(),
        source,
    };
    #[cfg(unix)]
    let mut signals = {
        use tokio::signal::unix::{SignalKind, signal};
        (
            signal(SignalKind::terminate()).map_err(io)?,
            signal(SignalKind::interrupt()).map_err(io)?,
        )
    };
    #[cfg(windows)]
    let mut signals = {
        use tokio::signal::windows::{ctrl_c, ctrl_shutdown};
        (ctrl_shutdown().map_err(io)?, ctrl_c().map_err(io)?)
    };
    tokio::spawn(async move {
        for first in [true, false] {
            tokio::select! {
                _ = signals.0.recv() => {}
                _ = signals.1.recv() => {}
            }
            if first {
                app.request_stop();
            } else {
                forced.send_replace(true);
            }
        }
    });
    Ok(())
}

/// Accepts connections until `close` turns true.
async fn accept(
    listener: tokio::net::TcpListener,
    router: Router,
    max_connections: usize,
    mut close: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(max_connections));
    loop {
        let accepted = async {
            let slot = Arc::clone(&slots)
                .acquire_owned()
                .await
                .expect("the semaphore is never closed");
            (slot, listener.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            accepted = accepted => accepted,
            _ = close.wait_for(|close| *close) => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Mostly too many open files: others must end first.
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(POLL).await;
                continue;
            }
        };
        // Tokens are small and each is wanted at once. A socket that refuses the option works without.
        let _ = stream.set_nodelay(true);
        let service = router.clone().layer(Extension(PeerAddress(peer)));
        let close = close.clone();
        tokio::spawn(async move {
            serve_connection(stream, service, close).await;
            drop(slot);
        });
    }
}

async fn serve_connection(stream: tokio::net::TcpStream, router: Router, mut close: watch::Receiver<bool>) {
    let service = tower_http::map_request_body::MapRequestBody::new(router, |body: Incoming| Body::new(body));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    tokio::pin!(connection);
    tokio::select! {
        // How a connection broke is of no interest.
        _ = connection.as_mut() => return,
        _ = close.wait_for(|close| *close) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
