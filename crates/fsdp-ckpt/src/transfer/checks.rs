//! The checksums that the source checkpoint keeps, checked on the bytes that happen to be read.
//!
//! A protected range that was read completely is judged at the end. Of one that was read in part,
//! [`Checks::rest`] says what is still to be read, so that a conversion can check all that it used. What was not
//! touched at all is the business of `verify`.

use std::{ops::Range, sync::Mutex};

use super::runs::Runs;
use crate::{
    checkpoint::{Checkpoint, Chunk, Protection, Source},
    digest::Digest,
    error::Error,
    lock::lock,
};

/// Protections of a checkpoint with what was seen of each.
#[derive(Debug)]
pub(crate) struct Checks<'a> {
    checkpoint: &'a Checkpoint,
    /// Per source, sorted by first byte.
    by_source: Vec<Vec<Watched<'a>>>,
}

#[derive(Debug)]
struct Watched<'a> {
    protection: &'a Protection,
    seen: Mutex<Runs>,
}

impl<'a> Checks<'a> {
    /// None of the checksums of a checkpoint.
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

    /// Takes note of bytes at an offset of a source. Returns their digest if it was computed over exactly
    /// these bytes, so that a caller that needs it does not compute it again.
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

    /// The unread parts (source and bytes) of plain ranges that were read in part. Compressed items are always
    /// read to their end.
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

    /// Compares every protected range that was read completely.
    pub(crate) fn verify(&self) -> Result<(), Error> {
        self.problems().next().map_or(Ok(()), Err)
    }

    /// All protected ranges that were read completely and do not match.
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

    /// What a protection says that it covers, and the tensors there if it names none: a record of a zip file does
    /// not know what it holds.
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

    /// How many protected ranges were read completely.
    pub(crate) fn complete(&self) -> usize {
        let is_complete = |watched: &&Watched| {
            let range = &watched.protection.range;
            let seen = lock(&watched.seen);
            seen.whole(range.end - range.start).is_some()
        };
        self.by_source.iter().flatten().filter(is_complete).count()
    }
}
