//! What can be wrong with a native checkpoint: one variant per cause. The error around it names the file.

use std::ops::Range;

use crate::{digest::Digest, safetensors::TensorType};

/// Why a native checkpoint, or one of its files, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NativeFault {
    /// A file of metadata is longer than anything that is written.
    #[error("it has more than {limit} bytes, the limit for such a file")]
    TooLong {
        /// The limit.
        limit: u64,
    },
    /// The last bytes are not those of a digest.
    #[error("it does not end in its own digest; it was cut off or changed, so use another checkpoint")]
    NotSealed,
    /// The digest at the end is not that of the bytes before it.
    #[error(
        "its bytes 0..{len} give {got}, but it ends in {expected}; it was changed, so use another checkpoint"
    )]
    SealBroken {
        /// Bytes before the digest.
        len: u64,
        /// The digest in the file.
        expected: Digest,
        /// The digest of the bytes.
        got: Digest,
    },
    /// The text is not that of a manifest or marker.
    #[error("its text cannot be read: {detail}")]
    Text {
        /// What the JSON reader says, with line and column.
        detail: String,
    },
    /// The file is of another kind.
    #[error("it says that it is `{got}`, not `{expected}`")]
    OtherFormat {
        /// What a manifest says.
        expected: &'static str,
        /// What this one says.
        got: String,
    },
    /// The checkpoint was written by a later version.
    #[error("it has format version {got}, and this program reads version {supported}; use a newer fsdp")]
    OtherVersion {
        /// The version that is read.
        supported: u64,
        /// The version of the file.
        got: u64,
    },
    /// Another number of ranks than there are files.
    #[error(
        "it says that {got} ranks saved it, but lists {expected} files, one for each rank; use another checkpoint"
    )]
    WorldSize {
        /// Files, of which each rank has one; at least one in a sound manifest.
        expected: usize,
        /// The number of ranks in the manifest.
        got: usize,
    },
    /// A dtype that is not known.
    #[error("tensor `{tensor}` has the unknown dtype `{dtype}`")]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The dtype as the file gives it.
        dtype: String,
    },
    /// A shape whose size in bytes cannot be counted.
    #[error("tensor `{tensor}` ({dtype} {shape:?}) has more bytes than can be counted")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: TensorType,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A file name that leads elsewhere, or is not that of a shard.
    #[error(
        "it names the file `{name}`, which is not a plain name ending in .safetensors, or names it twice"
    )]
    BadFileName {
        /// The name.
        name: String,
    },
    /// A file holds rows of a tensor that the manifest does not describe.
    #[error("file `{file}` holds rows of tensor `{tensor}`, which the manifest does not describe")]
    UndescribedTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
    },
    /// Rows that the tensor does not have, or that run backwards.
    #[error("file `{file}` holds rows {}..{} of tensor `{tensor}`, which has {row_count}", rows[0], rows[1])]
    BadRows {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// First row and the row after the last.
        rows: [usize; 2],
        /// Rows of the tensor.
        row_count: usize,
    },
    /// The checksums of a tensor's rows are not as many as its chunks.
    #[error(
        "file `{file}` has {got} checksums for rows {}..{} of tensor `{tensor}`, not {expected} as {chunk_rows} rows \
         a chunk make", rows.start, rows.end
    )]
    ChunkCount {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its rows in the file.
        rows: Range<usize>,
        /// Rows of a chunk.
        chunk_rows: usize,
        /// Chunks that the rows make.
        expected: usize,
        /// Checksums that there are.
        got: usize,
    },
    /// Rows that no file holds.
    #[error("rows {}..{} of tensor `{tensor}` are in no file", rows.start, rows.end)]
    RowsUncovered {
        /// The tensor.
        tensor: String,
        /// The first run of such rows.
        rows: Range<usize>,
    },
    /// Rows that two files hold.
    #[error("rows {}..{} of tensor `{tensor}` are in both `{first}` and `{second}`", rows.start, rows.end)]
    RowsDoubled {
        /// The tensor.
        tensor: String,
        /// The first run of such rows.
        rows: Range<usize>,
        /// One file.
        first: String,
        /// The other file.
        second: String,
    },
    /// A file of another length than the manifest says.
    #[error("it has {got} bytes, but the manifest says {expected}; it was cut off or replaced")]
    FileLength {
        /// The length in the manifest.
        expected: u64,
        /// The length of the file.
        got: u64,
    },
    /// The header of a file is not the one that was written.
    #[error("its header (bytes {}..{}) gives {got}, but the manifest says {expected}", bytes.start, bytes.end)]
    HeaderChanged {
        /// The bytes of the header.
        bytes: Range<u64>,
        /// The digest in the manifest.
        expected: Digest,
        /// The digest of the bytes.
        got: Digest,
    },
    /// The header of a file is not as long as the manifest says.
    #[error("its data begins at byte {got}, but the manifest says {expected}")]
    HeaderLength {
        /// Where the manifest says that the data begins.
        expected: u64,
        /// Where it begins.
        got: u64,
    },
    /// A file lacks rows that the manifest places in it.
    #[error("the manifest places rows {}..{} of tensor `{tensor}` in it, but it has no such tensor", rows.start, rows.end)]
    NotInFile {
        /// The tensor.
        tensor: String,
        /// The rows.
        rows: Range<usize>,
    },
    /// A file holds a tensor that the manifest does not place in it.
    #[error("it holds tensor `{tensor}`, which the manifest does not place in it")]
    NotInManifest {
        /// The tensor.
        tensor: String,
    },
    /// A tensor in a file is not what the manifest says.
    #[error(
        "tensor `{tensor}` is {dtype} {shape:?} in it, but the manifest makes it {expected_dtype} {expected:?}"
    )]
    WrongTensor {
        /// The tensor.
        tensor: String,
        /// The dtype of the manifest.
        expected_dtype: TensorType,
        /// The shape that the manifest gives to its rows in this file.
        expected: Vec<usize>,
        /// The dtype in the file.
        dtype: TensorType,
        /// The shape in the file.
        shape: Vec<usize>,
    },
    /// A safetensors file that does not belong to the checkpoint, and that other readers would take for a part.
    #[error("it is not listed in the manifest, but other programs would read it as a part; move it away")]
    ForeignFile,
    /// Data that is not what was written.
    #[error(
        "rows {}..{} of tensor `{tensor}` (bytes {}..{}) give {got}, but the manifest says {expected}; they were \
         changed, so use another checkpoint", rows.start, rows.end, bytes.start, bytes.end
    )]
    ChunkChanged {
        /// The tensor.
        tensor: String,
        /// The rows of the chunk.
        rows: Range<usize>,
        /// Its bytes in the file.
        bytes: Range<u64>,
        /// The digest in the manifest.
        expected: Digest,
        /// The digest of the bytes.
        got: Digest,
    },
    /// A value that is written otherwise than any value is.
    #[error("value `{name}` is none that a manifest can hold")]
    BadValue {
        /// The value.
        name: String,
    },
    /// A value that JSON readers would refuse to descend into.
    #[error("value `{name}` is nested too deeply for a manifest; leave it out")]
    TooDeep {
        /// The value.
        name: String,
    },
}
