//! Limits on hostile pickles.

use crate::error::Fault;

/// Maximum length of a pickle.
pub(crate) const PICKLE_BYTES_MAX: usize = 1 << 30;
/// Maximum number of values, counting shared ones once.
pub(super) const NODES_MAX: usize = 1 << 26;
/// Maximum number of memo entries.
pub(super) const MEMO_MAX: usize = 1 << 26;
/// Maximum bytes of one text, byte string or large integer.
pub(super) const STRING_BYTES_MAX: usize = 1 << 28;
/// Maximum depth of nested containers.
pub(super) const DEPTH_MAX: u32 = 200;
/// Maximum bytes of expanded values, in which shared parts count at every place.
pub(super) const EXPANDED_BYTES_MAX: u64 = 1 << 28;

/// The fault for a limit that is exceeded at byte `at`.
pub(super) fn too_large(at: usize, what: &str, limit: usize) -> Fault {
    Fault::at(at, format!("it has more than {limit} {what}"))
}
