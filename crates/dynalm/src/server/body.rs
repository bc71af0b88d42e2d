//! Request bodies: type, encoding, size and time are checked before a byte is parsed.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, Request, header};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::mpsc;

use super::error::ApiError;

/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// How much of a body that is too large is read and dropped, so that its sender gets to read the refusal instead of a
/// broken connection.
const DISCARD_BYTES: usize = 512 << 20;
/// How long that may take.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a JSON body.
///
/// # Errors
/// 415 for another type or an encoded body, 413 above `limit` bytes, 408 if it does not arrive.
pub(super) async fn read_json(request: Request<Body>, limit: usize) -> Result<Bytes, ApiError> {
    check_type(request.headers())?;
    let declared = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let mut body = request.into_body();
    if declared.is_some_and(|length: usize| length > limit) {
        discard(body).await;
        return Err(ApiError::too_large(limit));
    }
    let read = tokio::time::timeout(BODY_TIMEOUT, collect(&mut body, limit)).await;
    match read {
        Ok(Ok(Some(bytes))) => Ok(bytes),
        Ok(Ok(None)) => {
            discard(body).await;
            Err(ApiError::too_large(limit))
        }
        Ok(Err(error)) => Err(ApiError::malformed(format!(
            "the request body broke off: {error}"
        ))),
        Err(_) => Err(ApiError::body_timeout(BODY_TIMEOUT.as_secs())),
    }
}

/// `None`: more than `limit` bytes.
async fn collect(body: &mut Body, limit: usize) -> Result<Option<Bytes>, axum::Error> {
    let mut all = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if all.len() + data.len() > limit {
            return Ok(None);
        }
        all.extend_from_slice(&data);
    }
    Ok(Some(all.into()))
}

async fn discard(mut body: Body) {
    let reading = async {
        let mut seen = 0;
        while let Some(Ok(frame)) = body.frame().await {
            seen += frame.data_ref().map_or(0, Bytes::len);
            if seen > DISCARD_BYTES {
                break;
            }
        }
    };
    // Running out of time only means that the connection breaks instead.
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, reading).await;
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding.as_bytes() != b"identity"
    {
        let found = encoding.to_str().unwrap_or("?");
        let message = format!("`Content-Encoding: {found}` is not accepted; send the body as it is");
        return Err(ApiError::unsupported_media(message));
    }
    let found = headers
        .get(header::CONTENT_TYPE)
        .map(|value| value.to_str().unwrap_or("?"));
    let essence = found.unwrap_or("").split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let found = found.map_or("no `Content-Type`".to_owned(), |found| {
        format!("`Content-Type: {found}`")
    });
    Err(ApiError::unsupported_media(format!(
        "found {found}, expected `Content-Type: application/json`"
    )))
}

/// A response body that another task writes. Dropping it (the client left) closes the channel, which that task sees.
pub(super) struct ChannelBody(mpsc::Receiver<Bytes>);

impl ChannelBody {
    /// The body, and where to write it. At most `depth` pieces wait for a slow reader.
    pub(super) fn new(depth: usize) -> (mpsc::Sender<Bytes>, ChannelBody) {
        let (sender, receiver) = mpsc::channel(depth);
        (sender, ChannelBody(receiver))
    }
}

impl HttpBody for ChannelBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0
            .poll_recv(context)
            .map(|piece| piece.map(|bytes| Ok(Frame::data(bytes))))
    }
}
