//! State shared by the ranks of a process: the table of their calls, the first failure, all their communicators, and
//! the connection to other processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fsdp_comm::CallNumber;
use fsdp_comm::assembly::{Assembly, AssemblyError};
use fsdp_comm::rendezvous::{Failure, Group, Position, Rendezvous, Report, Seat};
use fsdp_core::comm::{CommError, Fingerprint};
use fsdp_core::{Error, Rank};

use super::NcclError;
use super::link::Link;
use super::remote::Peers;
use crate::device::DeviceMemory;

/// A call that was issued to the device.
#[derive(Debug)]
pub(super) struct Issued<E> {
    /// The event that follows it in its queue.
    pub(super) event: E,
    pub(super) record: Option<CallNumber>,
}

/// A call that a rank has entered.
#[derive(Clone, Copy)]
pub(super) struct Entered {
    pub(super) position: Position,
    record: Option<CallNumber>,
}

pub(super) struct State<M: DeviceMemory> {
    pub(super) rendezvous: Rendezvous<Issued<M::Event>>,
    /// The memories of ranks that have one, for queries of their events.
    pub(super) memories: Vec<Option<Arc<M>>>,
    pub(super) links: Vec<Arc<Link>>,
    /// All ranks have returned: the watcher closes what is left and ends.
    pub(super) stopping: bool,
}

/// State shared by all ranks and the watcher.
pub(super) struct World<M: DeviceMemory> {
    state: Mutex<State<M>>,
    has_failed: AtomicBool,
    /// Wakes the watcher.
    changed: Condvar,
    /// The assembly of all ranks, with the topics of this world.
    pub(super) assembly: Arc<dyn Assembly>,
    /// The other processes; `None` if there are none.
    pub(super) peers: Option<Peers>,
}

/// Topic in which ranks report that they are connected with all others.
const SEATED_TOPIC: &str = "seated";

