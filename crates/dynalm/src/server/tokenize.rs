//! `POST /tokenize`, `/detokenize` and `/apply-template`: what the model gets to see.

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::Request;
use axum::response::Response;
use serde_json::{Value, json};

use super::body::read_json;
use super::completions::read_tokens;
use super::error::ApiError;
use super::fields::{Fields, parse_object};
use super::logprobs::{bytes_of, token_text};
use super::messages;
use super::reply::json_response;
use super::state::{AppState, ServedModel};

/// Reads the body and answers with what `work` makes of it.
async fn answer(
    app: AppState,
    request: Request<Body>,
    work: fn(&ServedModel, Fields) -> Result<Value, ApiError>,
) -> Result<Response, ApiError> {
    app.ready()?;
    let body: Bytes = read_json(request, app.config().max_body_bytes).await?;
    let state = app.clone();
    let value = app
        .blocking(move || {
            let mut fields = parse_object(&body)?;
            let name = fields.string("model")?;
            work(&*state.model(name.as_deref())?, fields)
        })
        .await?;
    Ok(json_response(&value))
}

/// Text (`prompt`) or a chat (`messages`) to token ids.
///
/// # Errors
/// 400 naming the field that is wrong.
pub(super) async fn tokenize(
    State(app): State<AppState>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, request, |model, mut fields| {
        let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
        let tokens = match fields.string("prompt")? {
            Some(prompt) => {
                let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
                fields.finish()?;
                messages::encode_prompt(model, &prompt, special)?
            }
            None => {
                let conversation = messages::take(&mut fields)?;
                fields.finish()?;
                messages::encode(model, &conversation)?
            }
        };
        let mut reply =
            json!({ "count": tokens.len(), "max_model_len": model.max_context, "tokens": tokens });
        if strings {
            let texts = tokens
                .iter()
                .map(|&token| token_text(bytes_of(&model.tokenizer, token)));
            reply["token_strs"] = texts.collect::<Vec<String>>().into();
        }
        Ok(reply)
    })
    .await
}

/// Token ids to text.
///
/// # Errors
/// 400 naming the field that is wrong.
pub(super) async fn detokenize(
    State(app): State<AppState>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, request, |model, mut fields| {
        let Some(items) = fields.array("tokens")? else {
            return Err(ApiError::invalid("tokens", "`tokens` is missing"));
        };
        fields.finish()?;
        let tokens = read_tokens(items, "tokens", model.vocab_size)?;
        Ok(json!({ "prompt": messages::decode(model, &tokens, "tokens")? }))
    })
    .await
}

/// A chat to the text the model reads.
///
/// # Errors
/// 400 naming the field that is wrong, or with the template's own message.
pub(super) async fn apply_template(
    State(app): State<AppState>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    answer(app, request, |model, mut fields| {
        let conversation = messages::take(&mut fields)?;
        fields.finish()?;
        Ok(json!({ "prompt": messages::render_text(model, &conversation)? }))
    })
    .await
}
