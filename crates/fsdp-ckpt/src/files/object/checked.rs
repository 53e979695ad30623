//! Refuses answers that are not what the service sends.
//!
//! The `object_store` crate takes any XML for a list of objects, an empty one if need be, and any answer with a status of 2xx
//! for a deletion: an error page of a proxy would hide checkpoints, or leave them.

use async_trait::async_trait;
use futures_util::{Stream, StreamExt};
use object_store::{
    ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
        ReqwestConnector,
    },
};

use super::patient::BadAnswer;

/// The elements that hold a list: of S3 and Google Cloud Storage, and of Azure.
const LISTS: [&[u8]; 2] = [b"<ListBucketResult", b"<EnumerationResults"];

/// Maximum size of an answer other than an object, for example a list of 1,000 names.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Connects to a service whose answers are checked.
#[derive(Debug)]
pub(super) struct Checked;

impl HttpConnector for Checked {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        ReqwestConnector::default().connect(options).map(|client| HttpClient::new(CheckedClient(client)))
    }
}

#[derive(Debug)]
struct CheckedClient(HttpClient);

#[async_trait]
impl HttpService for CheckedClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let query = request.uri().query().unwrap_or_default();
        let is_list = query.split('&').any(|pair| matches!(pair, "list-type=2" | "comp=list"));
        let (is_deletion, is_reading) = (request.method() == "DELETE", request.method() == "GET" && !is_list);
        let answer = self.0.execute(request).await?;
        let is_success = answer.status().is_success();
        if is_reading && is_success {
            return Ok(answer);
        }
        let (head, body) = answer.into_parts();
        let body = collected(body.bytes_stream()).await?;
        let holds_list = || LISTS.iter().any(|list| body.windows(list.len()).any(|bytes| bytes == *list));
        if is_success && (is_list && !holds_list() || is_deletion && !body.is_empty()) {
            return Err(HttpError::new(HttpErrorKind::Decode, BadAnswer::Foreign));
        }
        Ok(HttpResponse::from_parts(head, body.into()))
    }
}

/// Collects the body of an answer other than an object, which must end.
async fn collected<B: AsRef<[u8]>>(
    mut body: impl Stream<Item = Result<B, HttpError>> + Unpin,
) -> Result<Vec<u8>, HttpError> {
    let mut bytes = Vec::new();
    while let Some(piece) = body.next().await {
        bytes.extend_from_slice(piece?.as_ref());
        if bytes.len() > ANSWER_BYTES_MAX {
            return Err(HttpError::new(HttpErrorKind::Decode, BadAnswer::Endless));
        }
    }
    Ok(bytes)
}
