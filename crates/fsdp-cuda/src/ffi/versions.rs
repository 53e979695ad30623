//! Versions reported by libraries.

use std::ffi::c_int;
use std::path::PathBuf;

use super::library::{Library, LibraryError, Wanted};

/// NVIDIA's matrix products, which libtorch uses.
pub(crate) const CUBLAS: Wanted = Wanted {
    name: "cuBLAS",
    files: &["libcublas.so.13", "libcublas.so.12", "libcublas.so"],
    install: "install the CUDA toolkit, or the Python wheel nvidia-cublas (it comes with torch)",
};

/// A library that was found, and the version that it reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) version: Option<String>,
}

/// Opens cuBLAS and returns its file and version.
pub(crate) fn cublas(folders: &[PathBuf]) -> Result<Found, LibraryError> {
    let library = Library::open(CUBLAS, folders)?;
    type Get = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
    // SAFETY: `cublasStatus_t cublasGetProperty(libraryPropertyType, int *)`; the library stays open here.
    let get = unsafe { library.function::<Get>("cublasGetProperty") }?;
    let part = |property: c_int| {
        let mut value = 0;
        // SAFETY: 0, 1 and 2 are MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL; the value outlives the call.
        let code = unsafe { get(property, &raw mut value) };
        (code == 0).then(|| value.to_string())
    };
    let version = [0, 1, 2].into_iter().map(part).collect::<Option<Vec<_>>>().map(|parts| parts.join("."));
    let path = library.path().to_owned();
    // These libraries do not support being closed and opened again.
    std::mem::forget(library);
    Ok(Found { path, version })
}
