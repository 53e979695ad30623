//! How ranks share cores and buffers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fsdp_comm::conformance::{PlainBuffer, PlainMemory};
use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::comm::{Purpose, ReduceOp};
use fsdp_core::memory::{Buffer, Category, Memory, SliceMut};
use fsdp_core::{DType, Error, Queue, Rank};
use fsdp_sim::{ThreadOptions, Threads};

/// Runs a body on every rank of a world with one memory.
fn run<T: Send>(
    options: ThreadOptions,
    ranks: usize,
    body: impl Fn(Seat<PlainMemory>) -> Result<T, Error> + Sync,
) -> Vec<T> {
    run_on(&Arc::new(PlainMemory::new(true)), options, ranks, body)
}

fn run_on<T: Send>(
    memory: &Arc<PlainMemory>,
    options: ThreadOptions,
    ranks: usize,
    body: impl Fn(Seat<PlainMemory>) -> Result<T, Error> + Sync,
) -> Vec<T> {
    let memory = memory.clone();
    Threads::new(options, move |_, _| Ok(memory.clone())).launch(ranks, &body).expect("no rank fails")
}

fn on(cores: usize) -> ThreadOptions {
    ThreadOptions { cores, ..ThreadOptions::default() }
}

fn zeros(memory: &PlainMemory, len: usize) -> Result<PlainBuffer, Error> {
    let mut buffer = memory.allocate(Category::CommStaging, DType::F32, len)?;
    memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
    Ok(buffer)
}

fn reduce_scatter(seat: &mut Seat<PlainMemory>) -> Result<Vec<PlainBuffer>, Error> {
    let (comm, memory) = (&mut seat.reductions, &*seat.memory);
    let (unsharded, shard) = (zeros(memory, comm.size())?, zeros(memory, 1)?);
    let pending =
        comm.reduce_scatter(memory, ReduceOp::Sum, Purpose::Gradient, None, vec![unsharded], vec![shard])?;
    pending.wait_on(memory, Queue::Reduce).map(|completed| completed.inputs)
}

#[test]
fn running_ranks_never_exceed_cores() {
    for cores in [1, 2, 5] {
        let (running, max_running) = (AtomicUsize::new(0), AtomicUsize::new(0));
        run(on(cores), 16, |mut seat| {
            for _ in 0..20 {
                max_running.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::yield_now();
                running.fetch_sub(1, Ordering::SeqCst);
                reduce_scatter(&mut seat)?;
            }
            Ok(())
        });
        assert!(max_running.load(Ordering::SeqCst) <= cores);
    }
}

#[test]
fn lower_ranks_run_first_on_one_core() {
    let turn = AtomicUsize::new(0);
    let turns = run(on(1), 8, |mut seat| {
        let first = turn.fetch_add(1, Ordering::SeqCst);
        reduce_scatter(&mut seat)?;
        Ok(first)
    });
    assert_eq!(turns, (0..8).collect::<Vec<_>>());
}

#[test]
fn results_are_in_rank_order() {
    let ranks = run(ThreadOptions::default(), 40, |seat| Ok(seat.rank));
    assert_eq!(ranks, (0..40).map(Rank).collect::<Vec<_>>());
}

#[test]
fn consumed_inputs_are_returned_released() {
    run(ThreadOptions::default(), 6, |mut seat| {
        let inputs = reduce_scatter(&mut seat)?;
        assert!(inputs.iter().all(|input| input.is_released() && input.len() == 6));
        Ok(())
    });
}

/// With one core, rank `r` arrives after all lower ranks, so it finds the partial sums of the tree instead of all
/// inputs.
#[test]
fn inputs_are_released_as_ranks_arrive() {
    let (memory, ranks) = (Arc::new(PlainMemory::new(true)), 64);
    run_on(&memory, on(1), ranks, |mut seat| {
        let rank = seat.rank.0;
        let outputs_bytes = 4 * rank;
        let partial_sums = (memory.resident_bytes() - outputs_bytes) / (4 * ranks);
        assert_eq!(partial_sums, rank.count_ones() as usize, "when rank {rank} begins");
        reduce_scatter(&mut seat).map(drop)
    });
    assert_eq!(memory.resident_bytes(), 0);
}

#[test]
fn outputs_share_storage_only_when_enabled() {
    for share_unsharded in [false, true] {
        let options = ThreadOptions { share_unsharded, ..ThreadOptions::default() };
        let outputs = run(options, 3, |mut seat| {
            let memory = &*seat.memory;
            let (shard, unsharded) = (zeros(memory, 2)?, zeros(memory, 6)?);
            let pending =
                seat.gathers.all_gather(memory, Purpose::Forward, None, vec![shard], vec![unsharded])?;
            Ok(pending.wait_on(memory, Queue::Gather)?.outputs.remove(0))
        });
        assert_eq!(outputs[0].shares_storage_with(&outputs[2]), share_unsharded);
        assert_eq!(outputs[1].is_exclusive(), !share_unsharded);
    }
}
