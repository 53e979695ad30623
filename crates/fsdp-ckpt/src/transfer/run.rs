//! Runs a plan: threads take jobs until none is left or one has failed.

use super::{
    elements::Reading,
    options::Options,
    output::Output,
    plan::{OutputPlan, PlannedFile, PlannedRun},
    sources::SourceFiles,
    staged::{OutputKind, Staged},
    threads::{PieceSizes, in_threads},
    work::{Job, Piece, Queue, Segment, Work, scratch_bytes},
};
use crate::{
    checkpoint::Checkpoint,
    digest::Digest,
    error::Error,
    floats::{self, expect_convertible},
};

/// Statistics of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of tensor bytes written.
    pub data_bytes: u64,
    /// Number of files written.
    pub files: usize,
    /// Number of source checksums that were verified; all matched.
    pub checked: usize,
}

/// Fills the planned files with the tensors of `checkpoint` and gives the output its final name.
///
/// Verifies every checksum of the checkpoint that covers any of the bytes used; the other bytes that it covers are read
/// for that.
///
/// # Errors
/// [`Error::BadRequest`] if the plan needs a tensor that does not exist, [`Error::BadRequest`] for dtypes and values
/// that cannot be converted, [`Error::Malformed`] for damage found on the way, [`Error::WrongPath`] if the final name
/// is taken by then, [`Error::Canceled`], [`Error::Io`]. After an error nothing is left behind.
///
/// # Panics
/// If the plan has several files and `staged` is one file.
pub fn run(
    checkpoint: &Checkpoint,
    plan: OutputPlan,
    staged: Staged,
    options: &Options,
) -> Result<Moved, Error> {
    let OutputPlan { files, tail } = plan;
    assert!(
        staged.kind() == OutputKind::Directory || files.len() == 1,
        "an output of several files is a directory"
    );
    let work = Work::new(checkpoint, &files)?;
    check_conversions(checkpoint, &work, &files)?;
    let data_bytes = files.iter().flat_map(|file| &file.places).map(PlannedRun::len_bytes).sum();
    options.progress.begin(data_bytes);
    let mut sources = SourceFiles::new(&staged.files, checkpoint);
    let sizes = PieceSizes::of(options);
    sources.spool(&staged.scratch_files(), &staged.scratch_dir(), &work.spooled, options)?;
    let output = Output::create(&staged, &files)?;
    let queue = Queue::new(&work, sizes);
    in_threads(options, |buffers: &mut Buffers| {
        let Some(job) = queue.next() else { return Ok(false) };
        let mover = Mover { work: &work, sources: &sources, output: &output, sizes, options };
        match job {
            Job::Stream(source) => mover.decode_into_place(source, &work.streams[&source], buffers)?,
            Job::Pieces(pieces) => mover.fill(&pieces, buffers)?,
        }
        Ok(true)
    })?;
    sources.complete_checks(options)?;
    sources.checks.verify()?;
    let tail = tail(&output.digests(&files))?;
    let count = output.finish(&files, tail, options)?;
    let moved = Moved { data_bytes, files: count, checked: sources.checks.complete() };
    drop(output);
    staged.commit(options.sync)?;
    Ok(moved)
}

/// Checks that dtypes that differ are both convertible.
fn check_conversions(checkpoint: &Checkpoint, work: &Work, files: &[PlannedFile]) -> Result<(), Error> {
    for (file, planned) in files.iter().enumerate() {
        for (index, place) in planned.places.iter().enumerate() {
            let reader = work.reader(&Piece { file, place: index, elements: 0..0 });
            assert!(place.elements.end <= reader.tensor.len(), "places lie inside their tensors");
            let dtype = reader.tensor.dtype;
            if dtype != place.dtype {
                let other = if dtype.is_convertible() { place.dtype } else { dtype };
                expect_convertible(&checkpoint.path, &place.tensor, other)?;
            }
        }
    }
    Ok(())
}

/// The buffers of a thread; they grow on demand.
#[derive(Default)]
struct Buffers {
    read: Vec<u8>,
    written: Vec<u8>,
    scratch: Vec<u8>,
}

/// Executes jobs.
struct Mover<'a> {
    work: &'a Work<'a>,
    sources: &'a SourceFiles<'a>,
    output: &'a Output<'a>,
    sizes: PieceSizes,
    options: &'a Options<'a>,
}

