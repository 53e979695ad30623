//! The life of an export: temporary files are created, and renamed when complete or removed.

use std::path::Path;

use super::{ExportPlan, Receipt, coverage};
use crate::{
    error::Error,
    file_io::{Files, PathFile, not_as_planned},
    model_files::{INDEX_FILE, SINGLE_FILE, two_models},
};

/// An export under way: owns the temporary files. Dropping it without a commit removes them.
#[derive(Debug)]
#[must_use = "dropping an export removes its temporary files"]
pub struct Export {
    plan: ExportPlan,
    /// One open, locked file per file of the plan, then the index; empty once settled.
    open: Vec<PathFile>,
}

impl ExportPlan {
    /// Creates the temporary files, each with its header and of its full length. The directory must exist.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unavailable`] if another export to the same path is under way; [`Error::WrongPath`] if
    /// the model would lie beside one of the other kind (single or sharded), or something else has the name of a
    /// temporary file. On an error nothing is left behind.
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
    /// Proves from the receipts of all writers that every row was written once, makes the files durable,
    /// renames them to their final names and makes the names durable. Files that had these names are replaced.
    ///
    /// # Errors
    /// [`Error::Unplanned`] for rows that nobody or two wrote and for receipts of another export, [`Error::WrongPath`]
    /// for a temporary file that was exchanged or cut, [`Error::Io`]. On an error the temporary files and those already
    /// renamed are removed; only if the very last step fails, making the names durable, does the complete
    /// model stay.
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
                // The first error is the one to report.
                outputs[..count].iter().for_each(|renamed| drop(files.remove_if_there(renamed.path)));
                return Err(error);
            }
        }
        self.open.clear();
        files.sync_directory(self.plan.dir())
    }

    /// Removes the temporary files, and says when that fails (dropping does not).
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

    /// Leaves the temporary files as they are, for the next export to overwrite: where there are no locks, they may be those of
    /// one that has begun already.
    pub fn leave(mut self) {
        self.open.clear();
    }

    /// The temporary files are still those that were created, at their full length.
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
            // Nobody is left to tell; the next export to this path overwrites a leftover.
            let _ = file.remove();
        }
    }
}

/// A file that an export writes.
struct Output<'a> {
    temporary: &'a Path,
    path: &'a Path,
    len: u64,
    /// Its first bytes, which are known beforehand.
    head: &'a [u8],
}

/// All files, the index last.
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

/// A directory holds a single model file or a sharded model, not both.
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
