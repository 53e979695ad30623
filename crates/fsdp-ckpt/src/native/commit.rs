//! The end of a save: if all parts exist and fit the plan, the checkpoint gets its name; otherwise the save fails.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{
    MANIFEST_FILE, Manifest, ManifestFile, ManifestShard, ManifestTensor, RankFile, RankReport, RunLock,
    SavePlan, objects::describe_equal_checkpoints, reader::read_header, run_dir::already_there,
};
use crate::{digest::DigestKind, error::Error, file_io::Files};

impl RunLock {
    /// Checks the reports of all ranks against the plan and their files, writes the manifest, and gives the checkpoint
    /// its final name. Lengths and headers of the files are read back; their data is not, because it was digested when
    /// it was written.
    ///
    /// Files are opened by name; no directory is listed, because a client of a network file system may cache a stale
    /// listing for a long time. If the final rename or put fails, it may have taken effect all the same, so the content
    /// of the final name decides: an equal checkpoint there counts as this one.
    ///
    /// # Errors
    /// [`Error::Unplanned`] if a rank saved something else, [`Error::Unavailable`] if its file is missing,
    /// [`Error::WrongPath`] if the step has another checkpoint; [`Error::Malformed`] if a header is damaged;
    /// [`Error::Io`]. Remove what was saved with [`RunLock::discard`] then. If only the very last step fails, making
    /// the final name durable, the checkpoint exists and may be lost if the machine crashes.
    ///
    /// # Panics
    /// If the number of reports is not the number of ranks.
    pub fn commit(
        &self,
        plan: &SavePlan,
        step: u64,
        run_state: Map<String, Value>,
        reports: Vec<RankReport>,
    ) -> Result<PathBuf, Error> {
        assert_eq!(reports.len(), plan.world_size(), "every rank reports its file");
        let (files, complete) = (&self.run().files, self.run().checkpoint(step));
        let is_on_disk = self.run().renames();
        let prefix = if is_on_disk { String::new() } else { format!("{}/", self.attempt()) };
        let commit =
            Commit { files, dir: self.run().unfinished(step, self.attempt()), plan, is_on_disk, prefix };
        let manifest = commit.prepare(run_state, reports)?;
        if let Err(error) = commit.publish(&complete, &manifest) {
            match files.read_whole(&complete.join(MANIFEST_FILE)) {
                // In an object store an identical manifest is this one: the put succeeded, and the files are already in
                // place.
                Ok(there) if there == manifest && !self.run().renames() => {}
                Ok(there) if describe_equal_checkpoints(&there, &manifest) => self.discard(step)?,
                Ok(_) => {
                    let reason = "another run saved it meanwhile with different content: two runs write \
                                  here; stop one of them";
                    return Err(Error::wrong_path(complete, reason));
                }
                Err(_) => return Err(error),
            }
        }
        files.sync_directory(self.run().checkpoints())?;
        Ok(complete)
    }
}

struct Commit<'a> {
    files: &'a Files,
    dir: PathBuf,
    plan: &'a SavePlan,
    /// Whether the directory gets its final name by a rename.
    is_on_disk: bool,
    /// Prefix of the file names in the manifest.
    prefix: String,
}

impl Commit<'_> {
    /// Does everything up to the final step. Returns the text of the manifest.
    fn prepare(&self, run_state: Map<String, Value>, reports: Vec<RankReport>) -> Result<Vec<u8>, Error> {
        let listed = reports.into_iter().enumerate();
        let listed = listed.map(|(rank, report)| self.check(rank, report)).collect::<Result<_, Error>>()?;
        let path = self.dir.join(MANIFEST_FILE);
        let mut manifest = manifest(self.plan, listed, run_state);
        manifest.files.iter_mut().for_each(|file| file.name.insert_str(0, &self.prefix));
        let text = manifest.to_bytes().map_err(|fault| fault.in_file(&path))?;
        if self.is_on_disk {
            self.files.write_new(&path, &text)?;
            self.files.sync_directory(&self.dir)?;
        }
        Ok(text)
    }

    /// The final step: gives the checkpoint its name or, in an object store, its manifest.
    fn publish(&self, complete: &Path, manifest: &[u8]) -> Result<(), Error> {
        if !self.is_on_disk {
            return self.files.write_new(&complete.join(MANIFEST_FILE), manifest);
        }
        match self.files.metadata_if_there(complete)? {
            Some(_) => Err(already_there(complete)),
            None => self.files.rename(&self.dir, complete),
        }
    }

    /// Checks the report of a rank against the plan and the file, and creates the file's entry in the manifest.
    fn check(&self, rank: usize, report: RankReport) -> Result<ManifestFile, Error> {
        let layout = self.plan.lay_out(rank)?;
        if report.plan != self.plan.digest() {
            let reason = format!(
                "rank {rank} saved different tensors or rows than rank 0 expects; all ranks need the same \
                 model and world"
            );
            return Err(Error::unplanned(&self.dir, reason));
        }
        if !fits(&report, &layout, rank) {
            let reason = format!("rank {rank} reports a different file than the plan has for it");
            return Err(Error::unplanned(&self.dir, reason));
        }
        if !self.is_on_disk {
            // The store has confirmed the object, and shows the same to all clients.
            return Ok(manifest_file(self.plan, &layout, report.chunks));
        }
        let path = self.dir.join(&layout.name);
        let is_gone = |error: Error| if error.is_not_found() { gone(&path, rank) } else { error };
        let file = self.files.open(&path).map_err(is_gone)?;
        read_header(&file, report.file_len, layout.prefix.len() as u64, report.header)?;
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

/// Creates a file's entry in the manifest from its layout and the digests of its chunks, by shard.
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

/// Creates the manifest of a plan whose files are written.
pub(crate) fn manifest(plan: &SavePlan, files: Vec<ManifestFile>, run_state: Map<String, Value>) -> Manifest {
    let tensors = plan.tensors().iter().map(|tensor| {
        let (spec, path) = (&tensor.spec, tensor.path.clone());
        let whole = ManifestTensor { dtype: spec.dtype, shape: spec.shape.clone(), path, role: tensor.role };
        (spec.name.clone(), whole)
    });
    let (world_size, tensors) = (plan.world_size(), tensors.collect());
    Manifest { world_size, tensors, files, values: Default::default(), run_state }
}

/// The error for a rank's file that rank 0 does not find.
fn gone(path: &Path, rank: usize) -> Error {
    let reason = format!(
        "rank {rank} wrote it, but rank 0 cannot find it: all processes need the same out_dir, and no others \
         may remove files there"
    );
    Error::unavailable(path, reason)
}
