//! Where the packages of a Python are.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders in which Python's packages are installed if its commands are in `prefix/bin`, such as
/// `lib/python3.11/site-packages`: also on Debian, on Fedora, and by `pip install --target`.
pub(crate) fn package_folders(prefix: &Path) -> Vec<PathBuf> {
    let pythons = ["lib", "lib64"].into_iter().filter_map(|lib| fs::read_dir(prefix.join(lib)).ok());
    let mut pythons: Vec<PathBuf> = pythons
        .flat_map(|entries| entries.flatten())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path())
        .collect();
    pythons.sort();
    let packages = pythons
        .iter()
        .flat_map(|python| ["site-packages", "dist-packages"].map(|packages| python.join(packages)));
    packages.chain([prefix.to_owned()]).collect()
}
