//! The plan of an output: its files, and the destination of each tensor's elements.

use std::ops::Range;

use crate::{
    digest::{Digest, DigestKind},
    error::Error,
    safetensors::TensorType,
};

/// Creates the last bytes from the digests of all places, in the order of the files and of their places.
pub type TailFn = Box<dyn FnOnce(&[Vec<Option<Digest>>]) -> Result<Tail, Error> + Send>;

/// The files of a new checkpoint.
pub struct OutputPlan {
    /// The files, with names relative to the output directory.
    pub files: Vec<PlannedFile>,
    /// Creates the last bytes.
    pub tail: TailFn,
}

/// A file of known length.
#[derive(Clone, Debug, Default)]
pub struct PlannedFile {
    /// Name relative to the output directory, or the name of a single-file output.
    pub name: String,
    /// Length in bytes. Bytes that are never written are zero.
    pub len: u64,
    /// Bytes that are known beforehand, by offset.
    pub literals: Vec<(u64, Vec<u8>)>,
    /// The destinations of tensor elements.
    pub places: Vec<PlannedRun>,
}

/// A place of an output: a run of elements of a tensor in a planned file.
#[derive(Clone, Debug)]
pub struct PlannedRun {
    /// Byte offset in the file.
    pub offset: u64,
    /// Name of the tensor in the source checkpoint.
    pub tensor: String,
    /// The elements of the tensor, flattened in C order.
    pub elements: Range<u64>,
    /// Dtype in the file; the elements are converted if the tensor has another one.
    pub dtype: TensorType,
    /// The digest to compute over the bytes that are written here, if any.
    pub digest: Option<DigestKind>,
}

/// The bytes and files that are written last.
#[derive(Clone, Debug, Default)]
pub struct Tail {
    /// Bytes to write into planned files: (index of the file, offset, bytes).
    pub patches: Vec<(usize, u64, Vec<u8>)>,
    /// Whole small files, by name.
    pub files: Vec<(String, Vec<u8>)>,
}

impl PlannedRun {
    /// Size in the file, in bytes.
    pub(super) fn len_bytes(&self) -> u64 {
        (self.elements.end - self.elements.start) * self.dtype.size_bytes() as u64
    }
}
