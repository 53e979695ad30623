//! Collectives between devices whose queues lag behind the host: only events enforce the order.

use std::sync::Arc;

use fsdp_comm::conformance;
use fsdp_core::DType;
use fsdp_sim::{ThreadOptions, Threads};

use crate::lagging::{Device, LaggingMemory};

fn worlds(share_unsharded: bool) -> Threads<LaggingMemory> {
    let device = Arc::<Device>::default();
    let options = ThreadOptions { cores: 3, share_unsharded, ..ThreadOptions::default() };
    Threads::new(options, move |rank, _| Ok(Arc::new(LaggingMemory { rank, device: device.clone() })))
}

#[test]
fn collectives_are_correct_on_lagging_queues() {
    for share_unsharded in [false, true] {
        let launcher = worlds(share_unsharded);
        for ranks in 1..=9 {
            for dtype in [DType::F32, DType::F64, DType::I64] {
                conformance::all_gather(&launcher, ranks, dtype, &[3, 0, 5]);
                conformance::reduce_scatter(&launcher, ranks, dtype, &[3, 0, 5]);
                conformance::all_reduce(&launcher, ranks, dtype, &[3, 0, 5]);
            }
            conformance::many_in_flight(&launcher, ranks);
            conformance::communicators_are_independent(&launcher, ranks);
            conformance::groups_of_groups(&launcher, ranks);
        }
    }
}
