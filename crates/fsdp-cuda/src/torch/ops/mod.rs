//! Operations composed of ATen's, a file for each family. Lengths were checked before.

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

/// A size or stride as libtorch takes it.
pub(super) fn int(len: usize) -> i64 {
    i64::try_from(len).expect("no buffer is that long")
}
