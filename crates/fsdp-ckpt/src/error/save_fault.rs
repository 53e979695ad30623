//! Why a native checkpoint could not be saved: one variant per cause. The error around it names the directory
//! or file.

use std::ops::Range;

/// Why a save was refused or given up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveFault {
    /// Another process works in the output directory.
    #[error(
        "is locked by another process that writes to this directory; stop that run or choose another out_dir"
    )]
    Locked,
    /// The directory of all checkpoints is a link, which can not be cleared in one step.
    #[error(
        "is a link to a directory with checkpoints, which can not be cleared in one step; remove what is there, or \
         choose another out_dir"
    )]
    Linked,
    /// A checkpoint of this step is there.
    #[error("exists already, and a checkpoint is never overwritten; remove it to save this step again")]
    AlreadyThere,
    /// The rows of a tensor are not listed for every rank.
    #[error("tensor `{tensor}` lists rows for {got} ranks, but the world has {expected}")]
    RankCount {
        /// The tensor.
        tensor: String,
        /// Ranks of the world.
        expected: usize,
        /// Ranks for which rows are listed.
        got: usize,
    },
    /// Rows that the tensor does not have.
    #[error("rank {rank} is to save rows {}..{} of tensor `{tensor}`, which has {row_count}", rows.start, rows.end)]
    RowsOutside {
        /// The rank.
        rank: usize,
        /// The tensor.
        tensor: String,
        /// The rows.
        rows: Range<usize>,
        /// Rows of the tensor.
        row_count: usize,
    },
    /// Rows that no rank saves.
    #[error("rows {}..{} of tensor `{tensor}` are saved by no rank", rows.start, rows.end)]
    RowsUncovered {
        /// The tensor.
        tensor: String,
        /// The first run of such rows.
        rows: Range<usize>,
    },
    /// Rows that two ranks save.
    #[error(
        "rows {}..{} of tensor `{tensor}` are saved by ranks {} and {}; replicas save nothing",
        rows.start, rows.end, ranks[0], ranks[1]
    )]
    RowsDoubled {
        /// The tensor.
        tensor: String,
        /// The first run of such rows.
        rows: Range<usize>,
        /// The two ranks.
        ranks: [usize; 2],
    },
    /// Rows were written out of order.
    #[error(
        "row {got} of tensor `{tensor}` was written where row {expected} is next; rows of a tensor are in order"
    )]
    OutOfOrder {
        /// The tensor.
        tensor: String,
        /// The row that is next.
        expected: usize,
        /// The row that was given.
        got: usize,
    },
    /// A rank finished before it had written all of its rows.
    #[error("rows {}..{} of tensor `{tensor}` were not written", rows.start, rows.end)]
    RowsNotWritten {
        /// The tensor.
        tensor: String,
        /// The rows that are missing.
        rows: Range<usize>,
    },
    /// The disk has no room for a save.
    #[error(
        "a save needs {needed} bytes, and the disk has {free} left; make room there, or choose another out_dir"
    )]
    NoSpace {
        /// Bytes of a save.
        needed: u64,
        /// Bytes that are left.
        free: u64,
    },
    /// The file of a rank is not where rank 0 looks for it.
    #[error(
        "was written by rank {rank} and is not there for rank 0: all processes need the same out_dir, and nobody else \
         may remove files there"
    )]
    Disappeared {
        /// The rank.
        rank: usize,
    },
    /// The step has got another checkpoint meanwhile.
    #[error("was saved by another run meanwhile, with other content: two runs write here; stop one of them")]
    TwoRuns,
    /// A rank saved by another plan.
    #[error(
        "rank {rank} saved other tensors or rows than rank 0 expects; all ranks need the same model and world"
    )]
    OtherPlan {
        /// The rank.
        rank: usize,
    },
    /// A rank's report does not fit what is planned for it.
    #[error("rank {rank} reports another file than the one that is planned for it")]
    OtherFile {
        /// The rank.
        rank: usize,
    },
}
