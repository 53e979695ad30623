//! A link: one rank's NCCL communicator, from its making to its end, behind a lock.
//!
//! The lock is held for calls that return at once, so whoever wants to abort never waits for long.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fsdp_comm::rendezvous::Seat;

use super::NcclError;
use crate::ffi::nccl_comm::{Progress, RawComm};

#[derive(Debug)]
enum State {
    /// It can be used.
    Open(RawComm),
    /// It is being finalized.
    Closing(RawComm),
    /// It was destroyed or aborted.
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

    /// Whose it is: a seat in the first group that uses it.
    pub(super) fn seat(&self) -> Seat {
        self.seat
    }

    /// Calls into an open communicator; `None` when it is not open any more.
    pub(super) fn call<T>(&self, work: impl FnOnce(&mut RawComm) -> T) -> Option<T> {
        match &mut *self.lock() {
            State::Open(comm) => Some(work(comm)),
            State::Closing(_) | State::Gone => None,
        }
    }

    /// Polls an open communicator for asynchronous errors; one that is being closed is destroyed when it is ready.
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

    /// Begins to flush and close an open communicator; [`Link::watch`] does the rest.
    pub(super) fn close(&self) -> Result<(), NcclError> {
        let mut state = self.lock();
        match mem::replace(&mut *state, State::Gone) {
            State::Open(mut comm) => {
                let begun = comm.finalize();
                *state = State::Closing(comm);
                begun
            }
            other => {
                *state = other;
                Ok(())
            }
        }
    }

    /// Ends everything on the communicators that still exist.
    pub(super) fn abort_all(links: &[Arc<Link>]) -> Result<(), NcclError> {
        let take = |link: &Arc<Link>| match mem::replace(&mut *link.lock(), State::Gone) {
            State::Open(comm) | State::Closing(comm) => Some(comm),
            State::Gone => None,
        };
        RawComm::abort_all(links.iter().filter_map(take).collect())
    }

    /// Whether nothing is left to be closed or aborted.
    pub(super) fn is_gone(&self) -> bool {
        matches!(*self.lock(), State::Gone)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is whole before any call can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
