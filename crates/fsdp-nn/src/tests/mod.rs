//! Tests of models as a whole, on the host: unsharded, block by block.

mod descriptions;
mod errors;
mod finite_differences;
mod golden;
mod harness;
mod memory;
mod modes;
mod operations;
mod products;
mod safetensors;
