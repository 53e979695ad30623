//! The file operations of this crate, whose errors name the path.
//!
//! [`Files`] is a file system, [`PathFile`] an open file in it. Operations that the underlying trait leaves out are
//! built here: whole reads and writes, locked temporary files, recursive removal.

use std::{
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

#[cfg(feature = "object-store")]
use crate::files::object;
use crate::{
    error::{Error, FileAction},
    files::{Access, FileKind, FileSystem, Metadata, OpenFile, disk::Disk, url},
};

/// A file system whose errors name the path.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// `None` for the file systems that a user can name: the disk, and object stores by their URLs.
    only: Option<Arc<dyn FileSystem>>,
}

/// An open file that knows its path.
#[derive(Debug)]
pub(crate) struct PathFile {
    file: Box<dyn OpenFile>,
    files: Files,
    path: PathBuf,
}

/// The result of an attempt to lock a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// This handle holds the lock until it is closed.
    Here,
    /// Another handle of the file holds the lock.
    Elsewhere,
    /// The file system has no locks, so a second holder goes unnoticed.
    Unsupported,
}

impl Files {
    /// The disk, and object stores for URLs.
    pub(crate) fn anywhere() -> Files {
        Files { only: None }
    }

    /// Another file system, for tests.
    #[cfg(test)]
    pub(crate) fn of(files: Arc<dyn FileSystem>) -> Files {
        Files { only: Some(files) }
    }

    /// Calls the file system that a path belongs to.
    fn at<T>(&self, path: &Path, call: impl FnOnce(&dyn FileSystem) -> io::Result<T>) -> io::Result<T> {
        match &self.only {
            Some(files) => call(&**files),
            None if !url::is_url(path) => call(&Disk),
            #[cfg(feature = "object-store")]
            None => call(&*object::at(path)?),
            #[cfg(not(feature = "object-store"))]
            None => Err(io::Error::new(io::ErrorKind::Unsupported, url::UrlFault::NotBuilt)),
        }
    }

    /// Whether files at a path can be renamed: true for disks, false for object stores.
    pub(crate) fn renames(&self, path: &Path) -> bool {
        self.only.as_ref().map_or_else(|| !url::is_url(path), |files| files.renames())
    }

    /// Opens a regular file for reading; returns its length too.
    pub(crate) fn open(&self, path: &Path) -> Result<(PathFile, u64), Error> {
        let opened = failed(FileAction::Open, path);
        // Merely opening a device may have side effects.
        expect_file(path, self.at(path, |files| files.metadata(path)).map_err(&opened)?)?;
        let file = self.open_as(path, Access::Read, FileAction::Open)?;
        // The name may refer to something else by now.
        let metadata = file.file.metadata().map_err(&opened)?;
        expect_file(path, metadata)?;
        Ok((file, metadata.len))
    }

    /// Creates a file that must not exist yet.
    pub(crate) fn create_new(&self, path: &Path) -> Result<PathFile, Error> {
        self.open_as(path, Access::CreateNew, FileAction::Create)
    }

    /// Creates a file of `len` zero bytes, reserves disk space for it, and locks it until it is closed. A leftover of
    /// an earlier process is emptied first; a file that another handle has locked is an error.
    pub(crate) fn create_locked(&self, path: &Path, len: u64) -> Result<PathFile, Error> {
        let before = self.kind_of_name(path);
        if before.is_some_and(|found| found != FileKind::File) {
            return Err(not_as_planned(path));
        }
        let created = self.open_as(path, Access::CreateOrWrite, FileAction::Create)?;
        let locked = created.try_lock();
        let is_ours = locked.as_ref().map_or(before.is_none(), |locked| *locked != Locked::Elsewhere);
        let ready = locked.and_then(|locked| {
            // Between opening and locking, the previous holder may have renamed or removed the file.
            if locked == Locked::Elsewhere || !created.is_still_at_path() {
                let reason =
                    "this temporary file is being written by another export; wait for it or remove the path";
                return Err(Error::unavailable(path, reason));
            }
            created.set_len(0)?;
            created.allocate(len)
        });
        if is_ours && ready.is_err() {
            // Report the first error.
            let _ = created.remove();
        }
        ready.map(|_| created)
    }

