//! A world: one thread per rank, from start to the report of how it ended.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fsdp_core::comm::Comm;
use fsdp_core::{Memory, Rank};

use crate::board::Board;
use crate::comm::{Group, SimComm};
use crate::failure::{Failure, RankFailure, WorldError};
use crate::fault::Fault;

/// How to run a world.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// Number of ranks.
    pub ranks: usize,
    /// How many ranks run at a time; a rank that is blocked in a collective does not count. At least 1.
    pub cores: usize,
    /// The world fails when ranks wait in a collective and nobody entered or left one for so long. (When
    /// nobody can any more, it fails at once.)
    pub timeout: Duration,
    /// Whether the outputs of an all-gather share storage, where the memory can do that.
    pub share_unsharded: bool,
    /// Stack of each rank's thread.
    pub stack_bytes: usize,
    /// What is to go wrong; the first rule that matches a collective decides.
    pub faults: Vec<Fault>,
}

impl WorldOptions {
    /// `ranks` ranks on all cores of this machine, a time limit of ten minutes, nothing shared, no faults.
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            cores: thread::available_parallelism().map_or(1, usize::from),
            timeout: Duration::from_secs(600),
            share_unsharded: false,
            stack_bytes: 2 << 20,
            faults: Vec::new(),
        }
    }
}

/// What the ranks of a world share.
pub(crate) struct Shared {
    pub(crate) board: Board,
    pub(crate) share_unsharded: bool,
    pub(crate) faults: Vec<Fault>,
    /// Groups by where they come from, so that all members find the same one. Their types differ by memory.
    groups: Mutex<BTreeMap<Vec<u64>, Arc<dyn Any + Send + Sync>>>,
}

impl Shared {
    /// The group at `path`, made by the first of its members that asks.
    pub(crate) fn group<M: Memory>(&self, path: &[u64], members: Arc<[Rank]>) -> Arc<Group<M>> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let id = groups.len();
        let group =
            groups.entry(path.to_vec()).or_insert_with(|| Arc::new(Group::<M>::new(id, members))).clone();
        drop(groups);
        group.downcast().expect("all ranks create their communicators in the same order, for the same memory")
    }
}

/// One rank's side of a world.
pub struct RankContext {
    world: Arc<Shared>,
    rank: Rank,
    members: Arc<[Rank]>,
    comms: u64,
    issued: Arc<AtomicU64>,
}

impl RankContext {
    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.members.len()
    }

    /// A new communicator over all ranks, independent of every other. The first one that a rank makes meets
    /// the first of every other rank, and so on.
    ///
    /// # Panics
    /// When another rank made its communicator of this number for another type of memory.
    pub fn comm<M: Memory>(&mut self) -> Comm<M> {
        let path = vec![self.comms];
        self.comms += 1;
        let (world, members) = (self.world.clone(), self.members.clone());
        Comm::new(Box::new(SimComm::new(world, path, members, self.rank, self.issued.clone())))
    }
}

/// Ranks as threads of this process.
pub struct World;

impl World {
    /// Runs `body` once per rank, each on its own thread, at most `cores` at a time, and returns what they
    /// return, in rank order.
    ///
    /// A rank that returns an error or panics ends the world: all pending and future collectives of the others
    /// return an error that names it. A thread can not be stopped from outside, so `run` returns when every
    /// body has; a body that neither returns nor communicates keeps it waiting (while the other ranks get
    /// their error after the time limit).
    ///
    /// ```
    /// use fsdp_sim::{World, WorldOptions};
    ///
    /// let doubled = World::run(WorldOptions::new(4), |context| Ok::<_, String>(2 * context.rank().0))?;
    /// assert_eq!(doubled, [0, 2, 4, 6]);
    ///
    /// let error = World::run(WorldOptions::new(4), |context| match context.rank().0 {
    ///     2 => Err("disk full"),
    ///     rank => Ok(rank),
    /// });
    /// assert_eq!(error.unwrap_err().to_string(), "rank 2 failed first: disk full");
    /// # Ok::<_, fsdp_sim::WorldError<String>>(())
    /// ```
    ///
    /// # Errors
    /// [`WorldError`] when a rank failed, never arrived in a collective, or gave one up.
    pub fn run<T, E>(
        options: WorldOptions,
        body: impl Fn(RankContext) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, WorldError<E>>
    where
        T: Send,
        E: fmt::Debug + fmt::Display + Send,
    {
        let WorldOptions { ranks, cores, timeout, share_unsharded, stack_bytes, faults } = options;
        let board = Board::new(ranks, cores, timeout);
        let world = Arc::new(Shared { board, share_unsharded, faults, groups: Mutex::default() });
        let members: Arc<[Rank]> = (0..ranks).map(Rank).collect();
        let body = &body;
        let outcomes = thread::scope(|scope| {
            let spawn = |&rank: &Rank| {
                let (world, members) = (world.clone(), members.clone());
                let thread = thread::Builder::new().name(rank.to_string()).stack_size(stack_bytes);
                thread.spawn_scoped(scope, move || {
                    world.board.enter(rank);
                    let issued = Arc::default();
                    run_rank(body, RankContext { world, rank, members, comms: 0, issued })
                })
            };
            let mut threads = Vec::with_capacity(ranks);
            for rank in members.iter() {
                threads.push(spawn(rank).map_err(|error| {
                    world.board.end(*rank, Some(&"its thread could not be started"));
                    RankFailure::Spawn(error)
                }));
            }
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("panics are caught");
            threads.into_iter().map(|thread| thread.and_then(join)).collect::<Vec<_>>()
        });
        report(outcomes, world.board.failure())
    }
}

/// Runs one rank to its end and tells the others about it.
fn run_rank<T, E: fmt::Display>(
    body: &impl Fn(RankContext) -> Result<T, E>,
    context: RankContext,
) -> Result<T, RankFailure<E>> {
    let (world, rank) = (context.world.clone(), context.rank);
    let outcome = match catch_unwind(AssertUnwindSafe(|| body(context))) {
        Ok(result) => result.map_err(RankFailure::Error),
        Err(panic) => Err(RankFailure::Panic(panic_message(panic.as_ref()))),
    };
    world.board.end(rank, outcome.as_ref().err().map(|failure| failure as &dyn fmt::Display));
    outcome
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Sorts the outcomes into results, or the first failure and its consequences.
fn report<T, E: fmt::Debug + fmt::Display>(
    outcomes: Vec<Result<T, RankFailure<E>>>,
    failure: Option<Failure>,
) -> Result<Vec<T>, WorldError<E>> {
    let mut results = Vec::with_capacity(outcomes.len());
    let mut failures = BTreeMap::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(result) => results.push(result),
            Err(failure) => drop(failures.insert(Rank(rank), failure)),
        }
    }
    let Some(Failure { culprit, error }) = failure else {
        assert!(failures.is_empty(), "a rank that fails tells the board");
        return Ok(results);
    };
    let cause = failures.remove(&culprit).unwrap_or(RankFailure::Comm(error));
    Err(WorldError { rank: culprit, cause: Box::new(cause), others: failures.into_iter().collect() })
}
