//! The files of an output under construction: created at full length, written at offsets, made durable.

use std::sync::Mutex;

use super::{
    open_files::OpenFiles,
    options::Options,
    plan::{PlannedFile, PlannedRun, Tail},
    runs::Runs,
    staged::{OutputKind, Staged},
    threads::each_in_threads,
};
use crate::{digest::Digest, error::Error, files::Access, lock::lock};

/// The planned files of an output, under their temporary names.
pub(super) struct Output<'a> {
    staged: &'a Staged,
    open: OpenFiles,
    /// For each place that needs a digest, the parts written so far.
    digests: Vec<Vec<Option<Mutex<Runs>>>>,
}

impl<'a> Output<'a> {
    /// Creates all files, with the bytes that are known beforehand.
    pub(super) fn create(staged: &'a Staged, files: &[PlannedFile]) -> Result<Output<'a>, Error> {
        let paths: Vec<_> = files.iter().map(|file| staged.path_of(&file.name)).collect();
        for (path, file) in paths.iter().zip(files) {
            // A single file was created when it was staged.
            let created = match staged.kind() {
                OutputKind::File if !staged.in_place => staged.files.open_for_writing(path)?,
                OutputKind::File | OutputKind::Directory => staged.files.create_new(path)?,
            };
            created.set_len(file.len)?;
            for (offset, bytes) in &file.literals {
                created.write_all_at(bytes, *offset)?;
            }
        }
        let digests = files.iter().map(|file| {
            let runs = |place: &PlannedRun| Some(Mutex::new(Runs::new(place.digest?)));
            file.places.iter().map(runs).collect()
        });
        let digests = digests.collect();
        let open = OpenFiles::new(staged.files.clone(), paths, Access::Write);
        Ok(Output { staged, open, digests })
    }

    pub(super) fn write(&self, file: usize, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.open.get(file)?.write_all_at(bytes, offset)
    }

    /// Adds bytes that were written `offset` bytes into a place, if it needs a digest. `known` is a digest of exactly
    /// these bytes, of any kind.
    pub(super) fn note(
        &self,
        (file, place): (usize, usize),
        offset: u64,
        bytes: &[u8],
        known: Option<Digest>,
    ) {
        let Some(runs) = &self.digests[file][place] else { return };
        let kind = lock(runs).kind();
        let digest = known.filter(|known| known.kind == kind).unwrap_or_else(|| kind.of(bytes));
        lock(runs).add(offset, bytes.len() as u64, digest);
    }

    /// Returns the digests of all places.
    pub(super) fn digests(&self, files: &[PlannedFile]) -> Vec<Vec<Option<Digest>>> {
        let of_file = |(runs, file): (&Vec<Option<Mutex<Runs>>>, &PlannedFile)| {
            let of_place = |(runs, place): (&Option<Mutex<Runs>>, &PlannedRun)| {
                let whole = lock(runs.as_ref()?).whole(place.len_bytes());
                Some(whole.expect("every byte of a place is written once"))
            };
            runs.iter().zip(&file.places).map(of_place).collect()
        };
        self.digests.iter().zip(files).map(of_file).collect()
    }

    /// Writes the tail, and makes all files durable if requested: first the files with tensors, in threads, then the
    /// files that refer to them. Returns the number of files.
    pub(super) fn finish(
        &self,
        files: &[PlannedFile],
        tail: Tail,
        options: &Options,
    ) -> Result<usize, Error> {
        for (file, offset, bytes) in &tail.patches {
            self.write(*file, bytes, *offset)?;
        }
        // An object does not exist before it is synced.
        let sync = options.sync || self.staged.in_place;
        let (with_tensors, others): (Vec<usize>, Vec<usize>) =
            (0..files.len()).filter(|_| sync).partition(|&file| !files[file].places.is_empty());
        each_in_threads(options, &with_tensors, |&file| self.open.get(file)?.sync())?;
        others.iter().try_for_each(|&file| self.open.get(file)?.sync())?;
        for (name, bytes) in &tail.files {
            assert_eq!(self.staged.kind(), OutputKind::Directory, "one file has no files beside it");
            let file = self.staged.files.create_new(&self.staged.path_of(name))?;
            file.write_all_at(bytes, 0)?;
            if sync {
                file.sync()?;
            }
        }
        Ok(files.len() + tail.files.len())
    }
}
