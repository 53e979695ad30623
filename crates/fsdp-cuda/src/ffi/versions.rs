//! What libraries say of their version.

use std::ffi::c_int;
use std::path::{Path, PathBuf};

use super::library::{Library, LibraryError, Wanted};

/// NVIDIA's driver.
pub(crate) const DRIVER: Wanted = Wanted {
    name: "the NVIDIA driver",
    files: &["libcuda.so.1", "libcuda.so"],
    install: "install NVIDIA's driver for this GPU",
};

/// The run-time compiler of kernels.
pub(crate) const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    install: "install the CUDA toolkit, or the Python wheel nvidia-cuda-nvrtc (it comes with torch)",
};

/// NVIDIA's matrix products, which libtorch uses.
pub(crate) const CUBLAS: Wanted = Wanted {
    name: "cuBLAS",
    files: &["libcublas.so.13", "libcublas.so.12", "libcublas.so"],
    install: "install the CUDA toolkit, or the Python wheel nvidia-cublas (it comes with torch)",
};

/// A library that was found, and the version that it states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) version: Option<String>,
}

/// Looks for the driver.
pub(crate) fn driver(folders: &[PathBuf]) -> Result<Found, LibraryError> {
    let library = Library::open(DRIVER, folders)?;
    // SAFETY: `CUresult cuDriverGetVersion(int *)`, which needs no initialised driver; the library stays open here.
    let get = unsafe { library.function::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuDriverGetVersion") }?;
    let mut number = 0;
    // SAFETY: the number outlives the call.
    let code = unsafe { get(&raw mut number) };
    let version = (code == 0).then(|| format!("CUDA {}.{}", number / 1000, number % 1000 / 10));
    Ok(found(library, version))
}

/// Looks for the compiler of kernels.
pub(crate) fn nvrtc(folders: &[PathBuf]) -> Result<Found, LibraryError> {
    let library = Library::open(NVRTC, folders)?;
    type Get = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    // SAFETY: `nvrtcResult nvrtcVersion(int *major, int *minor)`; the library stays open here.
    let get = unsafe { library.function::<Get>("nvrtcVersion") }?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both numbers outlive the call.
    let code = unsafe { get(&raw mut major, &raw mut minor) };
    let version = (code == 0).then(|| format!("{major}.{minor}"));
    Ok(found(library, version))
}

/// Loads the compiler of kernels from one of `folders`, so that it is found by name later, wherever the system's loader
/// looks. Nothing is said when it is nowhere: whoever compiles a kernel does.
pub fn load_compiler(folders: &[PathBuf]) {
    // The compiler opens its other half by name, and would not look beside itself.
    for file in folders.iter().flat_map(|folder| files(folder, "libnvrtc-builtins.so")) {
        // SAFETY: opening runs the initialisers of the library, which are NVIDIA's. It is never closed.
        match unsafe { libloading::Library::new(&file) } {
            Ok(library) => std::mem::forget(library),
            Err(error) => tracing::debug!(%error, file = %file.display(), "not loaded"),
        }
    }
    if let Err(error) = nvrtc(folders) {
        tracing::debug!(%error, "no compiler of kernels");
    }
}

/// The files of a folder whose names begin so.
fn files(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let names = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    names.map(|entry| entry.path()).collect()
}

/// Looks for cuBLAS.
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
    Ok(found(library, version))
}

fn found(library: Library, version: Option<String>) -> Found {
    let path = library.path().to_owned();
    // Closing and opening again is not what these libraries are made for.
    std::mem::forget(library);
    Found { path, version }
}
