//! Identifies the libtorch of this process, and the libraries installed with it.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::TorchError;
use crate::library;

/// The libtorch version that this program was built with.
pub const VERSION: &str = env!("FSDP_LIBTORCH_VERSION");

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

/// The version that a libtorch states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatedVersion {
    /// The version, including a local part (`2.11.0+cu130`).
    pub version: String,
    /// The file that states it.
    pub file: PathBuf,
}

/// The stated version of the loaded libtorch. The library has no function for this; it is stated by a file in the
/// parent of its folder. `None` if the distribution lacks that file.
pub fn stated_version() -> Option<StatedVersion> {
    stated_in(folder()?.parent()?)
}

/// Checks that the loaded libtorch has the version that this program was built with: its functions exchange C++
/// classes, whose layouts differ between versions. A libtorch that does not state its version passes.
///
/// # Errors
/// [`TorchError::Version`].
pub fn check_version() -> Result<(), TorchError> {
    stated_version().map_or(Ok(()), |stated| stated.expect(VERSION))
}

impl StatedVersion {
    fn expect(self, expected: &'static str) -> Result<(), TorchError> {
        // If the headers did not state a version, there is nothing to compare with.
        if release(&self.version) == expected || expected == "unknown" {
            return Ok(());
        }
        Err(TorchError::Version { file: self.file, found: self.version, expected })
    }
}

/// Wheels have `version.py` in the module's folder, zip distributions `build-version`.
fn stated_in(root: &Path) -> Option<StatedVersion> {
    let read = |name: &str, parse: fn(&str) -> Option<&str>| {
        let file = root.join(name);
        let text = fs::read_to_string(&file).ok()?;
        Some(StatedVersion { version: parse(&text)?.to_owned(), file })
    };
    let wheel = read("version.py", |text| {
        let value =
            text.lines().find_map(|line| line.strip_prefix("__version__"))?.trim().strip_prefix('=')?;
        Some(value.trim().trim_matches(['\'', '"']))
    });
    wheel.or_else(|| read("build-version", |text| Some(text.trim()).filter(|text| !text.is_empty())))
}

/// Major, minor and patch of a version; headers state no more.
fn release(version: &str) -> &str {
    let end = version.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(version.len());
    version[..end].trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loaded_libtorch_version_matches_build() {
        check_version().unwrap_or_else(|error| panic!("{error}"));
    }

    #[test]
    fn libtorch_version_is_read_from_wheel_or_zip() {
        let root = tempfile::tempdir().expect("a folder");
        assert_eq!(stated_in(root.path()), None, "that is no error");
        fs::write(root.path().join("build-version"), "2.10.0+cpu\n").expect("room");
        let zip = stated_in(root.path()).expect("it is said");
        assert_eq!((zip.version.as_str(), zip.file), ("2.10.0+cpu", root.path().join("build-version")));
        let text = "__all__ = ['__version__']\n__version__ = '2.12.1+cu130'\ncuda = '13.0'\n";
        fs::write(root.path().join("version.py"), text).expect("room");
        let wheel = stated_in(root.path()).expect("it is said");
        assert_eq!((wheel.version.as_str(), &wheel.file), ("2.12.1+cu130", &root.path().join("version.py")));
        let error = wheel.expect("2.11.0").expect_err("it is another version").to_string();
        for part in ["2.12.1+cu130", "version.py", "2.11.0", "LD_LIBRARY_PATH"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn version_suffixes_are_ignored() {
        for version in ["2.11.0", "2.11.0+cu130", "2.11.0a0+gitabc", "2.11.0.dev20260101"] {
            assert_eq!(release(version), "2.11.0");
        }
        assert_eq!(release("2.11.1"), "2.11.1");
    }
}
