//! Decodes one compressed item, once and sequentially, passing the pieces to callbacks on the way.

use std::{
    io::{self, BufReader, Read},
    path::Path,
};

use super::{options::Options, threads::PieceSizes};
use crate::error::Error;

/// Number of compressed bytes read at a time.
const READ_BYTES: usize = 256 << 10;

/// Space before the new bytes for bytes that the callback sees again, because an element may start in one piece and end
/// in the next; one more than the maximum carried.
const CARRIED: usize = 8;

/// Callback for the position of decoded bytes, and the bytes.
pub(crate) type EachPiece<'a> = dyn FnMut(u64, &[u8]) -> Result<(), Error> + 'a;

/// A compressed item to decode.
pub(super) struct Stream<'a> {
    pub(super) path: &'a Path,
    /// What the item is in its file, for messages.
    pub(super) what: String,
    /// Number of decoded bytes that tensors need.
    pub(super) needed: u64,
    /// Maximum decoded length, in bytes.
    pub(super) len_max: u64,
}

impl Stream<'_> {
    /// Decodes the item in pieces. `each` gets the position of the first byte and the bytes: the new ones, preceded by
    /// up to seven that it has seen, enough to complete any element. `observe` gets the new ones only.
    pub(super) fn decode(
        &self,
        compressed: impl Read,
        options: &Options,
        observe: &dyn Fn(u64, &[u8]),
        each: &mut EachPiece,
    ) -> Result<(), Error> {
        let piece_bytes = PieceSizes::of(options).usual;
        let compressed = BufReader::with_capacity(READ_BYTES, compressed);
        let mut decoder = zstd::Decoder::with_buffer(compressed).map_err(|cause| self.broken(cause))?;
        let mut buffer = vec![0; CARRIED + piece_bytes];
        let (mut carried, mut decoded) = (0, 0);
        loop {
            options.check_cancel()?;
            let new = fill(&mut decoder, &mut buffer[carried..carried + piece_bytes]);
            let new = new.map_err(|cause| self.broken(cause))?;
            if new == 0 {
                break;
            }
            if decoded + new as u64 > self.len_max {
                let max = self.len_max;
                return Err(self
                    .malformed(&format!("decodes to more than the {max} bytes that its checkpoint states")));
            }
            let filled = carried + new;
            observe(decoded, &buffer[carried..filled]);
            each(decoded - carried as u64, &buffer[..filled])?;
            decoded += new as u64;
            let keep = filled.min(CARRIED - 1);
            buffer.copy_within(filled - keep..filled, 0);
            carried = keep;
        }
        if decoded < self.needed {
            let needed = self.needed;
            let what = format!("decodes to {decoded} bytes, but tensors lie in its first {needed}");
            return Err(self.malformed(&what));
        }
        Ok(())
    }

    fn malformed(&self, what: &str) -> Error {
        Error::malformed(self.path, format!("{} {what}", self.what))
    }

    /// Returns the error of reading the file, or else of the decoder.
    fn broken(&self, cause: io::Error) -> Error {
        match cause.downcast::<Error>() {
            Ok(error) => error,
            Err(cause) => {
                self.malformed(&format!("cannot be decoded: {cause}; fetch or save the file again"))
            }
        }
    }
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
