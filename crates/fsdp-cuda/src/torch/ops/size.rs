//! Sizes as libtorch takes them.

/// Converts a size or stride for libtorch.
pub(in crate::torch) fn int(len: usize) -> i64 {
    i64::try_from(len).expect("no buffer is that long")
}
