//! The file operations of this crate, each with the error that names its path.
//!
//! [`Files`] is a file system, [`PathFile`] an open file of one. What the trait underneath leaves out is built
//! here: whole reads and writes, locked temporary files, removal of directories.

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

/// File systems whose errors name the path.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// None for those that a user can name: the disk, and object stores by their URLs.
    only: Option<Arc<dyn FileSystem>>,
}

/// An open file that knows its path.
#[derive(Debug)]
pub(crate) struct PathFile {
    file: Box<dyn OpenFile>,
    files: Files,
    path: PathBuf,
}

/// What came of an attempt to lock a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// It is locked until it is closed.
    Here,
    /// Another opening of the file holds the lock.
    Elsewhere,
    /// The file system has no locks: two holders are not noticed.
    Unsupported,
}

impl Files {
    /// The disk, and object stores by their URLs.
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

    /// Whether names can be changed at a path, as on disks and not in object stores.
    pub(crate) fn renames(&self, path: &Path) -> bool {
        self.only.as_ref().map_or_else(|| !url::is_url(path), |files| files.renames())
    }

    /// Opens a regular file for reading; returns the length too.
    pub(crate) fn open(&self, path: &Path) -> Result<(PathFile, u64), Error> {
        let opened = failed(FileAction::Open, path);
        // Opening a device may already do something.
        expect_file(path, self.at(path, |files| files.metadata(path)).map_err(&opened)?)?;
        let file = self.open_as(path, Access::Read, FileAction::Open)?;
        // Something else may have the name since.
        let metadata = file.file.metadata().map_err(&opened)?;
        expect_file(path, metadata)?;
        Ok((file, metadata.len))
    }

    /// Creates a file that must not be there yet.
    pub(crate) fn create_new(&self, path: &Path) -> Result<PathFile, Error> {
        self.open_as(path, Access::CreateNew, FileAction::Create)
    }

    /// Creates a file of `len` zero bytes, with their disk space, and locks it for as long as it is open. A leftover of a former
    /// process is emptied first; one that another holder has locked is an error.
    pub(crate) fn create_locked(&self, path: &Path, len: u64) -> Result<PathFile, Error> {
        let before = self.kind_of_name(path);
        if before.is_some_and(|found| found != FileKind::File) {
            return Err(not_as_planned(path));
        }
        let created = self.open_as(path, Access::CreateOrWrite, FileAction::Create)?;
        let locked = created.try_lock();
        let is_ours = locked.as_ref().map_or(before.is_none(), |locked| *locked != Locked::Elsewhere);
        let ready = locked.and_then(|locked| {
            // Between opening and locking, the former holder may have renamed or removed the file.
            if locked == Locked::Elsewhere || !created.is_still_at_path() {
                let reason =
                    "this temporary file is being written by another export; wait for it or remove the path";
                return Err(Error::unavailable(path, reason));
            }
            created.set_len(0)?;
            created.allocate(len)
        });
        if is_ours && ready.is_err() {
            // The first error is the one to report.
            let _ = created.remove();
        }
        ready.map(|_| created)
    }

    /// Opens an existing file for writing in place.
    pub(crate) fn open_for_writing(&self, path: &Path) -> Result<PathFile, Error> {
        self.open_as(path, Access::Write, FileAction::Open)
    }

    /// Locks a directory or file until the handle is closed; none if another holds it.
    pub(crate) fn lock(&self, path: &Path) -> Result<Option<PathFile>, Error> {
        let opened = self.open_as(path, Access::Read, FileAction::Open)?;
        Ok((opened.try_lock()? != Locked::Elsewhere).then_some(opened))
    }

    /// Opens a file, created if it is not there, whose only purpose is to be locked.
    pub(crate) fn open_lock(&self, path: &Path) -> Result<PathFile, Error> {
        self.open_as(path, Access::CreateOrWrite, FileAction::Create)
    }

    /// The whole content of a file, of at most `len_max` bytes; none if it is longer.
    pub(crate) fn read_small(&self, path: &Path, len_max: u64) -> Result<Option<Vec<u8>>, Error> {
        let (file, len) = self.open(path)?;
        (len <= len_max).then(|| file.read_first(len)).transpose()
    }

    /// The whole content of a file whose length is ours to choose.
    pub(crate) fn read_whole(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let (file, len) = self.open(path)?;
        file.read_first(len)
    }

    /// Writes a small file that must not be there yet, and makes its content durable.
    pub(crate) fn write_new(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        self.create_new(path)?.put(bytes)
    }

    /// Writes a small file of an object store in one step, in the place of what has its name.
    pub(crate) fn replace(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        self.open_as(path, Access::CreateOrWrite, FileAction::Create)?.put(bytes)
    }

    /// Whether something has this name, or is where it leads.
    pub(crate) fn exists(&self, path: &Path) -> bool {
        self.at(path, |files| files.metadata(path)).is_ok()
    }

    /// Whether something has this name, be it a link that leads nowhere.
    pub(crate) fn link_exists(&self, path: &Path) -> bool {
        self.at(path, |files| files.link_metadata(path)).is_ok()
    }

    /// What has this name, a link not followed; nothing if it can not be looked at.
    pub(crate) fn kind_of_name(&self, path: &Path) -> Option<FileKind> {
        self.at(path, |files| files.link_metadata(path)).ok().map(|found| found.kind)
    }

    /// What a path leads to, or nothing.
    pub(crate) fn metadata_if_there(&self, path: &Path) -> Result<Option<Metadata>, Error> {
        if_there(self.at(path, |files| files.metadata(path)).map(Some))
            .map_err(failed(FileAction::Open, path))
    }

    /// Whether the path leads to a directory.
    pub(crate) fn is_directory(&self, path: &Path) -> bool {
        self.at(path, |files| files.metadata(path)).is_ok_and(|found| found.kind == FileKind::Directory)
    }

