//! The GPUs that are visible to this process.

use std::ops::Range;

use crate::error::DeviceError;
pub use crate::ffi::driver::gpu_count;
use crate::ffi::driver::{Gpu, device_uuid};

/// Free and total bytes of a visible GPU; the query creates a context on it.
///
/// # Errors
/// [`DeviceError`] if there is no such GPU, or no driver.
pub fn gpu_memory(number: usize) -> Result<(usize, usize), DeviceError> {
    Gpu::open(number)?.memory()
}

/// NVIDIA's identifier of a GPU (`GPU-..`), which does not depend on its number in this process.
///
/// # Errors
/// The errors of [`gpu_count`]; [`DeviceError::NoDevice`].
pub fn gpu_uuid(number: usize) -> Result<String, DeviceError> {
    let uuid = device_uuid(number)?;
    let text = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(text);
    Ok(format!("GPU-{}", parts.join("-")))
}

/// There are fewer devices than ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{ranks} ranks need {ranks} GPUs, but this process sees {devices}: use fewer ranks, let them share one GPU, or make \
     more visible (CUDA_VISIBLE_DEVICES)"
)]
pub struct TooManyRanks {
    /// Number of ranks that need one.
    pub ranks: usize,
    /// Number of visible devices.
    pub devices: usize,
}

/// Assigns GPUs to the ranks of a process, one each, as numbers among the `devices` that it sees. The process is number
/// `local_process` of `local_processes` on its node, which hold `ranks` ranks each.
///
/// If the process sees enough GPUs for its whole node, it takes those that match its place. If it sees fewer, and
/// visibility was set explicitly (`is_visibility_set`: `CUDA_VISIBLE_DEVICES` is set), they are all its own.
///
/// # Errors
/// [`TooManyRanks`].
pub fn gpus_of_process(
    devices: usize,
    ranks: usize,
    (local_process, local_processes): (usize, usize),
    is_visibility_set: bool,
) -> Result<Range<usize>, TooManyRanks> {
    let on_node = ranks * local_processes;
    if devices >= on_node {
        Ok(local_process * ranks..(local_process + 1) * ranks)
    } else if !is_visibility_set {
        Err(TooManyRanks { ranks: on_node, devices })
    } else if devices >= ranks {
        Ok(0..ranks)
    } else {
        Err(TooManyRanks { ranks, devices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_gpus_follow_local_rank_or_preassignment() {
        let too_many = |ranks, devices| Err(TooManyRanks { ranks, devices });
        let gpus = |devices, ranks, place| gpus_of_process(devices, ranks, place, false);
        assert_eq!(gpus(8, 8, (0, 1)), Ok(0..8), "one process per node");
        assert_eq!(gpus(8, 2, (0, 1)), Ok(0..2));
        assert_eq!(gpus(8, 9, (0, 1)), too_many(9, 8));
        assert_eq!(gpus(8, 1, (5, 8)), Ok(5..6), "one per GPU, and all see all");
        assert_eq!(gpus(8, 2, (3, 4)), Ok(6..8));
        assert_eq!(gpus(4, 1, (5, 8)), too_many(8, 4));
        assert_eq!(gpus(1, 1, (1, 2)), too_many(2, 1), "two processes that see the same GPU");
        let chosen = |devices, ranks, place| gpus_of_process(devices, ranks, place, true);
        assert_eq!(chosen(1, 1, (0, 8)), Ok(0..1), "torchrun --virtual-local-rank: all are number 0");
        assert_eq!(chosen(1, 1, (5, 8)), Ok(0..1), "srun --gpus-per-task");
        assert_eq!(chosen(2, 2, (1, 4)), Ok(0..2));
        assert_eq!(chosen(1, 2, (1, 4)), too_many(2, 1));
        assert_eq!(chosen(8, 1, (5, 8)), Ok(5..6), "all were chosen, and all see all");
    }
}
