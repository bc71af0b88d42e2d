//! `GET /health`, `/ready`, `/live`, `/`, `/metrics` and `POST /admin/shutdown`: what operators and their machines ask.
//! None of them waits for the engine.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::json;

use super::PeerAddress;
use super::error::ApiError;
use super::reply::json_response;
use super::state::{AppState, Phase};

/// 200 if a request sent now would be answered, else 503.
pub(super) async fn health(State(app): State<AppState>) -> Response {
    let phase = app.phase();
    let mut body = json!({ "status": if phase == Phase::Ready { "ok" } else { phase.name() } });
    if let Phase::Failed(why) = &phase {
        body["reason"] = why.as_str().into();
    }
    let mut response = json_response(&body);
    if phase != Phase::Ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    }
    response
}

/// 200 unless the process should be started anew.
pub(super) async fn live(State(app): State<AppState>) -> Response {
    match app.phase() {
        Phase::Failed(_) => health(State(app)).await,
        phase => json_response(&json!({ "status": phase.name() })),
    }
}

/// What this server is.
pub(super) async fn root(State(app): State<AppState>) -> Response {
    let models: Vec<String> = app.models().iter().map(|model| model.name.clone()).collect();
    json_response(&json!({
        "name": "dynalm",
        "version": env!("CARGO_PKG_VERSION"),
        "status": app.phase().name(),
        "models": models,
        "api": "/v1",
    }))
}

/// All counters: OpenMetrics for those who ask for it, else Prometheus' older text format.
pub(super) async fn metrics(State(app): State<AppState>, headers: HeaderMap) -> Response {
    const OPEN: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("");
    let (text, kind) = if accept.contains("application/openmetrics-text") {
        (app.metrics().open_metrics(), OPEN)
    } else {
        (app.metrics().classic_text(), CLASSIC)
    };
    let mut response = Response::new(Body::from(text));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// Drains and ends the server.
///
/// # Errors
/// 403 from another machine if no API key is configured (with keys, one has been checked already).
pub(super) async fn shutdown(
    State(app): State<AppState>,
    Extension(PeerAddress(peer)): Extension<PeerAddress>,
) -> Result<Response, ApiError> {
    if app.config().keys.is_empty() && !peer.ip().to_canonical().is_loopback() {
        return Err(ApiError::forbidden(
            "only this machine may shut the server down, unless it has an API key",
        ));
    }
    app.request_stop();
    Ok(json_response(&json!({ "status": "draining" })))
}
