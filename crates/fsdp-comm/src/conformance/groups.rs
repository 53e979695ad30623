//! Checks of groups, and of many collectives in flight.

use fsdp_core::comm::{Comm, Completed, Pending, Purpose, ReduceOp};
use fsdp_core::{Axis, DType, Error, Memory, Mesh, Queue};

use super::values::{assert_contents, empty, filled, reduced, values};
use super::{in_schedule, run_ok};
use crate::launch::Launcher;

const LEN: usize = 5;

/// The ranks `members` (numbered in the world) average their values by one reduce-scatter, sum them by one all-reduce,
/// and receive the values of the last member by one broadcast.
fn work_in_group<M: Memory>(
    memory: &M,
    comm: &mut Comm<M>,
    world_rank: usize,
    members: &[usize],
) -> Result<(), Error> {
    assert_eq!(comm.size(), members.len(), "size of the group");
    assert_eq!(members[comm.rank()], world_rank, "the order of ranks is kept");
    assert_eq!(comm.world_rank().0, world_rank, "a rank keeps its name");
    let inputs = filled(memory, Queue::Reduce, DType::F32, world_rank, &[LEN], comm.size())?;
    let outputs = empty(memory, DType::F32, &[LEN])?;
    let mut completed = in_schedule(memory, || {
        comm.reduce_scatter(memory, ReduceOp::Average, Purpose::Gradient, None, inputs, outputs)
    })?;
    let expected = reduced(DType::F32, ReduceOp::Average, members, 0, LEN * members.len());
    let start = comm.rank() * LEN;
    let part = completed.outputs.remove(0);
    assert_contents(memory, &part, &expected[start..start + LEN], "reduce-scatter in a group")?;

    let buffers = filled(memory, Queue::Reduce, DType::I64, world_rank, &[LEN], 1)?;
    let completed =
        in_schedule(memory, || comm.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, buffers))?;
    let summed = &completed.outputs[0];
    assert_contents(
        memory,
        summed,
        &reduced(DType::I64, ReduceOp::Sum, members, 0, LEN),
        "all-reduce in a group",
    )?;

    let root = members.len() - 1;
    let buffers = filled(memory, Queue::Reduce, DType::F64, world_rank, &[LEN, 1], 1)?;
    let pending = comm.broadcast(memory, Purpose::Setup, None, root, buffers)?;
    let received = pending.wait_on(memory, Queue::Compute)?.outputs;
    assert_contents(
        memory,
        &received[0],
        &values(DType::F64, members[root], 0, LEN),
        "broadcast in a group",
    )?;
    assert_contents(memory, &received[1], &values(DType::F64, members[root], 1, 1), "broadcast in a group")
}

/// Checks that the world splits into the rows (shards) and columns (replicas) of a mesh, and that both work.
///
/// # Panics
/// Panics if the check fails.
pub fn rows_and_columns_of_a_mesh(launcher: &impl Launcher, replicas: usize, shards: usize) {
    let mesh = Mesh::new([(Axis::Replicate, replicas), (Axis::Shard, shards)])
        .expect("the suite makes meshes with positive axes");
    run_ok(launcher, mesh.world(), &|mut seat| {
        let memory = &*seat.memory;
        let rank = seat.gathers.world_rank();
        let (replica, shard) = (mesh.coordinate(rank, Axis::Replicate), mesh.coordinate(rank, Axis::Shard));
        let mut row = seat.gathers.split(memory, replica)?;
        let mut column = seat.gathers.split(memory, shard)?;
        let row_members: Vec<usize> = (0..shards).map(|other| replica * shards + other).collect();
        let column_members: Vec<usize> = (0..replicas).map(|other| other * shards + shard).collect();
        work_in_group(memory, &mut row, rank.0, &row_members)?;
        work_in_group(memory, &mut column, rank.0, &column_members)
    });
}

