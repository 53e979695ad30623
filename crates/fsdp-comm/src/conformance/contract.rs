//! Checks of the contract beyond the results: arguments, fingerprints, counters, aborts, buffer ownership.

use fsdp_core::comm::{CollectiveKind, Comm, CommError, Pending, Purpose, ReduceOp};
use fsdp_core::memory::{Buffer, Category, HostSliceMut, Slice};
use fsdp_core::{DType, Error, FailureKind, Memory, Queue, Rank};

use super::values::{empty, filled};
use super::{Body, in_schedule, outcomes, run_ok};
use crate::launch::{Launcher, Seat};

fn comm_error<T>(result: Result<T, Error>) -> CommError {
    match result {
        Err(Error::Comm(error)) => error,
        Err(other) => panic!("expected an error of communication, got {other}"),
        Ok(_) => panic!("expected an error of communication"),
    }
}

/// Checks that wrong lengths, dtypes, segment counts and shared outputs are rejected before anything is sent, and that
/// the communicator still works afterwards.
///
/// # Panics
/// Panics if the check fails.
pub fn arguments_are_checked(launcher: &impl Launcher, ranks: usize) {
    run_ok(launcher, ranks, &|mut seat| {
        let (memory, comm) = (&*seat.memory, &mut seat.gathers);
        let make = |dtype, lens: &[usize]| empty(memory, dtype, lens);
        let mut gather =
            |inputs, outputs| comm_error(comm.all_gather(memory, Purpose::Forward, None, inputs, outputs));
        let error = gather(make(DType::F32, &[3, 3])?, make(DType::F32, &[3 * ranks, 3 * ranks + 1])?);
        assert!(matches!(error, CommError::Length { segment: 1, .. }), "{error}");
        let error = gather(make(DType::F32, &[3])?, make(DType::F32, &[3 * ranks, 3 * ranks])?);
        assert!(matches!(error, CommError::Length { segment: 1, expected: 2, got: 1, .. }), "{error}");
        let error = gather(make(DType::F64, &[3])?, make(DType::F32, &[3 * ranks])?);
        assert!(matches!(error, CommError::Type { got: DType::F64, .. }), "{error}");
        let outputs = make(DType::F32, &[3 * ranks])?;
        let error = gather(make(DType::F32, &[3])?, outputs.clone());
        assert!(matches!(error, CommError::Shared { segment: 0, .. }), "{error}");
        drop(outputs);

        let inputs = make(DType::F32, &[3 * ranks])?;
        let outputs = make(DType::F32, &[3])?;
        let started =
            comm.reduce_scatter(memory, ReduceOp::Sum, Purpose::Gradient, None, inputs.clone(), outputs);
        let error = comm_error(started);
        assert!(matches!(error, CommError::Shared { segment: 0, .. }), "{error}");
        let (inputs, outputs) = (make(DType::F32, &[3, ranks])?, make(DType::F32, &[3, 2 * ranks])?);
        let error = comm_error(comm.all_to_all(memory, Purpose::Activations, inputs, outputs));
        assert!(matches!(error, CommError::Length { segment: 1, .. }), "{error}");
        if ranks > 1 {
            let uneven = || make(DType::F32, &[ranks, ranks + 1]);
            let error = comm_error(comm.all_to_all(memory, Purpose::Activations, uneven()?, uneven()?));
            assert!(matches!(error, CommError::Length { segment: 1, .. }), "{error}");
        }
        let buffers = make(DType::F32, &[3, 3])?;
        let error = comm_error(comm.broadcast(memory, Purpose::Setup, None, 0, buffers.clone()));
        assert!(matches!(error, CommError::Shared { segment: 0, .. }), "{error}");
        let mixed = [make(DType::F32, &[3])?, make(DType::F64, &[3])?].concat();
        let error = comm_error(comm.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, mixed));
        assert!(matches!(error, CommError::Type { segment: 1, got: DType::F64, .. }), "{error}");
        let integers = make(DType::I64, &[3])?;
        let averaged = comm.all_reduce(memory, ReduceOp::Average, Purpose::Scalars, None, integers);
        let error = comm_error(averaged);
        assert!(matches!(error, CommError::IntegerAverage { .. }), "{error}");
        assert_eq!(comm.traffic().bytes(), 0, "refused calls are not counted");
        reduce(memory, comm, Purpose::Gradient, 4)
    });
}

fn reduce<M: Memory>(memory: &M, comm: &mut Comm<M>, purpose: Purpose, len: usize) -> Result<(), Error> {
    let buffers = filled(memory, Queue::Reduce, DType::F32, comm.rank(), &[len], 1)?;
    let pending = comm.all_reduce(memory, ReduceOp::Sum, purpose, None, buffers)?;
    finish(memory, comm, pending)
}

/// Waits for a collective of f32 until its results are on the host, and checks whether they are valid. (On a device, a
/// collective may fail long after the wait for it was enqueued.)
fn finish<M: Memory>(memory: &M, comm: &Comm<M>, pending: Pending<M>) -> Result<(), Error> {
    for output in pending.wait_on(memory, Queue::Compute)?.outputs {
        let mut values = vec![0.0; output.len()];
        memory.read(Queue::Compute, Slice::whole(&output), HostSliceMut::F64(&mut values))?;
    }
    comm.check()
}

