//! The header of a safetensors file: parsed and verified, or laid out for a new file.
//!
//! This module does no I/O: it works on bytes and lengths. The reader and the exporter access files.

use std::{collections::BTreeMap, ops::Range};

use super::{
    TensorType,
    header_json::{self, METADATA_KEY, RawEntry},
};
use crate::error::Fault;

/// Maximum length of a header in bytes, for reading and writing. It is the limit of the reference implementation.
pub const HEADER_LEN_MAX: u64 = 100_000_000;

/// Bytes of the length field before the header.
pub(super) const LENGTH_BYTES: u64 = 8;

/// The `__metadata__` of a file: free-form text by key.
pub type Metadata = BTreeMap<String, String>;

/// A tensor to be written: its name, dtype and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name, unique in the model.
    pub name: String,
    /// Element type in the file.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
}

/// A tensor in a file: its name, dtype and shape, and the range of its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    spec: TensorSpec,
    row_bytes: u64,
    start: u64,
    end: u64,
}

impl TensorEntry {
    /// The name, unique in the file.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The element type in the file.
    pub fn dtype(&self) -> TensorType {
        self.spec.dtype
    }

    /// The dimensions, slowest first, in elements.
    pub fn shape(&self) -> &[usize] {
        &self.spec.shape
    }

    /// The range of the tensor's bytes, counted from the end of the header.
    pub fn data_range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// Bytes of the whole tensor.
    pub fn len_bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Number of rows: the first dimension, or 1 for a 0-d tensor.
    pub fn row_count(&self) -> usize {
        self.spec.shape.first().copied().unwrap_or(1)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Number of elements in one row.
    pub fn row_len(&self) -> u64 {
        self.row_bytes / self.spec.dtype.size_bytes() as u64
    }

    /// Places a tensor at byte `start` of the data, with checked arithmetic.
    pub(crate) fn place(spec: TensorSpec, start: u64) -> Result<TensorEntry, Fault> {
        // In this order, as the reference implementation does: after a 0, no dimension is too large.
        let elements = spec.shape.iter().try_fold(1, |elements: u64, &d| elements.checked_mul(d as u64));
        let end = elements.and_then(|elements| elements.checked_mul(spec.dtype.size_bytes() as u64));
        match end.and_then(|len| start.checked_add(len)) {
            Some(end) => Ok(TensorEntry { row_bytes: row_bytes(&spec.shape, spec.dtype), spec, start, end }),
            None => Err(too_large(&spec)),
        }
    }
}

/// Bytes of a row of a tensor whose bytes can be counted. The rows of an empty tensor may be too large to be counted; they
/// have none.
pub(crate) fn row_bytes(shape: &[usize], dtype: TensorType) -> u64 {
    let size_bytes = dtype.size_bytes() as u64;
    shape.iter().skip(1).try_fold(size_bytes, |bytes, &size| bytes.checked_mul(size as u64)).unwrap_or(0)
}

/// A verified header: its tensors account for every byte of the file after the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    entries: Vec<TensorEntry>,
    by_name: BTreeMap<String, usize>,
    metadata: Option<Metadata>,
    data_start: u64,
}

impl Header {
    /// Reads the length of the header, without the eight bytes of the length field, from the first bytes of a file.
    /// Checks it against the limit and the length of the file.
    ///
    /// # Errors
    /// If it is above the limit, or the file ends before the header does.
    pub fn parse_length(prefix: &[u8], file_len: u64) -> Result<u64, Fault> {
        let bytes = prefix.first_chunk::<8>().filter(|_| file_len >= LENGTH_BYTES);
        let too_short =
            || Fault::new(format!("it has {file_len} bytes, too few for the 8-byte header length"));
        let len = u64::from_le_bytes(*bytes.ok_or_else(too_short)?);
        expect_len_allowed(len)?;
        let available = file_len - LENGTH_BYTES;
        if len > available { Err(truncated(len, available)) } else { Ok(len) }
    }

    /// Parses and verifies the text of a header (the bytes after the length field) of a file of `file_len` bytes.
    ///
    /// # Errors
    /// A [`Fault`] with the broken rule and the tensor.
    pub fn parse(text: &[u8], file_len: u64) -> Result<Header, Fault> {
        let data_start = LENGTH_BYTES + text.len() as u64;
        let data_len = file_len.checked_sub(data_start);
        let data_len =
            data_len.ok_or_else(|| truncated(text.len() as u64, file_len.saturating_sub(LENGTH_BYTES)))?;
        let text = std::str::from_utf8(text).map_err(|error| {
            Fault::at(LENGTH_BYTES as usize + error.valid_up_to(), "its header is not UTF-8")
        })?;
        if !text.trim_ascii_start().starts_with('{') {
            return Err(Fault::new("its header does not begin with `{`"));
        }
        let mut raw = header_json::read(text)?;
        // A stable sort by both offsets puts an empty tensor before the one that starts at the same byte.
        raw.tensors.sort_by_key(|tensor| tensor.offsets);
        let mut entries: Vec<TensorEntry> = Vec::with_capacity(raw.tensors.len());
        for tensor in raw.tensors {
            let entry = verify(tensor, entries.last(), data_len)?;
            entries.push(entry);
        }
        let covered = entries.last().map_or(0, |last| last.end);
        if covered != data_len {
            let reason = format!("its tensors end at data byte {covered}, but the file holds {data_len}");
            return Err(Fault::new(reason));
        }
        let by_name = index(&entries);
        Ok(Header { entries, by_name, metadata: raw.metadata, data_start })
    }

