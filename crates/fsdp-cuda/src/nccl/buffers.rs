//! Buffers on their way through NCCL: who owns them, and where they are.

use std::mem::ManuallyDrop;

use fsdp_core::comm::{CollectiveKind, Completed};
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::{Error, Queue};

use super::NcclError;
use crate::device::DeviceMemory;

/// Buffers of a collective that was issued. They are leaked unless [`Flying::land`] takes them out: as long as the
/// device may work on them, they must not be freed.
pub(crate) struct Flying<B> {
    inputs: ManuallyDrop<Vec<B>>,
    outputs: ManuallyDrop<Vec<B>>,
}

impl<B> Flying<B> {
    /// Buffers that are about to be given to NCCL.
    pub(crate) fn new(inputs: Vec<B>, outputs: Vec<B>) -> Self {
        Self { inputs: ManuallyDrop::new(inputs), outputs: ManuallyDrop::new(outputs) }
    }

    /// The buffers, when whoever gets them is ordered behind the collective.
    pub(crate) fn land(self) -> Completed<B> {
        Completed {
            inputs: ManuallyDrop::into_inner(self.inputs),
            outputs: ManuallyDrop::into_inner(self.outputs),
        }
    }
}

/// One call of a group: addresses and elements.
pub(crate) struct Segment {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) count: usize,
}

/// Why a collective could not be issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IssueError {
    /// A buffer has no address.
    #[error(transparent)]
    Memory(#[from] Error),
    /// NCCL refused.
    #[error(transparent)]
    Nccl(#[from] NcclError),
}

/// Addresses, for work of `queue`, and counts of the segments that have elements. The count is of the shorter side, as NCCL
/// wants it.
pub(crate) fn segments<M: DeviceMemory>(
    memory: &M,
    queue: Queue,
    kind: CollectiveKind,
    buffers: &mut Flying<M::Buffer>,
) -> Result<Vec<Segment>, Error> {
    let mut segments = Vec::with_capacity(buffers.outputs.len());
    for (index, output) in buffers.outputs.iter_mut().enumerate().filter(|(_, output)| !output.is_empty()) {
        let len = output.len();
        let to = memory.pointer_mut(queue, SliceMut::whole(output))?;
        segments.push(match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter(_) => {
                let input = &buffers.inputs[index];
                let from = memory.pointer(queue, Slice::whole(input))?;
                Segment { from, to, count: len.min(input.len()) }
            }
            _ => Segment { from: to, to, count: len },
        });
    }
    Ok(segments)
}
