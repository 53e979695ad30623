//! Compute: kernels, tape, layers, models, update rules and the host backend.

pub mod backend;

pub use backend::Backend;
