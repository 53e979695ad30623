//! Checks the results of every collective against a naive computation.

use fsdp_core::comm::{Purpose, ReduceOp};
use fsdp_core::memory::Buffer;
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Queue};

use super::values::{assert_contents, empty, filled, reduced, values};
use super::{in_schedule, run_ok};
use crate::launch::Launcher;

/// Checks that every rank receives all inputs in rank order, and that inputs are only read. `lens` are the elements per
/// rank of each segment.
///
/// # Panics
/// Panics if the check fails, like all checks.
pub fn all_gather(launcher: &impl Launcher, ranks: usize, dtype: DType, lens: &[usize]) {
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        let inputs = filled(memory, Queue::Gather, dtype, seat.gathers.rank(), lens, 1)?;
        let full: Vec<usize> = lens.iter().map(|len| len * ranks).collect();
        let outputs = empty(memory, dtype, &full)?;
        let completed = in_schedule(memory, || {
            let (unit, inputs) = (Some(UnitId(1)), inputs.clone());
            seat.gathers.all_gather(memory, Purpose::Forward, unit, inputs, outputs)
        })?;
        assert!(completed.inputs.is_empty(), "an all-gather gives no inputs back");
        assert!(inputs.iter().all(Buffer::is_exclusive), "an all-gather lets go of its inputs");
        assert_eq!(completed.outputs.len(), lens.len(), "one output per segment");
        for (segment, (output, &len)) in completed.outputs.iter().zip(lens).enumerate() {
            let expected: Vec<f64> = (0..ranks).flat_map(|rank| values(dtype, rank, segment, len)).collect();
            assert_contents(memory, output, &expected, "all-gather")?;
            let input = values(dtype, seat.gathers.rank(), segment, len);
            assert_contents(memory, &inputs[segment], &input, "input of an all-gather")?;
        }
        Ok(())
    });
}

/// The reductions that a dtype supports.
fn operations(dtype: DType) -> &'static [ReduceOp] {
    if dtype.is_float() { &[ReduceOp::Sum, ReduceOp::Average] } else { &[ReduceOp::Sum] }
}

/// Checks that every rank receives its part of the sum or average by the tree, and that the inputs come back writable.
///
/// # Panics
/// Panics if the check fails.
pub fn reduce_scatter(launcher: &impl Launcher, ranks: usize, dtype: DType, lens: &[usize]) {
    let all: Vec<usize> = (0..ranks).collect();
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        let rank = seat.gathers.rank();
        for &op in operations(dtype) {
            let inputs = filled(memory, Queue::Reduce, dtype, rank, lens, ranks)?;
            let outputs = empty(memory, dtype, lens)?;
            let completed = in_schedule(memory, || {
                let (purpose, unit) = (Purpose::Gradient, Some(UnitId(2)));
                seat.gathers.reduce_scatter(memory, op, purpose, unit, inputs, outputs)
            })?;
            assert_eq!(completed.outputs.len(), lens.len(), "one output per segment");
            assert_eq!(completed.inputs.len(), lens.len(), "all inputs come back");
            for (segment, (output, &len)) in completed.outputs.iter().zip(lens).enumerate() {
                let expected = reduced(dtype, op, &all, segment, len * ranks);
                assert_contents(memory, output, &expected[rank * len..(rank + 1) * len], "reduce-scatter")?;
                assert!(output.is_exclusive(), "an output belongs to its rank");
                assert_eq!(completed.inputs[segment].len(), len * ranks, "inputs come back in order");
                assert!(completed.inputs[segment].is_exclusive(), "an input belongs to its rank again");
            }
        }
        Ok(())
    });
}

/// Checks that every rank receives the whole sum or average by the tree, in its own buffers.
///
/// # Panics
/// Panics if the check fails.
pub fn all_reduce(launcher: &impl Launcher, ranks: usize, dtype: DType, lens: &[usize]) {
    let all: Vec<usize> = (0..ranks).collect();
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        for &op in operations(dtype) {
            let buffers = filled(memory, Queue::Reduce, dtype, seat.gathers.rank(), lens, 1)?;
            let completed =
                in_schedule(memory, || seat.gathers.all_reduce(memory, op, Purpose::Scalars, None, buffers))?;
            assert_eq!(completed.outputs.len(), lens.len(), "one output per segment");
            for (segment, (output, &len)) in completed.outputs.iter().zip(lens).enumerate() {
                assert_contents(memory, output, &reduced(dtype, op, &all, segment, len), "all-reduce")?;
                assert!(output.is_exclusive(), "an output belongs to its rank");
            }
        }
        Ok(())
    });
}

/// Checks that every rank receives its part of all inputs, in rank order, and that inputs are only read. `lens` are the
/// elements per part of each segment.
///
/// # Panics
/// Panics if the check fails.
pub fn all_to_all(launcher: &impl Launcher, ranks: usize, dtype: DType, lens: &[usize]) {
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        let rank = seat.gathers.rank();
        let full: Vec<usize> = lens.iter().map(|len| len * ranks).collect();
        for purpose in [Purpose::Activations, Purpose::Gradient] {
            let queue = if purpose == Purpose::Activations { Queue::Compute } else { Queue::Reduce };
            let inputs = filled(memory, queue, dtype, rank, lens, ranks)?;
            let outputs = empty(memory, dtype, &full)?;
            let completed =
                in_schedule(memory, || seat.gathers.all_to_all(memory, purpose, inputs.clone(), outputs))?;
            assert!(completed.inputs.is_empty(), "an all-to-all gives no inputs back");
            assert!(inputs.iter().all(Buffer::is_exclusive), "an all-to-all lets go of its inputs");
            assert_eq!(completed.outputs.len(), lens.len(), "one output per segment");
            for (segment, (output, &len)) in completed.outputs.iter().zip(lens).enumerate() {
                let part = |from| values(dtype, from, segment, len * ranks)[rank * len..][..len].to_vec();
                let expected: Vec<f64> = (0..ranks).flat_map(part).collect();
                assert_contents(memory, output, &expected, "all-to-all")?;
                assert!(output.is_exclusive(), "an output belongs to its rank");
                let input = values(dtype, rank, segment, len * ranks);
                assert_contents(memory, &inputs[segment], &input, "input of an all-to-all")?;
            }
        }
        Ok(())
    });
}

/// Checks that every rank receives the root's data in its own buffers, whatever they held before, for every root.
///
/// # Panics
/// Panics if the check fails.
pub fn broadcast(launcher: &impl Launcher, ranks: usize, dtype: DType, lens: &[usize]) {
    run_ok(launcher, ranks, &|mut seat| {
        let memory = &*seat.memory;
        let rank = seat.gathers.rank();
        for root in 0..ranks {
            let buffers = match rank {
                _ if rank == root => filled(memory, Queue::Reduce, dtype, root, lens, 1)?,
                _ if rank % 2 == 0 => filled(memory, Queue::Reduce, dtype, rank, lens, 1)?,
                _ => empty(memory, dtype, lens)?,
            };
            let pending = seat.gathers.broadcast(memory, Purpose::Setup, Some(UnitId(3)), root, buffers)?;
            let completed = pending.wait_on(memory, Queue::Compute)?;
            assert!(completed.inputs.is_empty(), "a broadcast works in place");
            assert_eq!(completed.outputs.len(), lens.len(), "one output per segment");
            for (segment, (output, &len)) in completed.outputs.iter().zip(lens).enumerate() {
                assert_contents(memory, output, &values(dtype, root, segment, len), "broadcast")?;
                assert!(output.is_exclusive(), "an output belongs to its rank");
            }
        }
        Ok(())
    });
}
