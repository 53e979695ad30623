//! Libraries that are missing, or not what their name says.

use std::path::Path;
use std::sync::Arc;

use fsdp_core::FailureKind;
use fsdp_mpi::{MpiError, MpiLibrary, MpiWorld};

use crate::fake::{LONG, SharedAlarm, build};

/// Returns the error for a library, with its path replaced by FILE.
fn refusal(file: &Path) -> String {
    let error = MpiLibrary::open(file).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Input);
    error.to_string().replace(&file.display().to_string(), "FILE")
}

#[test]
fn missing_library_error_lists_tried_places() {
    insta::assert_snapshot!(refusal(Path::new("/nowhere/libmpi.so.40")), @r"
    no MPI library was found; install Open MPI or MPICH, or name the file in FSDP_MPI_LIBRARY; tried
      FILE: cannot open shared object file: No such file or directory
    ");
}

#[test]
fn library_without_required_function_is_rejected() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH", "MPI_Iprobe=fake_probe"]);
    insta::assert_snapshot!(refusal(&file), @"FILE has no function MPI_Iprobe: it is not MPI, or older than MPI 3");
}

#[test]
fn library_of_unknown_family_is_rejected() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH", "VERSION=\"Another MPI 1.0\""]);
    insta::assert_snapshot!(refusal(&file), @r#"FILE is neither Open MPI, nor MPICH (or compatible), nor of the standard ABI; its version text: "Another MPI 1.0""#);
}

#[test]
fn library_without_thread_support_is_rejected() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH", "PROVIDED=0"]);
    let library = MpiLibrary::open(&file).unwrap();
    let Err(error) = MpiWorld::open(library, LONG, Arc::new(SharedAlarm::default())) else { panic!() };
    assert!(matches!(error, MpiError::Threads { provided: 0, needed: 1, .. }), "{error}");
    assert_eq!(error.kind(), FailureKind::Input);
}

#[test]
fn library_version_is_first_line() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH"]);
    assert_eq!(MpiLibrary::open(&file).unwrap().version(), "MPICH Version: 4.0.2");
}
