//! What is said when memory runs out: what was asked for, and who has it.

use fsdp_core::memory::{Category, Usage};
use fsdp_core::out_of_memory::{Size, in_use};
use fsdp_core::{Error, MemoryKind, OutOfMemory};

use crate::error::DeviceError;

/// The error of an allocation for `category`, of a rank that has so much in use, if that is known.
pub(crate) fn explain(error: DeviceError, category: Category, usage: Option<&Usage>) -> Error {
    let (kind, bytes, mut said, used) = match error {
        DeviceError::OutOfMemory { bytes, free, total } => {
            let free = format!("{} of {} of the GPU are free", Size(free), Size(total));
            (MemoryKind::Device, bytes, vec![free], usage.map(|usage| in_use(&usage.device)))
        }
        DeviceError::OutOfPinnedMemory { bytes } => {
            let limit = "a limit of locked memory (ulimit -l) or of a container may be the cause".to_owned();
            (MemoryKind::Pinned, bytes, vec![limit], usage.map(|usage| in_use(&usage.host)))
        }
        other => return Error::Device(Box::new(other)),
    };
    said.extend(used);
    OutOfMemory { kind, category, bytes: Some(bytes), in_use: said.join("; ") }.into()
}
