//! What can be wrong with the metadata of a distributed checkpoint, and between it and the files that it names.

use std::{ops::Range, path::PathBuf};

use crate::safetensors::TensorType;

/// A distributed checkpoint (DCP) that is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DcpFault {
    /// A part of the metadata is not what PyTorch writes.
    #[error("{place} is not {expected}; save the checkpoint again")]
    Unexpected {
        /// Which part: "the entry of `model.weight`".
        place: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The checkpoint of another tool that resembles PyTorch's.
    #[error(
        "it is a checkpoint of {tool}, which only looks like one of PyTorch; convert it with {tool} first"
    )]
    OtherTool {
        /// The tool.
        tool: &'static str,
    },
    /// A dtype that is not supported.
    #[error("tensor `{tensor}` has the dtype {dtype}, which is not supported")]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The dtype.
        dtype: String,
    },
    /// A shape whose bytes cannot be counted.
    #[error("tensor `{tensor}` of shape {shape:?} has more bytes than can be counted")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A chunk that is not a box of its tensor.
    #[error(
        "tensor `{tensor}` of shape {shape:?} has a chunk at {offsets:?} of size {sizes:?}, which is outside of it"
    )]
    ChunkOutsideTensor {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// First index of the chunk.
        offsets: Vec<u64>,
        /// Size of the chunk.
        sizes: Vec<u64>,
    },
    /// A chunk or value that lies in no file.
    #[error("it does not say in which file {item} lies; the save was not completed, or files were mixed")]
    NoItem {
        /// The chunk or value.
        item: String,
    },
    /// A chunk or value that is said to lie at two places.
    #[error("it lists {item} twice")]
    TwoItems {
        /// The chunk or value.
        item: String,
    },
    /// Ranks list different things under one name.
    #[error("`{name}` has another type or shape here than in the metadata of a lower rank; files were mixed")]
    RanksDisagree {
        /// The name.
        name: String,
    },
    /// Two tensors or values get the same name.
    #[error("two tensors or values have the name `{name}`")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A file that is not a plain name in the directory.
    #[error("it places {item} in `{file}`, which is not a plain file name; all files lie in one directory")]
    EscapesDirectory {
        /// The chunk or value.
        item: String,
        /// The file as the metadata names it.
        file: String,
    },
    /// A file that is not there.
    #[error("{} is missing: it should hold {item}; fetch the checkpoint again", file.display())]
    MissingFile {
        /// The file.
        file: PathBuf,
        /// One chunk or value that it should hold.
        item: String,
    },
    /// An item that ends beyond its file.
    #[error(
        "{item} should be bytes {}..{} of {}, which has only {file_len}; it was truncated, or belongs to another save",
        range.start, range.end, file.display()
    )]
    ItemOutsideFile {
        /// The chunk or value.
        item: String,
        /// The file.
        file: PathBuf,
        /// Its bytes.
        range: Range<u64>,
        /// Length of the file.
        file_len: u64,
    },
    /// An item was transformed in a way that is not known.
    #[error("{item} is stored through {transforms:?}; only `stream.zstd/1` is supported")]
    UnknownTransform {
        /// The chunk or value.
        item: String,
        /// What was done to it.
        transforms: Vec<String>,
    },
    /// A compressed item that cannot be decompressed.
    #[error("{item} in {} cannot be decompressed: {detail}", file.display())]
    Compressed {
        /// The chunk or value.
        item: String,
        /// The file.
        file: PathBuf,
        /// What the decoder says.
        detail: String,
    },
    /// An item that holds something else than its chunk.
    #[error(
        "{item} in {} should be a tensor of {dtype} {sizes:?} and is {found}; the file belongs to another save",
        file.display()
    )]
    WrongTensor {
        /// The chunk.
        item: String,
        /// The file.
        file: PathBuf,
        /// The type that the metadata gives.
        dtype: TensorType,
        /// The size that the metadata gives.
        sizes: Vec<u64>,
        /// What lies there.
        found: String,
    },
    /// A small record of an item that does not match its own checksum.
    #[error("record `{record}` of {item} in {} does not match its CRC-32; fetch the file again", file.display())]
    Damaged {
        /// The record.
        record: String,
        /// The chunk or value.
        item: String,
        /// The file.
        file: PathBuf,
    },
}
