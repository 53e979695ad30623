//! The communicator between ranks that are threads.
//!
//! A collective starts without blocking: the rank enters the table of calls and deposits its buffers. The rank that
//! completes the work (see [`exchange`](mod@super::exchange)) does so within its own start; the others find the result
//! when they wait.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use fsdp_comm::rendezvous::{Failure, Group, Position, Seat};
use fsdp_core::comm::{CommError, Communicator, Completed, Fingerprint, InFlight};
use fsdp_core::{Error, FailureKind, Memory, Queue, Rank};

use super::exchange::{self, Contribution, Exchange};
use super::options::ThreadOptions;
use super::rank_scheduler::RankScheduler;
use crate::fault::{Entry, Intercept};
use crate::lock::lock;

/// Identifies a collective: the number of its group, and its position there.
type CollectiveKey = (usize, Position);

/// State shared by the ranks of a world.
pub(super) struct World<M: Memory> {
    pub(super) cores: RankScheduler,
    share_unsharded: bool,
    intercept: Option<Arc<dyn Intercept>>,
    /// Collectives that not all ranks have entered.
    open: Mutex<BTreeMap<CollectiveKey, Arc<Exchange<M>>>>,
}

impl<M: Memory> World<M> {
    /// Creates a world of `ranks` ranks.
    pub(super) fn new(ranks: usize, options: &ThreadOptions) -> Self {
        Self {
            cores: RankScheduler::new(ranks, options.cores, options.timeout),
            share_unsharded: options.share_unsharded,
            intercept: options.intercept.clone(),
            open: Mutex::default(),
        }
    }

    fn abort(&self, rank: Rank, reason: String, kind: FailureKind) {
        self.cores.fail(Failure { culprit: rank, error: CommError::Aborted { rank, reason, kind } });
    }
}

/// One rank's handle of a group of ranks that are threads of this process.
pub(super) struct ThreadComm<M: Memory> {
    world: Arc<World<M>>,
    group: Group,
    seat: Seat,
}

impl<M: Memory> ThreadComm<M> {
    /// The handle of `rank`.
    pub(super) fn new(world: &Arc<World<M>>, group: Group, rank: Rank) -> Self {
        let seat = world.cores.seat(&group, rank);
        Self { world: world.clone(), group, seat }
    }

    fn rank(&self) -> Rank {
        self.group.members[self.seat.index]
    }

    /// Enters the rank into its next collective, deposits its buffers and does its share of the work.
    fn enter(&mut self, memory: &M, call: Fingerprint, slot: Contribution<M>) -> Result<Flight<M>, Error> {
        let (world, seat, rank) = (&self.world, self.seat, self.rank());
        let entered = match world.intercept.as_ref().map(|intercept| intercept.entry(rank, call)) {
            None => call,
            Some(Entry::Call(other)) => other,
            Some(Entry::Fail(error)) => return Err(error.into()),
            Some(Entry::Stall) => return Err(world.cores.stall(rank, call).into()),
        };
        let position = world.cores.enter(seat, entered)?;
        let key = (seat.group, position);
        let members = &*self.group.members;
        let exchange = || Arc::new(Exchange::new(members.len(), world.share_unsharded));
        let exchange = lock(&world.open).entry(key).or_insert_with(exchange).clone();
        let arrived = exchange.arrive(memory, exchange::GroupCall { members, call }, seat.index, slot);
        if arrived.inspect_err(|error| self.fail(error))? {
            lock(&world.open).remove(&key);
            world.cores.complete(seat, position, &exchange.is_done);
        }
        Ok(Flight { world: world.clone(), exchange, seat, position, rank })
    }

    /// Fails the world after the work of a collective failed on this rank.
    fn fail(&self, error: &Error) {
        let rank = self.rank();
        self.world.cores.fail(match error {
            Error::Comm(error @ CommError::Length { rank: culprit, .. }) => {
                Failure { culprit: *culprit, error: error.clone() }
            }
            Error::Comm(error) => Failure { culprit: rank, error: error.clone() },
            other => Failure::of_rank(rank, other.to_string()),
        });
    }
}

impl<M: Memory> Communicator<M> for ThreadComm<M> {
    fn rank(&self) -> usize {
        self.seat.index
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn world_rank(&self) -> Rank {
        self.rank()
    }

    fn start(
        &mut self,
        memory: &M,
        call: Fingerprint,
        inputs: Vec<M::Buffer>,
        outputs: Vec<M::Buffer>,
    ) -> Result<Box<dyn InFlight<M>>, Error> {
        let slot = Contribution::new(inputs, outputs, memory.record(call.queue()));
        Ok(Box::new(self.enter(memory, call, slot)?))
    }

    fn split(
        &mut self,
        memory: &M,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<M>>, Error> {
        let slot = Contribution::new(Vec::new(), Vec::new(), memory.record(call.queue()));
        let flight = self.enter(memory, call, Contribution { colors: [color].into(), ..slot })?;
        let group = self.group.split(flight.position, &flight.wait()?.colors, color);
        Ok(Box::new(ThreadComm::new(&self.world, group, self.rank())))
    }

    fn abort(&mut self, reason: &str, kind: FailureKind) {
        self.world.abort(self.rank(), reason.to_owned(), kind);
    }
}

/// A collective that a rank has entered and not finished.
struct Flight<M: Memory> {
    world: Arc<World<M>>,
    exchange: Arc<Exchange<M>>,
    seat: Seat,
    position: Position,
    rank: Rank,
}

impl<M: Memory> Flight<M> {
    fn wait(&self) -> Result<Contribution<M>, CommError> {
        self.world.cores.wait(self.seat, self.position, &self.exchange.is_done)?;
        Ok(self.exchange.take(self.seat.index))
    }
}

impl<M: Memory> InFlight<M> for Flight<M> {
    fn is_ready(&mut self) -> bool {
        self.exchange.is_done.load(Ordering::Acquire) || self.world.cores.failure().is_some()
    }

    fn wait_on(self: Box<Self>, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        let Contribution { inputs, outputs, ready, .. } = self.wait()?;
        memory.wait(queue, &ready);
        Ok(Completed { outputs, inputs })
    }

    fn abandon(self: Box<Self>, reason: String) {
        // A panic that drops it is reported itself, with its message.
        if !std::thread::panicking() {
            self.world.abort(self.rank, reason, FailureKind::Temporary);
        }
    }
}
