//! The version of libtorch that this crate works with, and the one that an installed libtorch states.

use std::fs;
use std::path::{Path, PathBuf};

/// The version of libtorch that this crate was built with; without the feature `torch`, the one that it can be built with.
pub const VERSION: &str = env!("FSDP_LIBTORCH_VERSION");

/// The version that a libtorch states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatedVersion {
    /// The version, including a local part (`2.11.0+cu130`).
    pub version: String,
    /// The file that states it.
    pub file: PathBuf,
}

impl StatedVersion {
    /// Whether it is [`VERSION`]: a program and libtorch exchange C++ classes, whose layouts differ between versions.
    pub fn is_expected(&self) -> bool {
        // If the headers did not state a version, there is nothing to compare with.
        release(&self.version) == VERSION || VERSION == "unknown"
    }
}

/// The version that the libtorch in the folder `lib` states; `None` if its distribution lacks such a file. The library has no
/// function for this. Wheels have `version.py` in the module's folder, zip distributions `build-version`.
pub fn stated_version(lib: &Path) -> Option<StatedVersion> {
    let root = lib.parent()?;
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
    fn libtorch_version_is_read_from_wheel_or_zip() {
        let root = tempfile::tempdir().expect("a folder");
        let lib = root.path().join("lib");
        assert_eq!(stated_version(&lib), None, "that is not an error");
        fs::write(root.path().join("build-version"), "2.10.0+cpu\n").expect("room");
        let zip = stated_version(&lib).expect("it is said");
        assert_eq!((zip.version.as_str(), zip.file), ("2.10.0+cpu", root.path().join("build-version")));
        let text = "__all__ = ['__version__']\n__version__ = '2.12.1+cu130'\ncuda = '13.0'\n";
        fs::write(root.path().join("version.py"), text).expect("room");
        let wheel = stated_version(&lib).expect("it is said");
        assert_eq!((wheel.version.as_str(), &wheel.file), ("2.12.1+cu130", &root.path().join("version.py")));
        assert!(!wheel.is_expected());
        assert!(StatedVersion { version: format!("{VERSION}+cpu"), ..wheel }.is_expected());
    }

    #[test]
    fn version_suffixes_are_ignored() {
        for version in ["2.11.0", "2.11.0+cu130", "2.11.0a0+gitabc", "2.11.0.dev20260101"] {
            assert_eq!(release(version), "2.11.0");
        }
        assert_eq!(release("2.11.1"), "2.11.1");
    }
}
