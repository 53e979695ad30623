//! The life of an output: it grows under a temporary name beside its destination and gets its final name in
//! one step, complete, or is removed. In an object store it has its final names from the start, and what makes it
//! complete (a manifest, an index, the metadata of DCP) comes last.
//!
//! An [`export`](crate::export) replaces what has its name, because a trainer writes the same model again; a
//! staged output refuses to. Temporary names begin with a dot, tell processes apart and are locked, so that
//! what a killed process left is known from what another one is writing, and is removed.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    error::Error,
    file_io::{Files, PathFile, directory_of, file_name},
    files::FileKind,
};

/// Tells outputs of one process apart.
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
    /// Whether it takes the place of a file.
    replaces: bool,
    /// Whether it has its final name from the start.
    pub(super) in_place: bool,
    /// Open for its lock.
    lock: Option<PathFile>,
    /// Whether there is something to remove.
    is_there: bool,
}

impl Staged {
    /// Begins an output. The directory that the destination lies in must exist, the destination must not; an
    /// empty directory may be there where a directory is to come.
    ///
    /// # Errors
    /// [`Error::WrongPath`] if something is there, or the path has no file name; [`Error::Io`].
    pub fn new(destination: &Path, kind: OutputKind) -> Result<Staged, Error> {
        Staged::on(Files::anywhere(), destination, kind)
    }

    /// Begins an output of one file that takes the place of a file of its name.
    ///
    /// # Errors
    /// [`Error::WrongPath`] if the path has no file name; [`Error::Io`].
    pub fn replacing(destination: &Path) -> Result<Staged, Error> {
        Staged::begin(Files::anywhere(), destination, OutputKind::File, true)
    }

    /// Begins an output on a file system.
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
                // Network file systems may lock no directories; there, leftovers stay.
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

    /// One file, or a directory.
    pub fn kind(&self) -> OutputKind {
        self.kind
    }

    /// The temporary path of a file of the output.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        match self.kind {
            OutputKind::File => self.temporary.clone(),
            OutputKind::Directory => self.temporary.join(name),
        }
    }

    /// The file system of temporary files.
    pub(super) fn scratch_files(&self) -> Files {
        if self.in_place { Files::anywhere() } else { self.files.clone() }
    }

    /// The directory in which temporary files may be made.
    pub(super) fn scratch_dir(&self) -> PathBuf {
        match self.kind {
            _ if self.in_place => std::env::temp_dir(),
            OutputKind::File => directory_of(&self.temporary),
            OutputKind::Directory => self.temporary.clone(),
        }
    }

    /// Gives the output its name. With `sync`, the name is durable when this returns; contents must have been
    /// made durable before.
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
            // Nobody is left to tell; the next output to this destination removes a leftover.
            let _ = match (self.in_place, self.kind) {
                // Nothing may be there yet and much under way.
                (true, OutputKind::Directory) => self.files.remove_tree(&self.temporary),
                // What is there is not of this output, which would be complete.
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
        // The output takes the place of what has its name, which would be the link.
        Some(FileKind::Other(_)) if files.is_directory(destination) => {
            let reason = "it is a symbolic link to a directory, which an output can not take the place of; name the \
                          directory that it leads to, which must be empty, or another destination";
            Err(Error::wrong_path(destination, reason))
        }
        Some(_) => {
            let reason = "it exists already; remove it or choose another destination";
            Err(Error::wrong_path(destination, reason))
        }
    }
}

/// Removes outputs to the same destination that no living process holds.
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
    fn an_output_appears_whole_or_not_at_all() {
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
    fn what_exists_is_refused_before_and_after() {
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
    fn an_empty_directory_may_be_there_and_a_full_one_not() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("out");
        fs::create_dir(&destination).unwrap();
        assert!(Staged::new(&destination, OutputKind::File).is_err());
        Staged::new(&destination, OutputKind::Directory).unwrap().commit(true).unwrap();
        fs::write(destination.join("x"), b"").unwrap();
        assert!(Staged::new(&destination, OutputKind::Directory).is_err());
    }

    #[test]
    fn a_link_to_a_directory_is_refused_before_anything_is_made() {
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
    fn leftovers_of_dead_processes_are_removed_and_those_of_living_ones_stay() {
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
