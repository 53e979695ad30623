//! A ring of pinned memory for transfers between host slices and the device.
//!
//! A direct copy between the device and ordinary host memory would block, or read the memory after the caller has it
//! back. So elements pass through a ring of pinned bytes: a write converts them into the ring, and the device copies
//! them later; the bytes are reused once an event says that it has. The host waits only when a whole ring of writes is
//! in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use fsdp_core::Queue;
use fsdp_nn::host::HostBlock;

use super::queues::{CudaEvent, Queues};
use crate::error::DeviceError;
use crate::ffi::driver::{Gpu, PinnedBlock, Range};

/// Length of the ring.
const RING_BYTES: usize = 4 << 20;

/// Maximum length of one copy, so that one part is transferred while the next is converted.
pub(super) const PART_BYTES: usize = 1 << 20;

/// Alignment of parts in the ring.
const ALIGN_BYTES: usize = 64;

/// The ring of one rank.
#[derive(Debug)]
pub(super) struct Staging {
    gpu: Arc<Gpu>,
    /// Allocated on first use.
    ring: Option<PinnedBlock>,
    head: usize,
    /// Parts in use by copies, oldest first: start, end, and the event that completes them.
    in_flight: VecDeque<(usize, usize, CudaEvent)>,
}

impl Staging {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), ring: None, head: 0, in_flight: VecDeque::new() }
    }

    /// Fills a part of the ring and enqueues its copy on a queue. `dst` has at most [`PART_BYTES`] bytes.
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

    /// Copies to the host after all earlier work on a queue, waits for the copy, and passes the bytes to `take`.
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

    /// Reserves a part of the ring that no copy uses; returns its start.
    fn reserve(&mut self, bytes: usize) -> Result<usize, DeviceError> {
        if self.ring.is_none() {
            self.ring = Some(self.gpu.allocate_pinned(RING_BYTES)?);
        }
        assert!(bytes <= PART_BYTES, "a part of {bytes} bytes is more than {PART_BYTES}");
        if self.head + bytes > RING_BYTES {
            // The skipped end of the ring may still hold parts of the previous round.
            let skipped = self.head;
            self.retire(|first, _| first >= skipped)?;
            self.head = 0;
        }
        let (start, end) = (self.head, self.head + bytes);
        self.retire(|first, last| first < end && start < last)?;
        self.head = end.next_multiple_of(ALIGN_BYTES);
        Ok(start)
    }

    /// Waits for the oldest parts while they overlap. Parts are in ring order, so if the oldest does not overlap, none
    /// does.
    fn retire(&mut self, overlaps: impl Fn(usize, usize) -> bool) -> Result<(), DeviceError> {
        while let Some((first, last, event)) = self.in_flight.front() {
            if !overlaps(*first, *last) {
                break;
            }
            event.synchronize()?;
            self.in_flight.pop_front();
        }
        Ok(())
    }
}
