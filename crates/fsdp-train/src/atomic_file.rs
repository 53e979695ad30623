//! Writes files that are either complete or absent, even if interrupted.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use fsdp_ckpt::{is_url, objects};

use crate::error::TrainError;

/// Atomically replaces a small file of a run, on disk or in an object store.
///
/// # Errors
/// [`TrainError::Io`], [`TrainError::Checkpoint`].
pub(crate) fn write_small(path: &Path, content: impl AsRef<[u8]>) -> Result<(), TrainError> {
    let content = content.as_ref();
    if is_url(path) {
        return Ok(objects::write(path, content)?);
    }
    replace(path, content).map(drop).map_err(TrainError::io("write", path))
}

/// Atomically replaces a file. Its content is durable before it gets the name, and the name is durable on return. The
/// returned file is open for writing after the content.
///
/// Links are never followed: a link with the name of the file, or of the temporary file beside it, is itself replaced.
///
/// # Errors
/// If the folder or a file in it cannot be written. An existing file is then unchanged, unless only the last step
/// failed, which makes the new name durable.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<File> {
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let replaced = write_new(&temporary, content).and_then(|file| {
        fs::rename(&temporary, path)?;
        Ok(file)
    });
    if replaced.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    let file = replaced?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(file)
}

/// Creates a file. Fails if the path exists, even as a dangling link.
fn write_new(path: &Path, content: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn replaced_file_stays_open_for_appending() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        fs::write(&path, "old and long").unwrap();
        replace(&path, b"new").unwrap().write_all(b", more").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new, more");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn planted_symlinks_are_replaced_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("other");
        for planted in ["a.txt", "a.txt.tmp"] {
            fs::write(&other, "precious").unwrap();
            symlink(&other, dir.path().join(planted)).unwrap();
            replace(&dir.path().join("a.txt"), b"new").unwrap();
            assert_eq!(fs::read_to_string(&other).unwrap(), "precious", "{planted}");
            assert!(fs::symlink_metadata(dir.path().join("a.txt")).unwrap().is_file(), "{planted}");
        }
    }

    #[test]
    fn failed_replace_leaves_target_and_no_temp_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a.txt/inside")).unwrap();
        replace(&dir.path().join("a.txt"), b"new").unwrap_err();
        assert!(dir.path().join("a.txt/inside").exists());
        assert!(!dir.path().join("a.txt.tmp").exists(), "no temporary file is left");
    }
}
