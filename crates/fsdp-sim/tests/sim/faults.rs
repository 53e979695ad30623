//! Tests that every failure ends every rank with a typed error that names the culprit, and that no rank hangs.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fsdp_comm::conformance::PlainMemory;
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_core::comm::{Comm, CommError, Purpose, ReduceOp};
use fsdp_core::memory::{Category, Memory, SliceMut};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Error, Queue, Rank};
use fsdp_sim::{Action, Fault, Faults};
use fsdp_sim::{ThreadOptions, Threads};

/// A time limit that is reached only by a broken test.
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
    let gathered = memory.allocate(Category::CommStaging, DType::F32, 2 * comm.size())?;
    let pending = comm.all_gather(&memory, Purpose::Forward, Some(UnitId(0)), vec![shard], vec![gathered])?;
    pending.wait_on(&memory, Queue::Gather).map(drop)
}

/// How a world ended: the failure, and the errors that the other ranks returned.
#[derive(Debug)]
struct End<E> {
    failure: LaunchFailure<E>,
    others: Vec<(Rank, E)>,
}

/// Runs a body on every rank of a world that must fail.
fn ended<E: Clone + Send + std::fmt::Debug + std::fmt::Display>(
    options: ThreadOptions,
    ranks: usize,
    body: impl Fn(Seat<PlainMemory>) -> Result<(), E> + Sync,
) -> End<E> {
    let errors = Mutex::new(Vec::new());
    let launcher = Threads::new(options, |_, _| Ok(Arc::new(PlainMemory::new(true))));
    let failure = launcher.launch(ranks, &|seat| {
        let rank = seat.rank;
        body(seat)
            .inspect_err(|error| errors.lock().expect("no rank panics with it").push((rank, error.clone())))
    });
    let failure = failure.expect_err("the world has to fail");
    let mut others = errors.into_inner().expect("no rank panics with it");
    others.retain(|(rank, _)| *rank != failure.rank);
    others.sort_by_key(|(rank, _)| *rank);
    End { failure, others }
}

/// As [`ended`], for bodies that fail only with communication errors.
fn fails(
    options: ThreadOptions,
    ranks: usize,
    body: impl Fn(Seat<PlainMemory>) -> Result<(), Error> + Sync,
) -> End<CommError> {
    ended(options, ranks, |seat| {
        body(seat).map_err(|error| match error {
            Error::Comm(error) => error,
            other => panic!("expected an error of communication, got {other}"),
        })
    })
}

/// Runs some steps of gathers and reductions on two communicators.
fn train(mut seat: Seat<PlainMemory>) -> Result<(), Error> {
    for _ in 0..3 {
        gather(&mut seat.gathers)?;
        reduce(&mut seat.reductions)?;
    }
    Ok(())
}

fn options(cores: usize) -> ThreadOptions {
    ThreadOptions { cores, timeout: LONG, ..ThreadOptions::default() }
}

fn with(fault: Fault, cores: usize) -> ThreadOptions {
    ThreadOptions { intercept: Some(Arc::new(Faults::new(vec![fault]))), ..options(cores) }
}

fn cause(end: &End<CommError>) -> &CommError {
    match &end.failure.reason {
        FailureReason::Error(error) | FailureReason::Comm(error) => error,
        other => panic!("expected an error of communication, got {other}"),
    }
}

#[test]
fn every_fault_ends_all_ranks_and_names_faulty_rank() {
    let actions = [Action::Error, Action::Panic, Action::WrongCollective, Action::WrongLength, Action::Never];
    for ranks in [2, 3, 5] {
        for (culprit, nth, cores) in [(0, 0, 1), (ranks - 1, 3, 2), (1, 4, 8)] {
            for action in actions {
                let rank = Rank(culprit);
                let end = fails(with(Fault { rank, nth, action }, cores), ranks, train);
                check(rank, action, ranks, &end);
            }
        }
    }
}

