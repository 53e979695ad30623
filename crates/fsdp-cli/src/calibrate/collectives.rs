//! Times collectives by bytes and ranks.

use std::sync::Arc;
use std::time::Instant;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_config::Device;
use fsdp_core::comm::{Comm, Purpose, ReduceOp};
use fsdp_core::memory::{Category, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_plan::measured::{Point, Points};
use fsdp_plan::prices::Collective;
use fsdp_train::TrainError;

use super::computing::lower_quartile;
use crate::device::Work;
use crate::device::clock::Clock;

/// Bytes that are gathered or reduced; the largest only on devices with their own memory.
const BYTES: [usize; 10] =
    [256, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

/// Maximum bytes on a host.
const HOST_BYTES_MAX: usize = 64 << 20;

/// A size is repeated until this many bytes have moved, within `REPETITIONS` repetitions.
const BYTES_PER_SIZE: usize = 96 << 20;
const REPETITIONS: [usize; 2] = [3, 40];

/// Repetitions that are not counted, before those that are.
const WARM_UP: usize = 2;

/// Collectives of all ranks of a world.
pub(super) struct Collectives {
    pub(super) ranks: usize,
    /// The name of the transport.
    pub(super) transport: &'static str,
    /// Maximum bytes.
    pub(super) bytes_max: usize,
}

/// Maximum bytes to time on a device.
pub(super) fn bytes_max(device: Device) -> usize {
    if device == Device::Cuda { usize::MAX } else { HOST_BYTES_MAX }
}

impl Work for Collectives {
    type Outcome = Result<Points, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend + Clock,
    {
        let Self { ranks, transport, bytes_max } = self;
        let timed = |seat: Seat<L::Memory>| measure(seat, bytes_max).map_err(TrainError::from);
        let measured = launcher.launch(ranks, &timed)?;
        let mut points = Points::new();
        // All ranks did the same; the one that took longest saw the whole time.
        for (index, &(collective, bytes, _)) in measured[0].iter().enumerate() {
            let seconds = measured.iter().map(|rank| rank[index].2).fold(0.0, f64::max).max(1e-9);
            let point = Point { ranks, size: vec![bytes as f64], work: bytes as f64, seconds };
            points.entry(format!("{} {}", collective.name(), transport)).or_default().push(point);
        }
        Ok(points)
    }
}

/// A collective, its bytes, and its seconds.
type Timed = (Collective, usize, f64);

fn measure<M: Clock>(seat: Seat<M>, bytes_max: usize) -> Result<Vec<Timed>, Error> {
    let Seat { memory, mut gathers, mut reductions, .. } = seat;
    let mut timed = Vec::new();
    for collective in Collective::ALL {
        for bytes in BYTES.into_iter().filter(|&bytes| bytes <= bytes_max) {
            let comm = if collective == Collective::AllGather { &mut gathers } else { &mut reductions };
            timed.push((collective, bytes, lower_quartile(&mut times(&memory, comm, collective, bytes)?)));
        }
    }
    Ok(timed)
}

/// Seconds of each counted repetition.
fn times<M: Clock>(
    memory: &Arc<M>,
    comm: &mut Comm<M>,
    collective: Collective,
    bytes: usize,
) -> Result<Vec<f64>, Error> {
    let [min, max] = REPETITIONS;
    let count = (BYTES_PER_SIZE / bytes).clamp(min, max);
    let (ranks, elements) = (comm.size(), (bytes / DType::F32.size_bytes()).next_multiple_of(comm.size()));
    let mut seconds = Vec::new();
    for repetition in 0..WARM_UP + count {
        let (full, shard) = (zeroed(&**memory, elements)?, zeroed(&**memory, elements / ranks)?);
        let queue = if collective == Collective::AllGather { Queue::Gather } else { Queue::Reduce };
        // The zeros must be written before the time starts.
        memory.wait(queue, &memory.record(Queue::Compute));
        let (issued, begin) = (Instant::now(), memory.mark(queue)?);
        let pending = match collective {
            Collective::AllGather => {
                comm.all_gather(memory, Purpose::Forward, None, vec![shard], vec![full])?
            }
            Collective::ReduceScatter => {
                comm.reduce_scatter(memory, ReduceOp::Sum, Purpose::Gradient, None, vec![full], vec![shard])?
            }
            Collective::AllReduce => {
                comm.all_reduce(memory, ReduceOp::Sum, Purpose::Gradient, None, vec![full])?
            }
        };
        let done = pending.wait_on(memory, queue)?;
        let end = memory.mark(queue)?;
        let took = if memory.is_asynchronous() {
            memory.milliseconds(&begin, &end)? / 1e3
        } else {
            issued.elapsed().as_secs_f64()
        };
        drop(done);
        if repetition >= WARM_UP {
            seconds.push(took);
        }
    }
    Ok(seconds)
}

fn zeroed<M: Clock>(memory: &M, elements: usize) -> Result<M::Buffer, Error> {
    let mut buffer = memory.allocate(Category::Workspace, DType::F32, elements)?;
    memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
    Ok(buffer)
}
