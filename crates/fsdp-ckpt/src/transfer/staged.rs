//! The life of an output: it is written under a temporary name next to its destination, and either gets its final name
//! in one step when it is complete, or is removed. In an object store it has its final names from the start, and the
//! file that makes it complete (a manifest, an index, the metadata of DCP) comes last.
//!
//! An [`export`](crate::export) replaces an existing output of its name, because a trainer writes the same model
//! repeatedly; a staged output refuses to. Temporary names start with a dot, are unique to the process and are locked,
//! so that leftovers of a killed process can be told from the output of a running one, and are removed.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    error::Error,
    file_io::{Files, PathFile, directory_of, file_name},
    files::FileKind,
};

/// Distinguishes the outputs of one process.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Whether an output is one file or a directory of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// One file.
    File,
    /// A directory.
    Directory,
}

/// An output under its temporary name. Dropping it removes everything.
#[derive(Debug)]
#[must_use = "dropping a staged output removes it"]
pub struct Staged {
    pub(super) files: Files,
    destination: PathBuf,
    temporary: PathBuf,
    kind: OutputKind,
    /// Whether it replaces an existing file.
    replaces: bool,
    /// Whether it has its final name from the start.
    pub(super) in_place: bool,
    /// Open handle that holds the lock.
    lock: Option<PathFile>,
    /// Whether there is anything to remove on drop.
    is_there: bool,
}

impl Staged {
    /// Starts an output. The parent directory of the destination must exist, and the destination must not, except that
    /// an empty directory may exist if the output is a directory.
    ///
    /// # Errors
    /// [`Error::WrongPath`] if the destination exists, or the path has no file name; [`Error::Io`].
    pub fn new(destination: &Path, kind: OutputKind) -> Result<Staged, Error> {
        Staged::on(Files::anywhere(), destination, kind)
    }

    /// Starts an output of one file that replaces an existing file of its name.
    ///
    /// # Errors
    /// [`Error::WrongPath`] if the path has no file name; [`Error::Io`].
    pub fn replacing(destination: &Path) -> Result<Staged, Error> {
        Staged::begin(Files::anywhere(), destination, OutputKind::File, true)
    }

    /// Starts an output on a given file system.
    pub(crate) fn on(files: Files, destination: &Path, kind: OutputKind) -> Result<Staged, Error> {
        Staged::begin(files, destination, kind, false)
    }

    fn begin(files: Files, destination: &Path, kind: OutputKind, replaces: bool) -> Result<Staged, Error> {
        let name = file_name(destination)?;
        if !replaces {
            refuse_existing(&files, destination, kind)?;
        }
        let in_place = !files.renames(destination);
        let mut staged = Staged {
            files: files.clone(),
            destination: destination.to_owned(),
            temporary: destination.to_owned(),
            kind,
            replaces,
            in_place,
            lock: None,
            is_there: in_place,
        };
        if in_place {
            return Ok(staged);
        }
        let dir = directory_of(destination);
        let prefix = format!(".{}.tmp-", name.to_string_lossy());
        remove_leftovers(&files, &dir, &prefix)?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        staged.temporary = dir.join(format!("{prefix}{}-{number}", std::process::id()));
        staged.lock = match kind {
            OutputKind::File => Some(staged.files.create_locked(&staged.temporary, 0)?),
            OutputKind::Directory => {
                staged.files.create_directory_if_absent(&staged.temporary)?;
                // Network file systems may not be able to lock directories; leftovers stay there.
                staged.files.lock(&staged.temporary).ok().flatten()
            }
        };
        staged.is_there = true;
        Ok(staged)
    }

    /// The final path.
    pub fn destination(&self) -> &Path {
        &self.destination
    }

    /// Whether the output is one file or a directory.
    pub fn kind(&self) -> OutputKind {
        self.kind
    }

    /// Temporary path of a file of the output.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        match self.kind {
            OutputKind::File => self.temporary.clone(),
            OutputKind::Directory => self.temporary.join(name),
        }
    }

    /// The file system for temporary files.
    pub(super) fn scratch_files(&self) -> Files {
        if self.in_place { Files::anywhere() } else { self.files.clone() }
    }

    /// The directory for temporary files.
    pub(super) fn scratch_dir(&self) -> PathBuf {
        match self.kind {
            _ if self.in_place => std::env::temp_dir(),
            OutputKind::File => directory_of(&self.temporary),
            OutputKind::Directory => self.temporary.clone(),
        }
    }

    /// Gives the output its final name. With `sync`, the name is durable on return; the contents must have been made
    /// durable before.
    pub(super) fn commit(mut self, sync: bool) -> Result<(), Error> {
        if self.in_place {
            self.is_there = false;
            return Ok(());
        }
        if sync && self.kind == OutputKind::Directory {
            self.files.sync_directory(&self.temporary)?;
        }
        if !self.replaces {
            refuse_existing(&self.files, &self.destination, self.kind)?;
        }
        self.files.rename(&self.temporary, &self.destination)?;
        self.is_there = false;
        if sync { self.files.sync_directory(&directory_of(&self.destination)) } else { Ok(()) }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.is_there {
            // An error here cannot be reported; the next output to this destination removes the leftover.
            let _ = match (self.in_place, self.kind) {
                // There may be no complete file yet, but many uploads in progress.
                (true, OutputKind::Directory) => self.files.remove_tree(&self.temporary),
                // An existing object is not this output, which would be complete; only end the upload.
                (true, OutputKind::File) => self.files.give_up(&self.temporary),
                (false, _) => remove(&self.files, &self.temporary),
            };
        }
    }
}

