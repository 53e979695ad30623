//! The test suite that every communicator must pass.
//!
//! Each check is a function over a [`Launcher`] and panics with its finding; the launcher's memory must support f32,
//! f64, bf16, f16 and i64. [`all`] runs every check on worlds of the given sizes. Sums are compared bit for bit with
//! the tree of [`fsdp_core::tree`], so a communicator that adds in another order does not pass.

mod contract;
mod groups;
mod memory;
mod results;
mod values;

use std::sync::Mutex;

use fsdp_core::comm::{Completed, Pending};
use fsdp_core::{DType, Error, Memory, Queue};

use crate::launch::{FailureReason, LaunchFailure, Launcher, Seat};

pub use contract::{
    abort_reaches_every_rank, arguments_are_checked, buffers_come_back_to_their_rank,
    divergent_calls_are_reported, divergent_roots_are_reported, dropping_a_pending_aborts,
    traffic_matches_formulas,
};
pub use groups::{
    communicators_are_independent, groups_of_groups, many_in_flight, rows_and_columns_of_a_mesh,
};
pub use memory::{PlainBuffer, PlainMemory};
pub use results::{all_gather, all_reduce, all_to_all, broadcast, reduce_scatter};

/// The code that one rank runs.
pub type Body<'a, M> = dyn Fn(Seat<M>) -> Result<(), Error> + Sync + 'a;

/// Elements per rank of each segment of a call: no segment, one, several of mixed sizes, empty ones.
const SEGMENTS: [&[usize]; 5] = [&[], &[1], &[7], &[3, 0, 5, 1], &[64, 129]];

/// Runs every check on worlds of these sizes.
///
/// # Panics
/// Panics if a check fails.
pub fn all(launcher: &impl Launcher, sizes: &[usize]) {
    for &ranks in sizes {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I64] {
            for lens in SEGMENTS {
                all_gather(launcher, ranks, dtype, lens);
                reduce_scatter(launcher, ranks, dtype, lens);
                all_reduce(launcher, ranks, dtype, lens);
                all_to_all(launcher, ranks, dtype, lens);
                broadcast(launcher, ranks, dtype, lens);
            }
        }
        // For dtypes that are moved but never added.
        for lens in SEGMENTS {
            all_gather(launcher, ranks, DType::U8, lens);
            all_to_all(launcher, ranks, DType::U8, lens);
            broadcast(launcher, ranks, DType::U8, lens);
        }
        traffic_matches_formulas(launcher, ranks);
        buffers_come_back_to_their_rank(launcher, ranks);
        arguments_are_checked(launcher, ranks);
        abort_reaches_every_rank(launcher, ranks);
        dropping_a_pending_aborts(launcher, ranks);
        divergent_calls_are_reported(launcher, ranks);
        divergent_roots_are_reported(launcher, ranks);
        many_in_flight(launcher, ranks);
        communicators_are_independent(launcher, ranks);
        groups_of_groups(launcher, ranks);
        for replicas in (1..=ranks).filter(|&replicas| ranks.is_multiple_of(replicas)) {
            rows_and_columns_of_a_mesh(launcher, replicas, ranks / replicas);
        }
    }
}

/// Runs a body on every rank; returns the results of the ranks of this process, in rank order. An error ends the world,
/// as it would in training.
///
/// # Panics
/// Panics if a body panics.
pub fn outcomes<L: Launcher>(
    launcher: &L,
    ranks: usize,
    body: &Body<'_, L::Memory>,
) -> Vec<Result<(), Error>> {
    let kept: Vec<_> = (0..ranks).map(|_| Mutex::new(None)).collect();
    let ended = launcher.launch(ranks, &|seat| {
        let rank = seat.rank;
        let outcome = body(seat);
        // The launcher may report only the first error.
        let result = outcome.as_ref().map(drop).map_err(ToString::to_string);
        *kept[rank.0].lock().expect("one rank writes it") = Some(outcome);
        result
    });
    if let Err(LaunchFailure { rank, reason: FailureReason::Panic(message) }) = &ended {
        panic!("{rank} of {ranks}: {message}");
    }
    let outcomes: Vec<_> = kept.into_iter().filter_map(|cell| cell.into_inner().ok().flatten()).collect();
    assert!(!outcomes.is_empty(), "this process has ranks");
    if let Ok(results) = ended {
        assert_eq!(outcomes.len(), results.len(), "every rank has returned");
    }
    outcomes
}

/// Runs a collective as the engine does: within a schedule, which a memory may execute as a whole at its end.
fn in_schedule<M: Memory>(
    memory: &M,
    start: impl FnOnce() -> Result<Pending<M>, Error>,
) -> Result<Completed<M::Buffer>, Error> {
    memory.begin_schedule();
    let completed = start()?.wait_on(memory, Queue::Compute)?;
    memory.end_schedule()?;
    Ok(completed)
}

/// Runs a body on every rank and expects success.
fn run_ok<L: Launcher>(launcher: &L, ranks: usize, body: &Body<'_, L::Memory>) {
    for (rank, result) in outcomes(launcher, ranks, body).into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("rank {rank} of {ranks}: {error}"));
    }
}
