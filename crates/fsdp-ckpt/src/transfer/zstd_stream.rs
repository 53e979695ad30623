//! Decoding one compressed item, once and from front to back, with the work of others done on the way.

use std::{
    io::{self, BufReader, Read},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::sources::SourceFiles;
use crate::{
    checkpoint::Source,
    error::{Error, TransferFault},
    file_io::PathFile,
};

/// Compressed bytes read at a time.
const READ_BYTES: usize = 256 << 10;

/// Bytes in front of the new ones that a reader of decoded bytes sees again: an element that began in the last
/// piece ends in this one.
const CARRIED: usize = 8;

/// What is called with the position of decoded bytes and the bytes.
pub(crate) type EachPiece<'a> = dyn FnMut(u64, &[u8]) -> Result<(), Error> + 'a;

/// Decodes a compressed source in pieces of at most `piece_bytes`. `each` gets the position of the first byte
/// and the bytes: the new ones, and in front of them up to seven that it has seen, enough to complete any
/// element. At least `needed` bytes must come out. Returns how many did.
pub(crate) fn decode(
    sources: &SourceFiles,
    source: usize,
    needed: u64,
    piece_bytes: usize,
    cancel: &AtomicBool,
    each: &mut EachPiece,
) -> Result<u64, Error> {
    let Source::Zstd { path, range, decoded_len_max } = &sources.checkpoint.sources[source] else {
        unreachable!("only compressed sources are decoded");
    };
    let broken = |cause| TransferFault::BrokenStream { path: path.clone(), range: range.clone(), cause };
    let compressed = RangeReader { file: sources.file(source)?, range: range.clone() };
    let compressed = BufReader::with_capacity(READ_BYTES, compressed);
    let mut decoder = zstd::Decoder::with_buffer(compressed).map_err(broken)?;
    let mut buffer = vec![0; CARRIED + piece_bytes];
    let (mut carried, mut decoded) = (0, 0);
    loop {
        if cancel.load(Ordering::Relaxed) {
            return Err(TransferFault::Canceled.into());
        }
        let new = fill(&mut decoder, &mut buffer[carried..carried + piece_bytes]).map_err(broken)?;
        if new == 0 {
            break;
        }
        if decoded + new as u64 > *decoded_len_max {
            let (path, range) = (path.clone(), range.clone());
            return Err(TransferFault::StreamTooLong { path, range, limit: *decoded_len_max }.into());
        }
        let filled = carried + new;
        sources.checks.observe(source, decoded, &buffer[carried..filled]);
        each(decoded - carried as u64, &buffer[..filled])?;
        decoded += new as u64;
        let keep = filled.min(CARRIED - 1);
        buffer.copy_within(filled - keep..filled, 0);
        carried = keep;
    }
    if decoded < needed {
        let (path, range) = (path.clone(), range.clone());
        return Err(TransferFault::StreamTooShort { path, range, needed, got: decoded }.into());
    }
    Ok(decoded)
}

/// Reads until `out` is full or the stream ends.
fn fill(decoder: &mut impl Read, out: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < out.len() {
        match decoder.read(&mut out[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(filled)
}

/// A range of a file as a stream.
struct RangeReader {
    file: Arc<PathFile>,
    range: Range<u64>,
}

impl Read for RangeReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = (self.range.end - self.range.start).min(out.len() as u64) as usize;
        self.file.read_exact_at(&mut out[..count], self.range.start).map_err(io::Error::other)?;
        self.range.start += count as u64;
        Ok(count)
    }
}
