//! Operations composed of ATen's, one file per family. Lengths were checked before.

mod activation;
mod attention;
mod delta;
mod dequantize;
mod dora;
mod experts;
mod head;
mod latent;
mod linear;
mod lookup;
mod norm;
mod pointwise;
mod rope;
mod size;
mod sums;

pub use attention::attention_kernels;
pub(super) use size::int;
pub(super) use sums::BLOCK;
