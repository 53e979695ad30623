//! What can be wrong with what PyTorch wrote: archives, pickles, and what they say about tensors.

use super::{PickleFault, ZipFault};
use crate::digest::Digest;

/// A file of PyTorch, or an item in one, that is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TorchFault {
    /// The archive around it is damaged or hostile.
    #[error("its archive is refused: {0}")]
    Zip(#[from] ZipFault),
    /// A pickle in it is damaged or hostile.
    #[error("its pickle is refused: {0}")]
    Pickle(#[from] PickleFault),
    /// It is no archive at all.
    #[error("it is not an archive of torch.save; {0}")]
    NotAnArchive(&'static str),
    /// A record that every archive has is not there.
    #[error("its archive has no record `{0}`")]
    MissingRecord(String),
    /// A record holds something else than it should.
    #[error("its record `{record}` holds {found}; supported is {supported}")]
    UnsupportedRecord {
        /// The record.
        record: &'static str,
        /// What it holds.
        found: String,
        /// What it may hold.
        supported: &'static str,
    },
    /// A record does not have the checksum that the archive keeps of it.
    #[error(
        "its record `{record}` is damaged: the archive says {expected}, its bytes give {got}; fetch it again"
    )]
    Damaged {
        /// The record.
        record: String,
        /// What the archive says.
        expected: Digest,
        /// What the bytes give.
        got: Digest,
    },
    /// A record is longer than is read into memory.
    #[error("its record `{record}` has {len} bytes, more than the {limit} that are read into memory")]
    RecordTooLarge {
        /// The record.
        record: String,
        /// Its length.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// The arguments of a function that makes tensors or storages are not those that it takes.
    #[error("it calls {function} in an unknown way: {detail}")]
    BadCall {
        /// The function.
        function: String,
        /// What does not fit.
        detail: &'static str,
    },
    /// A kind of tensor that is not supported.
    #[error("it holds a tensor that only {0} can build; save it as a plain dense tensor")]
    UnsupportedTensor(String),
    /// An element type that is not supported.
    #[error(
        "it holds a tensor of type {0}, which is not supported; convert it to another type before saving"
    )]
    UnsupportedDtype(String),
    /// A storage has another length than the pickle says.
    #[error("storage `{key}` should have {expected} bytes and has {got}")]
    StorageLength {
        /// The storage.
        key: String,
        /// Bytes that its type and element count need.
        expected: u64,
        /// Bytes in the archive.
        got: u64,
    },
    /// A tensor that reaches beyond its storage.
    #[error(
        "a tensor of shape {shape:?}, strides {strides:?} and first element {offset} reaches beyond its storage \
         `{key}` of {len} elements"
    )]
    TensorOutsideStorage {
        /// The storage.
        key: String,
        /// Elements in the storage.
        len: u64,
        /// First element.
        offset: u64,
        /// Dimensions.
        shape: Vec<u64>,
        /// Strides in elements.
        strides: Vec<u64>,
    },
    /// The tree is not what the format needs.
    #[error("{place} should be {expected}")]
    Unexpected {
        /// Where in the tree: "`model.weight`".
        place: String,
        /// What should be there.
        expected: &'static str,
    },
    /// A tensor of which the file holds the part of one rank only.
    #[error(
        "tensor `{name}` is one rank's part of a {class}; name the directory that holds the files of all ranks"
    )]
    PartOfTensor {
        /// The tensor.
        name: String,
        /// Its class.
        class: String,
    },
    /// A state of FSDP1 that does not say which parameters it holds.
    #[error(
        "it is a local state of FSDP1 (`{name}`): flat parameters without the names and shapes of what is in them, \
         which only the model's code knows; save a sharded or full state dict instead"
    )]
    FlatParameter {
        /// A flat parameter.
        name: String,
    },
}