    /// Opens an existing file for writing in place.
    pub(crate) fn open_for_writing(&self, path: &Path) -> Result<PathFile, Error> {
        self.open_as(path, Access::Write, FileAction::Open)
    }

    /// Locks a directory or file until the handle is closed; `None` if another handle holds the lock.
    pub(crate) fn lock(&self, path: &Path) -> Result<Option<PathFile>, Error> {
        let opened = self.open_as(path, Access::Read, FileAction::Open)?;
        Ok((opened.try_lock()? != Locked::Elsewhere).then_some(opened))
    }

    /// Opens a lock file, which is created if it does not exist.
    pub(crate) fn open_lock(&self, path: &Path) -> Result<PathFile, Error> {
        self.open_as(path, Access::CreateOrWrite, FileAction::Create)
    }

    /// Reads a whole file; `None` if it has more than `len_max` bytes.
    pub(crate) fn read_small(&self, path: &Path, len_max: u64) -> Result<Option<Vec<u8>>, Error> {
        let (file, len) = self.open(path)?;
        (len <= len_max).then(|| file.read_first(len)).transpose()
    }

    /// Reads a whole file whose length this crate controls.
    pub(crate) fn read_whole(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let (file, len) = self.open(path)?;
        file.read_first(len)
    }

    /// Writes a small file that must not exist yet, and makes its contents durable.
    pub(crate) fn write_new(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        self.create_new(path)?.put(bytes)
    }

