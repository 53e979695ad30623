//! Why a path is not a checkpoint that can be read, or its safetensors files are not one checkpoint.

use std::path::PathBuf;

/// Names that a message lists.
const LISTED_MAX: usize = 8;

/// A path that cannot be opened as a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatFault {
    /// A file of no known format.
    #[error("it is no checkpoint file of a known format: it begins with {start}{}", beside(checkpoint))]
    UnknownFile {
        /// Its first bytes, readably.
        start: String,
        /// The directory of the file, if that holds a checkpoint.
        checkpoint: Option<PathBuf>,
    },
    /// An empty file.
    #[error("it is empty")]
    EmptyFile,
    /// A directory without anything that is known.
    #[error("it holds no checkpoint of a known format{}", listed(" (it holds ", found, ")"))]
    UnknownDirectory {
        /// Some of its entries.
        found: Vec<String>,
    },
    /// A directory that is not a checkpoint, but holds some.
    #[error("it is not a checkpoint itself; name one of those in it: {}", listed("", candidates, ""))]
    HoldsCheckpoints {
        /// Their paths, relative to the directory.
        candidates: Vec<String>,
    },
    /// A file that is part of a checkpoint.
    #[error("it is a part of a checkpoint; name the directory {} instead", directory.display())]
    PartOfDirectory {
        /// The directory.
        directory: PathBuf,
    },
    /// Files of a native checkpoint without what vouches for them.
    #[error(
        "it is part of a native checkpoint whose {} is missing: the save was not completed, or the file was lost; \
         without it nothing says that the tensors are whole",
        crate::native::MANIFEST_FILE
    )]
    NoManifest,
    /// Several files of weights that nothing joins.
    #[error(
        "it holds several files of weights and nothing says that they belong together; name one of them: {}",
        listed("", files, "")
    )]
    SeveralFiles {
        /// The files.
        files: Vec<String>,
    },
    /// `DCP_SHARDING_INFO` cannot be read.
    #[error("its DCP_SHARDING_INFO cannot be read: {detail}")]
    BadShardingInfo {
        /// What is wrong with it.
        detail: String,
    },
    /// A tensor that `DCP_SHARDING_INFO` does not list, or with offsets that do not fit its shape.
    #[error("its DCP_SHARDING_INFO gives no offsets that fit tensor `{tensor}` of shape {shape:?}")]
    NoOffsets {
        /// The tensor.
        tensor: String,
        /// Its shape in the file.
        shape: Vec<u64>,
    },
    /// Two shards of a tensor that cannot be of one tensor.
    #[error("its shard of tensor `{tensor}` differs in type or dimensions from the one in {}", other.display())]
    ShardsDiffer {
        /// The tensor.
        tensor: String,
        /// The other file.
        other: PathBuf,
    },
    /// A name that says how many files there are, and not all are there.
    #[error("{missing} of the {expected} files that its name counts are missing; fetch or save them again")]
    FilesMissing {
        /// How many are missing.
        missing: usize,
        /// How many there should be.
        expected: usize,
    },
}

fn beside(checkpoint: &Option<PathBuf>) -> String {
    let note = |dir: &PathBuf| format!("; the directory {} holds a checkpoint", dir.display());
    checkpoint.as_ref().map(note).unwrap_or_default()
}

fn listed(before: &str, names: &[String], after: &str) -> String {
    if names.is_empty() {
        return String::new();
    }
    let more = match names.len().saturating_sub(LISTED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let shown = &names[..names.len().min(LISTED_MAX)];
    format!("{before}{}{more}{after}", shown.join(", "))
}
