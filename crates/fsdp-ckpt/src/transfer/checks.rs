//! Verifies the checksums that the source checkpoint keeps, on the bytes that are read anyway.
//!
//! A protected range that was read completely is verified at the end. For a range that was read in part,
//! [`Checks::rest`] lists the unread bytes, so that a conversion can verify everything that it used. Ranges that were
//! not touched at all are left to `verify`.

use std::{ops::Range, sync::Mutex};

use super::runs::Runs;
use crate::{
    checkpoint::{Checkpoint, Chunk, Protection, Source},
    digest::Digest,
    error::Error,
    lock::lock,
};

/// The protections of a checkpoint, and the bytes of each that have been read.
#[derive(Debug)]
pub(crate) struct Checks<'a> {
    checkpoint: &'a Checkpoint,
    /// By source, sorted by first byte.
    by_source: Vec<Vec<Watched<'a>>>,
}

#[derive(Debug)]
struct Watched<'a> {
    protection: &'a Protection,
    seen: Mutex<Runs>,
}

impl<'a> Checks<'a> {
    /// Verifies none of the checkpoint's checksums.
    pub(crate) fn none(checkpoint: &'a Checkpoint) -> Checks<'a> {
        Checks { checkpoint, by_source: checkpoint.sources.iter().map(|_| Vec::new()).collect() }
    }

    pub(crate) fn new(checkpoint: &'a Checkpoint) -> Checks<'a> {
        let Checks { mut by_source, .. } = Checks::none(checkpoint);
        for protection in &checkpoint.protections {
            let seen = Mutex::new(Runs::new(protection.digest.kind));
            by_source[protection.source].push(Watched { protection, seen });
        }
        for watched in &mut by_source {
            watched.sort_by_key(|watched| (watched.protection.range.start, watched.protection.range.end));
        }
        Checks { checkpoint, by_source }
    }

    /// Adds bytes that were read at an offset of a source. Returns their digest if one was computed over exactly these
    /// bytes, so that the caller need not compute it again.
    pub(crate) fn observe(&self, source: usize, offset: u64, bytes: &[u8]) -> Option<Digest> {
        let watched = &self.by_source[source];
        let end = offset + bytes.len() as u64;
        // Protections of one source do not overlap, so their ends are sorted as well.
        let first = watched.partition_point(|watched| watched.protection.range.end <= offset);
        let mut whole = None;
        for watched in &watched[first..] {
            let range = &watched.protection.range;
            if range.start >= end {
                break;
            }
            let part = range.start.max(offset)..range.end.min(end);
            let part_bytes = &bytes[(part.start - offset) as usize..(part.end - offset) as usize];
            let digest = watched.protection.digest.kind.of(part_bytes);
            let mut seen = lock(&watched.seen);
            seen.add(part.start - range.start, part_bytes.len() as u64, digest);
            if part_bytes.len() == bytes.len() {
                whole = Some(digest);
            }
        }
        whole
    }

    /// Returns the unread parts (source and byte range) of plain ranges that were read in part. Compressed items are
    /// always read to their end.
    pub(crate) fn rest(&self) -> Vec<(usize, Range<u64>)> {
        let plain = self
            .by_source
            .iter()
            .enumerate()
            .filter(|(source, _)| matches!(self.checkpoint.sources[*source], Source::File { .. }));
        let watched = plain.flat_map(|(source, watched)| watched.iter().map(move |one| (source, one)));
        let rest = watched.flat_map(|(source, watched)| {
            let range = &watched.protection.range;
            let mut seen = lock(&watched.seen);
            let parts = seen.rest(range.end - range.start).into_iter();
            parts.map(move |part| (source, range.start + part.start..range.start + part.end))
        });
        rest.collect()
    }

    /// Returns an error if a protected range that was read completely does not match.
    pub(crate) fn verify(&self) -> Result<(), Error> {
        self.problems().next().map_or(Ok(()), Err)
    }

    /// Returns an error for each protected range that was read completely and does not match.
    pub(crate) fn problems(&self) -> impl Iterator<Item = Error> {
        self.by_source.iter().flatten().filter_map(|watched| {
            let Protection { source, range, digest, .. } = watched.protection;
            let seen = lock(&watched.seen);
            let got = seen.whole(range.end - range.start).filter(|got| got != digest)?;
            let reason = format!(
                "bytes {}..{} ({}) are damaged: their checksum is {got}, the checkpoint says {digest}; fetch or save the \
                 file again",
                range.start,
                range.end,
                self.with_tensors(watched.protection)
            );
            Some(Error::malformed(self.checkpoint.sources[*source].path(), reason))
        })
    }

    /// Describes a protection, and the tensors in it if its description names none: a record of a zip file does not
    /// know its content.
    fn with_tensors(&self, protection: &Protection) -> String {
        let Protection { source, range, what, .. } = protection;
        if what.contains("tensor `") {
            return what.clone();
        }
        let is_there = |chunk: &Chunk| chunk.source == *source && range.contains(&chunk.offset);
        let tensors = self.checkpoint.tensors.iter();
        let mut names =
            tensors.filter(|(_, tensor)| tensor.chunks.iter().any(is_there)).map(|(name, _)| name);
        let first = names.next().map(|name| format!(", tensor `{name}`")).unwrap_or_default();
        match names.count() {
            0 => format!("{what}{first}"),
            more => format!("{what}{first} and {more} more"),
        }
    }

    /// Returns the number of protected ranges that were read completely.
    pub(crate) fn complete(&self) -> usize {
        let is_complete = |watched: &&Watched| {
            let range = &watched.protection.range;
            let seen = lock(&watched.seen);
            seen.whole(range.end - range.start).is_some()
        };
        self.by_source.iter().flatten().filter(is_complete).count()
    }
}