    /// The names in a directory, sorted. Names that are not UTF-8 are none of ours and come out changed.
    pub(crate) fn list(&self, dir: &Path) -> Result<Vec<String>, Error> {
        let names = self.at(dir, |files| files.list(dir)).map_err(failed(FileAction::List, dir))?;
        let mut names: Vec<String> = names.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// Creates a directory; one that is there already is fine.
    pub(crate) fn create_directory_if_absent(&self, dir: &Path) -> Result<(), Error> {
        let cause = match self.at(dir, |files| files.create_directory(dir)) {
            Ok(()) => return Ok(()),
            Err(cause) => cause,
        };
        if cause.kind() == io::ErrorKind::AlreadyExists {
            match self.metadata_if_there(dir)? {
                // One that another client has just made may not be seen yet; what is created in it will tell.
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

    /// Renames a file, replacing what has the new name.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.at(from, |files| files.rename(from, to)).map_err(failed(FileAction::Rename, from))
    }

    /// Renames something; returns whether it was there.
    pub(crate) fn rename_if_there(&self, from: &Path, to: &Path) -> Result<bool, Error> {
        if_there(self.at(from, |files| files.rename(from, to)).map(|()| true))
            .map_err(failed(FileAction::Rename, from))
    }

    /// Removes a file; returns whether it was there.
    pub(crate) fn remove_if_there(&self, path: &Path) -> Result<bool, Error> {
        if_there(self.at(path, |files| files.remove_file(path)).map(|()| true))
            .map_err(failed(FileAction::Remove, path))
    }

    /// Gives up an object that is on its way.
    pub(crate) fn give_up(&self, path: &Path) -> Result<(), Error> {
        self.at(path, |files| files.remove_directory(path)).map_err(failed(FileAction::Remove, path))
    }

    /// Removes a directory and everything in it. Others may remove it at the same time: what is gone is no error.
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

    /// Bytes of all files below a directory, by their lengths.
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

    /// Bytes that may still be written to the disk of a directory.
    pub(crate) fn free_bytes(&self, dir: &Path) -> Result<u64, Error> {
        self.at(dir, |files| files.free_bytes(dir)).map_err(failed(FileAction::Measure, dir))
    }

    fn open_as(&self, path: &Path, access: Access, action: FileAction) -> Result<PathFile, Error> {
        let file = self.at(path, |files| files.open(path, access)).map_err(failed(action, path))?;
        Ok(PathFile { file, files: self.clone(), path: path.to_owned() })
    }
}

/// What a call returns, or the default if nothing has the name that it asks for.
fn if_there<T: Default>(called: io::Result<T>) -> io::Result<T> {
    called
        .or_else(|cause| if cause.kind() == io::ErrorKind::NotFound { Ok(T::default()) } else { Err(cause) })
}

impl PathFile {
    /// Opens a file of [`Files::anywhere`] for reading; returns the length too.
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

    /// Removes the path, if it still leads to this file: another process may have put its own there since.
    pub(crate) fn remove(&self) -> Result<(), Error> {
        if self.is_still_at_path() { self.files.remove_if_there(&self.path).map(drop) } else { Ok(()) }
    }

    /// Gives the file up, if it is an object on its way: it keeps memory until then.
    pub(crate) fn give_up(&self) {
        if !self.files.renames(&self.path) {
            // Nobody is left to tell; the store can be told to remove what is left of such.
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

    /// The path that the file was opened with.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The first `len` bytes.
    pub(crate) fn read_first(&self, len: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len as usize];
        self.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// Fills `out` from the bytes at `offset`.
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

    /// Writes the whole content, and makes it durable.
    fn put(&self, bytes: &[u8]) -> Result<(), Error> {
        self.write_all_at(bytes, 0)?;
        self.sync()
    }

    /// Extends the file by zeros to `len` bytes and takes their disk space; false where only the length could be set.
    pub(crate) fn allocate(&self, len: u64) -> Result<bool, Error> {
        self.file.allocate(len).map_err(failed(FileAction::Allocate, &self.path))
    }

    /// Cuts the file or extends it by zeros.
    pub(crate) fn set_len(&self, len: u64) -> Result<(), Error> {
        self.file.set_len(len).map_err(failed(FileAction::Resize, &self.path))
    }

    /// Makes content and length durable.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        self.file.sync().map_err(failed(FileAction::Sync, &self.path))
    }
}

/// The error for a temporary file that is something else than what was made there.
pub(crate) fn not_as_planned(path: &Path) -> Error {
    Error::wrong_path(
        path,
        "this temporary file is not a regular file of the planned length; remove that path",
    )
}

/// The directory that a path lies in.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Whether a file of this name, which a file gives, lies directly in its directory.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}

/// The last step of a path, which the path of an output must have.
pub(crate) fn file_name(path: &Path) -> Result<&OsStr, Error> {
    let reason = "it does not end in a file name; give a path such as model.safetensors";
    path.file_name().ok_or_else(|| Error::wrong_path(path, reason))
}

/// Refuses to read what is no regular file: a pipe can wait for ever, a device has no end.
fn expect_file(path: &Path, found: Metadata) -> Result<(), Error> {
    match found.kind {
        FileKind::File => Ok(()),
        FileKind::Directory => Err(failed(FileAction::Open, path)(io::ErrorKind::IsADirectory.into())),
        FileKind::Other(what) => Err(Error::NotRegular { path: path.to_owned(), what }),
    }
}

/// Turns an error of the operating system into ours.
pub(crate) fn failed(action: FileAction, path: &Path) -> impl Fn(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |cause| Error::Io { action, path: path.clone(), cause }
}

#[cfg(test)]
mod tests;
