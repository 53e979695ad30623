//! Errors for exhausted memory: what was requested, and how much is in use.

use fsdp_core::memory::{Category, Usage};
use fsdp_core::out_of_memory::{Size, in_use};
use fsdp_core::{Error, MemoryKind, OutOfMemory};

use crate::error::DeviceError;

/// The error of an allocation for `category`; `usage` is what the rank has in use, if known.
pub(crate) fn allocation_error(error: DeviceError, category: Category, usage: Option<&Usage>) -> Error {
    let (kind, bytes, mut details, used) = match error {
        DeviceError::OutOfMemory { bytes, free, total } => {
            let free = format!("{} of the GPU's {} are free", Size(free), Size(total));
            (MemoryKind::Device, bytes, vec![free], usage.map(|usage| in_use(&usage.device)))
        }
        DeviceError::OutOfPinnedMemory { bytes } => {
            let limit = "a limit on locked memory (ulimit -l) or of a container may be the cause".to_owned();
            (MemoryKind::Pinned, bytes, vec![limit], usage.map(|usage| in_use(&usage.host)))
        }
        other => return Error::Device(Box::new(other)),
    };
    details.extend(used);
    OutOfMemory { kind, category, bytes: Some(bytes), in_use: details.join("; ") }.into()
}
