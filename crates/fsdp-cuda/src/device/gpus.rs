//! The GPUs that the driver shows.

use crate::error::DeviceError;
use crate::ffi::driver::{Gpu, device_count};

/// Facts about a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// Its name.
    pub name: String,
    /// What compilers call its architecture (`sm_90`).
    pub architecture: String,
    /// Bytes of its memory that nobody has taken.
    pub free_bytes: usize,
    /// Bytes of its memory.
    pub total_bytes: usize,
}

/// How many GPUs the driver shows.
///
/// # Errors
/// [`DeviceError`]: there is no driver, or it is too old.
pub fn gpu_count() -> Result<usize, DeviceError> {
    device_count()
}

/// All GPUs, in the driver's order; asking takes a context on each.
///
/// # Errors
/// As [`gpu_count`]; for a single GPU: it can not be used.
pub fn gpus() -> Result<Vec<Result<GpuFacts, DeviceError>>, DeviceError> {
    Ok((0..device_count()?).map(facts).collect())
}

fn facts(number: usize) -> Result<GpuFacts, DeviceError> {
    let gpu = Gpu::open(number)?;
    let (free_bytes, total_bytes) = gpu.memory()?;
    let (name, architecture) = (gpu.name().to_owned(), gpu.architecture());
    Ok(GpuFacts { name, architecture, free_bytes, total_bytes })
}