/// Checks that calls and bytes are counted according to the closed formulas, on every rank.
///
/// # Panics
/// Panics if the check fails.
pub fn traffic_matches_formulas(launcher: &impl Launcher, ranks: usize) {
    run_ok(launcher, ranks, &|mut seat| {
        let (memory, comm) = (&*seat.memory, &mut seat.gathers);
        let lens = [3, 10];
        let full: Vec<usize> = lens.iter().map(|len| len * ranks).collect();
        let parts = filled(memory, Queue::Gather, DType::Bf16, comm.rank(), &lens, 1)?;
        let outputs = empty(memory, DType::Bf16, &full)?;
        in_schedule(memory, || comm.all_gather(memory, Purpose::Forward, None, parts, outputs))?;
        let inputs = filled(memory, Queue::Reduce, DType::F32, comm.rank(), &lens, ranks)?;
        let outputs = empty(memory, DType::F32, &lens)?;
        in_schedule(memory, || {
            comm.reduce_scatter(memory, ReduceOp::Sum, Purpose::Gradient, None, inputs, outputs)
        })?;
        reduce(memory, comm, Purpose::Gradient, 7 * ranks)?;
        let inputs = filled(memory, Queue::Compute, DType::F32, comm.rank(), &lens, ranks)?;
        let outputs = empty(memory, DType::F32, &full)?;
        in_schedule(memory, || comm.all_to_all(memory, Purpose::Activations, inputs, outputs))?;
        let buffers = filled(memory, Queue::Reduce, DType::Bf16, comm.rank(), &[5 * ranks, 0, ranks], 1)?;
        let pending = comm.broadcast(memory, Purpose::Setup, None, ranks - 1, buffers)?;
        pending.wait_on(memory, Queue::Compute)?;
        let (traffic, sent_to) = (comm.traffic(), ranks as u64 - 1);
        assert_eq!((traffic.all_gathers, traffic.reduce_scatters, traffic.all_reduces), (1, 1, 1));
        assert_eq!(traffic.all_gather_bytes, sent_to * 13 * 2);
        assert_eq!(traffic.reduce_scatter_bytes, sent_to * 13 * 4);
        assert_eq!(traffic.all_reduce_bytes, 2 * sent_to * 7 * 4);
        assert_eq!((traffic.all_to_alls, traffic.all_to_all_bytes), (1, sent_to * 13 * 4));
        assert_eq!((traffic.broadcasts, traffic.broadcast_bytes), (1, sent_to * 6 * 2));
        Ok(())
    });
}

/// Checks that every rank gets its own buffers back: freeing them is counted in its own memory.
///
/// # Panics
/// Panics if the check fails.
pub fn buffers_come_back_to_their_rank(launcher: &impl Launcher, ranks: usize) {
    run_ok(launcher, ranks, &|mut seat| {
        let (memory, comm) = (&*seat.memory, &mut seat.gathers);
        let live = || memory.usage().live(Category::CommStaging);
        let rank = comm.rank();
        let inputs = filled(memory, Queue::Reduce, DType::F64, rank, &[2, 3], ranks)?;
        let outputs = empty(memory, DType::F64, &[2, 3])?;
        let reduced = in_schedule(memory, || {
            comm.reduce_scatter(memory, ReduceOp::Sum, Purpose::Gradient, None, inputs, outputs)
        })?;
        assert_eq!(live(), 8 * (5 * ranks + 5), "a reduce-scatter keeps the buffers of this rank");
        drop(reduced.inputs);
        assert_eq!(live(), 8 * 5, "its inputs are this rank's");
        let outputs = empty(memory, DType::F64, &[2 * ranks, 3 * ranks])?;
        let parts = reduced.outputs;
        let gathered =
            in_schedule(memory, || comm.all_gather(memory, Purpose::Forward, None, parts, outputs))?;
        assert_eq!(live(), 8 * 5 * ranks, "an all-gather lets go of its inputs");
        drop(gathered);
        assert_eq!(live(), 0, "its outputs are this rank's");
        let buffers = filled(memory, Queue::Reduce, DType::F64, rank, &[4], 1)?;
        let pending = comm.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, buffers)?;
        drop(pending.wait_on(memory, Queue::Compute)?);
        assert_eq!(live(), 0, "an all-reduce gives back what it got");
        let buffers = filled(memory, Queue::Reduce, DType::F64, rank, &[4, 2], 1)?;
        let pending = comm.broadcast(memory, Purpose::Setup, None, 0, buffers)?;
        let received = pending.wait_on(memory, Queue::Compute)?;
        assert_eq!(live(), 8 * 6, "a broadcast keeps the buffers of this rank");
        drop(received);
        assert_eq!(live(), 0, "its buffers are this rank's");
        Ok(())
    });
}

/// Runs a world that must fail on every rank, and checks every error.
fn run_err<L: Launcher>(
    launcher: &L,
    ranks: usize,
    body: &Body<'_, L::Memory>,
    expected: impl Fn(&CommError) -> bool,
) {
    for (rank, result) in outcomes(launcher, ranks, body).into_iter().enumerate() {
        let error = comm_error(result);
        assert!(expected(&error), "rank {rank} of {ranks}: {error}");
    }
}

