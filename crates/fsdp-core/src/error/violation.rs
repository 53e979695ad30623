//! The reasons for which a schedule is unsafe.

use crate::rank::{Queue, Rank};

/// The reason for which a schedule is unsafe. Operations and buffers are named by number and description.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A buffer does not hold the contents that an operation, or the end of the step, requires.
    #[error("{place} needs {expected} in buffer {buffer}, which holds {got}")]
    Contents {
        /// The operation, or the end of the step.
        place: String,
        /// The buffer.
        buffer: String,
        /// The required contents.
        expected: String,
        /// The actual contents.
        got: String,
    },
    /// An operation has too many operands, or too few.
    #[error("operation {op} reads {reads} and writes {writes} buffers, expected {expected:?}")]
    Operands {
        /// The operation.
        op: String,
        /// Number of buffers it reads.
        reads: usize,
        /// Number of buffers it writes.
        writes: usize,
        /// The required numbers of reads and writes.
        expected: [usize; 2],
    },
    /// The length, dtype or place of an operand does not match the operation.
    #[error("buffer {buffer} does not fit operation {op}: expected {expected}")]
    Misfit {
        /// The operation.
        op: String,
        /// The buffer.
        buffer: String,
        /// The requirement on the buffer.
        expected: String,
    },
    /// Two conflicting operations are not ordered.
    #[error(
        "operation {later} may overtake operation {earlier}: both touch buffer {buffer}, and no wait orders them"
    )]
    Race {
        /// The first operation in program order.
        earlier: String,
        /// The later operation.
        later: String,
        /// The buffer that both access.
        buffer: String,
    },
    /// An operation waits for a later one, or for one on its own queue.
    #[error("operation {op} waits for operation {target}, which is not an earlier one on another queue")]
    BadWait {
        /// The operation.
        op: String,
        /// Index of the operation that it waits for.
        target: usize,
    },
    /// A join does not name an earlier collective that certainly completes before.
    #[error("operation {op} joins operation {target}, which is not an earlier collective")]
    BadJoin {
        /// The operation.
        op: String,
        /// Index of the operation that it joins.
        target: usize,
    },
    /// The result of a collective is used, but no operation before takes its buffers over.
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
        /// Index among the queue's collectives.
        index: usize,
        /// Rank 0's collective.
        expected: String,
        /// The collective of `rank`.
        got: String,
    },
}
