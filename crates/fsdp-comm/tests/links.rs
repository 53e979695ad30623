//! The communicator over links passes the suite of every communicator.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::conformance::{self, Body, Launcher, Member, PlainMemory};
use fsdp_comm::{InMemoryLinks, LinkComm};
use fsdp_core::comm::{Comm, CommError, Purpose};
use fsdp_core::memory::{Category, Memory};
use fsdp_core::{DType, Error, Queue, Rank};

/// Worlds of threads that are connected by in-memory links.
struct Linked {
    timeout: Duration,
}

impl Linked {
    fn run_rank(links: &InMemoryLinks, rank: Rank, body: &Body<'_, PlainMemory>) -> Result<(), Error> {
        let comm = |world| Ok::<_, Error>(Comm::new(Box::new(LinkComm::new(links.link(world, rank))?)));
        let memory = Arc::new(PlainMemory::new(true));
        body(Member { memory, comm: comm(0)?, second: comm(1)? })
    }
}

impl Launcher for Linked {
    type Memory = PlainMemory;

    fn run(&self, ranks: usize, body: &Body<'_, PlainMemory>) -> Vec<Result<(), Error>> {
        let links = InMemoryLinks::new(ranks, self.timeout);
        let fail = |rank, reason| links.alarm().raise(CommError::PeerFailed { rank, reason });
        let run = |rank| match catch_unwind(AssertUnwindSafe(|| Self::run_rank(&links, rank, body))) {
            Ok(result) => result.inspect_err(|error| fail(rank, error.to_string())),
            Err(panic) => {
                fail(rank, "panicked".to_owned());
                resume_unwind(panic)
            }
        };
        let outcomes: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(Rank(rank)))).collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    }
}

#[test]
fn worlds_of_one_to_nine_ranks_pass() {
    conformance::all(&Linked { timeout: Duration::from_secs(60) }, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

fn reduce(comm: &mut Comm<PlainMemory>, memory: &PlainMemory) -> Result<(), Error> {
    let buffer = memory.allocate(Category::CommStaging, DType::I64, 1)?;
    comm.all_reduce(memory, Purpose::Setup, None, vec![buffer])?.wait_on(memory, Queue::Reduce).map(drop)
}

#[test]
fn ranks_that_wait_for_each_other_are_told_after_the_time_limit() {
    let outcomes = Linked { timeout: Duration::from_millis(50) }.run(2, &|mut member| {
        let comm = if member.comm.rank() == 1 { &mut member.second } else { &mut member.comm };
        reduce(comm, &member.memory)
    });
    for outcome in outcomes {
        let Err(Error::Comm(CommError::Missing { missing, .. })) = outcome else { panic!("{outcome:?}") };
        assert_eq!(missing.len(), 1);
    }
}

#[test]
fn a_rank_that_returns_early_is_named() {
    let outcomes = Linked { timeout: Duration::from_secs(60) }.run(3, &|mut member| {
        if member.comm.rank() == 1 { Ok(()) } else { reduce(&mut member.comm, &member.memory) }
    });
    for (rank, outcome) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let Err(Error::Comm(CommError::PeerFailed { rank: named, .. })) = outcome else {
            panic!("rank {rank}: {outcome:?}")
        };
        assert_eq!(named, Rank(1));
    }
}
