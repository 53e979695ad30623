//! The communicator over links passes the suite of every communicator.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::conformance::{self, PlainMemory, outcomes};
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::{InMemoryLinks, LinkComm};
use fsdp_core::comm::{Comm, CommError, Purpose, ReduceOp};
use fsdp_core::memory::{Category, Memory};
use fsdp_core::{DType, Error, Queue, Rank};

/// Worlds of threads that are connected by in-memory links.
struct Linked {
    timeout: Duration,
}

impl Launcher for Linked {
    type Memory = PlainMemory;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<PlainMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let links = InMemoryLinks::new(world, self.timeout);
        let run = |rank| {
            let comm = |world| LinkComm::new(links.link(world, rank)).expect("threads can be started");
            let comm = |world| Comm::new(Box::new(comm(world)));
            let memory = Arc::new(PlainMemory::new(true));
            let outcome = body(Seat { rank, memory, gathers: comm(0), reductions: comm(1) });
            outcome.inspect_err(|error| {
                links.alarm().raise(CommError::PeerFailed { rank, reason: error.to_string() });
            })
        };
        thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || run(Rank(rank)))).collect();
            let join = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
                let outcome: Result<T, E> = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                outcome
                    .map_err(|error| LaunchFailure { rank: Rank(rank), reason: FailureReason::Error(error) })
            };
            // All are joined before the first failure is returned.
            threads.into_iter().enumerate().map(join).collect::<Vec<_>>().into_iter().collect()
        })
    }
}

#[test]
fn worlds_of_one_to_nine_ranks_pass() {
    conformance::all(&Linked { timeout: Duration::from_secs(60) }, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

fn reduce(comm: &mut Comm<PlainMemory>, memory: &PlainMemory) -> Result<(), Error> {
    let buffer = memory.allocate(Category::CommStaging, DType::I64, 1)?;
    comm.all_reduce(memory, ReduceOp::Sum, Purpose::Setup, None, vec![buffer])?
        .wait_on(memory, Queue::Reduce)
        .map(drop)
}

#[test]
fn ranks_that_wait_for_each_other_are_told_after_the_time_limit() {
    let outcomes = outcomes(&Linked { timeout: Duration::from_millis(50) }, 2, &|mut seat| {
        let comm = if seat.gathers.rank() == 1 { &mut seat.reductions } else { &mut seat.gathers };
        reduce(comm, &seat.memory)
    });
    for outcome in outcomes {
        let Err(Error::Comm(CommError::Missing { missing, .. })) = outcome else { panic!("{outcome:?}") };
        assert_eq!(missing.len(), 1);
    }
}

#[test]
fn a_rank_that_returns_early_is_named() {
    let outcomes = outcomes(&Linked { timeout: Duration::from_secs(60) }, 3, &|mut seat| {
        if seat.gathers.rank() == 1 { Ok(()) } else { reduce(&mut seat.gathers, &seat.memory) }
    });
    for (rank, outcome) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let Err(Error::Comm(CommError::PeerFailed { rank: named, .. })) = outcome else {
            panic!("rank {rank}: {outcome:?}")
        };
        assert_eq!(named, Rank(1));
    }
}
