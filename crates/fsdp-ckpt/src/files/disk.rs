//! The file system of the operating system.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

use rustix::{
    fs::{FallocateFlags, OFlags, fallocate, statvfs},
    io::{Errno, retry_on_intr},
};

use super::{Access, FileKind, FileSystem, Metadata, OpenFile};

/// `ENOLCK` on Linux: no locks are left, or NFS has no lock daemon.
const NO_LOCKS: i32 = 37;

/// The file system of the operating system.
#[derive(Debug)]
pub(crate) struct Disk;

impl FileSystem for Disk {
    fn renames(&self) -> bool {
        true
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        let mut options = OpenOptions::new();
        // Without it, opening a pipe would wait for its other end. It has no effect on regular files.
        options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
        match access {
            Access::Read => options.read(true),
            Access::Write => options.write(true),
            Access::CreateOrWrite => options.write(true).create(true).truncate(false),
            Access::CreateNew => options.write(true).create_new(true),
        };
        Ok(Box::new(options.open(path)?))
    }

    fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        fs::metadata(path).map(Metadata::from)
    }

    fn link_metadata(&self, path: &Path) -> io::Result<Metadata> {
        fs::symlink_metadata(path).map(Metadata::from)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn create_directory(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)
    }

    fn sync_directory(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_directory(&self, dir: &Path) -> io::Result<()> {
        fs::remove_dir(dir)
    }

    fn free_bytes(&self, dir: &Path) -> io::Result<u64> {
        let disk = statvfs(dir)?;
        Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
    }
}

impl OpenFile for File {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, out, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }

    fn allocate(&self, len: u64) -> io::Result<bool> {
        if len == 0 {
            return self.set_len(0).map(|()| true);
        }
        match retry_on_intr(|| fallocate(self, FallocateFlags::empty(), 0, len)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.set_len(len).map(|()| false),
            allocated => Ok(allocated.map(|()| true)?),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        File::metadata(self).map(Metadata::from)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }

    fn try_lock(&self) -> io::Result<bool> {
        locked(File::try_lock(self))
    }
}

/// Converts the result of an attempt to lock: whether the lock was taken.
fn locked(attempt: Result<(), TryLockError>) -> io::Result<bool> {
    match attempt {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(cause)) if cause.raw_os_error() == Some(NO_LOCKS) => {
            Err(io::Error::new(io::ErrorKind::Unsupported, cause))
        }
        Err(TryLockError::Error(cause)) => Err(cause),
    }
}

impl From<fs::Metadata> for Metadata {
    fn from(found: fs::Metadata) -> Metadata {
        let kind = match found.file_type() {
            kind if kind.is_file() => FileKind::File,
            kind if kind.is_dir() => FileKind::Directory,
            kind if kind.is_symlink() => FileKind::Other("a symbolic link"),
            kind if kind.is_fifo() => FileKind::Other("a named pipe"),
            kind if kind.is_socket() => FileKind::Other("a socket"),
            _ => FileKind::Other("a device"),
        };
        Metadata { kind, len: found.len(), id: (found.dev(), found.ino()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enolck_is_treated_as_missing_lock_support() {
        let failed = |number| locked(Err(TryLockError::Error(io::Error::from_raw_os_error(number))));
        assert_eq!(failed(NO_LOCKS).unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert_eq!(failed(5).unwrap_err().raw_os_error(), Some(5), "other failures stay what they are");
        assert!(locked(Ok(())).unwrap() && !locked(Err(TryLockError::WouldBlock)).unwrap());
    }
}
