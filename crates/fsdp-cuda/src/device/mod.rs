//! Memory of one CUDA device.

mod buffer;
mod contract;
mod full;
mod memory;
mod pinned;
mod pool;
mod queues;
mod staging;
mod transfer;

pub use buffer::CudaBuffer;
pub use contract::{DeviceMemory, StreamHandle};
pub use memory::{CudaMemory, CudaOptions};
pub use queues::{CudaEvent, TimedEvent};
