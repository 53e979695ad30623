//! One rank's connection with others: an NCCL communicator, used by one group or by several groups of the same ranks.
//!
//! An NCCL communicator costs device memory and time to connect, so a group with the same members as its parent shares
//! the parent's. The connection is closed when the last group that uses it is dropped.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;
use std::{hint, thread};

use fsdp_comm::rendezvous::{Failure, Seat};
use fsdp_core::Rank;
use fsdp_core::comm::{CommError, Fingerprint};

use super::NcclError;
use super::link::Link;
use super::world::World;
use crate::device::DeviceMemory;
use crate::ffi::nccl_comm::{Progress, RawComm};

/// Number of immediate polls before the thread sleeps between polls: long enough for a launch, which takes tens of
/// microseconds, but not for connecting.
const SPINS: u32 = 1000;

/// Sleep between polls.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// A link of this rank, and its world.
pub(super) struct Connection<M: DeviceMemory> {
    pub(super) world: Arc<World<M>>,
    pub(super) link: Arc<Link>,
    rank: Rank,
}

impl<M: DeviceMemory> Connection<M> {
    /// Registers a communicator with the watcher, and waits until it is connected.
    pub(super) fn establish(
        world: &Arc<World<M>>,
        raw: RawComm,
        seat: Seat,
        members: &[Rank],
        call: Fingerprint,
    ) -> Result<Arc<Self>, CommError> {
        let link = Arc::new(Link::new(raw, seat));
        world.add_link(link.clone());
        let connection = Self { world: world.clone(), link, rank: members[seat.index] };
        connection.wait_until_ready(call)?;
        connection.check_size_and_rank(call, members.len(), seat.index)?;
        Ok(Arc::new(connection))
    }

    /// Calls NCCL, unless the world has failed.
    fn call<T>(
        &self,
        call: Fingerprint,
        work: impl FnOnce(&mut RawComm) -> Result<T, NcclError>,
    ) -> Result<T, CommError> {
        match self.link.call(work) {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => Err(self.world.fail_nccl(self.rank, &call.to_string(), &error)),
            None => Err(self.world.check().expect_err("a communicator is taken away after a failure only")),
        }
    }

    /// Waits until NCCL has finished what was started: connecting, or issuing work to the device.
    pub(super) fn wait_until_ready(&self, call: Fingerprint) -> Result<(), CommError> {
        let mut spins = 0;
        loop {
            self.world.check()?;
            if let Progress::Ready = self.call(call, RawComm::poll)? {
                return Ok(());
            }
            spins += 1;
            if spins < SPINS { hint::spin_loop() } else { thread::sleep(POLL_INTERVAL) }
        }
    }

    /// Checks that NCCL and the table agree on size and rank.
    fn check_size_and_rank(&self, call: Fingerprint, members: usize, seat: usize) -> Result<(), CommError> {
        let (size, index, device) = self.call(call, RawComm::size_rank_device)?;
        let rank = self.rank;
        tracing::debug!(rank = rank.0, size, index, device, "connected");
        if (size, index) == (members, seat) {
            return Ok(());
        }
        let reason = format!("NCCL gave {rank} place {index} of {size} instead of {seat} of {members}");
        let error = CommError::Transport { rank, reason };
        self.world.fail(Failure { culprit: rank, error: error.clone() });
        Err(error)
    }

    /// Splits off the NCCL communicator of the ranks with the same `color`, ordered by `key`.
    pub(super) fn split(&self, call: Fingerprint, color: c_int, key: c_int) -> Result<RawComm, CommError> {
        let splitting = self.call(call, |raw| raw.split(color, key))?;
        self.wait_until_ready(call)?;
        self.call(call, |raw| raw.finish_split(splitting))
    }
}

impl<M: DeviceMemory> Drop for Connection<M> {
    fn drop(&mut self) {
        // The watcher aborts the communicators of a failed world.
        if thread::panicking() || self.world.check().is_err() {
            return;
        }
        if let Err(error) = self.link.close() {
            tracing::debug!(%error, rank = self.rank.0, "a communicator could not be finalized");
        }
    }
}
