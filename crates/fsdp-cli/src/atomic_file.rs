//! Writes small files atomically: under a temporary name, then renamed.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

/// Writes a file that must not exist: one that appears meanwhile is not replaced.
///
/// # Errors
/// [`io::Error`]; of kind [`io::ErrorKind::AlreadyExists`] if it exists.
pub(crate) fn create(file: &Path, text: &str) -> io::Result<()> {
    create_temporary(file, text)?.persist_noclobber(file).map(drop).map_err(|failed| failed.error)
}

/// Writes a file, replacing an existing one.
///
/// # Errors
/// [`io::Error`].
pub(crate) fn replace(file: &Path, text: &str) -> io::Result<()> {
    create_temporary(file, text)?.persist(file).map(drop).map_err(|failed| failed.error)
}

/// Whether a file may be replaced by one that begins with `head`: it does not exist, is empty, or begins like that. Anything but
/// a regular file, such as a pipe, has no contents to lose.
///
/// # Errors
/// [`io::Error`].
pub(crate) fn is_replaceable(file: &Path, head: &str) -> io::Result<bool> {
    match fs::metadata(file) {
        Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(found) if !found.is_file() || found.len() == 0 => return Ok(true),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    }
    let mut found = Vec::new();
    File::open(file)?.take(head.len() as u64).read_to_end(&mut found)?;
    Ok(found == head.as_bytes())
}

/// The folder of a file.
pub(crate) fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn create_temporary(file: &Path, text: &str) -> io::Result<NamedTempFile> {
    let mut temporary = Builder::new()
        .prefix(".fsdp-")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder_of(file))?;
    temporary.write_all(text.as_bytes())?;
    temporary.as_file().sync_all()?;
    Ok(temporary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn create_keeps_existing_file_and_replace_overwrites_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run.toml");
        create(&file, "first").unwrap();
        assert_eq!(create(&file, "second").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&file).unwrap(), "first");
        replace(&file, "third").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "third");
        // The permissions are those of ordinary files, not of temporary ones.
        let ordinary =
            fs::write(dir.path().join("other"), "").and_then(|()| fs::metadata(dir.path().join("other")));
        assert_eq!(fs::metadata(&file).unwrap().permissions(), ordinary.unwrap().permissions());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
