//! Benchmarks collectives between ranks that are threads, over host memory, against their bounds.
//!
//! `cargo bench -p fsdp-sim --features bench` measures with criterion. Before each benchmark, it prints the best of a
//! few short runs next to the time in which this machine copies as many bytes as the collective must read and write,
//! with as many threads as ranks may run at a time. Threads are started and buffers filled before the clock starts.
//!
//! The copies of the bound reuse one pair of blocks: where those fit a cache and the buffers of all ranks do not, no
//! collective can reach the bound.
//!
//! This measures the cost of moving elements and of synchronizing within one process. It says nothing about networks,
//! and no rank computes between its collectives.

mod bounds;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bounds::CopyRate;
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use fsdp_comm::launch::{self, Launcher};
use fsdp_core::comm::{Purpose, ReduceOp};
use fsdp_core::memory::{Category, Memory, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions, HostPool};
use fsdp_sim::{ThreadOptions, Threads};

/// Number of runs in a report, and of collectives in each.
const RUNS: usize = 3;
const RUN_COLLECTIVES: u64 = 4;

/// The measured collective.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// All-gather in which every rank receives a copy.
    AllGatherCopied,
    /// All-gather in which one rank receives a copy that the others read.
    AllGatherShared,
    ReduceScatter,
    AllReduce,
}

impl Kind {
    const ALL: [Self; 4] =
        [Self::AllGatherCopied, Self::AllGatherShared, Self::ReduceScatter, Self::AllReduce];

    const fn name(self) -> &'static str {
        match self {
            Self::AllGatherCopied => "all_gather/copied",
            Self::AllGatherShared => "all_gather/shared",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
        }
    }
}

/// One collective of a world.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    ranks: usize,
    /// Size of the unsharded buffer.
    bytes: usize,
}

impl Case {
    /// Bytes that must be read and written. A copy reads one and writes one; an addition reads two and writes one.
    fn moved_bytes(self) -> usize {
        let (copy, add) = (2 * self.bytes, 3 * self.bytes);
        let others = self.ranks - 1;
        match self.kind {
            Kind::AllGatherCopied => self.ranks * copy,
            Kind::AllGatherShared => copy,
            Kind::ReduceScatter => others * add + copy,
            Kind::AllReduce => others * add + others * copy,
        }
    }

    fn launcher(self, pool: &Arc<HostPool>) -> Threads<HostMemory> {
        let share_unsharded = self.kind == Kind::AllGatherShared;
        let (options, pool) = (ThreadOptions { share_unsharded, ..ThreadOptions::default() }, pool.clone());
        Threads::new(options, move |_, _| {
            let options = HostOptions { pool: pool.clone(), ..HostOptions::default() };
            Ok(Arc::new(HostMemory::new(options)?))
        })
    }

    /// The time of `iterations` collectives in a new world, after one that is not counted: from the start of the first
    /// rank to the end of the last, since a rank that starts late finds that others have already done some of the work.
    fn time(self, pool: &Arc<HostPool>, iterations: u64) -> Duration {
        let spans = self.launcher(pool).launch(self.ranks, &|seat| {
            let mut seat = Seat::new(self, seat)?;
            seat.step()?;
            let start = Instant::now();
            (0..iterations).try_for_each(|_| seat.step())?;
            Ok::<_, Error>((start, Instant::now()))
        });
        span(&spans.expect("no rank fails"))
    }

    /// Prints the best time next to the bound.
    fn report(self, pool: &Arc<HostPool>, name: &str, rate: CopyRate) {
        let run = || self.time(pool, RUN_COLLECTIVES).as_secs_f64() / RUN_COLLECTIVES as f64;
        let seconds = (0..RUNS).map(|_| run()).fold(f64::INFINITY, f64::min);
        let moved = self.moved_bytes() as f64;
        let bound = rate.seconds(moved);
        println!(
            "{name}: {:.3} ms, {:.1} GB/s; bound {:.3} ms ({:.0} % of it)",
            seconds * 1e3,
            moved / seconds / 1e9,
            bound * 1e3,
            100.0 * bound / seconds
        );
    }
}

/// From the earliest start to the latest end.
fn span(spans: &[(Instant, Instant)]) -> Duration {
    let start = spans.iter().map(|span| span.0).min().expect("there is a thread");
    let end = spans.iter().map(|span| span.1).max().expect("there is a thread");
    end - start
}

