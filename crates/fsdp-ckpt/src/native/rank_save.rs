//! One rank's part of a save: its file, its report, and the wait for the decision of rank 0.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use super::{
    RankFile, RunDir, SavePlan, WaitLimit,
    markers::{self, Report},
    wait::Unfulfilled,
};
use crate::{
    digest::{Digest, DigestKind},
    error::{Error, SaveFault},
    file_io::{Files, PathFile},
};

/// Bytes that are digested and written at a time: they stay in the cache in between.
const PIECE_BYTES: usize = 1 << 20;

/// One rank's file while it is written. Dropping it unfinished tells the other ranks that this one has failed.
///
/// Rows of a tensor are written in order, tensors in any order.
#[derive(Debug)]
#[must_use = "dropping an unfinished part fails the save on all ranks"]
pub struct RankSave {
    place: SavePlace,
    plan: SavePlan,
    layout: RankFile,
    file: PathFile,
    progress: Vec<Progress>,
    /// What the other ranks are told when this is dropped.
    reason: Option<String>,
}

/// A rank's part, durable and reported; the checkpoint still waits for rank 0.
#[derive(Debug)]
#[must_use = "the save has succeeded only when the wait or the commit has"]
pub struct RankDone {
    place: SavePlace,
}

/// Where a rank saves.
#[derive(Clone, Debug)]
struct SavePlace {
    files: Files,
    /// The directory while it is unfinished.
    dir: PathBuf,
    rank: usize,
    complete: PathBuf,
}

/// How far a shard is written.
#[derive(Debug)]
struct Progress {
    /// The next byte of the shard.
    bytes: u64,
    /// Digests of the chunks that are complete, then that of the current one.
    chunks: Vec<Digest>,
}

impl RankSave {
    /// Creates the file of a rank, and the directory of the save if this rank is the first to come. Rank 0 must
    /// have taken the lock of the run, which makes the directory above.
    ///
    /// # Errors
    /// [`SaveFault::AlreadyThere`] if the step has a checkpoint, or this rank a file; [`Error::Io`]. The other
    /// ranks learn of it.
    pub fn create(run: &RunDir, plan: &SavePlan, step: u64, rank: usize) -> Result<RankSave, Error> {
        let (dir, complete) = (run.unfinished(step), run.checkpoint(step));
        let place = SavePlace { files: run.files.clone(), dir, rank, complete };
        if place.files.metadata_if_there(&place.complete)?.is_some() {
            return Err(place.fault(SaveFault::AlreadyThere, &place.complete));
        }
        place.files.create_directory_if_absent(&place.dir)?;
        place.telling(|| {
            let layout = plan.lay_out(rank)?;
            let file = place.files.create_new(&place.dir.join(&layout.name))?;
            file.write_all_at(&layout.prefix, 0)?;
            let progress = layout.shards.iter().map(|_| Progress { bytes: 0, chunks: Vec::new() }).collect();
            let (place, plan) = (place.clone(), plan.clone());
            let reason = Some("it gave up before its part was complete".to_owned());
            Ok(RankSave { place, plan, layout, file, progress, reason })
        })
    }

    /// The file that is written: which rows of which tensors.
    pub fn layout(&self) -> &RankFile {
        &self.layout
    }

    /// Writes the next rows of a tensor, from `first_row` (counted in the whole tensor) on, as little-endian
    /// bytes of its dtype.
    ///
    /// # Errors
    /// [`Error::UnknownTensor`] if this rank saves no rows of it; [`Error::BufferLength`] if `bytes` are not
    /// whole rows; [`Error::RowsOutsideTensor`]; [`SaveFault::OutOfOrder`]; [`Error::Io`]. After an error the
    /// save has failed: drop it.
    pub fn write_rows(&mut self, name: &str, first_row: usize, bytes: &[u8]) -> Result<(), Error> {
        let written = self.try_write_rows(name, first_row, bytes);
        self.note(written)
    }

    /// Makes the file durable and reports it.
    ///
    /// # Errors
    /// [`SaveFault::RowsNotWritten`]; [`Error::Io`]. The other ranks learn of it.
    pub fn finish(mut self) -> Result<RankDone, Error> {
        let finished = self.try_finish();
        self.note(finished)?;
        self.reason = None;
        Ok(RankDone { place: self.place.clone() })
    }

    /// Gives up, and tells the other ranks why.
    pub fn fail(mut self, reason: impl Into<String>) {
        self.reason = Some(reason.into());
    }

