//! A store that repeats requests which fail in transit or because of the server.
//!
//! The `object_store` crate repeats some requests, but ends at once when a body is cut or cannot be parsed, or when a
//! connection breaks during a request that it does not take to be repeatable. Here, one rule applies to all requests;
//! the crate's own repetitions are turned off. An attempt that failed may have taken effect, so:
//!
//! - an object that a repeated creation finds is compared with the bytes that were to be created;
//! - an object that a repeated deletion does not find was deleted.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use futures_util::{
    FutureExt, StreamExt,
    stream::{self, BoxStream},
};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartId, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result, UploadPart,
    multipart::{MultipartStore, PartId},
    path::Path as Key,
};

use super::patience::Patience;

/// A remote store whose requests are repeated.
#[derive(Debug)]
pub(super) struct Patient<S> {
    store: Arc<S>,
    patience: Patience,
}

/// An answer that arrived whole but cannot be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadAnswer {
    #[error("the answer has {got} bytes where the object has {expected}")]
    Length { got: u64, expected: u64 },
    #[error("the answer is about version {got} of the object, but {expected} was asked for")]
    Version { got: String, expected: String },
    #[error("the answer does not name the version of the object")]
    NoVersion,
    #[error("the answer is not one of an object store; does a proxy answer?")]
    Foreign,
    #[error("the answer is too long")]
    Endless,
}

impl From<BadAnswer> for Error {
    fn from(answer: BadAnswer) -> Error {
        Error::Generic { store: "object store", source: Box::new(answer) }
    }
}

impl<S: ObjectStore + MultipartStore> Patient<S> {
    pub(super) fn new(store: S, patience: Patience) -> Patient<S> {
        Patient { store: Arc::new(store), patience }
    }

    /// Whether the object has exactly these bytes.
    async fn holds(&self, key: &Key, payload: &PutPayload) -> Result<bool> {
        let (found, len) = (self.head(key).await?, payload.content_length() as u64);
        if found.size != len || len == 0 {
            return Ok(found.size == len);
        }
        // Whatever version this is: only its bytes matter.
        let whole = GetOptions { range: Some((0..len).into()), ..GetOptions::default() };
        let bytes = self.get_opts(key, whole).await?.bytes().await?;
        Ok(payload.iter().flatten().eq(bytes.iter()))
    }

    async fn delete(&self, key: &Key) -> Result<()> {
        let mut attempts = self.patience.attempts();
        loop {
            match attempts.send(self.store.delete(key)).await {
                Err(Error::NotFound { .. }) if attempts.may_have_worked() => return Ok(()),
                Err(error) => attempts.pause_after(error).await?,
                Ok(()) => return Ok(()),
            }
        }
    }

    /// Gets an object or its metadata, once.
    async fn get_once(&self, key: &Key, options: GetOptions) -> Result<GetResult> {
        let (expected, is_head) = (options.if_match.clone(), options.head);
        let found = self.store.get_opts(key, options).await?;
        let got = found.meta.e_tag.clone().ok_or(BadAnswer::NoVersion)?;
        match expected {
            Some(expected) if expected != got => return Err(BadAnswer::Version { got, expected }.into()),
            _ if is_head => return Ok(found),
            _ => {}
        }
        let (meta, range) = (found.meta.clone(), found.range.clone());
        let (attributes, extensions) = (found.attributes.clone(), found.extensions.clone());
        let (mut bytes, expected) = (Vec::new(), range.end - range.start);
        let mut body = found.into_stream();
        // A body that does not end is not collected.
        while let Some(piece) = body.next().await.filter(|_| bytes.len() as u64 <= expected) {
            bytes.extend_from_slice(&piece?);
        }
        let got = bytes.len() as u64;
        if got != expected {
            return Err(BadAnswer::Length { got, expected }.into());
        }
        let payload = GetResultPayload::Stream(stream::once(async { Ok(bytes.into()) }).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }
}

impl<S> Clone for Patient<S> {
    fn clone(&self) -> Patient<S> {
        Patient { store: Arc::clone(&self.store), patience: self.patience }
    }
}

impl<S: ObjectStore> fmt::Display for Patient<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl<S: ObjectStore + MultipartStore> ObjectStore for Patient<S> {
    async fn put_opts(&self, key: &Key, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let mut attempts = self.patience.attempts();
        loop {
            let put = self.store.put_opts(key, payload.clone(), options.clone());
            let error = match attempts.send(put).await {
                Ok(put) => return Ok(put),
                Err(error) => error,
            };
            let is_found = matches!(error, Error::AlreadyExists { .. }) && options.mode == PutMode::Create;
            if is_found && attempts.may_have_worked() && self.holds(key, &payload).await? {
                return Ok(PutResult { e_tag: None, version: None, extensions: Default::default() });
            }
            attempts.pause_after(error).await?;
        }
    }

    async fn put_multipart_opts(
        &self,
        key: &Key,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let id = self.patience.ask(|| self.store.create_multipart_opts(key, options.clone())).await?;
        Ok(Box::new(PatientUpload {
            to: self.clone(),
            key: key.clone(),
            id,
            count: 0,
            parts: Arc::default(),
        }))
    }

    async fn get_opts(&self, key: &Key, options: GetOptions) -> Result<GetResult> {
        self.patience.ask(|| self.get_once(key, options.clone())).await
    }

    fn delete_stream(&self, keys: BoxStream<'static, Result<Key>>) -> BoxStream<'static, Result<Key>> {
        let store = self.clone();
        let delete = move |key: Result<Key>| {
            let store = store.clone();
            async move {
                let key = key?;
                store.delete(&key).await.map(|()| key)
            }
        };
        keys.then(delete).boxed()
    }

    /// Not repeated: what was listed before a failure cannot be taken back. Nothing here uses it.
    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Key>) -> Result<ListResult> {
        self.patience.ask(|| self.store.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Key, to: &Key, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

/// An upload in parts, each of which is repeated on its own.
#[derive(Debug)]
struct PatientUpload<S> {
    to: Patient<S>,
    key: Key,
    id: MultipartId,
    /// Number of parts so far.
    count: usize,
    /// The parts that have arrived.
    parts: Arc<Mutex<BTreeMap<usize, PartId>>>,
}

#[async_trait]
impl<S: ObjectStore + MultipartStore> MultipartUpload for PatientUpload<S> {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (to, key, id) = (self.to.clone(), self.key.clone(), self.id.clone());
        let (index, parts) = (self.count, Arc::clone(&self.parts));
        self.count += 1;
        let sent = async move {
            let part = to.patience.ask(|| to.store.put_part(&key, &id, index, data.clone())).await?;
            parts.lock().unwrap_or_else(PoisonError::into_inner).insert(index, part);
            Ok(())
        };
        sent.boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let parts: Vec<PartId> =
            self.parts.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        let complete = || self.to.store.complete_multipart(&self.key, &self.id, parts.clone());
        self.to.patience.ask(complete).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.to.store.abort_multipart(&self.key, &self.id).await
    }
}

#[cfg(test)]
mod tests;
