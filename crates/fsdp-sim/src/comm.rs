//! The communicator between ranks that are threads.
//!
//! A collective starts without blocking: the rank hands in its buffers and enters the meeting of its group
//! and sequence number. Whoever completes the work (see [`exchange`](crate::exchange)) does it inside its own
//! start; the others find the result when they wait.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::comm::{CommError, Communicator, Completed, Fingerprint, InFlight};
use fsdp_core::{Error, Memory, Queue, Rank};

use crate::board::Board;
use crate::exchange::{self, Exchange, Slot};
use crate::failure::Failure;
use crate::fault;
use crate::meetings::{Arrival, MeetingId};
use crate::world::Shared;

/// A group of ranks: its place among the groups of the world, and its collectives.
pub(crate) struct Group<M: Memory> {
    id: usize,
    members: Arc<[Rank]>,
    open: Mutex<BTreeMap<u64, Arc<Exchange<M>>>>,
}

impl<M: Memory> Group<M> {
    /// Group number `id`, without collectives yet.
    pub(crate) fn new(id: usize, members: Arc<[Rank]>) -> Self {
        Self { id, members, open: Mutex::default() }
    }

    fn exchange(&self, sequence: u64) -> Arc<Exchange<M>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.entry(sequence).or_insert_with(|| Arc::new(Exchange::new(self.members.len()))).clone()
    }

    fn close(&self, sequence: u64) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&sequence);
    }
}

/// One rank's handle of a group of ranks of a [`World`](crate::World).
pub struct SimComm<M: Memory> {
    world: Arc<Shared>,
    /// Where the group comes from: which world communicator, then (sequence, color) of every split.
    path: Vec<u64>,
    group: Arc<Group<M>>,
    index: usize,
    issued: u64,
    /// Collectives of this rank in all its communicators, for fault rules.
    rank_issued: Arc<AtomicU64>,
}

impl<M: Memory> SimComm<M> {
    /// The handle of `rank` of the group at `path`, which consists of `members`.
    pub(crate) fn new(
        world: Arc<Shared>,
        path: Vec<u64>,
        members: Arc<[Rank]>,
        rank: Rank,
        rank_issued: Arc<AtomicU64>,
    ) -> Self {
        let group = world.group(&path, members);
        let index = group.members.iter().position(|&member| member == rank);
        let index = index.expect("a rank asks for groups that it belongs to");
        Self { world, path, group, index, issued: 0, rank_issued }
    }

    /// Numbers the collective and lets the fault rules have their say.
    fn begin(&mut self, call: Fingerprint, note: usize) -> Result<Arrival, CommError> {
        let nth = self.rank_issued.fetch_add(1, Ordering::Relaxed);
        let rank = self.group.members[self.index];
        let call = fault::intercept(&self.world.faults, &self.world.board, rank, nth, call)?;
        let id = MeetingId { group: self.group.id, sequence: self.issued };
        self.issued += 1;
        Ok(Arrival { id, members: self.group.members.clone(), index: self.index, call, note })
    }

    /// Hands in buffers, enters the meeting and does this rank's share of the work.
    fn start(
        &mut self,
        call: Fingerprint,
        slot: Slot<M>,
        work: impl FnOnce(&Self, &Exchange<M>, bool) -> Result<bool, Error>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let arrival = self.begin(call, 0)?;
        let (id, call) = (arrival.id, arrival.call);
        let exchange = self.group.exchange(id.sequence);
        exchange.deposit(self.index, slot);
        let is_last = self.world.board.arrive(arrival)?;
        let complete = work(self, &exchange, is_last).inspect_err(|error| self.fail(error))?;
        if complete {
            self.group.close(id.sequence);
            self.world.board.complete(id);
        }
        let rank = self.group.members[self.index];
        Ok(Box::new(Flight { world: self.world.clone(), exchange, id, call, index: self.index, rank }))
    }

    fn reduce(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
        scatters: bool,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let slot = Slot { inputs, outputs, ready: memory.record(Queue::Reduce) };
        self.start(call, slot, |comm, exchange, _| {
            let group = exchange::Group { members: &comm.group.members, call, scatters };
            exchange.reduce(memory, group, comm.index)
        })
    }

