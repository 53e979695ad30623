//! What can be wrong with a safetensors header: one variant per cause, each naming the tensor.

use crate::safetensors::TensorType;

/// A rule of the safetensors format that a header breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderFault {
    /// The file is too short for the eight bytes of the header length.
    #[error("it has {file_len} bytes, too few for the 8-byte header length")]
    NoLength {
        /// Bytes in the file.
        file_len: u64,
    },
    /// The header is larger than the format allows.
    #[error("its header has {len} bytes, more than the {limit} that the format allows")]
    HeaderTooLarge {
        /// Length of the header.
        len: u64,
        /// The largest length allowed.
        limit: u64,
    },
    /// The file ends inside the header.
    #[error("its header needs {len} bytes, but the file has only {available} after the header length")]
    HeaderTruncated {
        /// Length of the header as the file states it.
        len: u64,
        /// Bytes that follow the length in the file.
        available: u64,
    },
    /// The header does not begin with `{`.
    #[error("its header does not begin with `{{`")]
    NotAnObject,
    /// The header is not UTF-8.
    #[error("its header is not UTF-8 after byte {valid_up_to}")]
    NotUtf8 {
        /// Bytes of the header that are valid.
        valid_up_to: usize,
    },
    /// The header is not JSON.
    #[error("its header is not valid JSON: {detail}")]
    Json {
        /// What the JSON reader says, with line and column.
        detail: String,
    },
    /// Two entries have the same name.
    #[error("its header lists `{tensor}` twice")]
    DuplicateTensor {
        /// The name (`__metadata__` for the metadata).
        tensor: String,
    },
    /// An entry cannot be read: not an object, or a field of the wrong type.
    #[error("the entry of tensor `{tensor}` cannot be read: {detail}")]
    BadEntry {
        /// The tensor.
        tensor: String,
        /// What the JSON reader says, with line and column.
        detail: String,
    },
    /// A field is given twice in one entry.
    #[error("tensor `{tensor}` has the field `{field}` twice")]
    DuplicateField {
        /// The tensor.
        tensor: String,
        /// The field.
        field: String,
    },
    /// An entry has a field that the format does not know, which might change what its bytes mean.
    #[error("tensor `{tensor}` has the unknown field `{field}`")]
    UnknownField {
        /// The tensor.
        tensor: String,
        /// The field.
        field: String,
    },
    /// An entry lacks one of its three fields.
    #[error("tensor `{tensor}` lacks the field `{field}`")]
    MissingField {
        /// The tensor.
        tensor: String,
        /// The field.
        field: &'static str,
    },
    /// A dtype that is not supported.
    #[error("tensor `{tensor}` has dtype `{dtype}`; supported are {}", TensorType::list())]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The dtype as the file gives it.
        dtype: String,
    },
    /// `__metadata__` is not a flat map from strings to strings.
    #[error("its `__metadata__` is not a map of strings to strings without repeated keys: {detail}")]
    BadMetadata {
        /// What the JSON reader says, with line and column.
        detail: String,
    },
    /// An end that comes before its start.
    #[error("tensor `{tensor}` has data offsets {start}..{end}, which run backwards")]
    ReversedOffsets {
        /// The tensor.
        tensor: String,
        /// Its first byte.
        start: u64,
        /// The byte after its last.
        end: u64,
    },
    /// A tensor that ends beyond the end of the file.
    #[error("tensor `{tensor}` ends at data byte {end}, but the file holds only {data_len} (truncated?)")]
    OffsetsBeyondFile {
        /// The tensor.
        tensor: String,
        /// The byte after its last, counted from the end of the header.
        end: u64,
        /// Bytes after the header.
        data_len: u64,
    },
    /// Bytes before a tensor that belong to none.
    #[error("data bytes {expected}..{start} before tensor `{tensor}` belong to no tensor")]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Where it should start.
        expected: u64,
        /// Where it starts.
        start: u64,
    },
    /// Two tensors that share bytes.
    #[error(
        "tensor `{tensor}` starts at data byte {start}, inside `{previous}`, which ends at {previous_end}"
    )]
    Overlap {
        /// The later tensor.
        tensor: String,
        /// Where it starts.
        start: u64,
        /// The tensor before it.
        previous: String,
        /// Where that one ends.
        previous_end: u64,
    },
    /// A byte range that does not fit the shape.
    #[error("tensor `{tensor}` ({dtype} {shape:?}) needs {expected} bytes, but its offsets span {got}")]
    WrongSize {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: TensorType,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes that dtype and shape need.
        expected: u64,
        /// Bytes that the offsets span.
        got: u64,
    },
    /// A shape whose size in bytes overflows 64 bits.
    #[error("tensor `{tensor}` ({dtype} {shape:?}) has more bytes than can be counted")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: TensorType,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Bytes after the last tensor.
    #[error("its tensors end at data byte {covered}, but the file holds {data_len}")]
    UncoveredTail {
        /// Where the last tensor ends.
        covered: u64,
        /// Bytes after the header.
        data_len: u64,
    },
    /// `__metadata__` as the name of a tensor to write.
    #[error("a tensor cannot be named `__metadata__`; rename it")]
    ReservedName,
}