fn refuse_existing(files: &Files, destination: &Path, kind: OutputKind) -> Result<(), Error> {
    match files.kind_of_name(destination) {
        None => Ok(()),
        Some(FileKind::Directory) if kind == OutputKind::Directory && files.list(destination)?.is_empty() => {
            Ok(())
        }
        // The rename would replace the link itself, not the directory.
        Some(FileKind::Other(_)) if files.is_directory(destination) => {
            let reason = "it is a symbolic link to a directory, which an output cannot replace; name the \
                          directory that it points to, which must be empty, or another destination";
            Err(Error::wrong_path(destination, reason))
        }
        Some(_) => {
            let reason = "it exists already; remove it or choose another destination";
            Err(Error::wrong_path(destination, reason))
        }
    }
}

/// Removes leftovers of outputs to the same destination that no living process has locked.
fn remove_leftovers(files: &Files, dir: &Path, prefix: &str) -> Result<(), Error> {
    for name in files.list(dir)?.iter().filter(|name| name.starts_with(prefix)) {
        let path = dir.join(name);
        if files.lock(&path).is_ok_and(|held| held.is_some()) {
            remove(files, &path)?;
        }
    }
    Ok(())
}

fn remove(files: &Files, path: &Path) -> Result<(), Error> {
    if files.is_directory(path) { files.remove_tree(path) } else { files.remove_if_there(path).map(drop) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        Files::anywhere().list(dir).unwrap()
    }

    #[test]
    fn output_appears_only_on_commit() {
        let dir = tempfile::tempdir().unwrap();
        for kind in [OutputKind::File, OutputKind::Directory] {
            let destination = dir.path().join("out");
            let staged = Staged::new(&destination, kind).unwrap();
            fs::write(staged.path_of("data"), b"1234").unwrap();
            drop(staged);
            assert!(names(dir.path()).is_empty());
            let staged = Staged::new(&destination, kind).unwrap();
            fs::write(staged.path_of("data"), b"1234").unwrap();
            assert!(!destination.exists());
            staged.commit(true).unwrap();
            assert_eq!(names(dir.path()), ["out"]);
            remove(&Files::anywhere(), &destination).unwrap();
        }
    }

    #[test]
    fn existing_destination_is_rejected_on_create_and_commit() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("out");
        let staged = Staged::new(&destination, OutputKind::File).unwrap();
        fs::write(&destination, b"of somebody else").unwrap();
        let error = staged.commit(false).unwrap_err().to_string();
        assert!(error.contains("out: it exists already"), "{error}");
        assert!(Staged::new(&destination, OutputKind::Directory).is_err());
        assert_eq!(fs::read(&destination).unwrap(), b"of somebody else");
        assert_eq!(names(dir.path()), ["out"]);
    }

    #[test]
    fn only_empty_destination_directory_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("out");
        fs::create_dir(&destination).unwrap();
        assert!(Staged::new(&destination, OutputKind::File).is_err());
        Staged::new(&destination, OutputKind::Directory).unwrap().commit(true).unwrap();
        fs::write(destination.join("x"), b"").unwrap();
        assert!(Staged::new(&destination, OutputKind::Directory).is_err());
    }

    #[test]
    fn symlink_to_directory_is_rejected_before_writing() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        for kind in [OutputKind::File, OutputKind::Directory] {
            let error = Staged::new(&link, kind).unwrap_err().to_string();
            assert!(error.contains("link: it is a symbolic link to a directory"), "{error}");
        }
        assert_eq!(names(dir.path()), ["link", "real"]);
        Staged::new(&link.canonicalize().unwrap(), OutputKind::Directory).unwrap().commit(true).unwrap();
    }

    #[test]
    fn only_leftovers_of_dead_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("out");
        fs::create_dir(dir.path().join(".out.tmp-1-0")).unwrap();
        fs::write(dir.path().join(".out.tmp-1-0/part"), b"x").unwrap();
        fs::write(dir.path().join(".out.tmp-2-0"), b"x").unwrap();
        fs::write(dir.path().join(".other.tmp-2-0"), b"x").unwrap();
        let first = Staged::new(&destination, OutputKind::Directory).unwrap();
        let second = Staged::new(&destination, OutputKind::File).unwrap();
        assert_eq!(names(dir.path()).len(), 3);
        drop((first, second));
        assert_eq!(names(dir.path()), [".other.tmp-2-0"]);
    }
}
