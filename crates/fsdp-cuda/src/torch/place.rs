//! Identifies the libtorch of this process, and the libraries installed with it.

use std::path::{Path, PathBuf};

use super::error::TorchError;
use crate::library;
use crate::libtorch::{self, StatedVersion};

/// The folder of the loaded libtorch; `None` if the system does not show it.
pub fn folder() -> Option<PathBuf> {
    library::loaded(Path::new("libtorch_cpu.so"))?.parent().map(Path::to_owned)
}

/// Folders of the libraries installed with libtorch: its own, and those of the wheels beside it. Empty if libtorch's
/// folder is not known.
pub fn library_folders() -> Vec<PathBuf> {
    let Some(lib) = folder() else { return Vec::new() };
    // <site-packages>/torch/lib
    let wheels = lib.ancestors().nth(2).map(library::wheel_folders).unwrap_or_default();
    std::iter::once(lib).chain(wheels).collect()
}

/// The version that the loaded libtorch states. `None` if its distribution lacks the file for it.
pub fn stated_version() -> Option<StatedVersion> {
    libtorch::stated_version(&folder()?)
}

/// Checks that the loaded libtorch has the version that this program was built with. A libtorch that does not state its
/// version passes.
///
/// # Errors
/// [`TorchError::Version`].
pub fn check_version() -> Result<(), TorchError> {
    match stated_version() {
        Some(stated) if !stated.is_expected() => Err(TorchError::Version(stated)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loaded_libtorch_version_matches_build() {
        check_version().unwrap_or_else(|error| panic!("{error}"));
    }
}
