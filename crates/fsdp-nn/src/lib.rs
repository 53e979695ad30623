//! Compute: kernels, tape, layers, models, update rules and the host backend.

pub mod backend;
mod error;
pub mod footprint;
pub mod hf;
pub mod host;
mod init;
pub mod layer;
pub mod model;
pub mod random;
pub mod shape;
pub mod tape;
pub mod update;

pub use backend::Backend;
pub use error::ModelError;
pub use host::{HostBuffer, HostMemory, HostOptions, HostPool};
pub use init::Init;
pub use shape::{ShapeBuffer, ShapeMemory};

#[cfg(test)]
mod tests;
