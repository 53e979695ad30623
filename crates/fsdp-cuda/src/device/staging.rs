//! Pinned memory through which the host's own slices travel.
//!
//! A copy between the device and ordinary memory of the host would block, or read the memory after the caller has it
//! back. So elements pass through a ring of pinned bytes: to write, they are put there (converted) and the device
//! copies them when it comes to it; the bytes are used again when an event says that it has. The host waits only
//! when a whole ring of writes is on its way.

use std::collections::VecDeque;
use std::sync::Arc;

use fsdp_core::Queue;
use fsdp_nn::host::HostBlock;

use super::queues::{CudaEvent, Queues};
use crate::error::DeviceError;
use crate::ffi::driver::{Gpu, PinnedBlock, Range};

/// Length of the ring.
const RING_BYTES: usize = 4 << 20;

/// The most that is copied at once, so that one part travels while the next is converted.
pub(super) const PART_BYTES: usize = 1 << 20;

/// Parts of the ring begin at multiples of this.
const ALIGN_BYTES: usize = 64;

/// The ring of one rank.
#[derive(Debug)]
pub(super) struct Staging {
    gpu: Arc<Gpu>,
    /// Allocated when it is first needed.
    ring: Option<PinnedBlock>,
    head: usize,
    /// Parts that copies may still use, oldest first: where they begin and end, and when they are done.
    in_flight: VecDeque<(usize, usize, CudaEvent)>,
}

impl Staging {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), ring: None, head: 0, in_flight: VecDeque::new() }
    }

    /// Fills a part of the ring and gives its copy to a queue. `bytes` is at most [`PART_BYTES`].
    pub(super) fn send(
        &mut self,
        queues: &Queues,
        queue: Queue,
        dst: Range<'_>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), DeviceError> {
        let bytes = dst.bytes();
        let start = self.reserve(bytes)?;
        let ring = self.ring.as_mut().expect("it was just reserved");
        fill(&mut ring.bytes_mut()[start..start + bytes]);
        queues.stream(queue).copy(ring.range(start, bytes), dst)?;
        self.in_flight.push_back((start, start + bytes, queues.record(queue)));
        Ok(())
    }

    /// Copies to the host after the earlier work of a queue, waits for that and shows the bytes.
    pub(super) fn receive(
        &mut self,
        queues: &Queues,
        queue: Queue,
        src: Range<'_>,
        take: impl FnOnce(&[u8]),
    ) -> Result<(), DeviceError> {
        let bytes = src.bytes();
        let start = self.reserve(bytes)?;
        let ring = self.ring.as_ref().expect("it was just reserved");
        queues.stream(queue).copy(src, ring.range(start, bytes))?;
        queues.stream(queue).synchronize()?;
        take(&ring.bytes()[start..start + bytes]);
        Ok(())
    }

    /// Where a part of the ring begins that no copy uses.
    fn reserve(&mut self, bytes: usize) -> Result<usize, DeviceError> {
        if self.ring.is_none() {
            self.ring = Some(self.gpu.allocate_pinned(RING_BYTES)?);
        }
        assert!(bytes <= PART_BYTES, "a part of {bytes} bytes is more than {PART_BYTES}");
        if self.head + bytes > RING_BYTES {
            // What is left of the round before lies in the end of the ring that is skipped.
            let skipped = self.head;
            self.retire(|first, _| first >= skipped)?;
            self.head = 0;
        }
        let (start, end) = (self.head, self.head + bytes);
        self.retire(|first, last| first < end && start < last)?;
        self.head = end.next_multiple_of(ALIGN_BYTES);
        Ok(start)
    }

    /// Waits for the oldest parts as long as they are in the way. Parts are in the order of the ring, so when the
    /// oldest is not, none is.
    fn retire(&mut self, in_the_way: impl Fn(usize, usize) -> bool) -> Result<(), DeviceError> {
        while let Some((first, last, event)) = self.in_flight.front() {
            if !in_the_way(*first, *last) {
                break;
            }
            event.synchronize()?;
            self.in_flight.pop_front();
        }
        Ok(())
    }
}
