//! Runs the conformance suite of all communicators over MPI links.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;

use fsdp_comm::conformance::{self, PlainMemory};
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::{Alarm, LinkComm};
use fsdp_core::comm::{Comm, CommError};
use fsdp_core::{DType, Rank};
use fsdp_mpi::Family;

use crate::fake::{FAMILIES, LONG, Worlds};

/// Launches worlds of threads that are connected by the fake MPI.
struct Faked(Family);

impl Launcher for Faked {
    type Memory = PlainMemory;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<PlainMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let mut worlds = Worlds::new(self.0, world, LONG);
        let run = |rank: usize| {
            let comm = |channel| LinkComm::new(worlds.link(channel, rank)).expect("threads can be started");
            let comm = |channel| Comm::new(Box::new(comm(channel)));
            let memory = Arc::new(PlainMemory::new(true));
            let seat = Seat { rank: Rank(rank), memory, gathers: comm(0), reductions: comm(1) };
            body(seat).map_err(|error| {
                worlds.alarm.raise(CommError::PeerFailed { rank: Rank(rank), reason: error.to_string() });
                LaunchFailure { rank: Rank(rank), reason: FailureReason::Error(error) }
            })
        };
        let outcomes: Vec<Result<T, _>> = thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || run(rank))).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let results = outcomes.into_iter().collect::<Result<Vec<T>, _>>()?;
        for rank in worlds.ranks.drain(..) {
            rank.finalize().expect("nothing is left to send or receive");
        }
        assert_eq!(worlds.finalized(), world);
        Ok(results)
    }
}

#[test]
fn open_mpi_handles_pass_with_1_to_9_ranks() {
    conformance::all(&Faked(Family::OpenMpi), &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn mpich_handles_pass_with_1_to_4_ranks() {
    conformance::all(&Faked(Family::Mpich), &[1, 2, 3, 4]);
}

#[test]
fn standard_abi_handles_pass_with_1_to_4_ranks() {
    conformance::all(&Faked(Family::Standard), &[1, 2, 3, 4]);
}

#[test]
fn long_segments_pass() {
    for (family, ranks) in FAMILIES.into_iter().zip([4, 3, 2]) {
        let launcher = Faked(family);
        for lens in [&[5_000][..], &[3, 0, 9_001, 1]] {
            conformance::all_gather(&launcher, ranks, DType::F64, lens);
            conformance::reduce_scatter(&launcher, ranks, DType::F32, lens);
            conformance::all_reduce(&launcher, ranks, DType::Bf16, lens);
            conformance::broadcast(&launcher, ranks, DType::I64, lens);
        }
    }
}
