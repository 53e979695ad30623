//! The kernels of [`Backend`](crate::Backend): one file per family of operations, over typed slices of checked
//! lengths.

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
pub(crate) mod matmul;
mod norm;
mod pointwise;
mod rope;
