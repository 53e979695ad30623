//! What is to be written: the files of an output, and where the elements of each tensor go.

use std::ops::Range;

use crate::{
    digest::{Digest, DigestKind},
    error::Error,
    safetensors::TensorType,
};

/// Makes the last bytes out of the digests of all places, in the order of the files and of their places.
pub type TailFn = Box<dyn FnOnce(&[Vec<Option<Digest>>]) -> Result<Tail, Error> + Send>;

/// The files of a new checkpoint.
pub struct OutputPlan {
    /// The files, with names relative to the output directory.
    pub files: Vec<PlannedFile>,
    /// Makes the last bytes.
    pub tail: TailFn,
}

/// A file of known length.
#[derive(Clone, Debug, Default)]
pub struct PlannedFile {
    /// Name relative to the output directory, or of the output itself where that is one file.
    pub name: String,
    /// Length in bytes. Bytes that nothing writes are zero.
    pub len: u64,
    /// Bytes that are known beforehand, with their offsets.
    pub literals: Vec<(u64, Vec<u8>)>,
    /// Where tensor elements go.
    pub places: Vec<Place>,
}

/// A run of elements of a tensor in a planned file.
#[derive(Clone, Debug)]
pub struct Place {
    /// First byte in the file.
    pub offset: u64,
    /// Name of the tensor in the source checkpoint.
    pub tensor: String,
    /// Which elements of the tensor, flattened in C order.
    pub elements: Range<u64>,
    /// Element type in the file; another one than the tensor's converts.
    pub dtype: TensorType,
    /// The digest to compute of the bytes written here.
    pub digest: Option<DigestKind>,
}

/// What is written last.
#[derive(Clone, Debug, Default)]
pub struct Tail {
    /// Bytes at offsets of planned files: (index of the file, offset, bytes).
    pub patches: Vec<(usize, u64, Vec<u8>)>,
    /// Whole small files, by name.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Place {
    /// Bytes of it in the file.
    pub(super) fn len_bytes(&self) -> u64 {
        (self.elements.end - self.elements.start) * self.dtype.size_bytes() as u64
    }
}
