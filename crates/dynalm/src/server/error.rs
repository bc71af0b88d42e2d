//! The one place where errors become HTTP: OpenAI's `{"error": {message, type, param, code}}` with the right status.

use std::borrow::Cow;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::error::Error;

/// Seconds a refused client is asked to wait when the queue is full.
const RETRY_QUEUE_FULL_S: u32 = 1;
/// Seconds a refused client is asked to wait while the model loads or the server drains.
const RETRY_UNAVAILABLE_S: u32 = 5;

/// An error as a client sees it.
#[derive(Debug, Clone)]
pub struct ApiError {
    /// HTTP status; before the first byte of a reply only.
    pub status: StatusCode,
    /// OpenAI's error type, e.g. `invalid_request_error`.
    pub kind: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    /// OpenAI's error code, e.g. `context_length_exceeded`.
    pub code: Option<Cow<'static, str>>,
    /// What was found, what was expected, what to do.
    pub message: String,
    /// `Retry-After`, seconds.
    pub retry_after: Option<u32>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status,
            kind,
            param: None,
            code: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// 400: the request is malformed or asks for something unsupported; `param` names the field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param.into()),
            ..ApiError::malformed(message)
        }
    }

    /// 400 without a field to blame: the body is no JSON object.
    pub fn malformed(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 401: no key or a wrong one.
    pub fn unauthorized() -> ApiError {
        let message = "missing or wrong API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message).with_code("invalid_api_key")
    }

    /// 403: the caller may not do this.
    pub fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// 404: no such route.
    pub fn no_route(method: &str, path: &str) -> ApiError {
        let message = format!("no route `{method} {path}`");
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message).with_code("unknown_url")
    }

    /// 404: a model that is not served.
    pub fn model_not_found(name: &str, served: &[String]) -> ApiError {
        let message = format!("model `{name}` is not served here; served: {}", served.join(", "));
        ApiError {
            param: Some("model".into()),
            ..ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
                .with_code("model_not_found")
        }
    }

    /// 405: the route exists with another method.
    pub fn method_not_allowed(method: &str, path: &str) -> ApiError {
        let message = format!("method `{method}` is not allowed on `{path}`");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    /// 408: the body did not arrive in time.
    pub fn body_timeout(seconds: u64) -> ApiError {
        let message = format!("the request body did not arrive within {seconds} s");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// 413: the body is larger than allowed.
    pub fn too_large(limit_bytes: usize) -> ApiError {
        let message = format!("the request body is larger than the limit of {limit_bytes} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
            .with_code("body_too_large")
    }

    /// 415: the body's type or encoding is not one this server reads.
    pub fn unsupported_media(message: impl Into<String>) -> ApiError {
        ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            message,
        )
    }

    /// 503 while loading or draining.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError {
            retry_after: Some(RETRY_UNAVAILABLE_S),
            ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// 500: a fault of ours.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).with_code("internal_error")
    }

    /// 400 of a prompt that does not fit the model's window.
    pub fn context_length(prompt_tokens: usize, max_context: usize, param: &str) -> ApiError {
        let message = format!(
            "the prompt has {prompt_tokens} tokens, but the model's context holds {max_context} tokens, prompt and \
             reply together; shorten the prompt"
        );
        ApiError::invalid(param, message).with_code("context_length_exceeded")
    }

    /// The same error with a code.
    #[must_use]
    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError {
            code: Some(Cow::Borrowed(code)),
            ..self
        }
    }

    /// The JSON body.
    pub fn body(&self) -> String {
        let inner = Inner {
            message: &self.message,
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code.as_deref(),
        };
        serde_json::to_string(&Envelope { error: inner }).expect("an error object of strings serialises")
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        let message = error.to_string();
        match error {
            Error::Request { param, code, .. } => ApiError {
                param,
                code: code.map(Cow::Borrowed),
                ..ApiError::malformed(message)
            },
            // A template's own message (`raise_exception`) concerns the messages it was given.
            Error::Template(_) => ApiError::invalid("messages", message),
            Error::QueueFull { .. } => ApiError {
                retry_after: Some(RETRY_QUEUE_FULL_S),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
                    .with_code("queue_full")
            },
            Error::Unavailable(_) => ApiError::unavailable(message),
            Error::Deadline { .. } => {
                let message = format!("{message}; allow more with `timeout`, or leave it out");
                ApiError {
                    param: Some("timeout".to_owned()),
                    ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message)
                        .with_code("deadline_exceeded")
                }
            }
            _ => ApiError::internal(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.body()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