    fn note<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result {
            self.reason = Some(error.to_string());
        }
        result
    }

    fn try_write_rows(&mut self, name: &str, first_row: usize, bytes: &[u8]) -> Result<(), Error> {
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

    /// The shard that the next rows of a tensor belong to, if these are they.
    fn check(&self, name: &str, first_row: usize, bytes: &[u8]) -> Result<usize, Error> {
        let (path, tensor, header) =
            (|| self.file.path().to_owned(), || name.to_owned(), &self.layout.header);
        let Some(shard) = header.position(name) else {
            let tensor_count = header.entries().len();
            return Err(Error::UnknownTensor { path: path(), tensor: tensor(), tensor_count });
        };
        let (row_bytes, got) = (header.entries()[shard].row_bytes(), bytes.len() as u64);
        let is_whole = if row_bytes == 0 { got == 0 } else { got.is_multiple_of(row_bytes) };
        if !is_whole {
            let (path, tensor) = (path(), tensor());
            return Err(Error::BufferLength { path, tensor, unit: "bytes", expected: row_bytes, got });
        }
        let rows = &self.layout.shards[shard].rows;
        let done = self.progress[shard].bytes.checked_div(row_bytes).unwrap_or(0) as usize;
        let count = got.checked_div(row_bytes).unwrap_or(0) as usize;
        if count > 0 && first_row != rows.start + done {
            let (expected, got) = (rows.start + done, first_row);
            let fault = SaveFault::OutOfOrder { tensor: tensor(), expected, got };
            return Err(self.place.fault(fault, self.file.path()));
        }
        if count > rows.len() - done {
            let (rows, row_count) = (first_row..first_row + count, rows.end);
            return Err(Error::RowsOutsideTensor { path: path(), tensor: tensor(), rows, row_count });
        }
        Ok(shard)
    }

    fn try_finish(&self) -> Result<(), Error> {
        for ((shard, entry), progress) in
            self.layout.shards.iter().zip(self.layout.header.entries()).zip(&self.progress)
        {
            if progress.bytes < entry.len_bytes() {
                let missing =
                    shard.rows.start + (progress.bytes / entry.row_bytes()) as usize..shard.rows.end;
                let fault = SaveFault::RowsNotWritten { tensor: entry.name().to_owned(), rows: missing };
                return Err(self.place.fault(fault, self.file.path()));
            }
        }
        self.file.sync()?;
        let report = Report {
            rank: self.place.rank,
            plan: self.plan.digest(),
            file_len: self.layout.header.file_len(),
            header: DigestKind::Crc64.of(&self.layout.prefix),
            chunks: (0..self.progress.len()).map(|shard| self.chunk_digests(shard)).collect(),
        };
        markers::write_done(&self.place.files, &self.place.dir, &report)
    }

    /// Rows without bytes make chunks too.
    fn chunk_digests(&self, shard: usize) -> Vec<u64> {
        let mut digests: Vec<u64> = self.progress[shard].chunks.iter().map(|chunk| chunk.value).collect();
        digests.resize(self.layout.chunks(shard).len(), DigestKind::Crc64.empty().value);
        digests
    }
}

impl Drop for RankSave {
    fn drop(&mut self) {
        if let Some(reason) = self.reason.take() {
            markers::tell_rank_failed(&self.place.files, &self.place.dir, self.place.rank, &reason);
        }
    }
}

impl RankDone {
    /// Waits for the decision of rank 0, and returns the complete checkpoint. Rank 0 calls
    /// [`RunLock::commit`](super::RunLock::commit) instead.
    ///
    /// # Errors
    /// [`Error::Save`] with the reason of the rank that failed, or because the limit has ended: then this rank
    /// has withdrawn its part, so that rank 0 fails too. [`SaveFault::OutcomeUnknown`] if rank 0 had taken it,
    /// and then said nothing for as long again.
    pub fn wait(self, limit: WaitLimit<'_>) -> Result<PathBuf, Error> {
        let place = self.place.clone();
        let unfulfilled = match limit.until(|| self.look())? {
            Ok(()) => return Ok(place.complete),
            Err(unfulfilled) => unfulfilled,
        };
        let fault = unfulfilled.or_late(SaveFault::CommitLate { limit: limit.limit });
        if place.files.remove_if_there(&markers::done_path(&place.dir, place.rank))? {
            let error = place.fault(fault, &place.dir);
            markers::tell_rank_failed(&place.files, &place.dir, place.rank, &error.to_string());
            return Err(error);
        }
        // Rank 0 has taken the part and is about to decide: to stop now would be to guess.
        let patient = WaitLimit { stop: &AtomicBool::new(false), ..limit };
        match patient.until(|| self.look())? {
            Ok(()) => Ok(place.complete),
            Err(Unfulfilled::Late | Unfulfilled::Stopped) => {
                Err(place.fault(SaveFault::OutcomeUnknown { limit: limit.limit }, &place.complete))
            }
        }
    }

    fn look(&self) -> Result<Option<()>, Error> {
        let SavePlace { files, dir, .. } = &self.place;
        if files.metadata_if_there(&self.place.complete)?.is_some() {
            return Ok(Some(()));
        }
        let names = match files.metadata_if_there(dir)? {
            Some(_) => files.list(dir),
            // It may have got its final name since.
            None if files.metadata_if_there(&self.place.complete)?.is_some() => return Ok(Some(())),
            None => return Err(self.place.fault(SaveFault::Disappeared, dir)),
        };
        // The directory may get its final name at any time, also while it is listed.
        let names = names.unwrap_or_default();
        match markers::failure(files, dir, &names) {
            Some(fault) => Err(self.place.fault(fault, dir)),
            None => Ok(None),
        }
    }
}

impl SavePlace {
    fn fault(&self, fault: SaveFault, path: &Path) -> Error {
        Error::Save { path: path.to_owned(), fault: Box::new(fault) }
    }

    /// Tells the other ranks if `attempt` fails.
    fn telling<T>(&self, attempt: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        attempt().inspect_err(|error| {
            markers::tell_rank_failed(&self.files, &self.dir, self.rank, &error.to_string());
        })
    }
}