/// One rank with its buffers. A collective takes them and returns them.
struct Seat {
    kind: Kind,
    seat: launch::Seat<HostMemory>,
    unsharded: Vec<HostBuffer>,
    shard: Vec<HostBuffer>,
}

impl Seat {
    /// A rank with buffers of zeros (which stay zeros, however often they are added).
    fn new(case: Case, seat: launch::Seat<HostMemory>) -> Result<Self, Error> {
        let memory = &seat.memory;
        let zeros = |len| {
            let mut buffer = memory.allocate(Category::CommStaging, DType::F32, len)?;
            memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
            Ok::<_, Error>(vec![buffer])
        };
        let len = case.bytes / DType::F32.size_bytes();
        let (unsharded, shard) = (zeros(len)?, zeros(len / case.ranks)?);
        Ok(Self { kind: case.kind, seat, unsharded, shard })
    }

    /// Runs one collective to its end.
    fn step(&mut self) -> Result<(), Error> {
        match self.kind {
            Kind::AllGatherCopied | Kind::AllGatherShared => self.all_gather(),
            Kind::ReduceScatter => self.reduce_scatter(),
            Kind::AllReduce => self.all_reduce(),
        }
    }

    /// Releases the output of the last collective, which others may still read, before the next one.
    fn all_gather(&mut self) -> Result<(), Error> {
        let (memory, mut unsharded) = (&*self.seat.memory, std::mem::take(&mut self.unsharded));
        unsharded.iter_mut().for_each(|buffer| memory.release(Queue::Gather, buffer));
        let pending =
            self.seat.gathers.all_gather(memory, Purpose::Forward, None, self.shard.clone(), unsharded)?;
        self.unsharded = pending.wait_on(memory, Queue::Gather)?.outputs;
        Ok(())
    }

    /// The last collective released the input. Writing one element restores its storage, all zeros; filling it would be
    /// timed too.
    fn reduce_scatter(&mut self) -> Result<(), Error> {
        let (memory, mut unsharded) = (&*self.seat.memory, std::mem::take(&mut self.unsharded));
        unsharded
            .iter_mut()
            .try_for_each(|buffer| memory.zero(Queue::Compute, SliceMut::new(buffer, 0, 1)))?;
        let shard = std::mem::take(&mut self.shard);
        let pending = self.seat.reductions.reduce_scatter(
            memory,
            ReduceOp::Sum,
            Purpose::Gradient,
            None,
            unsharded,
            shard,
        )?;
        let completed = pending.wait_on(memory, Queue::Reduce)?;
        (self.unsharded, self.shard) = (completed.inputs, completed.outputs);
        Ok(())
    }

    fn all_reduce(&mut self) -> Result<(), Error> {
        let (memory, unsharded) = (&*self.seat.memory, std::mem::take(&mut self.unsharded));
        let pending =
            self.seat.reductions.all_reduce(memory, ReduceOp::Sum, Purpose::Scalars, None, unsharded)?;
        self.unsharded = pending.wait_on(memory, Queue::Reduce)?.outputs;
        Ok(())
    }
}

/// Measures all collectives for one number of ranks and one size.
fn measure(c: &mut Criterion, ranks: usize, mebibytes: usize) {
    let (bytes, pool) = (mebibytes << 20, HostPool::new());
    let threads = ThreadOptions::default().cores.min(ranks);
    let rate = CopyRate::measure(threads, bytes);
    println!(
        "copy of {mebibytes} MiB: {:.1} GB/s on one thread, {:.1} GB/s on up to {threads} (read and written)",
        CopyRate::measure(1, bytes).gb_per_s(),
        rate.gb_per_s()
    );
    for kind in Kind::ALL {
        let case = Case { kind, ranks, bytes };
        let name = format!("{ranks}x{mebibytes}MiB");
        case.report(&pool, &format!("{}/{name}", kind.name()), rate);
        let mut group = c.benchmark_group(kind.name());
        group.sampling_mode(SamplingMode::Flat).throughput(Throughput::Bytes(case.moved_bytes() as u64));
        group.bench_function(&name, |bencher| {
            bencher.iter_custom(|iterations| case.time(&pool, iterations));
        });
        group.finish();
    }
}

fn collectives(c: &mut Criterion) {
    for ranks in [2, 4, 8] {
        for mebibytes in [1, 16] {
            measure(c, ranks, mebibytes);
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400));
    targets = collectives
}
criterion_main!(benches);
