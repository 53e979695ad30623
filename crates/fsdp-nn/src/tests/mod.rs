//! Tests of complete models on the host: unsharded, block by block.

mod costs;
mod descriptions;
mod errors;
mod harness;
mod kept;
mod memory;
mod models_page;
mod modes;
mod names;
mod operands;
mod packed;
mod products;
