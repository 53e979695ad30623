//! A link: one rank's NCCL communicator under a lock, from creation to destruction.
//!
//! The lock is held only for calls that return at once, so an abort never waits for long.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fsdp_comm::rendezvous::Seat;

use super::NcclError;
use crate::ffi::nccl_comm::{Progress, RawComm};

#[derive(Debug)]
enum State {
    /// Usable.
    Open(RawComm),
    /// Being finalized.
    Closing(RawComm),
    /// Destroyed or aborted.
    Gone,
}

#[derive(Debug)]
pub(super) struct Link {
    state: Mutex<State>,
    seat: Seat,
}

impl Link {
    pub(super) fn new(comm: RawComm, seat: Seat) -> Self {
        Self { state: Mutex::new(State::Open(comm)), seat }
    }

    /// The rank's seat in the first group that uses the link.
    pub(super) fn seat(&self) -> Seat {
        self.seat
    }

    /// Calls an open communicator; `None` if it is not open any more.
    pub(super) fn call<T>(&self, work: impl FnOnce(&mut RawComm) -> T) -> Option<T> {
        match &mut *self.lock() {
            State::Open(comm) => Some(work(comm)),
            State::Closing(_) | State::Gone => None,
        }
    }

    /// Polls an open communicator for asynchronous errors; destroys a closing one once it is finalized.
    pub(super) fn watch(&self) -> Result<(), NcclError> {
        let mut state = self.lock();
        match &mut *state {
            State::Open(comm) => comm.poll().map(drop),
            State::Closing(comm) => match comm.poll()? {
                Progress::InProgress => Ok(()),
                Progress::Ready => match mem::replace(&mut *state, State::Gone) {
                    State::Closing(comm) => comm.destroy(),
                    State::Open(_) | State::Gone => Ok(()),
                },
            },
            State::Gone => Ok(()),
        }
    }

    /// Starts flushing and closing an open communicator; [`Link::watch`] does the rest.
    pub(super) fn close(&self) -> Result<(), NcclError> {
        let mut state = self.lock();
        match mem::replace(&mut *state, State::Gone) {
            State::Open(mut comm) => {
                let result = comm.finalize();
                *state = State::Closing(comm);
                result
            }
            other => {
                *state = other;
                Ok(())
            }
        }
    }

    /// Aborts the communicators that still exist.
    pub(super) fn abort_all(links: &[Arc<Link>]) -> Result<(), NcclError> {
        let take = |link: &Arc<Link>| match mem::replace(&mut *link.lock(), State::Gone) {
            State::Open(comm) | State::Closing(comm) => Some(comm),
            State::Gone => None,
        };
        RawComm::abort_all(links.iter().filter_map(take).collect())
    }

    /// Whether there is nothing left to close or abort.
    pub(super) fn is_gone(&self) -> bool {
        matches!(*self.lock(), State::Gone)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent before any call can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
