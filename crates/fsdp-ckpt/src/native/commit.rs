//! The decision of rank 0: all parts are there and fit, so the checkpoint gets its name; or the save fails.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{
    MANIFEST_FILE, Manifest, ManifestFile, ManifestShard, ManifestTensor, RankFile, RunLock, SavePlan,
    WaitLimit,
    markers::{self, Report},
};
use crate::{
    digest::DigestKind,
    error::{Error, NativeFault, SaveFault},
    file_io::Files,
};

/// How many late ranks a message names.
const NAMED_MAX: usize = 8;

impl RunLock {
    /// Waits until all ranks are done, checks their reports against the plan and their files, writes the
    /// manifest, and gives the checkpoint its final name. Rank 0 calls it after its own
    /// [`RankSave::finish`](super::RankSave::finish). Lengths and headers of the files are read back; their data
    /// is not, which was digested when it was written.
    ///
    /// # Errors
    /// [`Error::Save`] if a rank failed, was late or saved something else, or the step has a checkpoint;
    /// [`Error::Native`] if a report or header is damaged; [`Error::Io`]. The other ranks learn of it, and what
    /// was saved is removed by the next [`RunLock::remove_leftovers`]. If the very last step fails, making the
    /// final name durable, the checkpoint is there and may be lost by a crash of the machine.
    pub fn commit(
        &self,
        plan: &SavePlan,
        step: u64,
        run_state: Map<String, Value>,
        limit: WaitLimit<'_>,
    ) -> Result<PathBuf, Error> {
        let (files, complete) = (&self.run().files, self.run().checkpoint(step));
        let commit = Commit { files, dir: self.run().unfinished(step), plan };
        let decided = commit.prepare(run_state, limit).and_then(|()| {
            if files.metadata_if_there(&complete)?.is_some() {
                return Err(save_fault(&complete, SaveFault::AlreadyThere));
            }
            files.rename(&commit.dir, &complete)
        });
        if let Err(error) = decided {
            markers::tell_commit_failed(files, &commit.dir, &error.to_string());
            return Err(error);
        }
        files.sync_directory(self.run().checkpoints())?;
        Ok(complete)
    }
}

struct Commit<'a> {
    files: &'a Files,
    dir: PathBuf,
    plan: &'a SavePlan,
}

impl Commit<'_> {
    /// Everything up to the final name.
    fn prepare(&self, run_state: Map<String, Value>, limit: WaitLimit<'_>) -> Result<(), Error> {
        self.wait_for_ranks(limit)?;
        let ranks = 0..self.plan.world_size();
        let listed = ranks.clone().map(|rank| self.check(rank)).collect::<Result<_, Error>>()?;
        let path = self.dir.join(MANIFEST_FILE);
        let manifest = manifest(self.plan, listed, run_state);
        let text = manifest.to_bytes().map_err(|fault| native_fault(&path, fault))?;
        let file = self.files.create_new(&path)?;
        file.write_all_at(&text, 0)?;
        file.sync()?;
        // A rank whose marker is taken can no longer withdraw.
        for rank in ranks {
            if !self.files.remove_if_there(&markers::done_path(&self.dir, rank))? {
                return Err(save_fault(&self.dir, SaveFault::Withdrawn { rank }));
            }
        }
        self.files.sync_directory(&self.dir)
    }

    fn wait_for_ranks(&self, limit: WaitLimit<'_>) -> Result<(), Error> {
        let mut late = Vec::new();
        let found = limit.until(|| {
            let names = self.files.list(&self.dir)?;
            if let Some(fault) = markers::failure(self.files, &self.dir, &names) {
                return Err(save_fault(&self.dir, fault));
            }
            let mut is_done = vec![false; self.plan.world_size()];
            for rank in names.iter().filter_map(|name| markers::done_rank(name)) {
                if let Some(done) = is_done.get_mut(rank) {
                    *done = true;
                }
            }
            late = (0..is_done.len()).filter(|&rank| !is_done[rank]).collect();
            Ok(late.is_empty().then_some(()))
        })?;
        found.map_err(|unfulfilled| {
            late.truncate(NAMED_MAX);
            let fault = unfulfilled.or_late(SaveFault::RanksLate { ranks: late, limit: limit.limit });
            save_fault(&self.dir, fault)
        })
    }

    /// Holds the report of a rank against the plan and the file, and makes the file's entry in the manifest.
    fn check(&self, rank: usize) -> Result<ManifestFile, Error> {
        let report = markers::read_done(self.files, &self.dir, rank)?;
        let layout = self.plan.lay_out(rank)?;
        if report.plan != self.plan.digest() {
            return Err(save_fault(&self.dir, SaveFault::OtherPlan { rank }));
        }
        if !fits(&report, &layout, rank) {
            return Err(save_fault(&self.dir, SaveFault::OtherFile { rank }));
        }
        let path = self.dir.join(&layout.name);
        let (file, got) = self.files.open(&path)?;
        if got != report.file_len {
            return Err(native_fault(&path, NativeFault::FileLength { expected: report.file_len, got }));
        }
        let mut prefix = vec![0; layout.prefix.len()];
        file.read_exact_at(&mut prefix, 0)?;
        let (expected, got) = (report.header, DigestKind::Crc64.of(&prefix));
        if expected != got {
            let bytes = 0..prefix.len() as u64;
            return Err(native_fault(&path, NativeFault::HeaderChanged { bytes, expected, got }));
        }
        Ok(manifest_file(self.plan, &layout, report.chunks))
    }
}

/// Whether a rank reports the file that is planned for it.
fn fits(report: &Report, layout: &RankFile, rank: usize) -> bool {
    report.rank == rank
        && report.file_len == layout.header.file_len()
        && report.header == DigestKind::Crc64.of(&layout.prefix)
        && report.chunks.len() == layout.shards.len()
        && (0..layout.shards.len()).all(|shard| report.chunks[shard].len() == layout.chunks(shard).len())
}

/// A file's entry in the manifest, of its layout and the digests of its chunks by shard.
pub(crate) fn manifest_file(plan: &SavePlan, layout: &RankFile, chunks: Vec<Vec<u64>>) -> ManifestFile {
    let shards = layout.shards.iter().zip(chunks).map(|(shard, chunks)| ManifestShard {
        tensor: plan.tensors()[shard.tensor].spec.name.clone(),
        rows: shard.rows.clone(),
        chunk_rows: shard.chunk_rows,
        chunks,
    });
    ManifestFile {
        name: layout.name.clone(),
        len: layout.header.file_len(),
        data_start: layout.header.data_start(),
        header: DigestKind::Crc64.of(&layout.prefix),
        shards: shards.collect(),
    }
}

/// The manifest of a plan whose files are written.
pub(crate) fn manifest(plan: &SavePlan, files: Vec<ManifestFile>, run_state: Map<String, Value>) -> Manifest {
    let tensors = plan.tensors().iter().map(|tensor| {
        let (spec, path) = (&tensor.spec, tensor.path.clone());
        let whole = ManifestTensor { dtype: spec.dtype, shape: spec.shape.clone(), path, role: tensor.role };
        (spec.name.clone(), whole)
    });
    let (world_size, tensors) = (plan.world_size(), tensors.collect());
    Manifest { world_size, tensors, files, values: Default::default(), run_state }
}

fn save_fault(path: &Path, fault: SaveFault) -> Error {
    Error::Save { path: path.to_owned(), fault: Box::new(fault) }
}

fn native_fault(path: &Path, fault: NativeFault) -> Error {
    Error::Native { path: path.to_owned(), fault: Box::new(fault) }
}
