//! The caller's handle of a collective in flight.

use std::fmt;

use super::{Completed, Fingerprint, InFlight};
use crate::error::Error;
use crate::memory::Memory;
use crate::rank::Queue;

/// A collective in flight. Dropping it without waiting aborts the communicator.
pub struct Pending<M: Memory> {
    in_flight: Option<Box<dyn InFlight<M>>>,
    call: Fingerprint,
}

impl<M: Memory> fmt::Debug for Pending<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({})", self.call)
    }
}

impl<M: Memory> Pending<M> {
    /// Wraps a collective that a backend has started.
    pub(super) fn new(in_flight: Box<dyn InFlight<M>>, call: Fingerprint) -> Self {
        Self { in_flight: Some(in_flight), call }
    }

    /// The fingerprint of the call.
    pub fn call(&self) -> Fingerprint {
        self.call
    }

    /// Whether waiting would not block the host.
    pub fn is_ready(&mut self) -> bool {
        self.in_flight.as_mut().is_none_or(|in_flight| in_flight.is_ready())
    }

    /// Makes later work of `queue` wait for the collective, and returns its buffers.
    ///
    /// # Errors
    /// [`Error::Comm`] when the collective failed on any rank.
    pub fn wait_on(mut self, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        let in_flight = self.in_flight.take().expect("a pending collective is waited for once");
        in_flight.wait_on(memory, queue)
    }
}

impl<M: Memory> Drop for Pending<M> {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.abandon(format!("{} was abandoned before it finished", self.call));
        }
    }
}
