//! The host backend: memory and kernels of one rank that computes on the CPU.
//!
//! Every kernel is deterministic: work is split by shape only, partial results are combined in index order, and
//! vector bodies round like their scalar tails. The number of threads, the alignment of a buffer and its offset
//! therefore never change a bit. Matrix products use the `gemm` crate (and the CPU's bf16 instructions where they are
//! faster); all other loops are plain Rust over fixed-width lanes, compiled for several instruction sets (module
//! `raw`).

mod arithmetic;
mod backend;
mod buffer;
pub mod convert;
pub(crate) mod element;
pub(crate) mod floats;
#[expect(clippy::too_many_arguments, reason = "a kernel takes its operands and sizes one by one")]
pub(crate) mod kernels;
pub(crate) mod math;
mod memory;
mod pool;
#[expect(unsafe_code, reason = "the one module of this crate that may")]
pub(crate) mod raw;
#[cfg(test)]
mod tests;
pub(crate) mod workers;

pub use buffer::HostBuffer;
pub use memory::{HostMemory, HostOptions};
pub use pool::{HostBlock, HostBlocks, HostPool};
