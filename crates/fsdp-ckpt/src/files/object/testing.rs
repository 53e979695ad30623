//! A store whose requests fail, before or after they take effect.

use std::{
    future::Future,
    sync::atomic::{AtomicU64, Ordering},
};

use async_trait::async_trait;
use futures_util::{
    FutureExt, StreamExt,
    stream::{self, BoxStream},
};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result, UploadPart, memory::InMemory,
};

pub(crate) mod server;

use super::*;
use crate::file_io::Files;

/// The fault to inject. Requests are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreFails {
    Never,
    /// The request with this number fails.
    At(u64),
    /// The request with this number takes effect, but its response is lost.
    AnswerAt(u64),
    /// The request with this number and all later ones fail.
    From(u64),
    /// The request with this number takes effect, but its response is lost, and all later ones fail.
    AfterAnswer(u64),
}

/// An in-memory store.
#[derive(Clone, Debug)]
pub(crate) struct FaultyStore {
    pub(crate) memory: Arc<InMemory>,
    fails: StoreFails,
    count: Arc<AtomicU64>,
}

impl FaultyStore {
    pub(crate) fn new() -> FaultyStore {
        FaultyStore { memory: Arc::new(InMemory::new()), fails: StoreFails::Never, count: Arc::default() }
    }

    /// A copy of the store with a fault to inject.
    pub(crate) fn with(&self, fails: StoreFails) -> FaultyStore {
        FaultyStore { memory: Arc::new(self.memory.fork()), fails, count: Arc::default() }
    }

    /// Another client of the same store, without faults, as in another process.
    pub(crate) fn again(&self) -> FaultyStore {
        FaultyStore { memory: Arc::clone(&self.memory), fails: StoreFails::Never, count: Arc::default() }
    }

    /// Number of requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(crate) fn files(&self) -> Files {
        tests::small_parts(Arc::new(self.clone()))
    }

    async fn request<T>(self, run: impl Future<Output = Result<T>>) -> Result<T> {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let failed = Error::Generic { store: "test", source: "this request was made to fail".into() };
        match self.fails {
            StoreFails::At(at) if number == at => Err(failed),
            StoreFails::From(at) if number >= at => Err(failed),
            StoreFails::AfterAnswer(at) if number > at => Err(failed),
            StoreFails::AnswerAt(at) | StoreFails::AfterAnswer(at) if number == at => {
                let _ = run.await;
                Err(failed)
            }
            _ => run.await,
        }
    }
}

impl std::fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a store that fails")
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Key, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.clone().request(self.memory.put_opts(location, payload, options)).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Key,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.clone().request(self.memory.put_multipart_opts(location, options)).await?;
        Ok(Box::new(FaultyUpload { store: self.clone(), inner }))
    }

    async fn get_opts(&self, location: &Key, options: GetOptions) -> Result<GetResult> {
        self.clone().request(self.memory.get_opts(location, options)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Key>>) -> BoxStream<'static, Result<Key>> {
        let store = self.clone();
        let delete = move |location: Result<Key>| {
            let store = store.clone();
            async move {
                let location = location?;
                let memory = Arc::clone(&store.memory);
                store.request(async { memory.delete(&location).await }).await?;
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, listed) = (self.clone(), self.memory.list(prefix));
        let all = async move { store.request(async { Ok(listed) }).await };
        all.map(|listed| listed.unwrap_or_else(|error| stream::once(async { Err(error) }).boxed()))
            .flatten_stream()
            .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Key>) -> Result<ListResult> {
        self.clone().request(self.memory.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Key, to: &Key, options: CopyOptions) -> Result<()> {
        self.clone().request(self.memory.copy_opts(from, to, options)).await
    }
}

#[derive(Debug)]
struct FaultyUpload {
    store: FaultyStore,
    inner: Box<dyn MultipartUpload>,
}

#[async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.store.clone().request(self.inner.put_part(data)).boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.store.clone().request(self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.store.clone().request(self.inner.abort()).await
    }
}
