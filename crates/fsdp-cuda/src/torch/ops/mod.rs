//! Operations composed of ATen's. Lengths were checked before.

mod attention;
mod embedding;
mod head;
mod norm;
mod pointwise;
mod products;
mod rope;
mod sums;

pub use attention::attention_kernels;
pub(super) use head::{HeadCall, HeadGradients};
pub(super) use sums::BLOCK;

/// A size or stride as libtorch takes it.
pub(super) fn int(len: usize) -> i64 {
    i64::try_from(len).expect("no buffer is that long")
}
