//! Which libtorch this process has, and what came with it.

use std::path::{Path, PathBuf};

use crate::library;

/// The version of the libtorch that this was built with.
pub const VERSION: &str = env!("FSDP_LIBTORCH_VERSION");

/// The folder of the libtorch that is loaded, if the system says so.
pub fn folder() -> Option<PathBuf> {
    library::loaded(Path::new("libtorch_cpu.so"))?.parent().map(Path::to_owned)
}

/// Folders of the libraries that came with it: its own, and those of the wheels beside it.
pub fn library_folders() -> Vec<PathBuf> {
    let Some(lib) = folder() else { return Vec::new() };
    // <site-packages>/torch/lib
    let wheels = lib.ancestors().nth(2).map(library::wheel_folders).unwrap_or_default();
    std::iter::once(lib).chain(wheels).collect()
}