    /// Lays out a new file with the tensors in the given order. Also returns the bytes of the file up to its data: the
    /// length field and the canonical JSON, padded with spaces so that the data is 8-byte aligned.
    ///
    /// # Errors
    /// For repeated names, a tensor named `__metadata__`, sizes that overflow, a packed tensor without dimensions, and a
    /// header above the limit.
    pub fn layout(tensors: Vec<TensorSpec>, metadata: Option<Metadata>) -> Result<(Header, Vec<u8>), Fault> {
        let mut entries: Vec<TensorEntry> = Vec::with_capacity(tensors.len());
        let mut by_name = BTreeMap::new();
        for spec in tensors {
            if spec.dtype.values() > 1 && spec.shape.is_empty() {
                return Err(header_json::parted_rows(&spec.name, spec.dtype, &spec.shape));
            }
            if spec.name == METADATA_KEY {
                return Err(Fault::new("a tensor cannot be named `__metadata__`; rename it"));
            }
            if by_name.insert(spec.name.clone(), entries.len()).is_some() {
                return Err(header_json::twice(&spec.name));
            }
            let start = entries.last().map_or(0, |last| last.end);
            entries.push(TensorEntry::place(spec, start)?);
        }
        let mut text = header_json::write(&entries, metadata.as_ref());
        text.resize(text.len().next_multiple_of(8), b' ');
        let len = text.len() as u64;
        expect_len_allowed(len)?;
        let data_start = LENGTH_BYTES + len;
        let header = Header { entries, by_name, metadata, data_start };
        header.check_file_len()?;
        Ok((header, [&len.to_le_bytes()[..], &text].concat()))
    }

    /// The tensors in the order of their data.
    pub fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// The tensor with this name; `None` if the file has none.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.position(name).map(|position| &self.entries[position])
    }

    /// The index in [`Header::entries`] of the tensor with this name; `None` if the file has none.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The `__metadata__`; `None` if the file has none.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.metadata.as_ref()
    }

    /// Byte offset of the data in the file.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Total bytes of all tensors.
    pub fn data_len(&self) -> u64 {
        self.entries.last().map_or(0, |last| last.end)
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        self.data_start + self.data_len()
    }

    /// Refuses a file whose length overflows 64 bits although the length of its data does not.
    fn check_file_len(&self) -> Result<(), Fault> {
        match (self.data_start.checked_add(self.data_len()), self.entries.last()) {
            (None, Some(entry)) => Err(too_large(&entry.spec)),
            _ => Ok(()),
        }
    }
}

fn index(entries: &[TensorEntry]) -> BTreeMap<String, usize> {
    entries.iter().enumerate().map(|(position, entry)| (entry.spec.name.clone(), position)).collect()
}

/// Checks one entry against the tensor before it and the end of the file.
fn verify(tensor: RawEntry, previous: Option<&TensorEntry>, data_len: u64) -> Result<TensorEntry, Fault> {
    let RawEntry { name, dtype, shape, offsets: [start, end] } = tensor;
    let refused = |what: String| Err(Fault::new(format!("tensor `{name}` {what}")));
    if start > end {
        return refused(format!("has data offsets {start}..{end}, which run backwards"));
    }
    if end > data_len {
        return refused(format!("ends at data byte {end}, but the file holds only {data_len} (truncated?)"));
    }
    let expected = previous.map_or(0, |previous| previous.end);
    match previous {
        Some(previous) if start < expected => {
            let previous = previous.name();
            return refused(format!(
                "starts at data byte {start}, inside `{previous}`, which ends at {expected}"
            ));
        }
        _ if start > expected => {
            let reason = format!("data bytes {expected}..{start} before tensor `{name}` belong to no tensor");
            return Err(Fault::new(reason));
        }
        _ => {}
    }
    let entry = TensorEntry::place(TensorSpec { name: name.clone(), dtype, shape }, start)?;
    if entry.end != end {
        let (shape, expected, got) = (entry.shape(), entry.len_bytes(), end - start);
        return refused(format!("({dtype} {shape:?}) needs {expected} bytes, but its offsets span {got}"));
    }
    Ok(entry)
}

fn expect_len_allowed(len: u64) -> Result<(), Fault> {
    if len <= HEADER_LEN_MAX {
        return Ok(());
    }
    Err(Fault::new(format!(
        "it does not begin with the length of a header (its first 8 bytes say {len}, more than the {HEADER_LEN_MAX} that the format allows)"
    )))
}

fn truncated(len: u64, available: u64) -> Fault {
    let there = format!("but the file has only {available} after the header length");
    Fault::new(format!("its header needs {len} bytes, {there}"))
}

/// The fault for a tensor whose size in bytes overflows 64 bits.
fn too_large(TensorSpec { name, dtype, shape }: &TensorSpec) -> Fault {
    Fault::new(format!("tensor `{name}` ({dtype} {shape:?}) has more bytes than can be counted"))
}

#[cfg(test)]
mod tests;
