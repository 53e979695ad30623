//! Every failure ends every rank with a typed error that names the culprit, and none hangs.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fsdp_comm::conformance::PlainMemory;
use fsdp_comm::launch::{FailureReason, Launcher, Seat};
use fsdp_core::comm::{Comm, CommError, Purpose, ReduceOp};
use fsdp_core::memory::{Category, Memory, SliceMut};
use fsdp_core::{DType, Error, Queue, Rank};
use fsdp_sim::{Action, Fault, RankContext, RankFailure, Threads, World, WorldError, WorldOptions};

/// A time limit that no test reaches unless it is broken.
const LONG: Duration = Duration::from_secs(600);

fn reduce(comm: &mut Comm<PlainMemory>) -> Result<(), Error> {
    let memory = PlainMemory::new(true);
    let mut buffer = memory.allocate(Category::CommStaging, DType::F32, 4)?;
    memory.zero(Queue::Reduce, SliceMut::whole(&mut buffer))?;
    comm.all_reduce(&memory, ReduceOp::Sum, Purpose::Scalars, None, vec![buffer])?
        .wait_on(&memory, Queue::Reduce)
        .map(drop)
}

fn gather(comm: &mut Comm<PlainMemory>) -> Result<(), Error> {
    let memory = PlainMemory::new(true);
    let mut shard = memory.allocate(Category::CommStaging, DType::F32, 2)?;
    memory.zero(Queue::Gather, SliceMut::whole(&mut shard))?;
    let whole = memory.allocate(Category::CommStaging, DType::F32, 2 * comm.size())?;
    let pending = comm.all_gather(&memory, Purpose::Forward, Some(0), vec![shard], vec![whole])?;
    pending.wait_on(&memory, Queue::Gather).map(drop)
}

/// Some steps of gathers and reductions on two communicators.
fn train(mut context: RankContext) -> Result<(), Error> {
    let (mut gathers, mut reductions) = (context.comm(), context.comm());
    for _ in 0..3 {
        gather(&mut gathers)?;
        reduce(&mut reductions)?;
    }
    Ok(())
}

fn options(ranks: usize, cores: usize) -> WorldOptions {
    WorldOptions { cores, timeout: LONG, ..WorldOptions::new(ranks) }
}

fn fails(options: WorldOptions) -> WorldError<Error> {
    World::run(options, train).expect_err("the world has to fail")
}

fn comm_error(failure: &RankFailure<Error>) -> &CommError {
    match failure {
        RankFailure::Error(Error::Comm(error)) | RankFailure::Comm(error) => error,
        other => panic!("expected an error of communication, got {other}"),
    }
}

#[test]
fn every_fault_ends_every_rank_and_names_the_culprit() {
    let actions = [Action::Error, Action::Panic, Action::WrongCollective, Action::WrongLength, Action::Never];
    for ranks in [2, 3, 5] {
        for (culprit, nth, cores) in [(0, 0, 1), (ranks - 1, 3, 2), (1, 4, 8)] {
            for action in actions {
                let rank = Rank(culprit);
                let faults = vec![Fault { rank, nth, action }];
                check(rank, action, ranks, &fails(WorldOptions { faults, ..options(ranks, cores) }));
            }
        }
    }
}

/// What the world and each of its ranks reported for a fault.
fn check(rank: Rank, action: Action, ranks: usize, error: &WorldError<Error>) {
    let case = format!("{action:?} on {rank} of {ranks}: {error:?}");
    assert_eq!(error.others.len(), ranks - 1, "{case}");
    for (_, other) in &error.others {
        let names_culprit = match (action, comm_error(other)) {
            (Action::Error | Action::Panic, CommError::PeerFailed { rank: named, reason }) => {
                *named == rank && reason.contains("injected fault")
            }
            (
                Action::WrongCollective | Action::WrongLength,
                CommError::Mismatch { rank: named, peer, got, expected },
            ) => (*named == rank || *peer == rank) && got != expected,
            (Action::Never, CommError::Missing { missing, status, .. }) => {
                **missing == [rank] && status.len() == ranks
            }
            _ => false,
        };
        assert!(names_culprit, "{case}");
    }
    match (action, &*error.cause) {
        (Action::Error, RankFailure::Error(Error::Comm(CommError::Transport { rank: named, .. }))) => {
            assert_eq!(*named, rank, "{case}");
        }
        (Action::Panic, RankFailure::Panic(message)) => assert!(message.contains("injected"), "{case}"),
        (Action::WrongCollective | Action::WrongLength, cause) => {
            assert!(matches!(comm_error(cause), CommError::Mismatch { .. }), "{case}");
            return;
        }
        (Action::Never, cause) => {
            assert!(matches!(comm_error(cause), CommError::Missing { .. }), "{case}");
        }
        _ => panic!("{case}"),
    }
    assert_eq!(error.rank, rank, "{case}");
}

#[test]
fn a_hundred_ranks_survive_the_failure_of_one() {
    let faults = vec![Fault { rank: Rank(77), nth: 2, action: Action::Panic }];
    let error = fails(WorldOptions { faults, ..options(100, 2) });
    assert_eq!((error.rank, error.others.len()), (Rank(77), 99));
}

#[test]
fn what_a_failure_says_of_every_rank_is_held_once() {
    let faults = vec![Fault { rank: Rank(3), nth: 2, action: Action::Never }];
    let error = fails(WorldOptions { faults, ..options(40, 2) });
    let table = |failure: &RankFailure<Error>| match comm_error(failure) {
        CommError::Missing { status, .. } => Arc::clone(status),
        other => panic!("{other}"),
    };
    let first = table(&error.cause);
    assert_eq!(first.len(), 40);
    assert!(error.others.iter().all(|(_, other)| Arc::ptr_eq(&table(other), &first)));
}

