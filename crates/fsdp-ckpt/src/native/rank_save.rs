//! One rank's part of a save: its file, and its report.

use serde::{Deserialize, Serialize};

use super::{Attempt, RankFile, RunDir, SavePlan, run_dir::already_there};
use crate::{
    digest::{Digest, DigestKind},
    error::Error,
    file_io::PathFile,
    rows::{expect_rows, whole_rows},
};

/// Bytes digested and written at a time; they stay in the cache in between.
const PIECE_BYTES: usize = 1 << 20;

/// One rank's file while it is written.
///
/// The rows of a tensor are written in order, the tensors in any order.
#[derive(Debug)]
#[must_use = "a part that is not finished cannot be committed"]
pub struct RankSave {
    rank: usize,
    plan: SavePlan,
    layout: RankFile,
    file: PathFile,
    progress: Vec<Progress>,
    is_finished: bool,
}

/// A rank's report of its file, which is durable by then. [`RunLock::commit`](super::RunLock::commit) takes the reports
/// of all ranks; the caller collects them, and may serialize them for that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "the save has succeeded only when the commit has"]
pub struct RankReport {
    pub(super) rank: usize,
    /// Digest of the plan that the rank followed.
    pub(super) plan: Digest,
    pub(super) file_len: u64,
    pub(super) header: Digest,
    /// CRC-64 of each chunk, by shard in file order.
    pub(super) chunks: Vec<Vec<u64>>,
}

/// Progress of writing a shard.
#[derive(Debug)]
struct Progress {
    /// Number of bytes written so far.
    bytes: u64,
    /// Digests of the complete chunks, followed by the digest of the current one.
    chunks: Vec<Digest>,
}

impl RankSave {
    /// Creates the file of a rank and allocates its disk space, preferably [reserved](super::RunLock::reserve) before,
    /// and creates the directory of the save if it does not exist. The run must be locked, which creates the parent
    /// directory, and the attempt must have been sent to this rank.
    ///
    /// # Errors
    /// [`Error::WrongPath`], on rank 0 only, if the step has a checkpoint; [`Error::Io`], also if the disk is too small
    /// or this rank's file exists.
    pub fn create(
        run: &RunDir,
        attempt: Attempt,
        plan: &SavePlan,
        step: u64,
        rank: usize,
    ) -> Result<RankSave, Error> {
        let dir = run.unfinished(step, attempt);
        // Other ranks do not look: their network file system client could cache for a long time that it does not exist.
        if rank == 0 && run.is_complete(step)? {
            return Err(already_there(&run.checkpoint(step)));
        }
        let layout = plan.lay_out(rank)?;
        // Free the space first, because the directory needs space too.
        run.give_back(rank, attempt)?;
        run.files.create_directory_if_absent(&dir)?;
        let file = run.files.create_new(&dir.join(&layout.name))?;
        file.allocate(layout.header.file_len())?;
        file.write_all_at(&layout.prefix, 0)?;
        let progress = layout.shards.iter().map(|_| Progress { bytes: 0, chunks: Vec::new() }).collect();
        Ok(RankSave { rank, plan: plan.clone(), layout, file, progress, is_finished: false })
    }

    /// Writes the next rows of a tensor, starting at `first_row` (counted in the whole tensor), as little-endian bytes
    /// of its dtype.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if this rank saves no rows of the tensor; [`Error::BadRequest`] if `bytes` are not
    /// whole rows, or are more than remain; [`Error::Unplanned`] for rows out of order; [`Error::Io`]. After an error
    /// the save has failed.
    pub fn write_rows(&mut self, name: &str, first_row: usize, bytes: &[u8]) -> Result<(), Error> {
        let shard = self.check(name, first_row, bytes)?;
        let entry = &self.layout.header.entries()[shard];
        let start = self.layout.header.data_start() + entry.data_range().start;
        let chunk_bytes = self.layout.shards[shard].chunk_rows as u64 * entry.row_bytes();
        let progress = &mut self.progress[shard];
        let mut rest = bytes;
        while !rest.is_empty() {
            let in_chunk = progress.bytes % chunk_bytes;
            let count = rest.len().min(PIECE_BYTES).min((chunk_bytes - in_chunk) as usize);
            let (piece, after) = rest.split_at(count);
            let digest = DigestKind::Crc64.of(piece);
            match progress.chunks.last_mut() {
                Some(chunk) if in_chunk > 0 => *chunk = chunk.then(digest, count as u64),
                _ => progress.chunks.push(digest),
            }
            self.file.write_all_at(piece, start + progress.bytes)?;
            progress.bytes += count as u64;
            rest = after;
        }
        Ok(())
    }

    /// Makes the file durable and returns its report.
    ///
    /// # Errors
    /// [`Error::Unplanned`] if rows were not written; [`Error::Io`].
    pub fn finish(mut self) -> Result<RankReport, Error> {
        for ((shard, entry), progress) in
            self.layout.shards.iter().zip(self.layout.header.entries()).zip(&self.progress)
        {
            if progress.bytes < entry.len_bytes() {
                let (first, end) = (progress.bytes / entry.row_bytes(), shard.rows.end);
                let first = shard.rows.start + first as usize;
                let reason = format!("rows {first}..{end} of tensor `{}` were not written", entry.name());
                return Err(Error::unplanned(self.file.path(), reason));
            }
        }
        self.file.sync()?;
        self.is_finished = true;
        Ok(RankReport {
            rank: self.rank,
            plan: self.plan.digest(),
            file_len: self.layout.header.file_len(),
            header: DigestKind::Crc64.of(&self.layout.prefix),
            chunks: (0..self.progress.len()).map(|shard| self.chunk_digests(shard)).collect(),
        })
    }

    /// Returns the shard that the rows belong to, after checking that they are its next rows.
    fn check(&self, name: &str, first_row: usize, bytes: &[u8]) -> Result<usize, Error> {
        let (path, header) = (self.file.path(), &self.layout.header);
        let unknown = || Error::unknown_tensor(path, name, header.entries().len());
        let shard = header.position(name).ok_or_else(unknown)?;
        let row_bytes = header.entries()[shard].row_bytes();
        let count = whole_rows(path, name, "bytes", bytes.len() as u64, row_bytes)?;
        let rows = &self.layout.shards[shard].rows;
        let next = rows.start + self.progress[shard].bytes.checked_div(row_bytes).unwrap_or(0) as usize;
        if count > 0 && first_row != next {
            let reason = format!(
                "row {first_row} of tensor `{name}` was written, but row {next} is next; rows of a tensor \
                 must be written in order"
            );
            return Err(Error::unplanned(path, reason));
        }
        expect_rows(path, name, &(next..next + count), rows.end)?;
        Ok(shard)
    }

    /// Returns the digests of all chunks, including those of rows without bytes.
    fn chunk_digests(&self, shard: usize) -> Vec<u64> {
        let mut digests: Vec<u64> = self.progress[shard].chunks.iter().map(|chunk| chunk.value).collect();
        digests.resize(self.layout.chunks(shard).len(), DigestKind::Crc64.empty().value);
        digests
    }
}

impl Drop for RankSave {
    fn drop(&mut self) {
        if !self.is_finished {
            self.file.give_up();
        }
    }
}
