//! Compute: kernels, tape, layers, models, update rules and the host backend.

pub mod backend;
pub mod host;
pub mod random;
pub mod shape;
pub mod update;

pub use backend::Backend;
pub use host::{HostBuffer, HostMemory, HostOptions, HostPool};
pub use shape::{ShapeBuffer, ShapeMemory};
