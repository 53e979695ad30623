//! Positioned reads of bytes in any storage, and named sections of these bytes for error messages.
//!
//! An archive is read in the same way from a whole file, from a range of a file, and from a decoded stream in memory. A
//! [`Section`] never returns bytes outside of its range and never allocates more than the length of its range, whatever
//! lengths its contents claim.

use std::{
    borrow::Borrow,
    io::{self, Read},
    ops::Range,
    path::Path,
};

use crate::{
    error::{Error, Fault},
    file_io::PathFile,
};

/// A sequence of bytes that can be read at any position.
pub(crate) trait ReadAt {
    /// Fills `out` with the bytes at `offset`.
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<(), Error>;
}

impl ReadAt for PathFile {
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<(), Error> {
        PathFile::read_exact_at(self, out, offset)
    }
}

/// Bytes in memory. Reading a section cannot fail, since sections are inside of the bytes.
pub(crate) struct Memory(pub(crate) Vec<u8>);

impl ReadAt for Memory {
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> Result<(), Error> {
        let start = usize::try_from(offset).expect("sections of memory lie inside of it");
        out.copy_from_slice(&self.0[start..start + out.len()]);
        Ok(())
    }
}

/// A range of bytes, with names for error messages.
#[derive(Clone, Copy)]
pub(crate) struct Section<'a> {
    bytes: &'a dyn ReadAt,
    start: u64,
    len: u64,
    path: &'a Path,
    item: &'a str,
}

impl<'a> Section<'a> {
    /// Makes a section of `bytes`, which must contain all of `range`. `item` is its name inside the file at `path`; it
    /// is empty for a whole file.
    pub(crate) fn new(
        bytes: &'a dyn ReadAt,
        range: Range<u64>,
        path: &'a Path,
        item: &'a str,
    ) -> Section<'a> {
        assert!(range.start <= range.end, "ranges run forward");
        Section { bytes, start: range.start, len: range.end - range.start, path, item }
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Position of the first byte in the underlying sequence.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Its name inside the file, for messages; empty for a whole file.
    pub(crate) fn item(&self) -> &'a str {
        self.item
    }

    /// Reads the bytes of `range`, counted from the start of the section.
    ///
    /// # Panics
    /// If the range is outside of the section. Callers check the lengths of files first.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Vec<u8>, Error> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        let mut out = vec![0; usize::try_from(range.end - range.start).expect("64-bit hosts")];
        self.bytes.read_exact_at(&mut out, self.start + range.start)?;
        Ok(out)
    }

    /// Converts a fault in this section to an error that names the file and the item.
    pub(crate) fn fault(&self, fault: Fault) -> Error {
        let part = if self.item.is_empty() { String::new() } else { format!("item {}: ", self.item) };
        fault.of_part(&part, 0).in_file(self.path)
    }
}

/// A range of a file as a stream.
pub(crate) struct RangeReader<F> {
    pub(crate) file: F,
    pub(crate) range: Range<u64>,
}

impl<F: Borrow<PathFile>> Read for RangeReader<F> {
    /// The returned error wraps the error of the file.
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = (self.range.end - self.range.start).min(out.len() as u64) as usize;
        self.file.borrow().read_exact_at(&mut out[..count], self.range.start).map_err(io::Error::other)?;
        self.range.start += count as u64;
        Ok(count)
    }
}
