//! The work of a plan: pieces of places that any thread may take, and compressed items to decode.
//!
//! A tensor whose chunks are in plain files is cut into pieces. A run of a tensor inside a compressed item is a
//! [`Segment`] of the job that decodes this item. Items with strided chunks cannot be decoded into place; they are
//! spooled first and then treated as plain.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Mutex,
};

use super::{
    parts::{TensorReader, needed},
    plan::PlannedFile,
    threads::PieceSizes,
};
use crate::{
    checkpoint::{Checkpoint, Region},
    error::Error,
    lock::lock,
};

/// Size of the buffer for strided reads, in usual pieces, so that a read may include unneeded bytes.
const SCRATCH_PIECES: usize = 4;

/// All work of a transfer.
pub(super) struct Work<'a> {
    pub(super) files: &'a [PlannedFile],
    pub(super) readers: Vec<TensorReader<'a>>,
    /// Index of the reader for each place of each file.
    reader_of: Vec<Vec<usize>>,
    runs: Vec<Piece>,
    /// Runs of tensors in compressed items that are decoded into place, by source.
    pub(super) streams: BTreeMap<usize, Vec<Segment>>,
    /// Compressed items that are spooled first, with the number of decoded bytes that are needed.
    pub(super) spooled: BTreeMap<usize, u64>,
}

/// Elements of a place, processed together.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) file: usize,
    pub(super) place: usize,
    pub(super) elements: Range<u64>,
}

/// Elements of a place that are contiguous in a compressed item.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// Offset in the decoded bytes.
    pub(super) start: u64,
    pub(super) piece: Piece,
}

impl<'a> Work<'a> {
    /// Computes the work of a plan.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if a place needs a tensor that the checkpoint does not have.
    pub(super) fn new(checkpoint: &'a Checkpoint, files: &'a [PlannedFile]) -> Result<Work<'a>, Error> {
        let mut numbers = BTreeMap::new();
        let mut readers = Vec::new();
        let mut reader_of = Vec::with_capacity(files.len());
        for file in files {
            let mut of_places = Vec::with_capacity(file.places.len());
            for place in &file.places {
                let number = match numbers.get(place.tensor.as_str()) {
                    Some(&number) => number,
                    None => {
                        readers.push(reader(checkpoint, &place.tensor)?);
                        numbers.insert(place.tensor.as_str(), readers.len() - 1);
                        readers.len() - 1
                    }
                };
                of_places.push(number);
            }
            reader_of.push(of_places);
        }
        let spooled = spooled(checkpoint, &readers);
        let (runs, streams) = (Vec::new(), BTreeMap::new());
        let mut work = Work { files, readers, reader_of, runs, streams, spooled };
        work.split(checkpoint);
        Ok(work)
    }

    pub(super) fn reader(&self, piece: &Piece) -> &TensorReader<'a> {
        &self.readers[self.reader_of[piece.file][piece.place]]
    }

    /// Decides for every place which elements are decoded into it and which are read.
    fn split(&mut self, checkpoint: &Checkpoint) {
        for (file, planned) in self.files.iter().enumerate() {
            for (place, wanted) in planned.places.iter().map(|place| &place.elements).enumerate() {
                let reader = &self.readers[self.reader_of[file][place]];
                let is_streamed =
                    |source| is_compressed(checkpoint, source) && !self.spooled.contains_key(&source);
                if !reader.parts().iter().any(|part| is_streamed(part.chunk.source)) {
                    self.runs.push(Piece { file, place, elements: wanted.clone() });
                    continue;
                }
                for part in reader.parts() {
                    let elements = part.span.start.max(wanted.start)..part.span.end.min(wanted.end);
                    if elements.is_empty() {
                        continue;
                    }
                    let skipped = (elements.start - part.span.start) * reader.size() as u64;
                    let piece = Piece { file, place, elements };
                    if is_streamed(part.chunk.source) {
                        let segment = Segment { start: part.chunk.offset + skipped, piece };
                        self.streams.entry(part.chunk.source).or_default().push(segment);
                    } else {
                        self.runs.push(piece);
                    }
                }
            }
        }
        self.streams.values_mut().for_each(|segments| segments.sort_by_key(|segment| segment.start));
    }
}

