//! A checkpoint as all formats see it: named tensors, each covered by chunks that say where their bytes lie.
//!
//! Readers of formats fill it from metadata alone; no tensor data is read before
//! something asks for it. Everything that works across formats (converting, verifying, comparing, listing)
//! works on it and knows no format.
//!
//! A [`Source`] is a sequence of bytes: a plain file, or a compressed item of one. A [`Chunk`] says which
//! elements of a tensor lie where in a source. A [`Protection`] is a checksum that the format itself keeps
//! over a range of a source.

mod coverage;
mod flatten;
mod join;
mod opaque;
mod optimizer_name;
mod region;
mod role;
mod under;
mod value;
mod wrappers;

use std::{collections::BTreeMap, ops::Range, path::PathBuf};

pub(crate) use flatten::key_text;
pub use flatten::{Nested, Nesting, Tree, flatten, nest};
pub use optimizer_name::OptimizerName;
pub(crate) use optimizer_name::{parameter_span, with_parameter};
pub(crate) use region::{element_count, len_bytes, packed_strides};
pub use role::Roles;
pub(crate) use role::has_model_step;
pub use value::{Global, Value};
pub(crate) use wrappers::Wrappers;

use crate::{digest::Digest, safetensors::TensorType};

/// One step of the path of a tensor or value in a nested state dict.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A key of a dict, as text.
    Name(String),
    /// An index of a list.
    Index(u64),
}

/// What a tensor is to training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A parameter or buffer of the model.
    Model,
    /// State of the optimizer.
    Optimizer,
    /// Anything else: random state, counters of the data loader.
    Other,
}

/// A checkpoint of any format, by name.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// The file or directory that was opened.
    pub path: PathBuf,
    /// The format in words, with its variant ("PyTorch DCP 1.0.0, zstd").
    pub format: String,
    /// Ranks that wrote it, where the format says.
    pub world_size: Option<usize>,
    /// All tensors by name. Names are flattened paths joined by dots.
    pub tensors: BTreeMap<String, Tensor>,
    /// Everything that is not a tensor, by name.
    pub values: BTreeMap<String, Object>,
    /// What was not read because only a program knows its class, by name: the class. Tensors in it are among the others.
    pub opaque: BTreeMap<String, Global>,
    /// Where bytes come from; chunks and protections index it.
    pub sources: Vec<Source>,
    /// Checksums that the format keeps.
    pub protections: Vec<Protection>,
    /// Facts about the run, for people: `("step", "50")`, in the order to show.
    pub run_state: Vec<(String, String)>,
    /// What is odd, but does not make the checkpoint unreadable.
    pub notes: Vec<String>,
    /// Losses and mix-ups of files that nothing in them would show.
    pub limits: Vec<String>,
}

/// A tensor and where its elements are.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its place in the nested state dict.
    pub path: Vec<Key>,
    /// What it is.
    pub role: Role,
    /// Element type.
    pub dtype: TensorType,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Where its elements are, in any order. Each is there once; readers prove that each is there once.
    pub chunks: Vec<Chunk>,
}

/// Elements of a tensor that lie together in a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which elements.
    pub region: Region,
    /// Index in [`Checkpoint::sources`].
    pub source: usize,
    /// First byte in the source of the chunk's first element.
    pub offset: u64,
}

/// Which elements of a tensor a chunk holds, and how they lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Region {
    /// Elements of the tensor flattened in C order, one after another. Whole rows are of this kind, and
    /// flattened shards that begin anywhere.
    Flat(Range<u64>),
    /// A box of the tensor; the element at index `i` of the box lies `sum(i * strides)` elements after the
    /// first one.
    Box {
        /// First index in each dimension.
        offsets: Vec<u64>,
        /// Size in each dimension.
        sizes: Vec<u64>,
        /// Distance of neighbours in each dimension, in elements.
        strides: Vec<u64>,
    },
}

/// A value that is not a tensor, with its place in the nested state dict.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// Its place in the nested state dict.
    pub path: Vec<Key>,
    /// What it is to training.
    pub role: Role,
    /// The value.
    pub value: Value,
}

/// A sequence of bytes that chunks refer to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file, from its first byte.
    File {
        /// Its path.
        path: PathBuf,
        /// Its length when it was opened.
        len: u64,
    },
    /// One zstd stream in a file: chunk offsets count decoded bytes.
    Zstd {
        /// The file.
        path: PathBuf,
        /// The compressed bytes in the file.
        range: Range<u64>,
        /// The length that decoding must not exceed.
        decoded_len_max: u64,
    },
}

/// A checksum over a range of a source, kept by the format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Index in [`Checkpoint::sources`].
    pub source: usize,
    /// The bytes (decoded bytes, in a compressed source).
    pub range: Range<u64>,
    /// What they must give.
    pub digest: Digest,
    /// What lies there, for messages ("tensor `x`", "record archive/data.pkl").
    pub what: String,
}

impl Key {
    /// The step as it stands in a name.
    pub(crate) fn text(&self) -> String {
        match self {
            Key::Name(name) => name.clone(),
            Key::Index(index) => index.to_string(),
        }
    }
}

impl Source {
    /// The file.
    pub fn path(&self) -> &PathBuf {
        match self {
            Source::File { path, .. } | Source::Zstd { path, .. } => path,
        }
    }

    /// Bytes that chunks may lie in: the length of a file, the limit of a compressed item.
    pub fn len_max(&self) -> u64 {
        match self {
            Source::File { len, .. } => *len,
            Source::Zstd { decoded_len_max, .. } => *decoded_len_max,
        }
    }
}

impl Tensor {
    /// Number of elements.
    ///
    /// # Panics
    /// When the number does not fit 64 bits: readers check shapes before they make a tensor.
    pub fn len(&self) -> u64 {
        element_count(&self.shape).expect("readers check products of shapes")
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all elements.
    pub fn len_bytes(&self) -> u64 {
        self.len() * self.dtype.size_bytes() as u64
    }
}

/// The name of a path: its steps joined by dots.
pub fn join(path: &[Key]) -> String {
    path.iter().map(Key::text).collect::<Vec<_>>().join(".")
}