impl<M: DeviceMemory> World<M> {
    pub(super) fn new(assembly: Arc<dyn Assembly>, peers: Option<Peers>, limit: Duration) -> Self {
        let ranks = assembly.world();
        let state = State {
            rendezvous: Rendezvous::new(assembly.local(), limit),
            memories: vec![None; ranks],
            links: Vec::new(),
            stopping: false,
        };
        let (state, has_failed, changed) = (Mutex::new(state), AtomicBool::new(false), Condvar::new());
        Self { state, has_failed, changed, assembly, peers }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State<M>> {
        // Every change under the lock is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the memory of a rank.
    pub(super) fn add_memory(&self, rank: Rank, memory: Arc<M>) {
        self.lock().memories[rank.0] = Some(memory);
    }

    /// The seat of `rank` in a group, which shares the NCCL communicator of another group or has its own.
    pub(super) fn seat(&self, group: &Group, rank: Rank, shares: Option<Seat>) -> Seat {
        self.lock().rendezvous.seat(group, rank, shares)
    }

    /// Registers a communicator with the watcher, which aborts it at once if the world has failed.
    pub(super) fn add_link(&self, link: Arc<Link>) {
        self.lock().links.push(link);
        self.changed.notify_all();
    }

    /// Enters a rank into its next call; a call that differs from another rank's ends the world.
    pub(super) fn enter(&self, seat: Seat, call: Fingerprint) -> Result<Entered, CommError> {
        let mut state = self.lock();
        let position = state.rendezvous.enter(seat, call).map_err(|failure| {
            let error = failure.error.clone();
            self.fail_locked(&mut state, failure, true);
            error
        })?;
        let record = self.peers.as_ref().map(|peers| {
            let table = &state.rendezvous.table;
            peers.recorder.issue(table.rank(seat), &table.members(seat), &call)
        });
        Ok(Entered { position, record })
    }

    /// Waits until all ranks are connected: a rank that fails afterwards fails during its work, and leaves no other
    /// rank without its seat.
    pub(super) fn wait_until_seated(&self, rank: Rank) -> Result<(), CommError> {
        let limit = self.limit();
        let barrier = || -> Result<Vec<u8>, AssemblyError> {
            self.assembly.give(SEATED_TOPIC, rank, Vec::new())?;
            if rank == Rank(0) {
                self.assembly.collect(SEATED_TOPIC, self.assembly.world(), limit)?;
                self.assembly.announce(SEATED_TOPIC, Vec::new())?;
            }
            self.assembly.hear(SEATED_TOPIC, limit)
        };
        barrier().map(drop).or_else(|error| {
            // If it was given up or lost, the cause is known.
            self.check()?;
            let reason = format!("it is not connected to all ranks: {error}");
            self.fail(Failure { culprit: rank, error: CommError::Transport { rank, reason } });
            self.check()
        })
    }

    /// Records that a call was issued to the device, and that it ends at `event`.
    pub(super) fn issued(&self, seat: Seat, entered: Entered, event: M::Event) {
        let Entered { position, record } = entered;
        if let (Some(peers), Some(record)) = (&self.peers, record) {
            peers.recorder.begin(record);
        }
        self.lock().rendezvous.table.issued(seat, position, Issued { event, record });
    }

    /// Records the end of a call that does not run on the device.
    pub(super) fn end_call(&self, seat: Seat, entered: Entered) {
        self.end_record(entered.record);
        self.lock().rendezvous.end_call(seat, entered.position);
    }

    /// Adds the end of a call to the flight recorder.
    pub(super) fn end_record(&self, record: Option<CallNumber>) {
        if let (Some(peers), Some(record)) = (&self.peers, record) {
            peers.recorder.end(record, None);
        }
    }

    /// The report for other processes about the ranks of this one; see
    /// [`Table::report`](fsdp_comm::rendezvous::Table::report).
    pub(super) fn report(&self, patience: Duration, requested_path: Option<&[u64]>) -> Report {
        let rendezvous = &mut self.lock().rendezvous;
        let now = rendezvous.now();
        rendezvous.table.report(now, patience, self.assembly.world(), requested_path)
    }

    /// A rank that has waited for the limit plus `extra`, and its call.
    pub(super) fn overdue_call(&self, extra: Duration) -> Option<(Rank, Fingerprint)> {
        let rendezvous = &mut self.lock().rendezvous;
        let (now, limit) = (rendezvous.now(), rendezvous.limit());
        rendezvous.table.waiting(now, limit + extra)
    }

    /// Records that a rank has returned, and its failure, if any.
    pub(super) fn end_rank(&self, rank: Rank, failed: Option<String>) {
        let mut state = self.lock();
        state.rendezvous.table.end_rank(rank);
        if let Some(reason) = failed {
            self.fail_locked(&mut state, Failure::of_rank(rank, reason), true);
        }
    }

    /// Tells the watcher that all ranks have returned.
    pub(super) fn stop(&self) {
        self.lock().stopping = true;
        self.changed.notify_all();
    }

    /// Makes every pending and future call of all ranks fail, unless the world has failed already.
    pub(super) fn fail(&self, failure: Failure) {
        self.fail_locked(&mut self.lock(), failure, true);
    }

    /// Records a failure reported by other processes.
    pub(super) fn fail_from_peer(&self, error: &CommError) {
        let culprit = match error {
            CommError::PeerFailed { rank, .. } => *rank,
            _ => Rank(0),
        };
        self.fail_locked(&mut self.lock(), Failure { culprit, error: error.clone() }, false);
    }

    /// `notify_peers`: whether other processes do not know of the failure yet.
    fn fail_locked(&self, state: &mut State<M>, failure: Failure, notify_peers: bool) {
        let error = failure.error.clone();
        if !state.rendezvous.fail(failure) {
            return;
        }
        if let Some(peers) = self.peers.as_ref().filter(|_| notify_peers) {
            peers.alarm.raise(error);
        }
        // Set before anything is aborted: code that sees the results of an aborted collective must see this too.
        self.has_failed.store(true, Ordering::SeqCst);
        self.assembly.give_up(SEATED_TOPIC);
        self.changed.notify_all();
    }

    /// Handles an NCCL error, of a call or asynchronous. NCCL may be the first to notice that another process is gone,
    /// but does not know which one; the other processes report it a moment later.
    pub(super) fn fail_nccl(&self, rank: Rank, context: &str, error: &NcclError) -> CommError {
        match self.peers.as_ref().and_then(Peers::wait_for_verdict) {
            Some(verdict) => self.fail_from_peer(&verdict),
            None => {
                let error = CommError::Transport { rank, reason: format!("NCCL: {error}, in {context}") };
                self.fail(Failure { culprit: rank, error });
            }
        }
        self.check().expect_err("the world has failed")
    }

    /// Fails the world because a rank cannot do its part of a collective.
    pub(super) fn fail_rank(&self, rank: Rank, error: &Error) {
        self.fail(Failure::of_rank(rank, error.to_string()));
    }

    /// Returns the first failure as an error.
    pub(super) fn check(&self) -> Result<(), CommError> {
        if !self.has_failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.lock().rendezvous.check()
    }

    /// How long a rank may wait.
    pub(super) fn limit(&self) -> Duration {
        self.lock().rendezvous.limit()
    }

    /// The first failure with the rank to blame; `None` if there is none.
    pub(super) fn failure(&self) -> Option<Failure> {
        self.lock().rendezvous.failure().cloned()
    }

    /// Sleeps until something changes, for `pause` at most.
    pub(super) fn pause<'a>(
        &self,
        state: MutexGuard<'a, State<M>>,
        pause: Duration,
    ) -> MutexGuard<'a, State<M>> {
        self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
    }
}