/// Checks that groups split again, with colors that are neither dense nor ordered, while the world keeps working.
///
/// # Panics
/// Panics if the check fails.
pub fn groups_of_groups(launcher: &impl Launcher, ranks: usize) {
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        let rank = seat.gathers.rank();
        let mut parity = seat.gathers.split(memory, 17 - rank % 2)?;
        let mut pairs = parity.split(memory, rank / 4)?;
        let pair: Vec<usize> =
            (0..ranks).filter(|other| other % 2 == rank % 2 && other / 4 == rank / 4).collect();
        work_in_group(memory, &mut pairs, rank, &pair)?;
        let half: Vec<usize> = (rank % 2..ranks).step_by(2).collect();
        work_in_group(memory, &mut parity, rank, &half)?;
        work_in_group(memory, &mut seat.gathers, rank, &(0..ranks).collect::<Vec<_>>())
    });
}

/// Checks a gather on one communicator and a reduction on another, issued and awaited in a different order on every
/// rank.
///
/// # Panics
/// Panics if the check fails.
pub fn communicators_are_independent(launcher: &impl Launcher, ranks: usize) {
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        let rank = seat.gathers.rank();
        for round in 0..8 {
            let order = (rank * 5 + round * 3) % 4;
            let (mut gather, mut reduce) = (None, None);
            for step in 0..2 {
                if (step == 0) == (order % 2 == 0) {
                    gather = Some(start_gather(memory, &mut seat.gathers)?);
                } else {
                    let buffers = filled(memory, Queue::Reduce, DType::F64, rank, &[LEN], 1)?;
                    reduce = Some(seat.reductions.all_reduce(
                        memory,
                        ReduceOp::Sum,
                        Purpose::Gradient,
                        None,
                        buffers,
                    )?);
                }
            }
            let (gather, reduce) = (gather.expect("issued above"), reduce.expect("issued above"));
            let wait = |pending: Pending<_>| pending.wait_on(memory, Queue::Compute);
            let (gathered, summed) = if order < 2 {
                let gathered = wait(gather)?;
                (gathered, wait(reduce)?)
            } else {
                let summed = wait(reduce)?;
                (wait(gather)?, summed)
            };
            check_gather(memory, ranks, &gathered)?;
            let all: Vec<usize> = (0..ranks).collect();
            assert_contents(
                memory,
                &summed.outputs[0],
                &reduced(DType::F64, ReduceOp::Sum, &all, 0, LEN),
                "all-reduce",
            )?;
        }
        Ok(())
    });
}

/// Checks several collectives in flight on one communicator, awaited in reverse order.
///
/// # Panics
/// Panics if the check fails.
pub fn many_in_flight(launcher: &impl Launcher, ranks: usize) {
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        memory.begin_schedule();
        let started: Vec<_> =
            (0..6).map(|_| start_gather(memory, &mut seat.gathers)).collect::<Result<_, _>>()?;
        let mut gathered = Vec::new();
        for (later, mut pending) in started.into_iter().rev().enumerate() {
            assert!(later == 0 || pending.is_ready(), "collectives of one communicator end in order");
            gathered.push(pending.wait_on(memory, Queue::Compute)?);
        }
        memory.end_schedule()?;
        gathered.iter().try_for_each(|completed| check_gather(memory, ranks, completed))?;
        Ok(())
    });
}

fn start_gather<M: Memory>(memory: &M, comm: &mut Comm<M>) -> Result<Pending<M>, Error> {
    let inputs = filled(memory, Queue::Gather, DType::F32, comm.rank(), &[LEN], 1)?;
    let outputs = empty(memory, DType::F32, &[LEN * comm.size()])?;
    comm.all_gather(memory, Purpose::Forward, None, inputs, outputs)
}

fn check_gather<M: Memory>(memory: &M, ranks: usize, completed: &Completed<M::Buffer>) -> Result<(), Error> {
    let expected: Vec<f64> = (0..ranks).flat_map(|rank| values(DType::F32, rank, 0, LEN)).collect();
    assert_contents(memory, &completed.outputs[0], &expected, "all-gather")
}
