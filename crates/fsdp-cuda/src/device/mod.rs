//! Memory of one CUDA device.

mod contract;

pub use contract::{DeviceMemory, StreamHandle};
