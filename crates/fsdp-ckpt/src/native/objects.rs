//! The directory of a run in an object store, which has no renames and no locks.
//!
//! ```text
//! checkpoints/step-00000050/manifest.json                     complete: written last and removed first
//! checkpoints/step-00000050/<attempt>/shard-00001-..          listed in the manifest
//! checkpoints/step-00000050/<other attempt>/shard-00001-..    a save that was interrupted, or is in progress
//! checkpoints/step-00000075/manifest.diverged.json            set aside: to use it again, copy it to manifest.json
//! checkpoints.cleared.tmp                                     no checkpoint counts until this is removed
//! ```
//!
//! The first attempt to put the manifest of a step has saved the step: others find it there. Files of an attempt that
//! may still be writing are left alone, because its manifest could arrive after its files were removed.

use std::path::{Path, PathBuf};

use super::{Attempt, MANIFEST_FILE, Manifest, RunDir, RunLock, attempt::plain_name, run_dir::step_of};
use crate::error::Error;

impl RunDir {
    /// Keeps only the steps that have a manifest.
    pub(super) fn retain_complete(&self, steps: &mut Vec<u64>) -> Result<(), Error> {
        if self.files.metadata_if_there(&self.cleared())?.is_some() {
            steps.clear();
        }
        let mut complete = Vec::new();
        for &step in steps.iter() {
            if self.is_complete(step)? {
                complete.push(step);
            }
        }
        *steps = complete;
        Ok(())
    }
}

impl RunLock {
    /// Marks all checkpoints as cleared: from here on none of them counts.
    pub(super) fn clear_objects(&self) -> Result<(), Error> {
        self.run().files.replace(&self.run().cleared(), b"")
    }

    pub(super) fn remove_cleared_objects(&self) -> Result<(), Error> {
        let files = &self.run().files;
        for name in files.list(self.run().checkpoints())? {
            files.remove_if_there(&self.run().checkpoints().join(name).join(MANIFEST_FILE))?;
        }
        files.remove_tree(self.run().checkpoints())?;
        files.remove_if_there(&self.run().cleared()).map(drop)
    }

    pub(super) fn set_object_aside(&self, step: u64, mark: &str) -> Result<PathBuf, Error> {
        let (files, checkpoint) = (&self.run().files, self.run().checkpoint(step));
        let aside = checkpoint.join(format!("manifest.{mark}.json"));
        files.replace(&aside, &files.read_whole(&checkpoint.join(MANIFEST_FILE))?)?;
        files.remove_if_there(&checkpoint.join(MANIFEST_FILE))?;
        Ok(aside)
    }

    /// Removes from an object store the files of attempts that are not part of a checkpoint. Call it when the run ends:
    /// an earlier attempt that was still alive when this one started is dead by then.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove_other_attempts(&self) -> Result<(), Error> {
        let (files, checkpoints) = (&self.run().files, self.run().checkpoints());
        if self.run().renames() {
            return Ok(());
        }
        for name in files.list(checkpoints)?.iter().filter(|name| step_of(name).is_some()) {
            self.remove_unlisted(&checkpoints.join(name))?;
        }
        Ok(())
    }

    fn remove_unlisted(&self, dir: &Path) -> Result<(), Error> {
        let files = &self.run().files;
        let names = files.list(dir)?;
        let mut unlisted: Vec<&String> = names.iter().filter(|name| Attempt::named(name).is_some()).collect();
        let is_manifest = |name: &&String| name.starts_with("manifest.") && name.ends_with(".json");
        let manifests: Vec<&String> = names.iter().filter(is_manifest).collect();
        if unlisted.len() <= manifests.len() {
            return Ok(());
        }
        for manifest in manifests {
            // A manifest that cannot be read may list any attempt.
            let Ok(manifest) = Manifest::parse(files.read_whole(&dir.join(manifest))?) else { return Ok(()) };
            let lists = |attempt: &String| manifest.files.iter().any(|file| file.name.starts_with(attempt));
            unlisted.retain(|attempt| !lists(attempt));
        }
        unlisted.into_iter().try_for_each(|attempt| files.remove_tree(&dir.join(attempt)))
    }
}

/// Whether two manifests describe equal checkpoints, whichever attempts saved them.
pub(super) fn describe_equal_checkpoints(one: &[u8], other: &[u8]) -> bool {
    let plain = |text: &[u8]| {
        let mut manifest = Manifest::parse(text.to_vec()).ok()?;
        for file in &mut manifest.files {
            file.name = plain_name(&file.name).to_owned();
        }
        Some(manifest)
    };
    plain(one).is_some_and(|one| plain(other) == Some(one))
}
