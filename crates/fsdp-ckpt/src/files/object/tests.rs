//! Object stores that work, and one that fails.

use std::path::PathBuf;

use object_store::{local::LocalFileSystem, memory::InMemory};

use super::*;
use crate::{file_io::Files, files::conformance};

/// Limits that split the files of tests into many parts.
const SMALL: Limits = Limits { part_bytes: 700, memory: 512 << 20 };

/// A file system on a store, with limits that split files into many parts.
pub(super) fn small_parts(store: Arc<dyn ObjectStore>) -> Files {
    Files::of(Arc::new(ObjectFiles::new(store, SMALL)))
}

fn memory(limits: Limits) -> ObjectFiles {
    ObjectFiles::new(Arc::new(InMemory::new()), limits)
}

#[test]
fn memory_store_passes_conformance_checks() {
    let dir = Path::new("memory:///a/dir");
    conformance::check(&memory(Limits::USUAL), dir);
    conformance::check(&memory(SMALL), dir);
}

#[test]
fn conformance_checks_pass_with_parts_spooled_to_disk() {
    conformance::check(&memory(Limits { memory: 0, ..SMALL }), Path::new("memory:///a/dir"));
}

#[test]
fn folder_store_passes_conformance_checks() {
    let dir = tempfile::tempdir().unwrap();
    let url = PathBuf::from(format!("file://{}", dir.path().join("a").display()));
    let files = ObjectFiles::new(Arc::new(LocalFileSystem::new().with_automatic_cleanup(true)), SMALL);
    conformance::check(&files, &url);
}

/// Uses the server (moto) that `FSDP_TEST_S3=http://127.0.0.1:PORT` names, in which it may create a bucket.
#[test]
fn s3_passes_conformance_checks() {
    let Ok(endpoint) = std::env::var("FSDP_TEST_S3") else {
        println!("skipped: FSDP_TEST_S3 names no server");
        return;
    };
    let store = s3(&endpoint);
    let dir = PathBuf::from(format!("s3://fsdp-test/conformance-{}", std::process::id()));
    conformance::check(
        &ObjectFiles::new(Arc::clone(&store), Limits { part_bytes: 5 << 20, ..Limits::USUAL }),
        &dir,
    );
}

fn s3(endpoint: &str) -> Arc<dyn ObjectStore> {
    let store = stores::for_s3(object_store::aws::AmazonS3Builder::new())
        .with_bucket_name("fsdp-test")
        .with_endpoint(endpoint)
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_access_key_id("test")
        .with_secret_access_key("test");
    Arc::new(patient::Patient::new(store.build().unwrap(), patience::Patience::USUAL))
}

#[test]
fn object_changed_while_read_is_error() {
    let files = memory(Limits::USUAL);
    let path = Path::new("memory:///a");
    let put = |bytes: &[u8]| {
        let file = files.open(path, Access::CreateOrWrite).unwrap();
        file.write_at(bytes, 0).unwrap();
        file.sync().unwrap();
    };
    put(b"before");
    let file = files.open(path, Access::Read).unwrap();
    put(b"after!");
    let error = file.read_at(&mut [0; 6], 0).unwrap_err().to_string();
    assert!(error.contains("changed while it was read: it was version \"0\" of 6 bytes when"), "{error}");
}

#[test]
fn unfinished_upload_is_invisible_and_can_be_abandoned() {
    let files = memory(SMALL);
    let dir = Path::new("memory:///a/dir");
    for len in [10, 5000] {
        let file = files.open(&dir.join("file"), Access::CreateNew).unwrap();
        file.set_len(len).unwrap();
        file.write_at(&[1; 5], 0).unwrap();
        assert!(files.list(dir).unwrap().is_empty());
        files.remove_directory(dir).unwrap();
        assert_eq!(files.open(&dir.join("file"), Access::Write).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(file.sync().is_ok() && files.list(dir).unwrap().is_empty(), "it was given up");
    }
}
