//! Collectives within a schedule (operations of a program) and outside of it (run on the host).

use fsdp_comm::conformance;
use fsdp_core::DType;

use super::devices;
use crate::{Devices, Reduction};

/// The suite of communicators without two of its checks. Subgroups of groups are not supported: a program specifies the
/// groups of all ranks, and a group does not know how others are split. Calls that differ between ranks become a
/// program within a schedule, and ranks compare programs rather than calls.
#[test]
fn tree_communicators_pass_conformance() {
    let Some(devices) = devices("this test", 4, Reduction::Tree) else { return };
    check(&devices, |_| true);
}

/// With two ranks, the sums of plugins are those of the tree too; with more, those of integers are.
#[test]
fn native_communicators_pass_conformance() {
    let Some(devices) = devices("this test", 4, Reduction::Native) else { return };
    check(&devices, |ranks| ranks <= 2);
}

/// Runs the suite; `adds_floats` says for which number of ranks floats are added by the tree.
fn check(devices: &Devices, adds_floats: impl Fn(usize) -> bool) {
    for ranks in 1..=4 {
        for lens in [&[][..], &[1], &[3, 0, 5, 1], &[64, 129]] {
            for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I64] {
                conformance::all_gather(devices, ranks, dtype, lens);
                conformance::broadcast(devices, ranks, dtype, lens);
                if dtype == DType::I64 || adds_floats(ranks) {
                    conformance::reduce_scatter(devices, ranks, dtype, lens);
                    conformance::all_reduce(devices, ranks, dtype, lens);
                }
            }
            conformance::all_gather(devices, ranks, DType::U8, lens);
        }
        conformance::traffic_matches_formulas(devices, ranks);
        conformance::buffers_come_back_to_their_rank(devices, ranks);
        conformance::arguments_are_checked(devices, ranks);
        conformance::abort_reaches_every_rank(devices, ranks);
        conformance::dropping_a_pending_aborts(devices, ranks);
        conformance::divergent_roots_are_reported(devices, ranks);
        conformance::many_in_flight(devices, ranks);
        conformance::communicators_are_independent(devices, ranks);
        for replicas in (1..=ranks).filter(|&replicas| ranks.is_multiple_of(replicas)) {
            let shards = ranks / replicas;
            if adds_floats(replicas.max(shards)) {
                conformance::rows_and_columns_of_a_mesh(devices, replicas, shards);
            }
        }
    }
}
