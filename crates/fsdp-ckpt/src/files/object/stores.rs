//! Opens the store of a URL, with settings from the environment.

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use object_store::{
    ObjectStore, RetryConfig, aws::AmazonS3Builder, azure::MicrosoftAzureBuilder,
    gcp::GoogleCloudStorageBuilder, local::LocalFileSystem, memory::InMemory,
};

use super::{
    ObjectFiles,
    checked::Checked,
    parts::Limits,
    patience::Patience,
    patient::Patient,
    runtime,
    url::{self, UrlFault},
};

/// The open stores of this process, by scheme and host of their URLs.
static STORES: Mutex<BTreeMap<String, ObjectFiles>> = Mutex::new(BTreeMap::new());

/// The store of a URL, opened on first use.
pub(crate) fn at(path: &Path) -> io::Result<Arc<ObjectFiles>> {
    let (scheme, host, _) = url::split(path).ok_or(io::ErrorKind::InvalidInput)?;
    let root = format!("{scheme}://{host}");
    // Every change under the lock is complete before anything can panic.
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(files) = stores.get(&root) {
        return Ok(Arc::new(files.clone()));
    }
    runtime::start()?;
    let files = ObjectFiles::new(open(scheme, &root)?, Limits::USUAL);
    stores.insert(root, files.clone());
    Ok(Arc::new(files))
}

fn open(scheme: &str, root: &str) -> io::Result<Arc<dyn ObjectStore>> {
    let settings = |variables| {
        move |error: object_store::Error| {
            let detail = error.to_string();
            io::Error::new(io::ErrorKind::InvalidInput, UrlFault::Settings { detail, variables })
        }
    };
    let patience = Patience::USUAL;
    Ok(match scheme {
        "s3" | "s3a" => {
            let store = for_s3(AmazonS3Builder::from_env().with_url(root)).build();
            Arc::new(Patient::new(store.map_err(settings("AWS_*"))?, patience))
        }
        "gs" => {
            let store = GoogleCloudStorageBuilder::from_env().with_url(root);
            let store = store.with_retry(once()).with_http_connector(Checked).build();
            Arc::new(Patient::new(store.map_err(settings("GOOGLE_*"))?, patience))
        }
        "az" | "azure" | "adl" | "abfs" | "abfss" => {
            let store = MicrosoftAzureBuilder::from_env().with_url(root);
            let store = store.with_retry(once()).with_http_connector(Checked).build();
            Arc::new(Patient::new(store.map_err(settings("AZURE_*"))?, patience))
        }
        "file" => Arc::new(LocalFileSystem::new().with_automatic_cleanup(true)),
        "memory" => Arc::new(InMemory::new()),
        _ => {
            let fault = UrlFault::UnknownScheme { scheme: scheme.to_owned() };
            return Err(io::Error::new(io::ErrorKind::Unsupported, fault));
        }
    })
}

/// The settings that every client of S3 has. Objects are deleted by plain requests, whose answers need not be parsed.
pub(super) fn for_s3(store: AmazonS3Builder) -> AmazonS3Builder {
    store.with_retry(once()).with_http_connector(Checked).with_disable_bulk_delete(true)
}

/// Turns off the repetitions of the `object_store` crate: [`Patient`] repeats requests.
fn once() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}
