//! The lifetime of an export: its temporary files are created, then renamed when complete, or removed.

use std::path::Path;

use super::{ExportPlan, Receipt, coverage};
use crate::{
    error::Error,
    file_io::{Files, PathFile, not_as_planned},
    model_files::{INDEX_FILE, SINGLE_FILE, two_models},
};

/// An export in progress, which owns the temporary files. Dropping it without a commit removes them.
#[derive(Debug)]
#[must_use = "dropping an export removes its temporary files"]
pub struct Export {
    plan: ExportPlan,
    /// One open, locked file per file of the plan, then the index; empty after a commit or an abort.
    open: Vec<PathFile>,
}

impl ExportPlan {
    /// Creates the temporary files, each with its header and at its full length. The directory must exist.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unavailable`] if another export to the same path is in progress; [`Error::WrongPath`] if
    /// the directory already has a model of the other kind (single or sharded), or the name of a temporary file is
    /// taken by anything but a regular file. After an error, no files are left behind.
    pub fn create(&self) -> Result<Export, Error> {
        refuse_ambiguity(self)?;
        let mut export = Export { plan: self.clone(), open: Vec::new() };
        for file in outputs(self) {
            export.open.push(Files::anywhere().create_locked(file.temporary, file.len)?);
            export.open[export.open.len() - 1].write_all_at(file.head, 0)?;
        }
        Ok(export)
    }
}

impl Export {
    /// Proves from the receipts of all writers that every row was written exactly once, makes the files durable,
    /// renames them to their final names and makes the names durable. Replaces existing files.
    ///
    /// # Errors
    /// [`Error::Unplanned`] for rows that were never written or written twice, and for receipts of another export;
    /// [`Error::WrongPath`] for a temporary file that was replaced or truncated; [`Error::Io`]. On an error, the
    /// temporary files and those already renamed are removed. Only if the very last step, making the names durable,
    /// fails, does the complete model stay.
    pub fn commit(mut self, receipts: impl IntoIterator<Item = Receipt>) -> Result<(), Error> {
        coverage::check(&self.plan, receipts)?;
        self.check_files()?;
        self.open.iter().try_for_each(PathFile::sync)?;
        let (files, outputs) = (Files::anywhere(), outputs(&self.plan));
        if let Some(index) = self.plan.index() {
            files.remove_if_there(&index.path)?;
            files.sync_directory(self.plan.dir())?;
        }
        for (count, Output { temporary, path, .. }) in outputs.iter().enumerate() {
            if let Err(error) = files.rename(temporary, path) {
                // Report the first error.
                outputs[..count].iter().for_each(|renamed| drop(files.remove_if_there(renamed.path)));
                return Err(error);
            }
        }
        self.open.clear();
        files.sync_directory(self.plan.dir())
    }

    /// Removes the temporary files and reports errors, which dropping does not.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn abort(mut self) -> Result<(), Error> {
        let mut result = Ok(());
        for file in self.open.drain(..) {
            result = result.and(file.remove());
        }
        result
    }

    /// Keeps the temporary files, for the next export to overwrite. Without locks, they may already belong to another
    /// export.
    pub fn leave(mut self) {
        self.open.clear();
    }

    /// Checks that the temporary files are still those that were created, at their full length.
    fn check_files(&self) -> Result<(), Error> {
        for (file, output) in self.open.iter().zip(outputs(&self.plan)) {
            if !file.is_still_at_path() || file.len()? != output.len {
                return Err(not_as_planned(file.path()));
            }
        }
        Ok(())
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        for file in self.open.drain(..) {
            // An error here cannot be reported; the next export to this path overwrites a leftover.
            let _ = file.remove();
        }
    }
}

/// A file that an export writes.
struct Output<'a> {
    temporary: &'a Path,
    path: &'a Path,
    len: u64,
    /// The first bytes, which the plan fixes.
    head: &'a [u8],
}

/// All files of the plan, the index last.
fn outputs(plan: &ExportPlan) -> Vec<Output<'_>> {
    let output = |path, temporary, len, head| Output { temporary, path, len, head };
    let files = plan.files().iter();
    let files =
        files.map(|file| output(&*file.path, &*file.temporary, file.header.file_len(), &*file.prefix));
    let index = plan.index().into_iter();
    let index =
        index.map(|index| output(&index.path, &index.temporary, index.text.len() as u64, &index.text));
    files.chain(index).collect()
}

/// Refuses to put a single model file and a sharded model into the same directory.
fn refuse_ambiguity(plan: &ExportPlan) -> Result<(), Error> {
    let is_single_model = plan.path().file_name().is_some_and(|name| name == SINGLE_FILE);
    let other = match plan.index() {
        Some(_) => plan.dir().join(SINGLE_FILE),
        None if is_single_model => plan.dir().join(INDEX_FILE),
        None => return Ok(()),
    };
    if Files::anywhere().exists(&other) {
        return Err(two_models(plan.path(), &other));
    }
    Ok(())
}
