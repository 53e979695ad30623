//! The device's limits: one large bf16 product, one large copy.

use fsdp_core::memory::{Buffer, Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::{BatchFacts, LinearDims, Operands, Orientation, Write};
use fsdp_nn::op::{Linear, Op};
use fsdp_nn::random;

use crate::clock::Clock;

/// Minimum time of a repetition, so that clock resolution and issue time do not matter.
const REPETITION_MS_MIN: f64 = 20.0;
/// Repetitions; the best one counts, since this is a ceiling.
const REPETITIONS: usize = 5;
/// Maximum number of operations timed together.
const OPERATIONS_MAX: usize = 64;
/// Edges of the smallest and the largest matrices.
const EDGES: [usize; 2] = [512, 8192];
/// Sizes of the smallest and the largest copy, in four-byte elements.
const COPY_ELEMS: [usize; 2] = [1 << 22, 1 << 28];

/// The best results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ceilings {
    /// TFLOP/s of a square bf16 product.
    pub(crate) matmul_tflops: f64,
    /// The edge of its matrices.
    pub(crate) matmul_edge: usize,
    /// GB/s read and written by a copy.
    pub(crate) copy_gb_per_s: f64,
}

/// Measures both, increasing sizes until they take long enough.
pub(crate) fn measure<M: Backend + Clock>(memory: &M) -> Result<Ceilings, Error> {
    let [mut edge, edge_max] = EDGES;
    let mut time = product(memory, edge)?;
    while time < REPETITION_MS_MIN && edge < edge_max {
        edge *= 2;
        time = product(memory, edge)?;
    }
    let [mut elements, elements_max] = COPY_ELEMS;
    let mut copy_time = copy(memory, elements)?;
    while copy_time < REPETITION_MS_MIN && elements < elements_max {
        elements *= 2;
        copy_time = copy(memory, elements)?;
    }
    let flops = 2.0 * (edge as f64).powi(3);
    let bytes = 2.0 * 4.0 * elements as f64;
    Ok(Ceilings {
        matmul_tflops: flops / time / 1e9,
        matmul_edge: edge,
        copy_gb_per_s: bytes / copy_time / 1e6,
    })
}

/// Milliseconds of a product of two square matrices.
fn product<M: Backend + Clock>(memory: &M, edge: usize) -> Result<f64, Error> {
    let dims = LinearDims {
        rows: edge,
        inputs: edge,
        outputs: edge,
        y_stride: edge,
        orientation: Orientation::OutIn,
    };
    let matrix = || zeroed(memory, DType::Bf16, edge * edge);
    let (mut x, mut weight, mut y) = (matrix()?, matrix()?, matrix()?);
    // Products of zeros take less power, and so run at higher clocks, than training does.
    for (matrix, seed) in [(&mut x, 1), (&mut weight, 2)] {
        fill(memory, matrix, seed)?;
    }
    best(memory, || {
        let reads = &[Slice::whole(&x), Slice::whole(&weight)];
        let writes = &mut [Write::over(SliceMut::whole(&mut y))];
        memory.run(
            &Op::Linear(Linear::Forward { dims, bias: false }),
            Operands { reads, writes, batch: BatchFacts::default() },
        )
    })
}

/// Milliseconds of a copy.
fn copy<M: Clock>(memory: &M, elements: usize) -> Result<f64, Error> {
    let from = zeroed(memory, DType::F32, elements)?;
    let mut to = zeroed(memory, DType::F32, elements)?;
    best(memory, || memory.copy(Queue::Compute, Slice::whole(&from), SliceMut::whole(&mut to)))
}

fn zeroed<M: Memory>(memory: &M, dtype: DType, len: usize) -> Result<M::Buffer, Error> {
    let mut buffer = memory.allocate(Category::Workspace, dtype, len)?;
    memory.zero(Queue::Compute, SliceMut::whole(&mut buffer))?;
    Ok(buffer)
}

/// Fills a buffer with normally distributed numbers, repeating one block.
fn fill<M: Memory>(memory: &M, buffer: &mut M::Buffer, seed: u64) -> Result<(), Error> {
    let block: Vec<f32> = (0..1 << 16).map(|i| random::normal(random::key(&[seed]), i) as f32).collect();
    for start in (0..buffer.len()).step_by(block.len()) {
        let len = block.len().min(buffer.len() - start);
        memory.write(Queue::Compute, HostSlice::F32(&block[..len]), SliceMut::new(buffer, start, len))?;
    }
    Ok(())
}

/// The shortest mean time per operation, over batches that take long enough, after one operation to warm up.
fn best<M: Clock>(memory: &M, mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    run()?;
    let mut timed = |count: usize| -> Result<f64, Error> {
        let begin = memory.mark(Queue::Compute)?;
        (0..count).try_for_each(|_| run())?;
        let end = memory.mark(Queue::Compute)?;
        Ok(memory.milliseconds(&begin, &end)? / count as f64)
    };
    let single = timed(1)?;
    let count = ((REPETITION_MS_MIN / single.max(1e-3)).ceil() as usize).clamp(1, OPERATIONS_MAX);
    let mut shortest = single;
    for _ in 0..REPETITIONS {
        shortest = shortest.min(timed(count)?);
    }
    Ok(shortest)
}
