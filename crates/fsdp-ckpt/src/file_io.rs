//! The file operations of this crate, each with the error that names its path.
//!
//! Everything that touches the file system goes through here.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use crate::error::{Error, FileAction};

/// An open file that knows its path.
#[derive(Debug)]
pub(crate) struct PathFile {
    file: File,
    path: PathBuf,
}

impl PathFile {
    /// Opens for reading; returns the length too.
    pub(crate) fn open(path: &Path) -> Result<(PathFile, u64), Error> {
        let file = File::open(path).map_err(failed(FileAction::Open, path))?;
        let metadata = file.metadata().map_err(failed(FileAction::Open, path))?;
        if metadata.is_dir() {
            return Err(failed(FileAction::Open, path)(io::ErrorKind::IsADirectory.into()));
        }
        Ok((PathFile { file, path: path.to_owned() }, metadata.len()))
    }

    /// Opens an existing file for writing in place.
    pub(crate) fn open_for_writing(path: &Path) -> Result<PathFile, Error> {
        let file = OpenOptions::new().write(true).open(path).map_err(failed(FileAction::Open, path))?;
        Ok(PathFile { file, path: path.to_owned() })
    }

    /// Creates a file of `len` zero bytes and locks it for as long as it is open. A leftover of a former
    /// process is emptied first; one that another holder has locked is an error.
    pub(crate) fn create_locked(path: &Path, len: u64) -> Result<PathFile, Error> {
        let taken = |in_use| Error::TemporaryFileTaken { path: path.to_owned(), in_use };
        if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(taken(false));
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(path);
        let file = file.map_err(failed(FileAction::Create, path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(taken(true)),
            // Some file systems have no locks; there, two exports to one path are not noticed.
            Err(TryLockError::Error(cause)) if cause.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(cause)) => return Err(failed(FileAction::Create, path)(cause)),
        }
        let created = PathFile { file, path: path.to_owned() };
        // Between opening and locking, the former holder may have renamed or removed the file.
        if !created.is_still_at_path() {
            return Err(taken(true));
        }
        if let Err(cause) = created.file.set_len(0).and_then(|()| created.file.set_len(len)) {
            // The first error is the one to report; what is left behind is an empty file at worst.
            let _ = fs::remove_file(path);
            return Err(failed(FileAction::Resize, path)(cause));
        }
        Ok(created)
    }

    /// Removes the path, if it still leads to this file: another process may have put its own there since.
    pub(crate) fn remove(&self) -> Result<(), Error> {
        if self.is_still_at_path() { remove_if_there(&self.path) } else { Ok(()) }
    }

    /// Whether the path still leads to this file.
    pub(crate) fn is_still_at_path(&self) -> bool {
        match (self.file.metadata(), fs::symlink_metadata(&self.path)) {
            (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
            _ => false,
        }
    }

    /// The length of the file.
    pub(crate) fn len(&self) -> Result<u64, Error> {
        Ok(self.file.metadata().map_err(failed(FileAction::Open, &self.path))?.len())
    }

    /// The path that the file was opened with.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `out` from the bytes at `offset`.
    pub(crate) fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<(), Error> {
        self.file.read_exact_at(out, offset).map_err(failed(FileAction::Read, &self.path))
    }

    /// Writes all of `bytes` at `offset`.
    pub(crate) fn write_all_at(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.file.write_all_at(bytes, offset).map_err(failed(FileAction::Write, &self.path))
    }

    /// Makes content and length durable.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(failed(FileAction::Sync, &self.path))
    }
}

/// Renames a file, replacing what has the new name.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).map_err(failed(FileAction::Rename, from))
}

/// Removes a file; one that is not there is fine.
pub(crate) fn remove_if_there(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(failed(FileAction::Remove, path)(cause)),
        _ => Ok(()),
    }
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(failed(FileAction::Sync, path))
}

/// Turns an error of the operating system into ours.
pub(crate) fn failed(action: FileAction, path: &Path) -> impl Fn(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |cause| Error::Io { action, path: path.clone(), cause }
}
