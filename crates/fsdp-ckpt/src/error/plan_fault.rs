//! Why a selection of tensors and values cannot be laid out in a format.

use super::NestingFault;

/// What keeps a selection from being written in a format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    /// The names do not form a nested state dict.
    #[error("{0}")]
    Nesting(#[from] NestingFault),
    /// Two tensors or values have one name.
    #[error("two tensors or values would be named `{name}`; rename one of them")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A checkpoint of no ranks was asked for.
    #[error("a checkpoint needs at least one rank; give a world size of 1 or more")]
    NoRanks,
}
