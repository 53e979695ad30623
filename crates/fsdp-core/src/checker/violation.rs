//! Why a schedule is unsafe.

use crate::rank::{Queue, Rank};

/// Why a schedule is unsafe. Operations and buffers are named by their numbers and by what they are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A buffer holds something else than it must: for an operation, or at the end of the step.
    #[error("{place} needs {expected} in buffer {buffer}, which holds {got}")]
    Contents {
        /// The operation, or the end.
        place: String,
        /// The buffer.
        buffer: String,
        /// What it must hold.
        expected: String,
        /// What it holds.
        got: String,
    },
    /// An operation has too many operands, or too few.
    #[error("operation {op} reads {reads} and writes {writes} buffers, expected {expected:?}")]
    Operands {
        /// The operation.
        op: String,
        /// How many it reads.
        reads: usize,
        /// How many it writes.
        writes: usize,
        /// How many of both there must be.
        expected: [usize; 2],
    },
    /// The length, dtype or place of an operand does not fit the operation.
    #[error("buffer {buffer} does not fit operation {op}: expected {expected}")]
    Misfit {
        /// The operation.
        op: String,
        /// The buffer.
        buffer: String,
        /// What it must be.
        expected: String,
    },
    /// Two conflicting operations are not ordered.
    #[error(
        "operation {later} may overtake operation {earlier}: both touch buffer {buffer}, and no wait orders them"
    )]
    Race {
        /// The operation that comes first in program order.
        earlier: String,
        /// The one that comes later.
        later: String,
        /// What both touch.
        buffer: String,
    },
    /// A wait names a later operation, or one of the same queue.
    #[error("operation {op} waits for operation {target}, which does not come before it on another queue")]
    BadWait {
        /// The operation.
        op: String,
        /// What it waits for.
        target: usize,
    },
    /// A join names something other than an earlier collective that certainly comes before.
    #[error("operation {op} joins operation {target}, which is no collective that comes before it")]
    BadJoin {
        /// The operation.
        op: String,
        /// What it joins.
        target: usize,
    },
    /// The result of a collective is used, but nothing before hands its buffers over.
    #[error("operation {later} uses the result of operation {collective}, which nothing waits for or joins")]
    NotHandedOver {
        /// The collective.
        collective: String,
        /// The operation that uses its result.
        later: String,
    },
    /// Two ranks would issue different collectives.
    #[error("{rank} issues {got} as collective {index} of queue {queue}, but rank 0 issues {expected}")]
    Diverges {
        /// The rank that differs from rank 0.
        rank: Rank,
        /// The queue.
        queue: Queue,
        /// Position among the queue's collectives.
        index: usize,
        /// Rank 0's collective.
        expected: String,
        /// The rank's.
        got: String,
    },
}
