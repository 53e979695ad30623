//! Compute: kernels, tape, layers, models, update rules and the host backend.

pub mod backend;
pub mod error;
pub mod footprint;
pub mod hf;
pub mod init;
pub mod layer;
pub mod model;
pub mod random;
pub mod tape;

pub use backend::Backend;

#[cfg(test)]
mod tests;
