//! `GET /v1/models` and `GET /v1/models/{id}`.

use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::error::ApiError;
use super::reply::json_response;
use super::state::{AppState, ServedModel};

fn describe(app: &AppState, model: &ServedModel) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "dynalm",
        "state": app.phase().name(),
        "aliases": model.aliases,
        "max_model_len": model.max_context,
        "vocab_size": model.vocab_size,
        "architecture": model.info.architecture,
        "quantization": model.info.quantization,
        "parameters": model.info.parameters,
        "size_bytes": model.info.file_bytes,
        "chat": model.template.is_some(),
    })
}

/// All served models.
pub(super) async fn list(State(app): State<AppState>) -> Response {
    let data: Vec<Value> = app.models().iter().map(|model| describe(&app, model)).collect();
    json_response(&json!({ "object": "list", "data": data }))
}

/// One model.
///
/// # Errors
/// 404 if it is not served.
pub(super) async fn get(State(app): State<AppState>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let model = app.model(Some(&id))?;
    Ok(json_response(&describe(&app, &model)))
}
