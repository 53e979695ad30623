//! How nested dicts and lists can fail to have flat names, and flat names to nest.

/// A nested state dict that has no flat names, or flat names that do not nest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NestingFault {
    /// The root of a state dict is something else than a dict.
    #[error("its root is not a dict; save a dict of names and tensors")]
    NoDict,
    /// A key of a dict has no text.
    #[error("the dict at `{at}` has the key {key}; keys that are text, integers, bools or None have names")]
    UnsupportedKey {
        /// Where the dict is; empty at the root.
        at: String,
        /// The key, for people.
        key: String,
    },
    /// Two leaves have the same name.
    #[error("two items have the name `{name}`; rename one of them where the checkpoint is saved")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// One place would have to be two of leaf, dict and list.
    #[error(
        "the name `{name}` does not nest beside the others: `{at}` would be two kinds of things; rename one"
    )]
    TwoKinds {
        /// The place.
        at: String,
        /// The name that does not fit those before it.
        name: String,
    },
    /// Too many items of lists have no names.
    #[error("a list begins with item {index}, or more than {limit} items of lists are missing")]
    ItemsMissing {
        /// The index at which there were too many.
        index: u64,
        /// How many may be missing.
        limit: u64,
    },
}