fn reader<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<TensorReader<'a>, Error> {
    let unknown = || Error::unknown_tensor(&checkpoint.path, name, checkpoint.tensors.len());
    let (name, tensor) = checkpoint.tensors.get_key_value(name).ok_or_else(unknown)?;
    Ok(TensorReader::new(name, tensor))
}

fn is_compressed(checkpoint: &Checkpoint, source: usize) -> bool {
    checkpoint.sources[source].is_compressed()
}

/// Returns the compressed items of tensors with strided chunks, each with the number of decoded bytes that any tensor
/// needs.
fn spooled(checkpoint: &Checkpoint, readers: &[TensorReader]) -> BTreeMap<usize, u64> {
    let has_box = |reader: &&TensorReader| {
        reader.parts().iter().any(|part| matches!(part.chunk.region, Region::Box { .. }))
    };
    let of_boxes = readers.iter().filter(has_box).flat_map(|reader| reader.parts());
    let sources: BTreeSet<usize> = of_boxes.map(|part| part.chunk.source).collect();
    needed(readers.iter(), |source| is_compressed(checkpoint, source) && sources.contains(&source))
}

/// Hands out the work to any number of threads.
pub(super) struct Queue<'a> {
    work: &'a Work<'a>,
    streams: Vec<usize>,
    sizes: PieceSizes,
    next: Mutex<Next>,
}

/// Maximum size of the buffer for sorting strided elements, in bytes.
pub(crate) fn scratch_bytes(sizes: PieceSizes, reader: &TensorReader) -> usize {
    if reader.wants_large_pieces() { sizes.large } else { sizes.large.min(SCRATCH_PIECES * sizes.usual) }
}

#[derive(Default)]
struct Next {
    stream: usize,
    run: usize,
    /// Number of elements of the run that were handed out.
    taken: u64,
}

/// A unit of work for one thread.
pub(super) enum Job {
    /// Decode this source into place.
    Stream(usize),
    /// Fill these pieces, which are consecutive in one file.
    Pieces(Vec<Piece>),
}

impl<'a> Queue<'a> {
    pub(super) fn new(work: &'a Work<'a>, sizes: PieceSizes) -> Queue<'a> {
        let streams = work.streams.keys().copied().collect();
        Queue { work, streams, sizes, next: Mutex::new(Next::default()) }
    }

    /// Returns the next job: streams first, because they take longest.
    pub(super) fn next(&self) -> Option<Job> {
        let mut next = lock(&self.next);
        if let Some(&source) = self.streams.get(next.stream) {
            next.stream += 1;
            return Some(Job::Stream(source));
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let (mut bytes, mut end) = (0, 0);
        while let Some(run) = self.work.runs.get(next.run) {
            let place = &self.work.files[run.file].places[run.place];
            let size = place.dtype.size_bytes() as u64;
            let first = run.elements.start + next.taken;
            let offset = place.offset + (first - place.elements.start) * size;
            let is_next = pieces.first().is_none_or(|other| other.file == run.file && end == offset);
            let len = (run.elements.end - first).min(self.elements_max(run, bytes as usize));
            if !is_next || (len == 0 && first < run.elements.end) {
                break;
            }
            bytes += len * size;
            end = offset + len * size;
            if len > 0 {
                pieces.push(Piece { elements: first..first + len, ..run.clone() });
            }
            next.taken += len;
            if first + len == run.elements.end {
                (next.run, next.taken) = (next.run + 1, 0);
            }
        }
        (!pieces.is_empty()).then_some(Job::Pieces(pieces))
    }

    /// Maximum number of elements of a run that fit into a job of `bytes` bytes so far.
    fn elements_max(&self, run: &Piece, bytes: usize) -> u64 {
        let reader = self.work.reader(run);
        let place = &self.work.files[run.file].places[run.place];
        let element = place.dtype.size_bytes().max(reader.size());
        let size = if reader.wants_large_pieces() { self.sizes.large } else { self.sizes.usual };
        let rest = size.saturating_sub(bytes) / element;
        if bytes == 0 { rest.max(1) as u64 } else { rest as u64 }
    }
}