#[test]
fn an_error_of_a_body_is_carried_and_reaches_the_others() {
    let result = World::run(options(3, 2), |mut context| {
        let mut comm = context.comm();
        if context.rank() == Rank(1) {
            return Err("no space left".to_owned());
        }
        reduce(&mut comm).map_err(|error| error.to_string())
    });
    let error = result.expect_err("rank 1 fails");
    assert_eq!(error.to_string(), "rank 1 failed first: no space left");
    for (_, other) in &error.others {
        assert_eq!(other.to_string(), "rank 1 failed: no space left");
    }
}

#[test]
fn a_rank_that_returns_early_is_missed_at_once() {
    let error = World::run(options(4, 2), |mut context| {
        let mut comm = context.comm();
        reduce(&mut comm)?;
        if context.rank() == Rank(2) { Ok(()) } else { reduce(&mut comm) }
    });
    let error = error.expect_err("rank 2 never arrives");
    assert_eq!(error.rank, Rank(2));
    let CommError::Missing { missing, call, status } = comm_error(&error.cause) else { panic!("{error}") };
    assert_eq!((&missing[..], call.sequence), (&[Rank(2)][..], 1));
    assert_eq!(status[2].doing, "has ended");
    assert_eq!(status[0].doing, "waits in #1 all-reduce (scalars, 4 x f32) of 4 ranks");
}

#[test]
fn groups_that_wait_for_each_other_are_a_deadlock() {
    let error = World::run(options(2, 2), |mut context| {
        let (mut first, mut second) = (context.comm(), context.comm());
        if context.rank() == Rank(0) {
            reduce(&mut first)?;
            gather(&mut second)
        } else {
            gather(&mut second)?;
            reduce(&mut first)
        }
    });
    let error = error.expect_err("each waits for the other");
    let CommError::Missing { missing, status, .. } = comm_error(&error.cause) else { panic!("{error}") };
    assert_eq!(missing.len(), 1);
    assert!(status[0].doing.contains("all-reduce") && status[1].doing.contains("all-gather"), "{error}");
}

#[test]
fn a_rank_that_works_too_long_is_missed_after_the_time_limit() {
    let (told, wait) = mpsc::channel();
    let (told, wait) = (Mutex::new(told), Mutex::new(wait));
    let options = WorldOptions { timeout: Duration::from_millis(50), ..options(2, 1) };
    let error = World::run(options, |mut context| {
        let mut comm = context.comm();
        if context.rank() == Rank(1) {
            // Busy until rank 0 has its error: only the time limit can give it.
            wait.lock().unwrap().recv().unwrap();
        }
        let result = reduce(&mut comm);
        told.lock().unwrap_or_else(PoisonError::into_inner).send(()).unwrap();
        result
    });
    let error = error.expect_err("rank 1 is late");
    assert_eq!((error.rank, error.others.len()), (Rank(1), 1));
    let CommError::Missing { missing, status, .. } = comm_error(&error.others[0].1) else {
        panic!("{error}")
    };
    assert_eq!(**missing, [Rank(1)]);
    assert_eq!(status[1].doing, "runs outside of collectives");
}

#[test]
fn segments_that_differ_though_their_total_is_equal_are_reported() {
    let error = World::run(options(3, 2), |mut context| {
        let memory = PlainMemory::new(true);
        let mut comm = context.comm();
        let lens = if context.rank() == Rank(1) { [1, 3] } else { [3, 1] };
        let mut buffers = Vec::new();
        for len in lens {
            let mut buffer = memory.allocate(Category::CommStaging, DType::I64, len)?;
            memory.zero(Queue::Reduce, SliceMut::whole(&mut buffer))?;
            buffers.push(buffer);
        }
        let pending = comm.all_reduce(&memory, ReduceOp::Sum, Purpose::Scalars, None, buffers)?;
        pending.wait_on(&memory, Queue::Reduce).map(drop)
    });
    let error = error.expect_err("lengths differ");
    assert!(matches!(comm_error(&error.cause), CommError::Length { segment: 0, .. }), "{error}");
    assert_eq!(error.others.len(), 2);
}

#[test]
fn a_pending_collective_that_is_dropped_fails_a_world_of_otherwise_content_ranks() {
    let error = World::run(options(2, 2), |mut context| -> Result<(), Error> {
        let memory = PlainMemory::new(true);
        let buffer = memory.allocate(Category::CommStaging, DType::I64, 1)?;
        drop(context.comm().all_reduce(&memory, ReduceOp::Sum, Purpose::Scalars, None, vec![buffer])?);
        Ok(())
    });
    let error = error.expect_err("nobody waited");
    assert!(matches!(comm_error(&error.cause), CommError::Aborted { .. }), "{error}");
}

#[test]
fn a_rank_without_memory_was_not_set_up() {
    let launcher = Threads::new(WorldOptions::new(1), |rank, world| match rank.0 {
        2 => Err(Error::Memory { category: None, what: format!("no room for one of {world}") }),
        _ => Ok(Arc::new(PlainMemory::new(true))),
    });
    let failure =
        launcher.launch(4, &|mut seat: Seat<PlainMemory>| reduce(&mut seat.reductions)).unwrap_err();
    assert_eq!(failure.rank, Rank(2));
    match failure.reason {
        FailureReason::Setup(error) => assert_eq!(error.to_string(), "memory: no room for one of 4"),
        other => panic!("{other}"),
    }
}
