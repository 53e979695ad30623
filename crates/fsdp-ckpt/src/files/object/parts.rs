//! Uploads long objects in parts of a fixed size.
//!
//! Threads write files at arbitrary positions, and some files get bytes in their middle last, but an object is uploaded
//! from front to back. So bytes are collected in parts, and a part is uploaded once it and all previous parts are
//! complete. Waiting parts are kept in memory while there is room, and otherwise in an unnamed temporary file on this
//! machine.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use object_store::MultipartUpload;
use tokio::task::JoinHandle;

use super::{
    fault::failed,
    runtime::{runtime, wait},
};
use crate::files::OpenFile;

/// Maximum number of parts; S3 allows 10,000.
const PARTS_MAX: u64 = 9_000;

/// Maximum number of parts of one file that are being uploaded at a time.
const IN_FLIGHT_MAX: usize = 4;

/// Limits on the parts that are collected before they are uploaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes of a part. Larger for a file that would otherwise have too many parts.
    pub(super) part_bytes: u64,
    /// Maximum bytes in memory of the parts of all files of this process.
    pub(super) memory: usize,
}

impl Limits {
    pub(super) const USUAL: Limits = Limits { part_bytes: 8 << 20, memory: 512 << 20 };
}

/// Bytes in memory of all parts.
static IN_MEMORY: AtomicUsize = AtomicUsize::new(0);

/// The upload of a long object.
#[derive(Debug)]
pub(super) struct Parts {
    len: u64,
    limits: Limits,
    upload: Box<dyn MultipartUpload>,
    /// Number of the first part that is not uploaded yet.
    next: u64,
    waiting: BTreeMap<u64, Part>,
    /// Holds the bytes of parts that have no room in memory, at the same offsets as in the object.
    scratch: Option<Box<dyn OpenFile>>,
    in_flight: VecDeque<JoinHandle<object_store::Result<()>>>,
}

/// A part that is incomplete or waits for previous parts.
#[derive(Debug)]
struct Part {
    /// `None` if the bytes are in the scratch file.
    bytes: Option<(Vec<u8>, Room)>,
    written: Written,
}

/// A number of bytes that count against the memory limit until this is dropped.
#[derive(Debug)]
struct Room(usize);

impl Room {
    fn take(len: usize, limits: Limits) -> Option<Room> {
        let room = Room(len);
        (IN_MEMORY.fetch_add(len, Ordering::Relaxed) + len <= limits.memory).then_some(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        IN_MEMORY.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// The written bytes of a part, as disjoint ranges in order.
#[derive(Debug, Default)]
struct Written(Vec<Range<usize>>);

impl Written {
    fn add(&mut self, mut range: Range<usize>) {
        let at = self.0.partition_point(|other| other.end < range.start);
        while let Some(other) = self.0.get(at).filter(|other| other.start <= range.end) {
            range = range.start.min(other.start)..range.end.max(other.end);
            self.0.remove(at);
        }
        self.0.insert(at, range);
    }

    fn is_all(&self, len: usize) -> bool {
        matches!(self.0.as_slice(), [all] if *all == (0..len))
    }
}

impl Parts {
    pub(super) fn new(len: u64, mut limits: Limits, upload: Box<dyn MultipartUpload>) -> Parts {
        limits.part_bytes = limits.part_bytes.max(len.div_ceil(PARTS_MAX));
        let (waiting, in_flight) = (BTreeMap::new(), VecDeque::new());
        Parts { len, limits, upload, next: 0, waiting, scratch: None, in_flight }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Writes bytes of one part; returns their number.
    pub(super) fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let part = offset / self.limits.part_bytes;
        assert!(part >= self.next && offset < self.len, "bytes are written once, and inside of the file");
        let start = offset - part * self.limits.part_bytes;
        let count = bytes.len().min(self.part_len(part) - start as usize);
        let in_part = start as usize..start as usize + count;
        self.make_room(part)?;
        let waiting = self.waiting.get_mut(&part).expect("room was made for it");
        match &mut waiting.bytes {
            Some((held, _)) => held[in_part.clone()].copy_from_slice(&bytes[..count]),
            None => write_all(self.scratch.as_deref(), &bytes[..count], offset)?,
        }
        waiting.written.add(in_part);
        while self.waiting.get(&self.next).is_some_and(|part| part.written.is_all(self.part_len(self.next))) {
            self.upload_next()?;
        }
        Ok(count)
    }

    /// Uploads the rest, in which unwritten bytes are zero, and completes the object.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        while self.next < self.len.div_ceil(self.limits.part_bytes) {
            self.upload_next()?;
        }
        while !self.in_flight.is_empty() {
            self.wait_for_one()?;
        }
        wait(self.upload.complete()).map(drop).map_err(failed)
    }

    /// Aborts the upload. Errors are ignored: stores can be configured to remove incomplete uploads after some days.
    pub(super) fn abort(mut self) {
        self.in_flight.drain(..).for_each(|part| drop(wait(part)));
        let _ = wait(self.upload.abort());
    }

    fn part_len(&self, part: u64) -> usize {
        (self.len - part * self.limits.part_bytes).min(self.limits.part_bytes) as usize
    }

    /// Makes room for the bytes of a part that has none yet: in memory if possible, otherwise in the scratch file.
    fn make_room(&mut self, part: u64) -> io::Result<()> {
        if self.waiting.contains_key(&part) {
            return Ok(());
        }
        let len = self.part_len(part);
        let mut room = Room::take(len, self.limits);
        while room.is_none() && !self.in_flight.is_empty() {
            self.wait_for_one()?;
            room = Room::take(len, self.limits);
        }
        if room.is_none() && self.scratch.is_none() {
            let file = tempfile::tempfile()?;
            file.set_len(self.len)?;
            self.scratch = Some(Box::new(file));
        }
        let bytes = room.map(|room| (vec![0; len], room));
        self.waiting.insert(part, Part { bytes, written: Written::default() });
        Ok(())
    }

    fn upload_next(&mut self) -> io::Result<()> {
        while self.in_flight.len() >= IN_FLIGHT_MAX {
            self.wait_for_one()?;
        }
        self.make_room(self.next)?;
        let part = self.waiting.remove(&self.next).expect("room was made for it");
        let (bytes, room) = match part.bytes {
            Some((bytes, room)) => (bytes, Some(room)),
            None => (self.read_scratch(self.next)?, None),
        };
        let sent = self.upload.put_part(bytes.into());
        self.in_flight.push_back(runtime().spawn(async move {
            let answer = sent.await;
            drop(room);
            answer
        }));
        self.next += 1;
        Ok(())
    }

    fn read_scratch(&self, part: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.part_len(part)];
        let (scratch, mut done) = (self.scratch.as_deref().expect("the part is there"), 0);
        while done < bytes.len() {
            match scratch.read_at(&mut bytes[done..], part * self.limits.part_bytes + done as u64)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(bytes)
    }

    /// Waits until the oldest part in flight is uploaded; fails if its upload failed.
    fn wait_for_one(&mut self) -> io::Result<()> {
        let Some(part) = self.in_flight.pop_front() else { return Ok(()) };
        wait(part).map_err(|error| failed(error.into()))?.map_err(failed)
    }
}

fn write_all(scratch: Option<&dyn OpenFile>, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    let scratch = scratch.expect("room was made there");
    while !bytes.is_empty() {
        let count = scratch.write_at(bytes, offset)?;
        (bytes, offset) = (&bytes[count..], offset + count as u64);
    }
    Ok(())
}
