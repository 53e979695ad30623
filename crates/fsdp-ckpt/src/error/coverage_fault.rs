//! How the chunks of a tensor can fail to make it up.

use std::{fmt::Write, ops::Range, path::PathBuf};

/// Files that a message lists.
const LISTED_MAX: usize = 4;

/// Chunks of a tensor that do not hold each of its elements exactly once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoverageFault {
    /// Elements that no chunk holds.
    #[error(
        "elements {}..{} (from index {}) of tensor `{tensor}` of shape {shape:?} are in none of its {} files{}; a \
         file or a rank is missing, or the checkpoint was not written to its end",
        elements.start, elements.end, index_text(shape, elements.start), files.len(), list(files)
    )]
    Missing {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The first run of elements that is missing, in C order.
        elements: Range<u64>,
        /// The files that hold the other elements.
        files: Vec<PathBuf>,
    },
    /// Elements that more than one chunk holds.
    #[error(
        "elements {}..{} (from index {}) of tensor `{tensor}` of shape {shape:?} are held twice, by {} and by {}; \
         files of different checkpoints may lie together",
        elements.start, elements.end, index_text(shape, elements.start), first.display(), second.display()
    )]
    Doubled {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The first run of elements that is doubled, in C order.
        elements: Range<u64>,
        /// A file that holds them.
        first: PathBuf,
        /// Another one, or the same.
        second: PathBuf,
    },
    /// A chunk reaches out of its tensor.
    #[error("{} holds {region} of tensor `{tensor}`, which has the shape {shape:?}; the file is damaged", file.display())]
    OutsideTensor {
        /// The tensor.
        tensor: String,
        /// The region, as text.
        region: String,
        /// The shape of the tensor.
        shape: Vec<u64>,
        /// The file.
        file: PathBuf,
    },
    /// A chunk reaches out of its file.
    #[error(
        "a chunk of tensor `{tensor}` at byte {offset} of {} reaches beyond its {len} bytes; the file is truncated \
         or damaged", file.display()
    )]
    OutsideSource {
        /// The tensor.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// First byte of the chunk.
        offset: u64,
        /// Length of the file, or of the decoded bytes of a compressed item.
        len: u64,
    },
}

/// The index of a flat element, as in `[3, 0]`.
fn index_text(shape: &[u64], mut flat: u64) -> String {
    let mut index: Vec<u64> = Vec::new();
    for dim in shape.iter().rev() {
        index.push(flat % dim.max(&1));
        flat /= dim.max(&1);
    }
    index.reverse();
    format!("{index:?}")
}

fn list(files: &[PathBuf]) -> String {
    let mut text = String::new();
    for (index, file) in files.iter().take(LISTED_MAX).enumerate() {
        let separator = if index == 0 { " (" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{separator}{}", file.display());
    }
    match files.len() {
        0 => text,
        len if len > LISTED_MAX => text + ", ..)",
        _ => text + ")",
    }
}
