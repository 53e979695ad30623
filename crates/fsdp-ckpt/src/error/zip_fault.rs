//! What can be wrong with a zip archive: one variant per cause, each naming the record or the byte.

/// An archive that is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ZipFault {
    /// There is no end record where the archive ends.
    #[error("no zip archive ends at its last byte (truncated, or not a zip archive)")]
    NoEnd,
    /// The end records contradict each other or the place where they are.
    #[error("its end record is inconsistent: {detail}")]
    BadEnd {
        /// What does not fit.
        detail: &'static str,
    },
    /// The directory does not hold the entries that the end record counts.
    #[error("its directory of {len} bytes cannot hold {count} entries")]
    DirectoryTooShort {
        /// Bytes of the directory.
        len: u64,
        /// Entries that it should hold.
        count: u64,
    },
    /// The directory is larger than is read.
    #[error("its directory has {len} bytes, more than the {limit} that are read")]
    DirectoryTooLarge {
        /// Bytes of the directory.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// An entry of the directory cannot be read.
    #[error("entry {index} of its directory cannot be read: {detail}")]
    BadEntry {
        /// Which entry, from 0.
        index: u64,
        /// What does not fit.
        detail: &'static str,
    },
    /// The name of a record is not a relative path of plain names.
    #[error("record `{name}` is not named by a plain relative path")]
    BadName {
        /// The name, made readable.
        name: String,
    },
    /// Two records have the same name.
    #[error("record `{name}` is there twice")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A record is compressed or encrypted.
    #[error("record `{name}` is {how}; archives of PyTorch store their records as they are")]
    NotStored {
        /// The record.
        name: String,
        /// "compressed (method 8)" or "encrypted".
        how: String,
    },
    /// A record or its header does not lie before the directory.
    #[error("record `{name}` needs bytes up to {end}, but the archive's data ends at byte {limit}")]
    RecordOutside {
        /// The record.
        name: String,
        /// The byte after its last one, from the start of the archive.
        end: u64,
        /// Where the directory begins.
        limit: u64,
    },
    /// The header before the data does not agree with the directory.
    #[error("the header of record `{name}` at byte {at} does not agree with the directory: {detail}")]
    BadLocalHeader {
        /// The record.
        name: String,
        /// Where the header is, from the start of the archive.
        at: u64,
        /// What does not fit.
        detail: &'static str,
    },
    /// Two records share bytes.
    #[error("records `{first}` and `{second}` overlap")]
    Overlap {
        /// The record that begins first.
        first: String,
        /// The other one.
        second: String,
    },
}