/// Checks what the world and each of its ranks reported for a fault.
fn check(rank: Rank, action: Action, ranks: usize, end: &End<CommError>) {
    let case = format!("{action:?} on {rank} of {ranks}: {end:?}");
    assert_eq!(end.others.len(), ranks - 1, "{case}");
    for (_, other) in &end.others {
        let names_culprit = match (action, other) {
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
    match (action, &end.failure.reason) {
        (Action::Error, FailureReason::Error(CommError::Transport { rank: named, .. })) => {
            assert_eq!(*named, rank, "{case}");
        }
        (Action::Panic, FailureReason::Panic(message)) => assert!(message.contains("injected"), "{case}"),
        (Action::WrongCollective | Action::WrongLength, _) => {
            assert!(matches!(cause(end), CommError::Mismatch { .. }), "{case}");
            return;
        }
        (Action::Never, _) => assert!(matches!(cause(end), CommError::Missing { .. }), "{case}"),
        _ => panic!("{case}"),
    }
    assert_eq!(end.failure.rank, rank, "{case}");
}

#[test]
fn panic_of_one_rank_ends_all_100_ranks() {
    let end = fails(with(Fault { rank: Rank(77), nth: 2, action: Action::Panic }, 2), 100, train);
    assert_eq!((end.failure.rank, end.others.len()), (Rank(77), 99));
}

#[test]
fn rank_status_table_is_shared_between_errors() {
    let end = fails(with(Fault { rank: Rank(3), nth: 2, action: Action::Never }, 2), 40, train);
    let table = |failure: &CommError| match failure {
        CommError::Missing { status, .. } => Arc::clone(status),
        other => panic!("{other}"),
    };
    let first = table(cause(&end));
    assert_eq!(first.len(), 40);
    assert!(end.others.iter().all(|(_, other)| Arc::ptr_eq(&table(other), &first)));
}

#[test]
fn body_error_is_returned_and_reaches_other_ranks() {
    let end = ended(options(2), 3, |mut seat| {
        if seat.rank == Rank(1) {
            return Err("no space left".to_owned());
        }
        reduce(&mut seat.reductions).map_err(|error| error.to_string())
    });
    assert_eq!((end.failure.rank, end.failure.reason.to_string()), (Rank(1), "no space left".to_owned()));
    assert_eq!(end.others.len(), 2);
    for (_, other) in &end.others {
        assert_eq!(other, "rank 1 failed: no space left");
    }
}

#[test]
fn early_return_is_reported_as_missing_rank() {
    let end = fails(options(2), 4, |mut seat| {
        reduce(&mut seat.reductions)?;
        if seat.rank == Rank(2) { Ok(()) } else { reduce(&mut seat.reductions) }
    });
    assert_eq!(end.failure.rank, Rank(2));
    let CommError::Missing { missing, call, status } = cause(&end) else { panic!("{end:?}") };
    assert_eq!((&missing[..], call.sequence), (&[Rank(2)][..], 1));
    assert_eq!(status[2].doing, "has returned");
    assert_eq!(status[0].doing, "waits in #1 all-reduce (scalars, 4 x f32) of 4 ranks");
}

#[test]
fn groups_waiting_for_each_other_are_reported() {
    let end = fails(options(2), 2, |mut seat| {
        if seat.rank == Rank(0) {
            reduce(&mut seat.reductions)?;
            gather(&mut seat.gathers)
        } else {
            gather(&mut seat.gathers)?;
            reduce(&mut seat.reductions)
        }
    });
    let CommError::Missing { missing, status, .. } = cause(&end) else { panic!("{end:?}") };
    assert_eq!(missing.len(), 1);
    assert!(status[0].doing.contains("all-reduce") && status[1].doing.contains("all-gather"), "{end:?}");
}

#[test]
fn busy_rank_is_reported_after_timeout() {
    let (sender, receiver) = mpsc::channel();
    let (sender, receiver) = (Mutex::new(sender), Mutex::new(receiver));
    let options = ThreadOptions { timeout: Duration::from_millis(50), ..options(1) };
    let end = fails(options, 2, |mut seat| {
        if seat.rank == Rank(1) {
            // Busy until rank 0 has its error, which only the time limit can cause.
            receiver.lock().unwrap().recv().unwrap();
        }
        let result = reduce(&mut seat.reductions);
        sender.lock().unwrap_or_else(PoisonError::into_inner).send(()).unwrap();
        result
    });
    assert_eq!((end.failure.rank, end.others.len()), (Rank(1), 1));
    let CommError::TimedOut { rank, missing, status, .. } = &end.others[0].1 else { panic!("{end:?}") };
    assert_eq!((*rank, &**missing), (Rank(0), &[Rank(1)][..]));
    assert_eq!(status[1].doing, "runs outside of collectives");
}

#[test]
fn different_segments_of_equal_total_are_reported() {
    let end = fails(options(2), 3, |mut seat| {
        let memory = &*seat.memory;
        let lens = if seat.rank == Rank(1) { [1, 3] } else { [3, 1] };
        let mut buffers = Vec::new();
        for len in lens {
            let mut buffer = memory.allocate(Category::CommStaging, DType::I64, len)?;
            memory.zero(Queue::Reduce, SliceMut::whole(&mut buffer))?;
            buffers.push(buffer);
        }
        let pending = seat.reductions.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, buffers)?;
        pending.wait_on(memory, Queue::Reduce).map(drop)
    });
    assert!(matches!(cause(&end), CommError::Length { segment: 0, .. }), "{end:?}");
    assert_eq!(end.others.len(), 2);
}

#[test]
fn dropped_pending_collective_fails_world() {
    let end = fails(options(2), 2, |mut seat| {
        let memory = &*seat.memory;
        let buffer = memory.allocate(Category::CommStaging, DType::I64, 1)?;
        drop(seat.reductions.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, vec![buffer])?);
        Ok(())
    });
    assert!(matches!(cause(&end), CommError::Aborted { .. }), "nobody waited: {end:?}");
}

#[test]
fn memory_setup_failure_names_rank() {
    let launcher = Threads::new(ThreadOptions::default(), |rank, world| match rank.0 {
        2 => Err(Error::Device(format!("no room for one of {world}").into())),
        _ => Ok(Arc::new(PlainMemory::new(true))),
    });
    let failure =
        launcher.launch(4, &|mut seat: Seat<PlainMemory>| reduce(&mut seat.reductions)).unwrap_err();
    assert_eq!(failure.rank, Rank(2));
    match failure.reason {
        FailureReason::Setup(error) => assert_eq!(error.to_string(), "no room for one of 4"),
        other => panic!("{other}"),
    }
}
