//! The kernels behind [`Backend`](crate::Backend), over typed slices of checked lengths.

pub(crate) mod attention;
pub(crate) mod embedding;
pub(crate) mod head;
pub(crate) mod linear;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod pointwise;
pub(crate) mod rope;
