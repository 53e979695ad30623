//! Buffers used by NCCL: ownership and addresses.

use std::mem::ManuallyDrop;

use fsdp_core::comm::{CollectiveKind, Completed};
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};

use super::NcclError;
use crate::device::DeviceMemory;

/// Buffers of an issued collective. They are leaked unless [`InFlightBuffers::into_completed`] takes them out: as long
/// as the device may access them, they must not be freed.
pub(crate) struct InFlightBuffers<B> {
    inputs: ManuallyDrop<Vec<B>>,
    outputs: ManuallyDrop<Vec<B>>,
}

impl<B> InFlightBuffers<B> {
    /// Buffers that are about to be passed to NCCL.
    pub(crate) fn new(inputs: Vec<B>, outputs: Vec<B>) -> Self {
        Self { inputs: ManuallyDrop::new(inputs), outputs: ManuallyDrop::new(outputs) }
    }

    /// Returns the buffers; later accesses must be ordered after the collective.
    pub(crate) fn into_completed(self) -> Completed<B> {
        Completed {
            inputs: ManuallyDrop::into_inner(self.inputs),
            outputs: ManuallyDrop::into_inner(self.outputs),
        }
    }
}

/// One NCCL call of a group: addresses, and number and type of elements.
pub(crate) struct Segment {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

/// Why a collective could not be issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IssueError {
    /// The memory could not provide an address.
    #[error(transparent)]
    Memory(#[from] Error),
    /// NCCL rejected a call.
    #[error(transparent)]
    Nccl(#[from] NcclError),
}

/// Addresses, for work on `queue`, and counts of the non-empty segments. The count is that of the shorter side, as NCCL
/// expects.
pub(crate) fn segments<M: DeviceMemory>(
    memory: &M,
    queue: Queue,
    kind: CollectiveKind,
    buffers: &mut InFlightBuffers<M::Buffer>,
) -> Result<Vec<Segment>, Error> {
    let mut segments = Vec::with_capacity(buffers.outputs.len());
    for (index, output) in buffers.outputs.iter_mut().enumerate().filter(|(_, output)| !output.is_empty()) {
        let (len, dtype) = (output.len(), output.dtype());
        let to = memory.pointer_mut(queue, SliceMut::whole(output))?;
        segments.push(match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter(_) | CollectiveKind::AllToAll => {
                let input = &buffers.inputs[index];
                let from = memory.pointer(queue, Slice::whole(input))?;
                Segment { from, to, count: len.min(input.len()), dtype }
            }
            _ => Segment { from: to, to, count: len, dtype },
        });
    }
    Ok(segments)
}
