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
fn a_library_that_is_nowhere_is_said_with_the_places_that_were_tried() {
    insta::assert_snapshot!(refusal(Path::new("/nowhere/libmpi.so.40")), @r"
    no MPI library was found; install Open MPI or MPICH, or name the file in FSDP_MPI_LIBRARY; tried
      FILE: cannot open shared object file: No such file or directory
    ");
}

#[test]
fn a_library_that_lacks_a_function_is_refused() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH", "MPI_Iprobe=fake_probe"]);
    insta::assert_snapshot!(refusal(&file), @"FILE has no function MPI_Iprobe: it is not MPI, or older than MPI 3");
}

#[test]
fn a_library_whose_constants_are_not_known_is_refused() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH", "VERSION=\"Another MPI 1.0\""]);
    insta::assert_snapshot!(refusal(&file), @r#"FILE is neither Open MPI, nor MPICH (or compatible), nor of the standard ABI; its version text: "Another MPI 1.0""#);
}

#[test]
fn a_library_without_threads_is_refused() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH", "PROVIDED=0"]);
    let library = MpiLibrary::open(&file).unwrap();
    let Err(error) = MpiWorld::open(library, LONG, Arc::new(SharedAlarm::default())) else { panic!() };
    assert!(matches!(error, MpiError::Threads { provided: 0, needed: 1, .. }), "{error}");
    assert_eq!(error.kind(), FailureKind::Input);
}

#[test]
fn what_a_library_says_of_itself_is_one_line() {
    let file = build("libmpi.so.12", &["FAMILY_MPICH"]);
    assert_eq!(MpiLibrary::open(&file).unwrap().version(), "MPICH Version: 4.0.2");
}