    /// The work of a collective failed on this rank: nobody will see its end.
    fn fail(&self, error: &Error) {
        let rank = self.group.members[self.index];
        let failure = match error {
            Error::Comm(CommError::Length { rank: culprit, .. }) => {
                Failure { culprit: *culprit, error: comm_error(error, rank) }
            }
            _ => Failure { culprit: rank, error: comm_error(error, rank) },
        };
        self.world.board.fail(failure);
    }
}

fn comm_error(error: &Error, rank: Rank) -> CommError {
    match error {
        Error::Comm(error) => error.clone(),
        other => CommError::PeerFailed { rank, reason: other.to_string() },
    }
}

impl<M: Memory> Communicator<M> for SimComm<M> {
    fn rank(&self) -> usize {
        self.index
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn world_rank(&self) -> Rank {
        self.group.members[self.index]
    }

    fn all_gather(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let slot = Slot { inputs, outputs, ready: memory.record(Queue::Gather) };
        self.start(call, slot, |comm, exchange, is_last| {
            if is_last {
                let group = exchange::Group { members: &comm.group.members, call, scatters: false };
                exchange.gather(memory, group, comm.world.share_unsharded)?;
            }
            Ok(is_last)
        })
    }

    fn reduce_scatter(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        self.reduce(memory, call, inputs, outputs, true)
    }

    fn all_reduce(
        &mut self,
        memory: &M,
        call: Fingerprint,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        self.reduce(memory, call, buffers, Vec::new(), false)
    }

    fn broadcast(
        &mut self,
        memory: &M,
        call: Fingerprint,
        root: usize,
        buffers: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let slot = Slot { inputs: Vec::new(), outputs: buffers, ready: memory.record(Queue::Reduce) };
        self.start(call, slot, |comm, exchange, is_last| {
            if is_last {
                let group = exchange::Group { members: &comm.group.members, call, scatters: false };
                exchange.broadcast(memory, group, root)?;
            }
            Ok(is_last)
        })
    }

    fn split(
        &mut self,
        _memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error> {
        let arrival = self.begin(call, color)?;
        let id = arrival.id;
        if self.world.board.arrive(arrival)? {
            self.world.board.complete(id);
        }
        let rank = self.group.members[self.index];
        let colors = self.world.board.wait_for_notes(rank, id)?;
        let same = self.group.members.iter().zip(&colors).filter(|&(_, &theirs)| theirs == color);
        let members: Arc<[Rank]> = same.map(|(&member, _)| member).collect();
        let mut path = self.path.clone();
        path.extend([id.sequence, color as u64]);
        Ok(Box::new(SimComm::<M>::new(self.world.clone(), path, members, rank, self.rank_issued.clone())))
    }

    fn abort(&mut self, reason: &str) {
        let rank = self.group.members[self.index];
        abort(&self.world.board, rank, reason.to_owned());
    }
}

fn abort(board: &Board, rank: Rank, reason: String) {
    board.fail(Failure { culprit: rank, error: CommError::Aborted { rank, reason } });
}

/// A collective that a rank has entered and not left.
struct Flight<M: Memory> {
    world: Arc<Shared>,
    exchange: Arc<Exchange<M>>,
    id: MeetingId,
    call: Fingerprint,
    index: usize,
    rank: Rank,
}

impl<M: Memory> InFlight<M> for Flight<M> {
    fn is_ready(&mut self) -> bool {
        self.world.board.is_done(self.id)
    }

    fn wait_on(self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        self.world.board.wait(self.rank, self.id)?;
        let (completed, done) = self.exchange.take(self.index);
        memory.wait(queue, &done);
        Ok(completed)
    }

    fn abandon(self: Box<Self>) {
        // A panic that drops it will be reported itself, with its message.
        if !std::thread::panicking() {
            abort(&self.world.board, self.rank, format!("{} was given up before its end", self.call));
        }
    }
}
