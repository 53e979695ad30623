//! The simulated communicator passes the suite of every communicator.

use fsdp_comm::conformance;
use fsdp_core::DType;
use proptest::prelude::*;

use crate::launcher::Simulated;

#[test]
fn worlds_of_one_to_nine_ranks_pass() {
    conformance::all(&Simulated::default(), &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn a_single_core_is_enough() {
    conformance::all(&Simulated { cores: 1, ..Simulated::default() }, &[1, 4, 5]);
}

#[test]
fn shared_outputs_pass_with_and_without_aliases() {
    for can_alias in [false, true] {
        conformance::all(&Simulated { share_unsharded: true, can_alias, cores: 2 }, &[1, 2, 5]);
    }
}

#[test]
fn many_ranks_pass() {
    let launcher = Simulated::default();
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
        let launcher = Simulated { cores, share_unsharded, can_alias: true };
        for dtype in [DType::F32, DType::Bf16] {
            conformance::all_gather(&launcher, ranks, dtype, &lens);
            conformance::reduce_scatter(&launcher, ranks, dtype, &lens);
            conformance::all_reduce(&launcher, ranks, dtype, &lens);
        }
    }
}
