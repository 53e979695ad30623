//! Compute: kernels, tape, layers, models, update rules and the host backend.

pub mod backend;
pub mod error;
pub mod layer;
pub mod model;
pub mod random;
pub mod tape;

pub use backend::Backend;
