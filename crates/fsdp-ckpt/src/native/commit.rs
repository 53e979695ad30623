//! The end of a save: all parts are there and fit, so the checkpoint gets its name; or the save fails.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{
    MANIFEST_FILE, Manifest, ManifestFile, ManifestShard, ManifestTensor, RankFile, RankReport, RunLock,
    SavePlan, rank_save::save_fault,
};
use crate::{
    digest::DigestKind,
    error::{Error, NativeFault, SaveFault},
    file_io::Files,
};

impl RunLock {
    /// Checks the reports of all ranks against the plan and their files, writes the manifest, and gives the checkpoint
    /// its final name. Lengths and headers of the files are read back; their data is not, which was digested when it
    /// was written.
    ///
    /// # Errors
    /// [`Error::Save`] if a rank saved something else, the directory has gone, or the step has a checkpoint;
    /// [`Error::Native`] if a header is damaged; [`Error::Io`]. What was saved is then removed by
    /// [`RunLock::discard`]. If the very last step fails, making the final name durable, the checkpoint is there and may
    /// be lost by a crash of the machine.
    ///
    /// # Panics
    /// When there is not one report for each rank.
    pub fn commit(
        &self,
        plan: &SavePlan,
        step: u64,
        run_state: Map<String, Value>,
        reports: Vec<RankReport>,
    ) -> Result<PathBuf, Error> {
        assert_eq!(reports.len(), plan.world_size(), "every rank reports its file");
        let (files, complete) = (&self.run().files, self.run().checkpoint(step));
        let commit = Commit { files, dir: self.run().unfinished(step), plan };
        if files.metadata_if_there(&commit.dir)?.is_none() {
            return Err(save_fault(&commit.dir, SaveFault::Disappeared));
        }
        commit.prepare(run_state, reports)?;
        if files.metadata_if_there(&complete)?.is_some() {
            return Err(save_fault(&complete, SaveFault::AlreadyThere));
        }
        files.rename(&commit.dir, &complete)?;
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
    fn prepare(&self, run_state: Map<String, Value>, reports: Vec<RankReport>) -> Result<(), Error> {
        let listed = reports.into_iter().enumerate();
        let listed = listed.map(|(rank, report)| self.check(rank, report)).collect::<Result<_, Error>>()?;
        let path = self.dir.join(MANIFEST_FILE);
        let manifest = manifest(self.plan, listed, run_state);
        let text = manifest.to_bytes().map_err(|fault| native_fault(&path, fault))?;
        let file = self.files.create_new(&path)?;
        file.write_all_at(&text, 0)?;
        file.sync()?;
        self.files.sync_directory(&self.dir)
    }

    /// Holds the report of a rank against the plan and the file, and makes the file's entry in the manifest.
    fn check(&self, rank: usize, report: RankReport) -> Result<ManifestFile, Error> {
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
fn fits(report: &RankReport, layout: &RankFile, rank: usize) -> bool {
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

fn native_fault(path: &Path, fault: NativeFault) -> Error {
    Error::Native { path: path.to_owned(), fault: Box::new(fault) }
}
