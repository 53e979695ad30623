//! The content of a checkpoint as plain data.

use std::{collections::BTreeMap, ops::Range, path::PathBuf, sync::Arc};

use super::{
    region::{Region, element_count},
    value::{Global, Value},
};
use crate::{digest::Digest, safetensors::TensorType};

/// One step of a tensor's or value's path in a nested state dict.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A key of a dict, as text.
    Name(String),
    /// An index of a list.
    Index(u64),
}

/// The role of a tensor or value in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A parameter or buffer of the model.
    Model,
    /// State of the optimizer.
    Optimizer,
    /// Anything else, such as random state or counters of the data loader.
    Other,
}

/// A checkpoint of any format.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// The file or directory that was opened.
    pub path: PathBuf,
    /// The format in words, with its variant ("PyTorch DCP 1.0.0, zstd").
    pub format: String,
    /// Number of ranks that wrote it. `None` if the format does not record it.
    pub world_size: Option<usize>,
    /// All tensors by name. Names are flattened paths joined by dots.
    pub tensors: BTreeMap<String, Tensor>,
    /// Everything that is not a tensor, by name.
    pub values: BTreeMap<String, Object>,
    /// Objects that were not read because their class is not part of a checkpoint format: class by name. Tensors inside
    /// them are listed in `tensors`.
    pub opaque: BTreeMap<String, Global>,
    /// The files and items that contain the bytes; chunks and protections index into this list.
    pub sources: Vec<Source>,
    /// Checksums kept by the format.
    pub protections: Vec<Protection>,
    /// Facts about the run to show to people, in display order: `("step", "50")`.
    pub run_state: Vec<(String, String)>,
    /// Oddities that do not make the checkpoint unreadable.
    pub notes: Vec<String>,
    /// Kinds of lost or mixed-up files that nothing in the checkpoint would reveal.
    pub limits: Vec<String>,
}

/// A tensor and the locations of its elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Path in the nested state dict.
    pub path: Vec<Key>,
    /// Role in training.
    pub role: Role,
    /// Element type.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Locations of the elements, in any order. Readers prove that the chunks contain each element exactly once.
    pub chunks: Vec<Chunk>,
}

/// A set of elements of a tensor that are stored together in a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The elements of the chunk.
    pub region: Region,
    /// Index in [`Checkpoint::sources`].
    pub source: usize,
    /// Byte offset of the chunk's first element in the source.
    pub offset: u64,
}

/// A value that is not a tensor, with its path in the nested state dict.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// Path in the nested state dict.
    pub path: Vec<Key>,
    /// Role in training.
    pub role: Role,
    /// The value.
    pub value: Value,
}

/// A sequence of bytes that chunks refer to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A whole file.
    File {
        /// Path or URL of the file.
        path: PathBuf,
        /// Length in bytes when it was opened.
        len: u64,
    },
    /// One zstd stream in a file; chunk offsets count decoded bytes.
    Zstd {
        /// Path or URL of the file.
        path: PathBuf,
        /// Byte range of the compressed stream in the file.
        range: Range<u64>,
        /// Upper limit of the decoded length, in bytes.
        decoded_len_max: u64,
    },
    /// One zstd stream among the metadata, as OCDBT keeps short values; chunk offsets count decoded bytes.
    Inline {
        /// Path or URL of the file with the metadata.
        path: PathBuf,
        /// Name of the stream, for messages.
        key: String,
        /// The compressed stream.
        stream: Arc<[u8]>,
        /// Upper limit of the decoded length, in bytes.
        decoded_len_max: u64,
    },
}

/// A checksum over a range of a source, kept by the format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Index in [`Checkpoint::sources`].
    pub source: usize,
    /// The protected byte range (of decoded bytes, in a compressed source).
    pub range: Range<u64>,
    /// The expected digest of the range.
    pub digest: Digest,
    /// A description of the range for messages ("tensor `x`", "record archive/data.pkl").
    pub what: String,
}

impl Key {
    /// The step as text, as it appears in a name.
    pub(crate) fn text(&self) -> String {
        match self {
            Key::Name(name) => name.clone(),
            Key::Index(index) => index.to_string(),
        }
    }
}

impl Source {
    /// Path or URL of the file.
    pub fn path(&self) -> &PathBuf {
        match self {
            Source::File { path, .. } | Source::Zstd { path, .. } | Source::Inline { path, .. } => path,
        }
    }

    /// Number of bytes that chunks may refer to: the length of a file, or the decoded limit of a compressed item.
    pub fn len_max(&self) -> u64 {
        match self {
            Source::File { len, .. } => *len,
            Source::Zstd { decoded_len_max, .. } | Source::Inline { decoded_len_max, .. } => *decoded_len_max,
        }
    }

    /// Whether the bytes have to be decoded, from the first one on.
    pub(crate) fn is_compressed(&self) -> bool {
        !matches!(self, Source::File { .. })
    }
}

impl Tensor {
    /// Number of elements.
    ///
    /// # Panics
    /// If the number does not fit in 64 bits; readers check shapes before they create a tensor.
    pub fn len(&self) -> u64 {
        element_count(&self.shape).expect("readers check products of shapes")
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of all elements in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len() * self.dtype.size_bytes() as u64
    }
}

/// Returns the name of a path: its steps joined by dots.
pub fn join(path: &[Key]) -> String {
    path.iter().map(Key::text).collect::<Vec<_>>().join(".")
}
