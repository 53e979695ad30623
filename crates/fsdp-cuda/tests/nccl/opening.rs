//! Finding and opening the library, and the errors for one that is missing, too old, or not NCCL.

use std::fs;
use std::path::PathBuf;

use fsdp_cuda::library::{self, Library, LibraryError, Wanted};
use fsdp_cuda::nccl::{Nccl, NcclError};

use crate::fake;

/// A library that no machine has.
const NOWHERE: Wanted = Wanted {
    name: "Nothing",
    files: &["libfsdp-has-no-such-library.so.2", "libfsdp-has-no-such-library.so"],
    install: "install nothing",
};

#[test]
fn missing_library_error_lists_every_candidate_tried() {
    let folder = fake::fresh(&[]);
    let error = Library::open(NOWHERE, &[folder.clone(), PathBuf::from("/nowhere")]).unwrap_err();
    let LibraryError::NotFound { tried, .. } = &error else { panic!("{error}") };
    let (first, second) = (NOWHERE.files[0], NOWHERE.files[1]);
    let expected = [
        folder.join(first),
        folder.join(second),
        PathBuf::from("/nowhere").join(first),
        PathBuf::from("/nowhere").join(second),
        PathBuf::from(first),
        PathBuf::from(second),
    ];
    assert_eq!(tried.iter().map(|attempt| attempt.candidate.clone()).collect::<Vec<_>>(), expected);
    let text = error.to_string();
    assert!(text.starts_with("Nothing was not found; install nothing; tried\n"), "{text}");
    assert!(text.contains("/nowhere/libfsdp-has-no-such-library.so.2: no such file"), "{text}");
    assert!(
        text.contains(
            "\n  libfsdp-has-no-such-library.so (where the loader looks): libfsdp-has-no-such-library.so: "
        ),
        "{text}"
    );
}

#[test]
fn invalid_library_file_is_skipped() {
    let (broken, good) = (fake::fresh(&[]), fake::fresh(&[]));
    fs::write(broken.join("libnccl.so.2"), "not a library").unwrap();
    let nccl = Nccl::open(&[broken, good.clone()]).unwrap();
    assert_eq!(nccl.path(), good.join("libnccl.so.2"));
    assert_eq!(nccl.version().to_string(), "2.28.9");
}

#[test]
fn too_old_library_error_names_both_versions() {
    for (version, text) in [("21403", "2.14.3"), ("2708", "2.7.8")] {
        let folder = fake::fresh(&[&format!("FAKE_VERSION={version}")]);
        let error = Nccl::open(std::slice::from_ref(&folder)).unwrap_err();
        let NcclError::TooOld { path, .. } = &error else { panic!("{error}") };
        assert_eq!(path, &folder.join("libnccl.so.2"));
        let expected = format!("is NCCL {text}, but 2.18.1 or newer is needed; install");
        assert!(error.to_string().contains(&expected), "{error}");
    }
}

#[test]
fn missing_function_error_names_library_and_function() {
    let folder = fake::fresh(&["WITHOUT_SPLIT"]);
    let error = Nccl::open(std::slice::from_ref(&folder)).unwrap_err();
    let path = folder.join("libnccl.so.2");
    let expected = LibraryError::NoSymbol { name: "NCCL", path: path.clone(), symbol: "ncclCommSplit" };
    assert_eq!(error, NcclError::Library(expected));
    assert!(
        error.to_string().contains(&format!("{} has no function ncclCommSplit", path.display())),
        "{error}"
    );
}

#[test]
fn python_wheel_library_folders_are_found() {
    let root = fake::fresh(&[]);
    for folder in ["nvidia/nccl/lib", "nvidia/cu13/lib", "nvidia/cudnn/include"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    let expected = [root.join("nvidia/cu13/lib"), root.join("nvidia/nccl/lib")];
    assert_eq!(library::wheel_folders(&root), expected);
    assert_eq!(library::wheel_folders(&root.join("nowhere")), Vec::<PathBuf>::new());
}
