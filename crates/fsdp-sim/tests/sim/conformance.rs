//! Runs the conformance suite of all communicators on the simulated one.

use std::sync::Arc;

use fsdp_comm::conformance::{self, PlainMemory};
use fsdp_core::DType;
use fsdp_nn::host::{HostMemory, HostOptions, HostPool};
use fsdp_sim::{ThreadOptions, Threads};
use proptest::prelude::*;

/// Launches worlds on `cores` cores, which share the outputs of all-gathers if `share_unsharded`.
fn worlds(cores: usize, share_unsharded: bool, can_alias: bool) -> Threads<PlainMemory> {
    let options =
        ThreadOptions { cores, share_unsharded, stack_bytes: 256 << 10, ..ThreadOptions::default() };
    Threads::new(options, move |_, _| Ok(Arc::new(PlainMemory::new(can_alias))))
}

#[test]
fn world_sizes_1_to_9_pass() {
    conformance::all(&worlds(4, false, false), &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn single_core_passes() {
    conformance::all(&worlds(1, false, false), &[1, 4, 5]);
}

#[test]
fn shared_outputs_pass_with_and_without_aliasing() {
    for can_alias in [false, true] {
        conformance::all(&worlds(2, true, can_alias), &[1, 2, 5]);
    }
}

#[test]
fn host_memory_passes() {
    for share_unsharded in [false, true] {
        let pool = HostPool::new();
        let options = ThreadOptions { cores: 2, share_unsharded, ..ThreadOptions::default() };
        let launcher = Threads::new(options, move |_, _| {
            let options = HostOptions { pool: pool.clone(), poison: true, ..HostOptions::default() };
            Ok(Arc::new(HostMemory::new(options)?))
        });
        conformance::all(&launcher, &[1, 2, 3, 4, 6, 8]);
    }
}

#[test]
fn many_ranks_pass() {
    let launcher = worlds(4, false, false);
    for ranks in [128, 256] {
        conformance::all_gather(&launcher, ranks, DType::F32, &[3, 1]);
        conformance::reduce_scatter(&launcher, ranks, DType::F32, &[3, 1]);
        conformance::all_reduce(&launcher, ranks, DType::I64, &[69]);
    }
    conformance::rows_and_columns_of_a_mesh(&launcher, 4, 32);
    conformance::communicators_are_independent(&launcher, 128);
    conformance::divergent_calls_are_reported(&launcher, 128);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn random_segments_pass(
        ranks in 1usize..=12,
        lens in prop::collection::vec(0usize..50, 0..4),
        cores in 1usize..5,
        share_unsharded: bool,
    ) {
        let launcher = worlds(cores, share_unsharded, true);
        for dtype in [DType::F32, DType::Bf16] {
            conformance::all_gather(&launcher, ranks, dtype, &lens);
            conformance::reduce_scatter(&launcher, ranks, dtype, &lens);
            conformance::all_reduce(&launcher, ranks, dtype, &lens);
        }
    }
}
