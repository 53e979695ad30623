//! Why a selection of tensors and values cannot be laid out in a format.

/// What keeps a selection from being written in a format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    /// Two names need the same place in a nested state dict.
    #[error("`{name}` has no place: `{at}` already is something else; rename one of them")]
    PathsCollide {
        /// The name that came second.
        name: String,
        /// The place that is taken.
        at: String,
    },
    /// The indices of a list have large gaps.
    #[error("the list `{at}` has {items} items, but its last index is {last}; rename or leave out its items")]
    ListTooSparse {
        /// The list.
        at: String,
        /// How many items it has.
        items: usize,
        /// Its last index.
        last: u64,
    },
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
