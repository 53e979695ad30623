//! Operations composed of ATen's, one file per family. Lengths were checked before.

mod activation;
mod attention;
mod experts;
mod head;
mod linear;
mod lookup;
mod norm;
mod pointwise;
mod rope;
mod sums;

pub use attention::attention_kernels;
pub(super) use sums::BLOCK;

/// Converts a size or stride for libtorch.
pub(super) fn int(len: usize) -> i64 {
    i64::try_from(len).expect("no buffer is that long")
}
