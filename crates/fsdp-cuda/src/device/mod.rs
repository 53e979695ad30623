//! Memory of one CUDA device.

mod arithmetic;
mod buffer;
mod code_books;
mod contract;
pub(crate) mod full;
mod gpus;
mod lock;
mod memory;
mod mirror;
mod pinned;
mod pool;
mod queues;
mod reclaim;
mod rotations;
mod staging;
mod transfer;

pub use buffer::CudaBuffer;
pub use contract::{DeviceMemory, StreamHandle};
pub use gpus::{TooManyRanks, gpu_count, gpu_memory, gpu_uuid, gpus_of_process};
pub use memory::{CudaMemory, CudaOptions};
pub use queues::{CudaEvent, TimedEvent};
pub use reclaim::{Neighbor, ask_when_full, give_back, is_only, is_scarce};

#[cfg(feature = "torch")]
pub(crate) use buffer::{In, Out};
pub(crate) use memory::{expect_dtype, expect_float};
pub(crate) use mirror::{put_back, readable, take};