    /// Writes a small object in one step, replacing an object with this name.
    pub(crate) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        self.open_as(path, Access::CreateOrWrite, FileAction::Create)?.put(bytes)
    }

    /// Whether a path exists; follows symbolic links.
    pub(crate) fn exists(&self, path: &Path) -> bool {
        self.at(path, |files| files.metadata(path)).is_ok()
    }

    /// Whether a name exists, even as a symbolic link that leads nowhere.
    pub(crate) fn link_exists(&self, path: &Path) -> bool {
        self.at(path, |files| files.link_metadata(path)).is_ok()
    }

    /// The kind of a name, without following symbolic links; `None` if it cannot be determined.
    pub(crate) fn kind_of_name(&self, path: &Path) -> Option<FileKind> {
        self.at(path, |files| files.link_metadata(path)).ok().map(|found| found.kind)
    }

    /// The metadata of a path; `None` if it does not exist.
    pub(crate) fn metadata_if_there(&self, path: &Path) -> Result<Option<Metadata>, Error> {
        if_there(self.at(path, |files| files.metadata(path)).map(Some))
            .map_err(failed(FileAction::Open, path))
    }

    /// Whether a path leads to a directory.
    pub(crate) fn is_directory(&self, path: &Path) -> bool {
        self.at(path, |files| files.metadata(path)).is_ok_and(|found| found.kind == FileKind::Directory)
    }

    /// The names in a directory, sorted. This crate makes only UTF-8 names; other names are returned altered.
    pub(crate) fn list(&self, dir: &Path) -> Result<Vec<String>, Error> {
        let names = self.at(dir, |files| files.list(dir)).map_err(failed(FileAction::List, dir))?;
        let mut names: Vec<String> = names.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// Creates a directory, if it does not exist.
    pub(crate) fn create_directory_if_absent(&self, dir: &Path) -> Result<(), Error> {
        let cause = match self.at(dir, |files| files.create_directory(dir)) {
            Ok(()) => return Ok(()),
            Err(cause) => cause,
        };
        if cause.kind() == io::ErrorKind::AlreadyExists {
            match self.metadata_if_there(dir)? {
                // A directory that another client has just made may not be visible yet; creating a file in it will
                // show.
                None | Some(Metadata { kind: FileKind::Directory, .. }) => return Ok(()),
                Some(_) => {}
            }
        }
        Err(failed(FileAction::Create, dir)(cause))
    }

    /// Makes the names in a directory durable.
    pub(crate) fn sync_directory(&self, dir: &Path) -> Result<(), Error> {
        self.at(dir, |files| files.sync_directory(dir)).map_err(failed(FileAction::Sync, dir))
    }

    /// Renames a file, replacing a file that has the new name.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.at(from, |files| files.rename(from, to)).map_err(failed(FileAction::Rename, from))
    }

    /// Renames a file or directory; returns whether it existed.
    pub(crate) fn rename_if_there(&self, from: &Path, to: &Path) -> Result<bool, Error> {
        if_there(self.at(from, |files| files.rename(from, to)).map(|()| true))
            .map_err(failed(FileAction::Rename, from))
    }

    /// Removes a file; returns whether it existed.
    pub(crate) fn remove_if_there(&self, path: &Path) -> Result<bool, Error> {
        if_there(self.at(path, |files| files.remove_file(path)).map(|()| true))
            .map_err(failed(FileAction::Remove, path))
    }

    /// Aborts the upload of objects at or below a path.
    pub(crate) fn give_up(&self, path: &Path) -> Result<(), Error> {
        self.at(path, |files| files.remove_directory(path)).map_err(failed(FileAction::Remove, path))
    }

    /// Removes a directory and everything in it. Tolerates that other processes remove parts of it at the same time.
    pub(crate) fn remove_tree(&self, dir: &Path) -> Result<(), Error> {
        let names = if_there(self.at(dir, |files| files.list(dir))).map_err(failed(FileAction::List, dir))?;
        for path in names.into_iter().map(|name| dir.join(name)) {
            let found = if_there(self.at(&path, |files| files.link_metadata(&path)).map(Some));
            match found.map_err(failed(FileAction::Remove, &path))? {
                Some(Metadata { kind: FileKind::Directory, .. }) => self.remove_tree(&path)?,
                Some(_) => drop(self.remove_if_there(&path)?),
                None => {}
            }
        }
        if_there(self.at(dir, |files| files.remove_directory(dir))).map_err(failed(FileAction::Remove, dir))
    }

    /// Total length of all files below a directory, in bytes.
    pub(crate) fn tree_bytes(&self, dir: &Path) -> Result<u64, Error> {
        let mut bytes = 0;
        for name in self.at(dir, |files| files.list(dir)).map_err(failed(FileAction::List, dir))? {
            let path = dir.join(name);
            let found = self
                .at(&path, |files| files.link_metadata(&path))
                .map_err(failed(FileAction::Open, &path))?;
            bytes += if found.kind == FileKind::Directory { self.tree_bytes(&path)? } else { found.len };
        }
        Ok(bytes)
    }

    /// Bytes that can still be written to the disk of a directory.
    pub(crate) fn free_bytes(&self, dir: &Path) -> Result<u64, Error> {
        self.at(dir, |files| files.free_bytes(dir)).map_err(failed(FileAction::Measure, dir))
    }

    fn open_as(&self, path: &Path, access: Access, action: FileAction) -> Result<PathFile, Error> {
        let file = self.at(path, |files| files.open(path, access)).map_err(failed(action, path))?;
        Ok(PathFile { file, files: self.clone(), path: path.to_owned() })
    }
}

/// The result of a call, or the default if it failed because the path does not exist.
fn if_there<T: Default>(called: io::Result<T>) -> io::Result<T> {
    called
        .or_else(|cause| if cause.kind() == io::ErrorKind::NotFound { Ok(T::default()) } else { Err(cause) })
}

impl PathFile {
    /// Opens a file of [`Files::anywhere`] for reading; returns its length too.
    pub(crate) fn open(path: &Path) -> Result<(PathFile, u64), Error> {
        Files::anywhere().open(path)
    }

    /// Tries to lock the file until it is closed.
    pub(crate) fn try_lock(&self) -> Result<Locked, Error> {
        match self.file.try_lock() {
            Ok(true) => Ok(Locked::Here),
            Ok(false) => Ok(Locked::Elsewhere),
            Err(cause) if cause.kind() == io::ErrorKind::Unsupported => Ok(Locked::Unsupported),
            Err(cause) => Err(failed(FileAction::Lock, &self.path)(cause)),
        }
    }

