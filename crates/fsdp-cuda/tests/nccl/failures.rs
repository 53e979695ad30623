//! Failures: the rank that is blamed, the error message, and that no rank hangs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_core::comm::Comms;
use fsdp_core::comm::{Comm, CommError, Purpose, ReduceOp};
use fsdp_core::memory::{Buffer, Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::wrap::UnitId;
use fsdp_core::{Axis, DType, Digest, Error, Memory, Mesh, Queue, Rank};
use fsdp_cuda::nccl::{GpuOptions, Gpus};

use crate::fake::Fake;
use crate::memory::StreamMemory;

const RANKS: usize = 3;

fn gpus(fake: &Fake, timeout: Duration) -> Gpus<StreamMemory> {
    let options = GpuOptions { timeout, ..GpuOptions::new(8) };
    Gpus::new(fake.nccl.clone(), options, |_, _| Ok(Arc::new(StreamMemory::default())))
}

/// Sums a value over all ranks, and reads the sum back.
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

/// Runs a world that must fail, well before [`NEVER`].
fn failure(
    fake: &Fake,
    timeout: Duration,
    body: impl Fn(Seat<StreamMemory>) -> Result<(), Error> + Sync,
) -> LaunchFailure<Error> {
    let start = Instant::now();
    let failure = gpus(fake, timeout).launch(RANKS, &body).expect_err("the world fails");
    assert!(start.elapsed() < NEVER / 2, "took {:?}", start.elapsed());
    fake.assert_clean();
    failure
}

/// Longer than any of these tests may take.
const NEVER: Duration = Duration::from_secs(600);

/// Longer than working ranks need to enter a collective, even on a loaded machine.
const ENOUGH: Duration = Duration::from_secs(5);

/// Between two looks at something that will happen.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

#[test]
fn async_error_aborts_world_naming_rank_and_collective() {
    let fake = Fake::new();
    let failure = failure(&fake, NEVER, |mut seat| {
        for round in 0.. {
            if seat.rank == Rank(1) && round == 2 {
                fake.async_error(1, 6);
            }
            let all = sum(&seat.memory, &mut seat.reductions, 1)?;
            assert_eq!(all, RANKS as i64, "a sum that was cut off is not trusted");
        }
        Ok(())
    });
    assert_eq!(failure.rank, Rank(1));
    let text = failure.reason.to_string();
    assert!(text.contains("rank 1: transport: NCCL: "), "{text}");
    assert!(text.contains("ncclRemoteError"), "{text}");
    assert!(text.contains("NCCL's last message: socket closed by peer"), "{text}");
    assert!(text.contains(" all-reduce (scalars, 1 x i64)"), "{text}");
}

#[test]
fn failed_nccl_call_aborts_world_and_reports_result() {
    for (code, expected) in [(4, "ncclInvalidArgument: invalid argument"), (99, "unknown result 99")] {
        let fake = Fake::new();
        let failure = gpus(&fake, NEVER).launch(RANKS, &|mut seat: Seat<StreamMemory>| {
            fake.refuse_calls(code);
            sum(&seat.memory, &mut seat.reductions, 1)
        });
        let text = failure.expect_err("calls are refused").reason.to_string();
        assert!(text.contains(&format!("NCCL: ncclAllReduce: {expected}")), "{text}");
        assert!(text.ends_with("in #0 all-reduce (scalars, 1 x i64)"), "{text}");
    }
}

#[test]
fn timeout_names_absent_rank_and_latest_collectives() {
    let fake = Fake::new();
    let failure = failure(&fake, ENOUGH, |mut seat| {
        sum(&seat.memory, &mut seat.reductions, 1)?;
        if seat.rank == Rank(2) {
            // Busy elsewhere until the others give up.
            while seat.gathers.check().is_ok() {
                std::thread::sleep(PAUSE);
            }
            return seat.gathers.check();
        }
        sum(&seat.memory, &mut seat.reductions, 1).map(drop)
    });
    assert_eq!(failure.rank, Rank(2));
    let FailureReason::Error(Error::Comm(CommError::TimedOut { call, seconds, missing, status, .. })) =
        &failure.reason
    else {
        panic!("{failure:?}");
    };
    assert_eq!((call.to_string().as_str(), *seconds), ("#1 all-reduce (scalars, 1 x i64)", 5));
    assert_eq!(**missing, [Rank(2)]);
    let lines: Vec<&str> = status.iter().map(|line| line.doing.as_str()).collect();
    let connected = "#0 connect (setup, 0 x u32)";
    let (first, second) = ("#0 all-reduce (scalars, 1 x i64)", "#1 all-reduce (scalars, 1 x i64)");
    assert_eq!(lines[2], format!("gathers: ended {connected}; reductions: ended {first}"));
    assert_eq!(lines[0], format!("gathers: ended {connected}; reductions: issued {second}, ended {first}"));
    let text = failure.reason.to_string();
    assert!(
        text.contains("has waited 5 s in #1 all-reduce (scalars, 1 x i64): rank 2 did not enter it"),
        "{text}"
    );
}

#[test]
fn timeout_blames_stuck_rank_not_waiting_ranks() {
    let fake = Fake::new();
    let failure = failure(&fake, ENOUGH, |mut seat| {
        let stuck = |seat: &Seat<StreamMemory>| {
            while seat.gathers.check().is_ok() {
                std::thread::sleep(PAUSE);
            }
            seat.gathers.check()
        };
        // Rank 0 waits for 1 and 2, rank 1 waits for 2 on the other communicator, rank 2 does not wait.
        match seat.rank.0 {
            0 => sum(&seat.memory, &mut seat.gathers, 1).map(drop),
            1 => sum(&seat.memory, &mut seat.reductions, 1).map(drop),
            _ => stuck(&seat),
        }
    });
    assert_eq!(failure.rank, Rank(2), "{}", failure.reason);
}

#[test]
fn early_returning_rank_is_reported_immediately() {
    let fake = Fake::new();
    let failure = failure(&fake, NEVER, |mut seat| match seat.rank.0 {
        1 => Ok(()),
        _ => sum(&seat.memory, &mut seat.gathers, 1).map(drop),
    });
    assert_eq!(failure.rank, Rank(1));
    let FailureReason::Comm(CommError::Missing { missing, status, .. }) = &failure.reason else {
        panic!("{failure:?}");
    };
    assert_eq!(**missing, [Rank(1)]);
    assert!(status[1].doing.starts_with("has returned"), "{status:?}");
}

#[test]
fn mismatched_calls_are_never_both_sent_to_nccl() {
    let fake = Fake::new();
    let failure = failure(&fake, NEVER, |mut seat| {
        let len = if seat.rank == Rank(1) { 2 } else { 3 };
        let memory = &*seat.memory;
        let mut buffer = memory.allocate(Category::CommStaging, DType::F32, len)?;
        memory.write(Queue::Reduce, HostSlice::F64(&vec![1.0; len]), SliceMut::whole(&mut buffer))?;
        let pending = seat.reductions.all_reduce(
            memory,
            ReduceOp::Sum,
            Purpose::Gradient,
            Some(UnitId(4)),
            vec![buffer],
        )?;
        let out = pending.wait_on(memory, Queue::Compute)?.outputs.remove(0);
        let mut values = vec![0.0; len];
        memory.read(Queue::Compute, Slice::whole(&out), HostSliceMut::F64(&mut values))?;
        seat.reductions.check()
    });
    let FailureReason::Error(Error::Comm(CommError::Mismatch { rank, peer, got, expected })) = failure.reason
    else {
        panic!("{failure:?}");
    };
    assert!(rank == Rank(1) || peer == Rank(1), "{rank} and {peer}");
    assert_eq!([got.elements, expected.elements].iter().sum::<usize>(), 5);
    let calls: Vec<String> = fake.log().into_iter().filter(|line| line.contains("all_reduce")).collect();
    let lens = |len: &str| calls.iter().filter(|line| line.ends_with(len)).count();
    assert!(lens(" 2x7") == 0 || lens(" 3x7") == 0, "{calls:?}");
}

#[test]
fn failing_or_panicking_rank_is_reported_and_ends_others() {
    for panics in [false, true] {
        let fake = Fake::new();
        let others = std::sync::Mutex::new(Vec::new());
        let failure = failure(&fake, NEVER, |mut seat| {
            let result = (0..).try_for_each(|round| {
                if seat.rank == Rank(1) && round == 3 {
                    assert!(!panics, "planted panic");
                    return Err(Error::Device("planted".into()));
                }
                sum(&seat.memory, &mut seat.reductions, 1).map(drop)
            });
            others.lock().unwrap().push(result.as_ref().unwrap_err().to_string());
            result
        });
        assert_eq!(failure.rank, Rank(1));
        let expected = if panics { "panicked: planted panic" } else { "planted" };
        assert_eq!(failure.reason.to_string(), expected);
        let others = others.into_inner().unwrap();
        let told = others.iter().filter(|error| **error == format!("rank 1 failed: {expected}")).count();
        assert_eq!(told, 2, "{others:?}");
    }
}

#[test]
fn rank_without_memory_is_reported_before_any_body_runs() {
    let fake = Fake::new();
    let memory = |rank: Rank, world| match rank.0 {
        2 => Err(Error::Device(format!("no device for one of {world}").into())),
        _ => Ok(Arc::new(StreamMemory::default())),
    };
    let gpus = Gpus::new(fake.nccl.clone(), GpuOptions::new(8), memory);
    let failure = gpus.launch(RANKS, &|_| -> Result<(), Error> { panic!("no rank may begin") });
    let failure = failure.expect_err("a rank has no memory");
    assert_eq!(failure.rank, Rank(2));
    assert!(matches!(failure.reason, FailureReason::Setup(_)), "{failure:?}");
    assert_eq!(failure.reason.to_string(), "no device for one of 3");
    fake.assert_clean();
}

#[test]
fn more_ranks_than_devices_is_rejected() {
    let fake = Fake::new();
    let gpus = Gpus::new(fake.nccl.clone(), GpuOptions::new(2), |_, _| Ok(Arc::new(StreamMemory::default())));
    assert!(gpus.check(2).is_ok());
    let failure = gpus.launch(3, &|_| Ok::<_, Error>(())).expect_err("there are two devices");
    assert_eq!(failure.rank, Rank(2));
    assert_eq!(
        failure.reason.to_string(),
        "3 ranks need 3 GPUs, but this process sees 2: use fewer ranks, let them share one GPU, or make more \
         visible (CUDA_VISIBLE_DEVICES)"
    );
    assert!(fake.log().is_empty(), "NCCL is not asked");
}

#[test]
fn buffers_of_abandoned_collective_are_leaked() {
    let fake = Fake::new();
    let memories = std::sync::Mutex::new(Vec::new());
    let failure = failure(&fake, NEVER, |mut seat| {
        memories.lock().unwrap().push((seat.rank, seat.memory.clone()));
        let memory = &*seat.memory;
        let input = memory.allocate(Category::CommStaging, DType::F64, 2)?;
        let output = memory.allocate(Category::CommStaging, DType::F64, 2 * RANKS)?;
        assert!(input.is_exclusive());
        if seat.rank == Rank(0) {
            drop(seat.gathers.all_gather(memory, Purpose::Forward, None, vec![input], vec![output])?);
        }
        // Every rank learns of the abort.
        while seat.gathers.check().is_ok() {
            std::thread::sleep(PAUSE);
        }
        seat.gathers.check()
    });
    let text = failure.reason.to_string();
    let given_up = "#0 all-gather (forward, 6 x f64) was abandoned before it finished";
    assert_eq!(text, format!("the communicator was aborted on rank 0: {given_up}"));
    for (rank, memory) in memories.into_inner().unwrap() {
        let expected = if rank == Rank(0) { 8 * (2 + 2 * RANKS) } else { 0 };
        assert_eq!(memory.usage().live(Category::CommStaging), expected, "{rank}");
    }
}

#[test]
fn connect_names_ranks_with_different_settings() {
    let fake = Fake::new();
    let connect = |seat: Seat<StreamMemory>, started_with: &str| {
        let (mesh, digest) = (Mesh::new([(Axis::Shard, RANKS)])?, Digest::of(&started_with));
        Comms::connect(&*seat.memory, seat.gathers, seat.reductions, mesh, &BTreeSet::new(), digest).map(drop)
    };
    let failure = failure(&fake, NEVER, |seat| {
        let is_other = seat.rank == Rank(1);
        connect(seat, if is_other { "lr = 1e-3" } else { "lr = 1e-4" })
    });
    let FailureReason::Error(Error::Comm(CommError::Differs { ranks, reference })) = failure.reason else {
        panic!("{failure:?}");
    };
    assert_eq!((ranks, reference), (vec![Rank(1)], Rank(0)));

    let fake = Fake::new();
    gpus(&fake, NEVER).launch(RANKS, &|seat| connect(seat, "lr = 1e-4")).expect("all were started alike");
    fake.assert_clean();
}
