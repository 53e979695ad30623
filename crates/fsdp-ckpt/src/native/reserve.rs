//! Reserves disk space for the next save, so that a run does not lose its state when others fill the disk.
//!
//! There is one file per rank, as long as the rank's part of the save; rank 0's includes space for the manifest. A rank
//! removes its own file right before it creates its part of a checkpoint.

use std::path::{Path, PathBuf};

use serde_json::Map;

use super::{
    Attempt, RunDir, RunLock, SavePlan,
    commit::{manifest, manifest_file},
};
use crate::error::Error;
use crate::file_io::Files;

/// Space in a manifest for the state of a run: configuration, config.json and changes to it.
const RUN_STATE_BYTES: u64 = 64 << 10;

/// The number of bytes that each rank of a plan writes in a save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveSpace {
    rank_bytes: Vec<u64>,
}

impl SaveSpace {
    /// Computes the space for one save of a plan.
    ///
    /// # Errors
    /// Those of [`SavePlan::lay_out`].
    pub fn new(plan: &SavePlan) -> Result<SaveSpace, Error> {
        let (mut rank_bytes, mut files) = (Vec::new(), Vec::new());
        for rank in 0..plan.world_size() {
            let layout = plan.lay_out(rank)?;
            rank_bytes.push(layout.header.file_len());
            // Placeholders; the text of every digest has the same length.
            let chunks = (0..layout.shards.len()).map(|shard| vec![u64::MAX; layout.chunks(shard).len()]);
            files.push(manifest_file(plan, &layout, chunks.collect()));
        }
        let text = manifest(plan, files, Map::new()).to_bytes();
        rank_bytes[0] += text.map_or(0, |text| text.len() as u64) + RUN_STATE_BYTES;
        Ok(SaveSpace { rank_bytes })
    }

    /// Total bytes of all ranks.
    pub fn bytes(&self) -> u64 {
        self.rank_bytes.iter().sum()
    }
}

/// Returns the free bytes of the disk on which a directory exists or will be created.
///
/// # Errors
/// [`Error::Io`].
pub fn free_bytes(dir: &Path) -> Result<u64, Error> {
    let there = dir.ancestors().find(|dir| dir.exists());
    // The last ancestor of a relative path is empty: use the working directory.
    let there = there.filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Files::anywhere().free_bytes(there)
}

impl RunLock {
    /// Reserves the space of one save. If the file system cannot allocate space, only compares the free space with the
    /// size of a save. Object stores are never full.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is too little space; [`Error::Io`]. Nothing is reserved then.
    pub fn reserve(&self, space: &SaveSpace) -> Result<(), Error> {
        let run = self.run();
        if !run.renames() {
            return Ok(());
        }
        let give_back =
            || (0..space.rank_bytes.len()).try_for_each(|rank| run.give_back(rank, self.attempt()));
        give_back()?;
        // Check first: filling the disk only to find that it is too small would make other writers fail.
        self.expect_free(space.bytes(), run.files.free_bytes(run.checkpoints())?)?;
        let reserved = self.try_reserve(space);
        if !matches!(reserved, Ok(true)) {
            give_back()?;
        }
        reserved.map(drop)
    }

    /// Checks that there is space for one save after the existing checkpoints are [cleared](RunLock::clear).
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is too little space; [`Error::Io`].
    pub fn expect_room_after_clearing(&self, space: &SaveSpace) -> Result<(), Error> {
        let RunDir { files, .. } = self.run();
        if !self.run().renames() {
            return Ok(());
        }
        let checkpoints = self.run().checkpoints();
        self.expect_free(space.bytes(), files.free_bytes(checkpoints)? + files.tree_bytes(checkpoints)?)
    }

    fn expect_free(&self, needed: u64, free: u64) -> Result<(), Error> {
        if needed <= free {
            return Ok(());
        }
        let reason = format!(
            "a save needs {needed} bytes, but the disk has {free} left; make room there, or choose another out_dir"
        );
        Err(Error::unavailable(self.run().checkpoints(), reason))
    }

    /// Returns `false` if the file system only sets lengths, without allocating space.
    fn try_reserve(&self, space: &SaveSpace) -> Result<bool, Error> {
        for (rank, &bytes) in space.rank_bytes.iter().enumerate() {
            let file = self.run().files.create_new(&self.run().reserved(rank, self.attempt()))?;
            if !file.allocate(bytes)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl RunDir {
    /// Removes the space that an attempt has reserved for a rank, if any.
    pub(super) fn give_back(&self, rank: usize, attempt: Attempt) -> Result<(), Error> {
        if self.renames() {
            self.files.remove_if_there(&self.reserved(rank, attempt)).map(drop)
        } else {
            Ok(())
        }
    }

    fn reserved(&self, rank: usize, attempt: Attempt) -> PathBuf {
        self.checkpoints().join(format!("reserved-{:05}.{attempt}.tmp", rank + 1))
    }
}