/// Checks that after one rank aborts, every pending and future collective fails on every rank and names that rank.
///
/// # Panics
/// Panics if the check fails.
pub fn abort_reaches_every_rank(launcher: &impl Launcher, ranks: usize) {
    let culprit = ranks - 1;
    let body = |mut seat: Seat<_>| {
        let (memory, comm) = (&*seat.memory, &mut seat.gathers);
        reduce(memory, comm, Purpose::Setup, 3)?;
        if comm.rank() == culprit {
            comm.abort("enough", FailureKind::Input);
        }
        reduce(memory, &mut seat.reductions, Purpose::Setup, 3)
    };
    run_err(launcher, ranks, &body, |error| names(error, culprit));
}

/// Checks that dropping a pending collective without waiting ends the world, and that the errors name the rank.
///
/// # Panics
/// Panics if the check fails.
pub fn dropping_a_pending_aborts(launcher: &impl Launcher, ranks: usize) {
    let body = |mut seat: Seat<_>| {
        let (memory, comm) = (&*seat.memory, &mut seat.gathers);
        let buffers = filled(memory, Queue::Reduce, DType::F32, comm.rank(), &[3], 1)?;
        let pending = comm.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, buffers)?;
        if comm.rank() == 0 {
            drop(pending);
        } else {
            pending.wait_on(memory, Queue::Compute)?;
        }
        reduce(memory, comm, Purpose::Setup, 3)
    };
    run_err(launcher, ranks, &body, |error| names(error, 0));
}

fn names(error: &CommError, culprit: usize) -> bool {
    match error {
        CommError::Aborted { rank, .. } | CommError::PeerFailed { rank, .. } => *rank == Rank(culprit),
        _ => false,
    }
}

/// Checks that a broadcast in which one rank expects another root is reported on every rank.
///
/// # Panics
/// Panics if the check fails.
pub fn divergent_roots_are_reported(launcher: &impl Launcher, ranks: usize) {
    if ranks == 1 {
        return;
    }
    for culprit in [0, ranks - 1] {
        let body = |mut seat: Seat<_>| {
            let (memory, comm) = (&*seat.memory, &mut seat.gathers);
            let root = if comm.rank() == culprit { 1 } else { 0 };
            let buffers = filled(memory, Queue::Reduce, DType::F32, comm.rank(), &[3], 1)?;
            let pending = comm.broadcast(memory, Purpose::Setup, None, root, buffers)?;
            finish(memory, comm, pending)?;
            reduce(memory, comm, Purpose::Setup, 3)
        };
        run_err(launcher, ranks, &body, |error| match error {
            CommError::Mismatch { rank, peer, got, expected } => {
                let roots = [got.kind, expected.kind].map(|kind| match kind {
                    CollectiveKind::Broadcast { root } => Some(root),
                    _ => None,
                });
                (*rank == Rank(culprit) || *peer == Rank(culprit))
                    && (roots == [Some(0), Some(1)] || roots == [Some(1), Some(0)])
            }
            _ => false,
        });
    }
}

/// Checks that a different length, purpose, kind, operation or sequence number on one rank is reported on every rank.
///
/// # Panics
/// Panics if the check fails.
pub fn divergent_calls_are_reported(launcher: &impl Launcher, ranks: usize) {
    if ranks == 1 {
        return;
    }
    let culprit = ranks / 2;
    for fault in 0..5 {
        let body = |mut seat: Seat<_>| {
            let (memory, comm) = (&*seat.memory, &mut seat.gathers);
            reduce(memory, comm, Purpose::Setup, 3)?;
            match fault {
                _ if comm.rank() != culprit => reduce(memory, comm, Purpose::Scalars, 4 * ranks),
                0 => reduce(memory, comm, Purpose::Scalars, 4 * ranks + 1),
                1 => reduce(memory, comm, Purpose::UpdateRule, 4 * ranks),
                2 => {
                    let (full, part) = ([4 * ranks], [4]);
                    let inputs = filled(memory, Queue::Reduce, DType::F32, comm.rank(), &full, 1)?;
                    let outputs = empty(memory, DType::F32, &part)?;
                    let pending =
                        comm.reduce_scatter(memory, ReduceOp::Sum, Purpose::Scalars, None, inputs, outputs)?;
                    finish(memory, comm, pending)
                }
                3 => {
                    let buffers = filled(memory, Queue::Reduce, DType::F32, comm.rank(), &[4 * ranks], 1)?;
                    let pending =
                        comm.all_reduce(memory, ReduceOp::Average, Purpose::Scalars, None, buffers)?;
                    finish(memory, comm, pending)
                }
                _ => comm.split(memory, 0).map(drop),
            }
        };
        run_err(launcher, ranks, &body, |error| match error {
            CommError::Mismatch { rank, peer, got, expected } => {
                (*rank == Rank(culprit) || *peer == Rank(culprit)) && got != expected
            }
            _ => false,
        });
    }
}
