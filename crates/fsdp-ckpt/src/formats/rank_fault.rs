//! Error messages shared by formats of several files: why files do not make up one checkpoint.

use std::{fmt::Display, path::Path};

use crate::{
    error::{Error, Fault, listed},
    safetensors::TensorType,
};

/// Maximum number of names that a message lists.
const LISTED_MAX: usize = 8;

/// No file name contains a rank; `example` is a name that does.
pub(crate) fn no_rank_files(example: &str) -> Fault {
    Fault::new(format!("no file is named after a rank in a known way (such as {example})"))
}

/// The directory holds files of several checkpoints; `sets` are patterns of file names.
pub(crate) fn several_sets(sets: &[String]) -> Fault {
    let sets = sets.join(", ");
    Fault::new(format!("it holds files of several checkpoints ({sets}); name a file of the one to read"))
}

/// Companion files are present but the model files are missing. Both arguments are patterns of file names.
pub(crate) fn no_main_files(main: &str, found: &str) -> Fault {
    Fault::new(format!(
        "the files of the model ({main}) are missing beside {found}; fetch them, or pass one of the files \
         that are present to read only these"
    ))
}

/// Two files belong to the same rank.
pub(crate) fn same_rank(rank: usize, first: &Path, second: &Path) -> Fault {
    let (first, second) = (first.display(), second.display());
    let way_out = "remove the one that does not belong to this checkpoint";
    Fault::new(format!("{first} and {second} are both of rank {rank}; {way_out}"))
}

/// The rank, world size or another number in a file contradicts its name or the other files. `because` begins with a
/// space, a comma or a semicolon.
pub(crate) fn disagrees(what: &str, expected: impl Display, got: impl Display, because: &str) -> Fault {
    Fault::new(format!(
        "its {what} is {got}, where {expected} was expected{because}; it belongs to another checkpoint"
    ))
}

/// A tensor is missing in one rank's file and present in another's.
pub(crate) fn not_in_rank(tensor: &str, other: &Path) -> Fault {
    let other = other.display();
    Fault::new(format!(
        "it has no tensor `{tensor}`, which {other} has; the files are of different checkpoints"
    ))
}

/// A tensor's shape differs between ranks, or from the shape that follows from `other`.
pub(crate) fn other_shape(tensor: &str, expected: &[u64], got: &[u64], other: &Path) -> Fault {
    let other = other.display();
    Fault::new(format!(
        "tensor `{tensor}` has the shape {got:?} in it, but {expected:?} follows from {other}"
    ))
}

/// A tensor's dtype differs between ranks.
pub(crate) fn other_type(tensor: &str, expected: TensorType, got: TensorType, other: &Path) -> Fault {
    Fault::new(format!("tensor `{tensor}` is {got} in it and {expected} in {}", other.display()))
}

/// The shards of a parameter have too few elements in total.
pub(crate) fn too_short(tensor: &str, expected: u64, got: u64) -> Fault {
    Fault::new(format!(
        "its shard of `{tensor}` is too short: all ranks together hold {got} elements, but its parameters \
         have {expected}; the file was truncated or belongs to another checkpoint"
    ))
}

/// A shard is not stored as one contiguous run of elements.
pub(crate) fn strided(tensor: &str) -> Fault {
    let supported = "only contiguous shards are supported";
    Fault::unsupported(format!("its shard of `{tensor}` is a strided view; {supported}"))
}

/// A tensor is distributed in a way that cannot be merged.
pub(crate) fn placement(tensor: &str, why: impl Display) -> Fault {
    Fault::new(format!("tensor `{tensor}` cannot be assembled: {why}"))
}

/// Two tensors or values have the same name, perhaps because the names of wrapping modules are removed.
pub(crate) fn same_name(name: &str) -> Fault {
    Fault::new(format!("two tensors or values have the name `{name}` (without module wrappers)"))
}

/// A file is named after another rank than the one it was saved as.
pub(crate) fn other_name(saved_as: &str, saved: usize, named: usize) -> Fault {
    Fault::new(format!(
        "it was saved as {saved_as}, the file of rank {saved}, but has the name of rank {named}: files of \
         ranks were swapped, or one was copied over another; give each its own name, or fetch them again"
    ))
}

/// A file records another rank than the one that its name states.
pub(crate) fn ranks_swapped(named: usize, recorded: usize) -> Fault {
    Fault::new(format!(
        "it records rank {recorded}, where rank {named} was expected by its name: files of ranks were swapped, or one \
         was copied over another; give each its own name, or fetch them again"
    ))
}

/// A file of one rank stands alone, under a name that does not lead to those of the other ranks.
pub(crate) fn one_of(rank: usize, world_size: usize, format: &str) -> Fault {
    Fault::new(format!(
        "it holds only what rank {rank} of {world_size} saved ({format}), not a model; put the files of all ranks into \
         one directory, with names that end with `_rank-<rank>-of-{world_size}.pth`, and name that directory"
    ))
}

/// A file of one rank was to be read as a whole model.
pub(crate) fn part_of_ranks(format: &str) -> Fault {
    Fault::new(format!(
        "it holds only what one rank saved ({format}), not a model; name the directory that holds the files of all ranks"
    ))
}

/// Two rank files hold the same bytes.
pub(crate) fn same_bytes(first: &Path) -> Fault {
    Fault::new(format!(
        "it holds the same bytes as {}, which no two ranks do: one was copied over the other; fetch them again",
        first.display()
    ))
}

/// The error for several weight files that no index or name joins.
pub(crate) fn several_files(dir: &Path, files: &[String]) -> Error {
    let reason = format!(
        "it holds several files of weights and nothing says that they belong together; name one of them: {}",
        listed(files, LISTED_MAX)
    );
    Error::wrong_path(dir, reason)
}

/// The error for a file that is part of a checkpoint.
pub(crate) fn part_of_directory(file: &Path, directory: &Path) -> Error {
    let directory = directory.display();
    Error::wrong_path(file, format!("it is a part of a checkpoint; name the directory {directory} instead"))
}
