//! Cores and buffers that ranks share.

use std::sync::atomic::{AtomicUsize, Ordering};

use fsdp_comm::conformance::{PlainBuffer, PlainMemory};
use fsdp_core::comm::{Comm, Purpose, ReduceOp};
use fsdp_core::memory::{Buffer, Category, Memory, SliceMut};
use fsdp_core::{DType, Error, Queue, Rank};
use fsdp_sim::{RankContext, World, WorldOptions};

fn zeros(memory: &PlainMemory, len: usize) -> Result<PlainBuffer, Error> {
    let mut buffer = memory.allocate(Category::CommStaging, DType::F32, len)?;
    memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
    Ok(buffer)
}

fn reduce_scatter(comm: &mut Comm<PlainMemory>, memory: &PlainMemory) -> Result<Vec<PlainBuffer>, Error> {
    let (whole, part) = (zeros(memory, comm.size())?, zeros(memory, 1)?);
    let pending =
        comm.reduce_scatter(memory, ReduceOp::Sum, Purpose::Gradient, None, vec![whole], vec![part])?;
    pending.wait_on(memory, Queue::Reduce).map(|completed| completed.inputs)
}

#[test]
fn no_more_ranks_run_than_there_are_cores() {
    for cores in [1, 2, 5] {
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let body = |mut context: RankContext| {
            let (mut comm, memory) = (context.comm(), PlainMemory::new(true));
            for _ in 0..20 {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::yield_now();
                running.fetch_sub(1, Ordering::SeqCst);
                reduce_scatter(&mut comm, &memory)?;
            }
            Ok::<_, Error>(())
        };
        World::run(WorldOptions { cores, ..WorldOptions::new(16) }, body).unwrap();
        assert!(most.load(Ordering::SeqCst) <= cores);
    }
}

#[test]
fn lower_ranks_run_first_on_one_core() {
    let turn = AtomicUsize::new(0);
    let turns = World::run(WorldOptions { cores: 1, ..WorldOptions::new(8) }, |mut context| {
        let (mut comm, memory) = (context.comm(), PlainMemory::new(true));
        let first = turn.fetch_add(1, Ordering::SeqCst);
        reduce_scatter(&mut comm, &memory)?;
        Ok::<_, Error>(first)
    });
    assert_eq!(turns.unwrap(), (0..8).collect::<Vec<_>>());
}

#[test]
fn results_come_back_in_rank_order() {
    let ranks = World::run(WorldOptions::new(40), |context| Ok::<_, Error>(context.rank()));
    assert_eq!(ranks.unwrap(), (0..40).map(Rank).collect::<Vec<_>>());
}

#[test]
fn consumed_inputs_come_back_released() {
    World::run(WorldOptions::new(6), |mut context| {
        let inputs = reduce_scatter(&mut context.comm(), &PlainMemory::new(true))?;
        assert!(inputs.iter().all(|input| input.is_released() && input.len() == 6));
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// With one core, rank `r` arrives after all lower ranks: it finds the partial sums of the tree, not the
/// inputs of all of them.
#[test]
fn inputs_are_released_as_ranks_arrive() {
    let memory = PlainMemory::new(true);
    let ranks = 64;
    World::run(WorldOptions { cores: 1, ..WorldOptions::new(ranks) }, |mut context| {
        let rank = context.rank().0;
        let outputs_bytes = 4 * rank;
        let partial_sums = (memory.resident_bytes() - outputs_bytes) / (4 * ranks);
        assert_eq!(partial_sums, rank.count_ones() as usize, "when rank {rank} begins");
        reduce_scatter(&mut context.comm(), &memory).map(drop)
    })
    .unwrap();
    assert_eq!(memory.resident_bytes(), 0);
}

#[test]
fn outputs_share_storage_only_where_asked() {
    for share_unsharded in [false, true] {
        let options = WorldOptions { share_unsharded, ..WorldOptions::new(3) };
        let outputs = World::run(options, |mut context| {
            let (mut comm, memory) = (context.comm(), PlainMemory::new(true));
            let (shard, whole) = (zeros(&memory, 2)?, zeros(&memory, 6)?);
            let pending = comm.all_gather(&memory, Purpose::Forward, None, vec![shard], vec![whole])?;
            Ok::<_, Error>(pending.wait_on(&memory, Queue::Gather)?.outputs.remove(0))
        });
        let outputs = outputs.unwrap();
        assert_eq!(outputs[0].shares_storage_with(&outputs[2]), share_unsharded);
        assert_eq!(outputs[1].is_exclusive(), !share_unsharded);
    }
}
