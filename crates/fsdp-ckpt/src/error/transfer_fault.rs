//! What can go wrong while bytes are moved, other than what the operating system says.

use std::{io, ops::Range, path::PathBuf};

use crate::digest::Digest;

/// Why bytes could not be moved, or must not be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferFault {
    /// The caller asked to stop.
    #[error("interrupted; nothing was left behind")]
    Canceled,
    /// Something has the name of the output already.
    #[error("{} exists already; remove it or choose another destination", path.display())]
    DestinationExists {
        /// The destination.
        path: PathBuf,
    },
    /// The output is to replace a link.
    #[error(
        "{} is a symbolic link to a directory, which an output can not take the place of; name the directory that it \
         leads to, which must be empty, or another destination", path.display()
    )]
    DestinationIsLink {
        /// The link.
        path: PathBuf,
    },
    /// A checksum of the checkpoint does not match its bytes.
    #[error(
        "bytes {}..{} of {} ({what}) are damaged: their checksum is {got}, the checkpoint says {expected}; fetch or \
         save the file again", range.start, range.end, path.display()
    )]
    ChecksumMismatch {
        /// The file.
        path: PathBuf,
        /// What lies there.
        what: String,
        /// The bytes; in a compressed item, decoded ones.
        range: Range<u64>,
        /// The checksum that the checkpoint keeps.
        expected: Digest,
        /// The checksum of the bytes.
        got: Digest,
    },
    /// A compressed item cannot be decoded.
    #[error(
        "the zstd stream in bytes {}..{} of {} cannot be decoded: {cause}; fetch or save the file again",
        range.start, range.end, path.display()
    )]
    BrokenStream {
        /// The file.
        path: PathBuf,
        /// The compressed bytes.
        range: Range<u64>,
        /// What the decoder says.
        cause: io::Error,
    },
    /// A compressed item decodes to more than the format allows it to.
    #[error(
        "the zstd stream in bytes {}..{} of {} decodes to more than the {limit} bytes that its checkpoint states",
        range.start, range.end, path.display()
    )]
    StreamTooLong {
        /// The file.
        path: PathBuf,
        /// The compressed bytes.
        range: Range<u64>,
        /// The most that it may hold.
        limit: u64,
    },
    /// A compressed item decodes to less than tensors need.
    #[error(
        "the zstd stream in bytes {}..{} of {} decodes to {got} bytes, but tensors lie in its first {needed}",
        range.start, range.end, path.display()
    )]
    StreamTooShort {
        /// The file.
        path: PathBuf,
        /// The compressed bytes.
        range: Range<u64>,
        /// Decoded bytes that tensors need.
        needed: u64,
        /// Decoded bytes that are there.
        got: u64,
    },
    /// A tensor reaches beyond the end of its file.
    #[error(
        "tensor `{tensor}` needs bytes {}..{} of {}, which has {len}; fetch or save the file again",
        range.start, range.end, path.display()
    )]
    BeyondSource {
        /// The tensor.
        tensor: String,
        /// The file.
        path: PathBuf,
        /// The bytes.
        range: Range<u64>,
        /// The length of the file.
        len: u64,
    },
}
