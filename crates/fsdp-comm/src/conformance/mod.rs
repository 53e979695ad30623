//! The suite that every communicator must pass.
//!
//! Each check is a function over a [`Launcher`], which knows how to run ranks; it panics with what it found.
//! [`all`] runs every check on worlds of the given sizes. Sums are compared bit for bit with the tree of
//! [`fsdp_core::tree`], so a communicator that adds in another order does not pass.

mod contract;
mod groups;
mod memory;
mod results;
mod values;

use std::sync::Arc;

use fsdp_core::comm::Comm;
use fsdp_core::{DType, Error, Memory};

pub use contract::{
    abort_reaches_every_rank, arguments_are_checked, buffers_come_back_to_their_rank,
    divergent_calls_are_reported, dropping_a_pending_aborts, traffic_matches_formulas,
};
pub use groups::{
    communicators_are_independent, groups_of_groups, many_in_flight, rows_and_columns_of_a_mesh,
};
pub use memory::{PlainBuffer, PlainMemory};
pub use results::{all_gather, all_reduce, reduce_scatter};

/// One rank of a world under test.
pub struct Member<M: Memory> {
    /// Its memory.
    pub memory: Arc<M>,
    /// A communicator over all ranks.
    pub comm: Comm<M>,
    /// Another one, independent of the first.
    pub second: Comm<M>,
}

/// Runs worlds for the suite.
pub trait Launcher {
    /// The memory of the ranks; it must have f32, f64, bf16 and i64.
    type Memory: Memory;

    /// Runs `body` once per rank and returns the results in rank order. A panic of a body is passed on to the
    /// caller; an error of a body ends the world, as it would in training.
    fn run(&self, ranks: usize, body: &Body<'_, Self::Memory>) -> Vec<Result<(), Error>>;
}

/// What one rank does.
pub type Body<'a, M> = dyn Fn(Member<M>) -> Result<(), Error> + Sync + 'a;

/// Elements per rank of the segments of one call: none, one, several of mixed sizes, empty ones.
const SEGMENTS: [&[usize]; 5] = [&[], &[1], &[7], &[3, 0, 5, 1], &[64, 129]];

/// Runs every check on worlds of these sizes.
///
/// # Panics
/// When a check fails.
pub fn all(launcher: &impl Launcher, sizes: &[usize]) {
    for &ranks in sizes {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::I64] {
            for lens in SEGMENTS {
                all_gather(launcher, ranks, dtype, lens);
                reduce_scatter(launcher, ranks, dtype, lens);
                all_reduce(launcher, ranks, dtype, lens);
            }
        }
        traffic_matches_formulas(launcher, ranks);
        buffers_come_back_to_their_rank(launcher, ranks);
        arguments_are_checked(launcher, ranks);
        abort_reaches_every_rank(launcher, ranks);
        dropping_a_pending_aborts(launcher, ranks);
        divergent_calls_are_reported(launcher, ranks);
        many_in_flight(launcher, ranks);
        communicators_are_independent(launcher, ranks);
        groups_of_groups(launcher, ranks);
        for replicas in (1..=ranks).filter(|&replicas| ranks.is_multiple_of(replicas)) {
            rows_and_columns_of_a_mesh(launcher, replicas, ranks / replicas);
        }
    }
}

/// Runs a body that is expected to succeed on every rank.
fn run_well<L: Launcher>(launcher: &L, ranks: usize, body: &Body<'_, L::Memory>) {
    for (rank, result) in launcher.run(ranks, body).into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("rank {rank} of {ranks}: {error}"));
    }
}
