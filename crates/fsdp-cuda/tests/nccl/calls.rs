//! Checks the calls that reach NCCL: their groups, counts and order, and that NCCL would refuse none.

use std::sync::Arc;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_core::comm::{Purpose, ReduceOp};
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Error, Memory, Queue};
use fsdp_cuda::nccl::{GpuOptions, Gpus};

use crate::fake::Fake;
use crate::memory::{StreamBuffer, StreamMemory};

fn buffers(memory: &StreamMemory, lens: &[usize]) -> Result<Vec<StreamBuffer>, Error> {
    lens.iter().map(|&len| memory.allocate(Category::CommStaging, DType::Bf16, len)).collect()
}

/// Runs a world that must succeed, and returns the calls of each rank.
fn calls(ranks: usize, body: impl Fn(Seat<StreamMemory>) -> Result<(), Error> + Sync) -> Vec<Vec<String>> {
    let fake = Fake::new();
    let gpus = Gpus::new(fake.nccl.clone(), GpuOptions::new(8), |_, _| Ok(Arc::new(StreamMemory::default())));
    gpus.launch(ranks, &body).unwrap_or_else(|failure| panic!("{failure:?}"));
    fake.assert_clean();
    let log = fake.log();
    let of_rank = |rank| {
        let prefix = format!("rank {rank} ");
        log.iter().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
    };
    (0..ranks).map(of_rank).collect()
}

#[test]
fn call_segments_form_one_group_and_empty_ones_are_skipped() {
    let calls = calls(2, |mut seat| {
        let memory = &*seat.memory;
        let (inputs, outputs) = (buffers(memory, &[3, 0, 5])?, buffers(memory, &[6, 0, 10])?);
        let pending = seat.gathers.all_gather(memory, Purpose::Forward, Some(UnitId(1)), inputs, outputs)?;
        pending.wait_on(memory, Queue::Compute)?;
        let (inputs, outputs) = (buffers(memory, &[8, 2])?, buffers(memory, &[4, 1])?);
        let pending = seat.reductions.reduce_scatter(
            memory,
            ReduceOp::Sum,
            Purpose::Gradient,
            Some(UnitId(1)),
            inputs,
            outputs,
        )?;
        let consumed = pending.wait_on(memory, Queue::Reduce)?.inputs;
        let mut values = [0.0; 2];
        let read = memory.read(Queue::Reduce, Slice::whole(&consumed[1]), HostSliceMut::F64(&mut values));
        assert!(matches!(read, Err(Error::Released { len: 2, .. })), "consumed inputs come back released");
        let pending = seat.reductions.all_reduce(
            memory,
            ReduceOp::Sum,
            Purpose::Gradient,
            None,
            buffers(memory, &[7])?,
        )?;
        pending.wait_on(memory, Queue::Reduce)?;
        for op in [ReduceOp::Average, ReduceOp::Sum] {
            let (inputs, outputs) = (buffers(memory, &[6])?, buffers(memory, &[3])?);
            let comm = &mut seat.reductions;
            let pending =
                comm.reduce_scatter(memory, op, Purpose::Gradient, Some(UnitId(1)), inputs, outputs)?;
            pending.wait_on(memory, Queue::Reduce)?;
        }
        let shared = buffers(memory, &[6, 0, 1])?;
        let pending = seat.reductions.broadcast(memory, Purpose::Setup, None, 1, shared)?;
        pending.wait_on(memory, Queue::Compute)?;
        // Without elements, there is no call and no error.
        for lens in [&[][..], &[0, 0]] {
            let nothing = buffers(memory, lens)?;
            let pending =
                seat.reductions.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, nothing)?;
            assert_eq!(pending.wait_on(memory, Queue::Reduce)?.outputs.len(), lens.len());
        }
        Ok(())
    });
    // Counts are those of the smaller buffer; 9 is NCCL's dtype number of bf16.
    let expected = [
        "comm 1 all_gather 3x9 5x9",
        "comm 2 reduce_scatter 4x9 1x9",
        "comm 2 all_reduce 7x9",
        "comm 2 reduce_scatter average 3x9",
        "comm 2 reduce_scatter 3x9",
        "comm 2 broadcast from 1 6x9 1x9",
    ];
    for calls in calls {
        assert_eq!(calls[..expected.len()], expected);
        let mut rest: Vec<&str> = calls[expected.len()..].iter().map(String::as_str).collect();
        rest.sort_unstable();
        assert_eq!(rest, ["comm 1 destroyed", "comm 2 destroyed"]);
    }
}

#[test]
fn collectives_launch_in_call_order_across_communicators() {
    let calls = calls(3, |mut seat| {
        let memory = &*seat.memory;
        let mut row = seat.gathers.split(memory, 5)?;
        let mut pending = Vec::new();
        for step in 0..6 {
            pending.push(match step % 3 {
                0 => row.all_gather(
                    memory,
                    Purpose::Forward,
                    None,
                    buffers(memory, &[1])?,
                    buffers(memory, &[3])?,
                )?,
                1 => seat.reductions.all_reduce(
                    memory,
                    ReduceOp::Sum,
                    Purpose::Scalars,
                    None,
                    buffers(memory, &[2])?,
                )?,
                _ => seat.gathers.all_gather(
                    memory,
                    Purpose::Forward,
                    None,
                    buffers(memory, &[4])?,
                    buffers(memory, &[12])?,
                )?,
            });
        }
        for pending in pending.into_iter().rev() {
            pending.wait_on(memory, Queue::Compute)?;
        }
        Ok(())
    });
    // The row is the whole world, so it shares the parent's communicator; ranks find out by gathering colors.
    let round = ["comm 1 all_gather 1x9", "comm 2 all_reduce 2x9", "comm 1 all_gather 4x9"];
    for calls in calls {
        assert_eq!(calls[0], "comm 1 all_gather 1x4");
        assert_eq!(calls[1..7], [round, round].concat());
    }
}

#[test]
fn waiting_does_not_block_host() {
    // Rank 0 waits on its collective before rank 1 issues the matching call, so a blocking wait would deadlock.
    let fake = Fake::new();
    let gpus = Gpus::new(fake.nccl.clone(), GpuOptions::new(8), |_, _| Ok(Arc::new(StreamMemory::default())));
    let (first, second) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    let ended = gpus.launch(2, &|mut seat: Seat<StreamMemory>| {
        let memory = &*seat.memory;
        let mut buffer = memory.allocate(Category::CommStaging, DType::I64, 1)?;
        memory.write(
            Queue::Reduce,
            HostSlice::I64(&[20 + seat.rank.0 as i64]),
            SliceMut::whole(&mut buffer),
        )?;
        if seat.rank.0 == 1 {
            first.wait();
        }
        let pending =
            seat.reductions.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, vec![buffer])?;
        let summed = pending.wait_on(memory, Queue::Download)?.outputs.remove(0);
        if seat.rank.0 == 0 {
            first.wait();
        }
        second.wait();
        let mut out = [0];
        memory.read(Queue::Download, Slice::whole(&summed), HostSliceMut::I64(&mut out))?;
        seat.reductions.check()?;
        Ok::<_, Error>(out[0])
    });
    assert_eq!(ended.unwrap(), [41, 41]);
    fake.assert_clean();
}
