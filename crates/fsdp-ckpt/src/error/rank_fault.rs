//! How files of ranks can fail to make up one checkpoint.

use std::path::PathBuf;

use crate::safetensors::TensorType;

/// Ranks that a message lists.
const LISTED_MAX: usize = 12;

/// A set of files, one per rank, that is not one whole checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankFault {
    /// No file name says a rank.
    #[error("no file is named after a rank in a way that is known (such as {example})")]
    NoRankFiles {
        /// A name of that kind.
        example: &'static str,
    },
    /// Files of more than one checkpoint lie together.
    #[error("files of several checkpoints lie together ({}); name one of the files of the one to read", sets.join(", "))]
    SeveralSets {
        /// The sets, as patterns of file names.
        sets: Vec<String>,
    },
    /// Files of ranks are not there.
    #[error(
        "the files of ranks {} of {world_size} are missing; fetch them, every rank holds a part",
        list(ranks)
    )]
    MissingRanks {
        /// The missing ranks.
        ranks: Vec<usize>,
        /// Ranks that there should be.
        world_size: usize,
    },
    /// Two files are of the same rank.
    #[error("{} and {} are both of rank {rank}; remove the one that is not of this checkpoint", first.display(), second.display())]
    SameRank {
        /// The rank.
        rank: usize,
        /// One file.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// What a file says of its rank or world is not what its name or the other files say.
    #[error("its {what} is {got}, where {expected} was expected{because}; it is of another checkpoint")]
    Disagrees {
        /// What differs: "world size", "rank".
        what: &'static str,
        /// What was expected.
        expected: String,
        /// What it says.
        got: String,
        /// Why that was expected; begins with a space or is empty.
        because: &'static str,
    },
    /// A tensor of one rank's file is not in another one's.
    #[error("it has no tensor `{tensor}`, which {} has; the files are of different checkpoints", other.display())]
    NotInRank {
        /// The tensor.
        tensor: String,
        /// The file that has it.
        other: PathBuf,
    },
    /// A tensor differs in shape between ranks, or from what the checkpoint says of it.
    #[error("tensor `{tensor}` has the shape {got:?} in it, where {expected:?} follows from {}", other.display())]
    Shape {
        /// The tensor.
        tensor: String,
        /// The shape that was expected.
        expected: Vec<u64>,
        /// The shape in the file.
        got: Vec<u64>,
        /// The file that the expectation comes from.
        other: PathBuf,
    },
    /// A tensor differs in type between ranks.
    #[error("tensor `{tensor}` is {got} in it and {expected} in {}", other.display())]
    Type {
        /// The tensor.
        tensor: String,
        /// The type in the other file.
        expected: TensorType,
        /// The type in this file.
        got: TensorType,
        /// The other file.
        other: PathBuf,
    },
    /// All shards of a parameter together have too few elements.
    #[error(
        "its shard of `{tensor}` is too short: all ranks together hold {got} elements, the parameters in it have \
         {expected}; the file was cut or is of another checkpoint"
    )]
    TooShort {
        /// The sharded parameter.
        tensor: String,
        /// Elements that are needed.
        expected: u64,
        /// Elements that there are.
        got: u64,
    },
    /// A shard is not stored as one run of elements.
    #[error("its shard of `{tensor}` is a strided view; shards that lie in one run are supported")]
    Strided {
        /// The sharded parameter.
        tensor: String,
    },
    /// A tensor is distributed in a way that cannot be put together.
    #[error("tensor `{tensor}` cannot be put together: {why}")]
    Placement {
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },
    /// Something that the format needs is not there, or is something else.
    #[error("{place} should be {expected}")]
    Unexpected {
        /// Where in the file.
        place: String,
        /// What should be there.
        expected: &'static str,
    },
    /// Two parameters have the same name once wrappers are removed from names.
    #[error("two tensors have the name `{tensor}` when names of wrappers are removed from it")]
    SameName {
        /// The name.
        tensor: String,
    },
}

fn list(ranks: &[usize]) -> String {
    let shown: Vec<String> = ranks.iter().take(LISTED_MAX).map(usize::to_string).collect();
    let rest = if ranks.len() > LISTED_MAX { ", .." } else { "" };
    shown.join(", ") + rest
}
