//! The routes, and what every request passes on its way to one: counting, CORS, the Host check, the key check.
//!
//! CORS stands outside the key check: a preflight carries no key, and a page must be able to read a 401.

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, State};
use axum::http::{HeaderValue, Method, Request, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::auth::check_host;
use super::error::ApiError;
use super::state::AppState;
use super::{chat, completions, health, models, tokenize};
use crate::error::{Error, Result};

/// Answered without a key: they say nothing but whether the server lives.
const OPEN_ROUTES: [&str; 3] = ["/health", "/ready", "/live"];

/// The whole service.
///
/// # Errors
/// If a configured CORS origin is no valid header value.
pub(super) fn router(app: AppState) -> Result<Router> {
    let cors = cors(&app.config().cors_origins)?;
    let routes = Router::new()
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/apply-template", post(tokenize::apply_template))
        .route("/health", get(health::health))
        .route("/ready", get(health::health))
        .route("/live", get(health::live))
        .route("/metrics", get(health::metrics))
        .route("/admin/shutdown", post(health::shutdown))
        .route("/", get(health::root))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(no_route)
        .layer(from_fn_with_state(app.clone(), guard));
    let routes = match cors {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    Ok(routes
        .layer(from_fn_with_state(app.clone(), count))
        .with_state(app))
}

/// # Errors
/// If an origin is no valid header value.
fn cors(origins: &[String]) -> Result<Option<CorsLayer>> {
    if origins.is_empty() {
        return Ok(None);
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let value = |origin: &String| {
            let trimmed = origin.trim_end_matches('/');
            HeaderValue::from_str(trimmed)
                .map_err(|_| Error::Settings(format!("CORS origin `{origin}` cannot stand in a header")))
        };
        AllowOrigin::list(origins.iter().map(value).collect::<Result<Vec<_>>>()?)
    };
    // Keys travel in headers that the page sets itself, never in cookies: credentials stay off.
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER]);
    Ok(Some(layer))
}

async fn count(State(app): State<AppState>, request: Request<Body>, next: Next) -> Response {
    let matched = request
        .extensions()
        .get::<MatchedPath>()
        .map(|path| path.as_str().to_owned());
    let response = next.run(request).await;
    app.metrics()
        .http_reply(matched.as_deref().unwrap_or("other"), response.status().as_u16());
    response
}

async fn guard(State(app): State<AppState>, request: Request<Body>, next: Next) -> Response {
    if app.loopback()
        && let Err(error) = check_host(request.headers(), &app.config().allowed_hosts)
    {
        return error.into_response();
    }
    if !OPEN_ROUTES.contains(&request.uri().path())
        && let Err(error) = app.config().keys.check(request.headers())
    {
        return error.into_response();
    }
    next.run(request).await
}

async fn no_route(method: Method, uri: Uri) -> ApiError {
    ApiError::no_route(method.as_str(), uri.path())
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::method_not_allowed(method.as_str(), uri.path())
}
