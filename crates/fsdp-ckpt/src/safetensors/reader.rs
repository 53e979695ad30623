//! Reads one safetensors file: its header when it is opened, tensors by positioned reads.

use std::{ops::Range, path::Path};

use super::{Header, TensorEntry, header::LENGTH_BYTES};
use crate::{
    error::{Error, Fault},
    file_io::PathFile,
    rows::{expect_len, expect_rows},
};

/// An open safetensors file. Reads are positioned, so one reader can serve any number of threads.
#[derive(Debug)]
pub struct SafetensorsReader {
    file: PathFile,
    header: Header,
}

impl SafetensorsReader {
    /// Opens a file and verifies its header. Reads no tensor.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Malformed`] if its header breaks a rule of the format.
    pub fn open(path: impl AsRef<Path>) -> Result<SafetensorsReader, Error> {
        let path = path.as_ref();
        let (file, file_len) = PathFile::open(path)?;
        let malformed = |fault| malformed(path, fault);
        let prefix = file.read_first(file_len.min(LENGTH_BYTES))?;
        let len = Header::parse_length(&prefix, file_len).map_err(malformed)?;
        let mut text = vec![0; len as usize];
        file.read_exact_at(&mut text, LENGTH_BYTES)?;
        let header = Header::parse(&text, file_len).map_err(malformed)?;
        Ok(SafetensorsReader { file, header })
    }

    /// The path with which the file was opened.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The verified header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The names of the tensors, in the order of their data.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.entries().iter().map(TensorEntry::name)
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if the file has no such tensor.
    pub fn entry(&self, name: &str) -> Result<&TensorEntry, Error> {
        let unknown = || Error::unknown_tensor(self.path(), name, self.header.entries().len());
        self.header.entry(name).ok_or_else(unknown)
    }

    /// Fills `out` with the bytes of a tensor from byte `offset_bytes` of the tensor on.
    ///
    /// # Errors
    /// [`Error::BadRequest`], [`Error::Io`].
    pub fn read_at(&self, name: &str, offset_bytes: u64, out: &mut [u8]) -> Result<(), Error> {
        let entry = self.entry(name)?;
        let end = offset_bytes.saturating_add(out.len() as u64);
        if end > entry.len_bytes() {
            let len = entry.len_bytes();
            let reason =
                format!("bytes {offset_bytes}..{end} of tensor `{name}` do not exist: it has {len} bytes");
            return Err(Error::bad_request(self.path(), reason));
        }
        self.read_bytes(entry, offset_bytes, out)
    }

    /// Fills `out`, which must have exactly their length, with the bytes of whole rows of a tensor.
    ///
    /// # Errors
    /// [`Error::BadRequest`], [`Error::Io`].
    pub fn read_rows(&self, name: &str, rows: Range<usize>, out: &mut [u8]) -> Result<(), Error> {
        let entry = self.entry(name)?;
        let bytes = self.rows_to_bytes(entry, &rows)?;
        expect_len(self.path(), name, "bytes", bytes.end - bytes.start, out.len() as u64)?;
        self.read_bytes(entry, bytes.start, out)
    }

    /// The byte range of rows, relative to the start of the tensor.
    pub(crate) fn rows_to_bytes(
        &self,
        entry: &TensorEntry,
        rows: &Range<usize>,
    ) -> Result<Range<u64>, Error> {
        expect_rows(self.path(), entry.name(), rows, entry.row_count())?;
        Ok(rows.start as u64 * entry.row_bytes()..rows.end as u64 * entry.row_bytes())
    }

    /// Reads bytes of a tensor. The caller checks that they are inside of the tensor.
    pub(crate) fn read_bytes(&self, entry: &TensorEntry, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let start = self.header.data_start() + entry.data_range().start;
        self.file.read_exact_at(out, start + offset)
    }
}

/// The error for a header that breaks a rule of the format.
pub(crate) fn malformed(path: &Path, fault: Fault) -> Error {
    match fault.in_file(path) {
        Error::Malformed { path, offset, reason } => {
            let reason = format!("not a valid safetensors file: {reason}; fetch or export the file again");
            Error::Malformed { path, offset, reason }
        }
        other => other,
    }
}