    /// Removes the path if it still leads to this file; another process may have replaced it.
    pub(crate) fn remove(&self) -> Result<(), Error> {
        if self.is_still_at_path() { self.files.remove_if_there(&self.path).map(drop) } else { Ok(()) }
    }

    /// Aborts the upload if this is an object that is being written, which frees its memory.
    pub(crate) fn give_up(&self) {
        if !self.files.renames(&self.path) {
            // An error here cannot be reported; stores can be configured to remove incomplete uploads.
            let _ = self.files.give_up(&self.path);
        }
    }

    /// Whether the path still leads to this file.
    pub(crate) fn is_still_at_path(&self) -> bool {
        match (self.file.metadata(), self.files.at(&self.path, |files| files.link_metadata(&self.path))) {
            (Ok(open), Ok(named)) => open.id == named.id,
            _ => false,
        }
    }

    /// The length of the file.
    pub(crate) fn len(&self) -> Result<u64, Error> {
        Ok(self.file.metadata().map_err(failed(FileAction::Open, &self.path))?.len)
    }

    /// The path with which the file was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the first `len` bytes.
    pub(crate) fn read_first(&self, len: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len as usize];
        self.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// Fills `out` with the bytes at `offset`.
    pub(crate) fn read_exact_at(&self, mut out: &mut [u8], mut offset: u64) -> Result<(), Error> {
        let failed = failed(FileAction::Read, &self.path);
        while !out.is_empty() {
            match self.file.read_at(out, offset) {
                Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => (out, offset) = (&mut out[count..], offset + count as u64),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(failed(cause)),
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` at `offset`.
    pub(crate) fn write_all_at(&self, mut bytes: &[u8], mut offset: u64) -> Result<(), Error> {
        let failed = failed(FileAction::Write, &self.path);
        while !bytes.is_empty() {
            match self.file.write_at(bytes, offset) {
                Ok(0) => return Err(failed(io::ErrorKind::WriteZero.into())),
                Ok(count) => (bytes, offset) = (&bytes[count..], offset + count as u64),
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(failed(cause)),
            }
        }
        Ok(())
    }

    /// Writes the whole contents and makes them durable.
    fn put(&self, bytes: &[u8]) -> Result<(), Error> {
        self.write_all_at(bytes, 0)?;
        self.sync()
    }

    /// Extends the file with zeros to `len` bytes and reserves disk space; returns false if only the length could be
    /// set.
    pub(crate) fn allocate(&self, len: u64) -> Result<bool, Error> {
        self.file.allocate(len).map_err(failed(FileAction::Allocate, &self.path))
    }

    /// Truncates the file or extends it with zeros.
    pub(crate) fn set_len(&self, len: u64) -> Result<(), Error> {
        self.file.set_len(len).map_err(failed(FileAction::Resize, &self.path))
    }

    /// Makes contents and length durable.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.file.sync().map_err(failed(FileAction::Sync, &self.path))
    }
}

/// The error for a temporary file that is not the one that was created.
pub(crate) fn not_as_planned(path: &Path) -> Error {
    Error::wrong_path(
        path,
        "this temporary file is not a regular file of the planned length; remove that path",
    )
}

/// The directory that contains a path.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Whether a name read from a file is a plain file name, without directories.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}

/// The last component of an output path, which must have one.
pub(crate) fn file_name(path: &Path) -> Result<&OsStr, Error> {
    let reason = "it does not end in a file name; give a path such as model.safetensors";
    path.file_name().ok_or_else(|| Error::wrong_path(path, reason))
}

/// Refuses anything but a regular file: a pipe may block forever, and a device has no end.
fn expect_file(path: &Path, found: Metadata) -> Result<(), Error> {
    match found.kind {
        FileKind::File => Ok(()),
        FileKind::Directory => Err(failed(FileAction::Open, path)(io::ErrorKind::IsADirectory.into())),
        FileKind::Other(what) => Err(Error::NotRegular { path: path.to_owned(), what }),
    }
}

/// Converts an I/O error of an action on a path to an [`Error`].
pub(crate) fn failed(action: FileAction, path: &Path) -> impl Fn(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |cause| Error::Io { action, path: path.clone(), cause }
}

#[cfg(test)]
mod tests;
