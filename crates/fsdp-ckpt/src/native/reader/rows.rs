//! Reads rows, and verifies every chunk that they touch.
//!
//! A chunk is read as a whole even if only one of its rows is requested, because its checksum covers all of it. The
//! other rows pass through a small buffer, so memory stays bounded whatever the size of a chunk.

use std::ops::Range;

use super::{NativeReader, RowLocation};
use crate::{
    digest::DigestKind,
    error::Error,
    file_io::PathFile,
    rows::{expect_len, expect_rows},
};

/// Bytes read and digested at a time; they stay in the cache in between.
const PIECE_BYTES: u64 = 1 << 20;

impl NativeReader {
    /// Fills `out` with the bytes of whole rows of a tensor, in its dtype. The rows may be spread over any number of
    /// files.
    ///
    /// # Errors
    /// [`Error::BadRequest`] for an unknown tensor, for rows that do not exist or do not fit `out`;
    /// [`Error::Malformed`] with the rows and bytes of a chunk whose checksum does not match; [`Error::Io`]. After an
    /// error the content of `out` is unspecified.
    pub fn read_rows(&self, name: &str, rows: Range<usize>, out: &mut [u8]) -> Result<(), Error> {
        let tensor = self.tensor(name)?;
        expect_rows(self.dir(), name, &rows, tensor.row_count())?;
        let expected = rows.len() as u64 * tensor.row_bytes();
        expect_len(self.dir(), name, "bytes", expected, out.len() as u64)?;
        let mut scratch = Vec::new();
        for place in self.places.get(name).map_or(&[][..], Vec::as_slice) {
            self.read_place(place, &rows, tensor.row_bytes(), out, &mut scratch)?;
        }
        Ok(())
    }

    /// Reads and verifies all data of all tensors.
    ///
    /// # Errors
    /// [`Error::Malformed`] for the first chunk whose checksum does not match; [`Error::Io`].
    pub fn verify(&self) -> Result<(), Error> {
        let mut scratch = Vec::new();
        for (name, tensor) in &self.manifest().tensors {
            for place in self.places.get(name).map_or(&[][..], Vec::as_slice) {
                let shard = &self.manifest().files[place.file].shards[place.shard];
                let file = self.file(place.file)?;
                for chunk in 0..shard.chunks.len() {
                    self.read_chunk(&file, place, chunk, tensor.row_bytes(), (0..0, &mut []), &mut scratch)?;
                }
            }
        }
        Ok(())
    }

    /// Reads the requested rows that are at this location.
    fn read_place(
        &self,
        place: &RowLocation,
        wanted: &Range<usize>,
        row_bytes: u64,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let shard = &self.manifest().files[place.file].shards[place.shard];
        let rows = wanted.start.max(shard.rows.start)..wanted.end.min(shard.rows.end);
        if rows.is_empty() {
            return Ok(());
        }
        let file = self.file(place.file)?;
        let (first, last) = (rows.start - shard.rows.start, rows.end - 1 - shard.rows.start);
        for chunk in first / shard.chunk_rows..=last / shard.chunk_rows {
            let held = shard.chunk(chunk);
            let part = rows.start.max(held.start)..rows.end.min(held.end);
            let bytes = |row: usize, origin: usize| (row - origin) as u64 * row_bytes;
            let target = bytes(part.start, wanted.start) as usize..bytes(part.end, wanted.start) as usize;
            let in_chunk = bytes(part.start, held.start)..bytes(part.end, held.start);
            self.read_chunk(&file, place, chunk, row_bytes, (in_chunk, &mut out[target]), scratch)?;
        }
        Ok(())
    }

    /// Reads and verifies a whole chunk, and copies the bytes `wanted` (relative to the chunk) to `out`.
    fn read_chunk(
        &self,
        file: &PathFile,
        place: &RowLocation,
        chunk: usize,
        row_bytes: u64,
        (wanted, out): (Range<u64>, &mut [u8]),
        scratch: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let shard = &self.manifest().files[place.file].shards[place.shard];
        let rows = shard.chunk(chunk);
        let start =
            self.offsets[place.file][place.shard] + (rows.start - shard.rows.start) as u64 * row_bytes;
        let len = rows.len() as u64 * row_bytes;
        let (mut got, mut at) = (DigestKind::Crc64.empty(), 0);
        while at < len {
            // A piece never crosses the start or end of the requested bytes.
            let edge = [wanted.start, wanted.end].into_iter().find(|&edge| at < edge).unwrap_or(len);
            let count = PIECE_BYTES.min(edge.min(len) - at);
            let piece = if wanted.contains(&at) {
                let begin = (at - wanted.start) as usize;
                &mut out[begin..begin + count as usize]
            } else {
                scratch.resize(scratch.len().max(count as usize), 0);
                &mut scratch[..count as usize]
            };
            file.read_exact_at(piece, start + at)?;
            got = got.then(DigestKind::Crc64.of(piece), count);
            at += count;
        }
        let expected = shard.digest(chunk);
        if got != expected {
            let reason = format!(
                "rows {}..{} of tensor `{}` (bytes {start}..{}) give {got}, but the manifest says {expected}; they were \
                 changed, so use another checkpoint",
                rows.start,
                rows.end,
                shard.tensor,
                start + len
            );
            return Err(Error::malformed(file.path(), reason));
        }
        Ok(())
    }
}
