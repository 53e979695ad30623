//! The life of an export: temporary files are created, and renamed when complete or removed.

use std::path::Path;

use super::{ExportPlan, Receipt, coverage};
use crate::{
    error::Error,
    file_io::{self, Files, PathFile},
    model_files::{INDEX_FILE, SINGLE_FILE},
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
    /// [`Error::Io`]; [`Error::TemporaryFileTaken`] if another export to the same path is under way;
    /// [`Error::TwoModels`] if the model would lie beside one of the other kind (single or sharded). On an
    /// error nothing is left behind.
    pub fn create(&self) -> Result<Export, Error> {
        refuse_ambiguity(self)?;
        let mut export = Export { plan: self.clone(), open: Vec::new() };
        for file in self.files() {
            export.open.push(PathFile::create_locked(&file.temporary, file.header.file_len())?);
            export.open[export.open.len() - 1].write_all_at(&file.prefix, 0)?;
        }
        if let Some(index) = self.index() {
            export.open.push(PathFile::create_locked(&index.temporary, index.text.len() as u64)?);
            export.open[export.open.len() - 1].write_all_at(&index.text, 0)?;
        }
        Ok(export)
    }
}

impl Export {
    /// The plan that is being carried out.
    pub fn plan(&self) -> &ExportPlan {
        &self.plan
    }

    /// Proves from the receipts of all writers that every row was written once, makes the files durable,
    /// renames them to their final names and makes the names durable. Files that had these names are replaced.
    ///
    /// # Errors
    /// [`Error::RowsNotWritten`], [`Error::RowsWrittenTwice`], [`Error::ForeignReceipt`],
    /// [`Error::TemporaryFileTaken`], [`Error::Io`]. On an error the temporary files and those already
    /// renamed are removed; only if the very last step fails, making the names durable, does the complete
    /// model stay.
    pub fn commit(mut self, receipts: impl IntoIterator<Item = Receipt>) -> Result<(), Error> {
        coverage::check(&self.plan, receipts)?;
        self.check_files()?;
        self.open.iter().try_for_each(PathFile::sync)?;
        let moves = moves(&self.plan);
        if let Some(index) = self.plan.index() {
            file_io::remove_if_there(&index.path)?;
            file_io::sync_directory(self.plan.dir())?;
        }
        for (count, (from, to)) in moves.iter().enumerate() {
            if let Err(error) = file_io::rename(from, to) {
                // The first error is the one to report.
                moves[..count].iter().for_each(|(_, to)| drop(file_io::remove_if_there(to)));
                return Err(error);
            }
        }
        self.open.clear();
        file_io::sync_directory(self.plan.dir())
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
        let lengths = self.plan.files().iter().map(|file| file.header.file_len());
        let lengths = lengths.chain(self.plan.index().map(|index| index.text.len() as u64));
        for (file, len) in self.open.iter().zip(lengths) {
            if !file.is_still_at_path() || file.len()? != len {
                return Err(Error::TemporaryFileTaken { path: file.path().to_owned(), in_use: false });
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

/// Pairs of temporary and final path, the index last.
fn moves(plan: &ExportPlan) -> Vec<(&Path, &Path)> {
    let files = plan.files().iter().map(|file| (file.temporary.as_path(), file.path.as_path()));
    files.chain(plan.index().map(|index| (index.temporary.as_path(), index.path.as_path()))).collect()
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
        return Err(Error::TwoModels { wanted: plan.path().to_owned(), other });
    }
    Ok(())
}