impl Mover<'_> {
    /// Reads pieces that are consecutive in a file, and writes them at once.
    fn fill(&self, pieces: &[Piece], buffers: &mut Buffers) -> Result<(), Error> {
        let Buffers { read, written, scratch } = buffers;
        let total: usize = pieces.iter().map(|piece| self.target_len(piece)).sum();
        let written = sized(written, total);
        let mut filled = 0;
        for piece in pieces {
            let reader = self.work.reader(piece);
            let out = &mut written[filled..filled + self.target_len(piece)];
            filled += out.len();
            let from = reader.tensor.dtype;
            let scratch_max = scratch_bytes(self.sizes, reader);
            let mut reading = Reading { reader, sources: self.sources, scratch, scratch_max };
            let elements = piece.elements.clone();
            let known = if from == self.place(piece).dtype {
                reading.read(elements, out)?
            } else {
                let read = sized(read, out.len() / self.place(piece).dtype.size_bytes() * from.size_bytes());
                reading.read(elements, read)?;
                self.convert(piece, read, out)?;
                None
            };
            self.note(piece, out, known);
        }
        self.output.write(pieces[0].file, written, self.target_offset(&pieces[0]))?;
        self.options.progress.advance(total as u64);
        Ok(())
    }

    /// Decodes a compressed item, and writes the elements of each of its segments to their destinations.
    fn decode_into_place(
        &self,
        source: usize,
        segments: &[Segment],
        buffers: &mut Buffers,
    ) -> Result<(), Error> {
        let size = |segment: &Segment| self.work.reader(&segment.piece).size() as u64;
        let end = |segment: &Segment| {
            segment.start + (segment.piece.elements.end - segment.piece.elements.start) * size(segment)
        };
        let needed = segments.iter().map(end).max().unwrap_or(0);
        // The remaining part of each segment.
        let mut rest: Vec<Segment> = segments.to_vec();
        self.sources.decode(source, needed, self.options, &mut |position, bytes| {
            let decoded_end = position + bytes.len() as u64;
            for segment in rest.iter_mut().take_while(|segment| segment.start < decoded_end) {
                let size = size(segment);
                let elements = &mut segment.piece.elements;
                let count = ((decoded_end - segment.start) / size).min(elements.end - elements.start);
                let piece =
                    Piece { elements: elements.start..elements.start + count, ..segment.piece.clone() };
                let first = (segment.start - position) as usize;
                self.put(&piece, &bytes[first..first + (count * size) as usize], buffers)?;
                segment.piece.elements.start += count;
                segment.start += count * size;
            }
            rest.retain(|segment| !segment.piece.elements.is_empty());
            Ok(())
        })
    }

    /// Converts and writes elements that are in memory.
    fn put(&self, piece: &Piece, bytes: &[u8], buffers: &mut Buffers) -> Result<(), Error> {
        let converted;
        let out = if self.work.reader(piece).tensor.dtype == self.place(piece).dtype {
            bytes
        } else {
            converted = sized(&mut buffers.written, self.target_len(piece));
            self.convert(piece, bytes, converted)?;
            converted
        };
        self.note(piece, out, None);
        self.output.write(piece.file, out, self.target_offset(piece))?;
        self.options.progress.advance(out.len() as u64);
        Ok(())
    }

    fn convert(&self, piece: &Piece, bytes: &[u8], out: &mut [u8]) -> Result<(), Error> {
        let reader = self.work.reader(piece);
        let converted = floats::between(reader.tensor.dtype, self.place(piece).dtype, bytes, out);
        let path = &self.sources.checkpoint.path;
        converted.map_err(|found| found.in_tensor(path, reader.name, piece.elements.start))
    }

    fn note(&self, piece: &Piece, bytes: &[u8], known: Option<Digest>) {
        let offset = self.target_offset(piece) - self.place(piece).offset;
        self.output.note((piece.file, piece.place), offset, bytes, known);
    }

    fn place(&self, piece: &Piece) -> &PlannedRun {
        &self.work.files[piece.file].places[piece.place]
    }

    /// Size of a piece in the output, in bytes.
    fn target_len(&self, piece: &Piece) -> usize {
        (piece.elements.end - piece.elements.start) as usize * self.place(piece).dtype.size_bytes()
    }

    /// Byte offset of a piece in its file.
    fn target_offset(&self, piece: &Piece) -> u64 {
        let place = self.place(piece);
        place.offset + (piece.elements.start - place.elements.start) * place.dtype.size_bytes() as u64
    }
}

/// Returns the first `len` bytes of a buffer, growing it if necessary.
fn sized(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

#[cfg(test)]
mod tests;
