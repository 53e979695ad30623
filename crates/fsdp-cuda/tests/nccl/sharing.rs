//! Counts the NCCL communicators that are created, and checks that groups of the same ranks share one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_core::comm::Comms;
use fsdp_core::comm::{Comm, CommError, Purpose, ReduceOp};
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{Axis, DType, Digest, Error, Group, Memory, Mesh, Queue, Rank};
use fsdp_cuda::nccl::{GpuOptions, Gpus};

use crate::fake::Fake;
use crate::memory::StreamMemory;

/// Runs a world, and checks that no communicator is left.
fn launch<T: Send>(
    fake: &Fake,
    ranks: usize,
    body: impl Fn(Seat<StreamMemory>) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, LaunchFailure<Error>> {
    let options = GpuOptions { timeout: Duration::from_secs(600), ..GpuOptions::new(8) };
    let gpus = Gpus::new(fake.nccl.clone(), options, |_, _| Ok(Arc::new(StreamMemory::default())));
    let ended = gpus.launch(ranks, &body);
    fake.assert_clean();
    ended
}

/// Returns the number of communicators that each rank created, all of which are destroyed by then.
fn made(fake: &Fake, ranks: usize) -> Vec<usize> {
    let log = fake.log();
    let of_rank = |rank| {
        let prefix = format!("rank {rank} ");
        log.iter().filter(|line| line.starts_with(&prefix) && line.ends_with(" destroyed")).count()
    };
    (0..ranks).map(of_rank).collect()
}

/// Returns the number of communicators that each rank of a mesh creates for training.
fn made_for(replicas: usize, shards: usize, sub_group: Option<usize>) -> Vec<usize> {
    let (fake, mesh) =
        (Fake::new(), Mesh::new([(Axis::Replicate, replicas), (Axis::Shard, shards)]).unwrap());
    let own = sub_group.map(|n| (Queue::Gather, Group::SHARDS.neighbors(n)));
    let copies = (replicas > 1).then_some((Queue::Reduce, Group::REPLICATE));
    let groups =
        [(Queue::Gather, Group::SHARDS), (Queue::Reduce, Group::SHARDS), (Queue::Reduce, Group::WORLD)];
    let groups: BTreeSet<_> = groups.into_iter().chain(own).chain(copies).collect();
    launch(&fake, mesh.world(), |seat| {
        let Seat { memory, gathers, reductions, .. } = seat;
        Comms::connect(&*memory, gathers, reductions, mesh, &groups, Digest::of(&"alike")).map(drop)
    })
    .unwrap();
    made(&fake, mesh.world())
}

#[test]
fn plain_sharding_creates_two_communicators_per_rank() {
    for ranks in [1, 2, 3, 5] {
        for sub_group in [None, Some(ranks)] {
            assert_eq!(made_for(1, ranks, sub_group), vec![2; ranks], "{ranks} ranks, {sub_group:?}");
        }
    }
}

#[test]
fn smaller_groups_get_separate_communicators() {
    assert_eq!(made_for(1, 4, Some(2)), [3; 4], "and one for the sub-group");
    assert_eq!(made_for(2, 2, None), [5; 4], "and two for the row, and one for the column");
    assert_eq!(made_for(3, 1, None), [4; 3], "the column is the world");
}

/// Sums a value over a group, and reads the sum back.
fn sum(memory: &StreamMemory, comm: &mut Comm<StreamMemory>, value: i64) -> Result<i64, Error> {
    let mut buffer = memory.allocate(Category::CommStaging, DType::I64, 1)?;
    memory.write(Queue::Reduce, HostSlice::I64(&[value]), SliceMut::whole(&mut buffer))?;
    let pending = comm.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, vec![buffer])?;
    let summed = pending.wait_on(memory, Queue::Download)?.outputs.remove(0);
    let mut out = [0];
    memory.read(Queue::Download, Slice::whole(&summed), HostSliceMut::I64(&mut out))?;
    comm.check()?;
    Ok(out[0])
}

#[test]
fn shared_communicator_closes_when_last_group_is_dropped() {
    let fake = Fake::new();
    let sums = launch(&fake, 3, |seat| {
        let (memory, mut parent) = (&*seat.memory, seat.gathers);
        let mut child = parent.split(memory, 4)?;
        let mut grandchild = child.split(memory, 0)?;
        assert_eq!((child.size(), child.rank()), (3, seat.rank.0));
        let mut sums = vec![sum(memory, &mut parent, 1)?];
        drop(parent);
        sums.push(sum(memory, &mut grandchild, 2)?);
        drop(grandchild);
        sums.push(sum(memory, &mut child, 3)?);
        // A smaller group, split from a child that shares its parent's communicator.
        let mut pair = child.split(memory, usize::from(seat.rank == Rank(1)))?;
        drop(child);
        sums.push(sum(memory, &mut pair, 4)?);
        Ok(sums)
    });
    assert_eq!(sums.unwrap(), [[3, 6, 9, 8], [3, 6, 9, 4], [3, 6, 9, 8]]);
    assert_eq!(made(&fake, 3), [3; 3]);
    let log = fake.log();
    let at = |wanted: &str| log.iter().position(|line| line == wanted).unwrap();
    let last_sum = log.iter().rposition(|line| line == "rank 0 comm 1 all_reduce 1x4").unwrap();
    assert!(at("rank 0 comm 1 destroyed") > last_sum, "{log:?}");
}

#[test]
fn out_of_order_calls_on_shared_communicator_are_rejected() {
    let fake = Fake::new();
    let failure = launch(&fake, 2, |mut seat| {
        let memory = &*seat.memory;
        let mut child = seat.reductions.split(memory, 0)?;
        sum(memory, &mut child, 1)?;
        let (first, second) = match seat.rank.0 {
            0 => (&mut child, &mut seat.reductions),
            _ => (&mut seat.reductions, &mut child),
        };
        sum(memory, first, 1)?;
        sum(memory, second, 1)
    });
    let reason = failure.unwrap_err().reason;
    let FailureReason::Error(Error::Comm(CommError::Order { group, peer_group, .. })) = &reason else {
        panic!("{reason:?}");
    };
    let mut groups = [group.as_str(), peer_group];
    groups.sort_unstable();
    assert_eq!(groups, ["reductions", "reductions/0"]);
    for rank in 0..2 {
        let prefix = format!("rank {rank} comm 2 all_reduce");
        let calls = fake.log().iter().filter(|line| line.starts_with(&prefix)).count();
        assert!(calls <= 2, "rank {rank} made {calls} calls");
    }
}

#[test]
fn async_error_names_call_of_active_group() {
    let fake = Fake::new();
    let failure = launch(&fake, 2, |mut seat| {
        let memory = &*seat.memory;
        let mut child = seat.reductions.split(memory, 0)?;
        sum(memory, &mut seat.reductions, 1)?;
        for round in 0.. {
            if seat.rank == Rank(1) && round == 3 {
                fake.async_error(1, 6);
            }
            sum(memory, &mut child, 1)?;
        }
        Ok(())
    });
    let text = failure.unwrap_err().reason.to_string();
    // It is the child's fourth sum, or the third if the error was seen at once; the parent group had only one sum.
    let named = |sequence| text.contains(&format!("in #{sequence} all-reduce (scalars, 1 x i64)"));
    assert!(named(3) || named(2), "{text}");
}
