//! Linear attention at the sizes of `bench/delta.py`, which runs this beside transformers' implementation.
//!
//! Arguments: threads, batch, positions, runs. Prints the seconds of each run: of forward and backward of the gated delta rule,
//! then of the short convolution before it. With one thread these are seconds of its processor, whatever else runs there.

use std::time::Instant;

use fsdp_core::memory::{Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_nn::backend::{Backend, BatchFacts, Operands, Write};
use fsdp_nn::op::{ConvolutionDims, Delta, DeltaDims, Op};
use fsdp_nn::{HostBuffer, HostMemory, HostOptions};

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let [threads, batch, seq, runs] = numbers[..] else {
        return println!("arguments: threads, batch, positions, runs");
    };
    let memory = HostMemory::new(HostOptions { threads, ..HostOptions::default() }).expect("threads");
    let dims =
        DeltaDims { batch, seq, key_heads: 8, value_heads: 8, key_dim: 128, value_dim: 128, packed: false };
    let convolution = ConvolutionDims { batch, seq, width: dims.width(), kernel: 4, packed: false };
    let operations = [
        Delta::Scan(dims),
        Delta::ScanBackward { dims, weight: true },
        Delta::Convolve(convolution),
        Delta::ConvolveBackward { dims: convolution, weight: true },
    ];
    for _ in 0..runs {
        let times = operations.map(|operation| seconds(&memory, threads, &Op::Delta(operation)).to_string());
        println!("{}", times.join(" "));
    }
}

/// The time of an operation, whose operands are made from its description.
fn seconds(memory: &HostMemory, threads: usize, op: &Op) -> f64 {
    let describe = op.describe();
    let reads: Vec<_> = describe.reads.iter().map(|role| filled(memory, role.len)).collect();
    let mut writes: Vec<_> = describe.writes.iter().map(|role| filled(memory, role.len)).collect();
    let reads: Vec<_> = reads.iter().map(Slice::whole).collect();
    let (start, used) = (Instant::now(), processor_seconds());
    let mut writes: Vec<_> = writes.iter_mut().map(|buffer| Write::over(SliceMut::whole(buffer))).collect();
    let operands = Operands { reads: &reads, writes: &mut writes, batch: BatchFacts::default() };
    memory.run(op, operands).expect("operands fit");
    if threads == 1 { processor_seconds() - used } else { start.elapsed().as_secs_f64() }
}

/// How long this thread has run, as Linux says.
fn processor_seconds() -> f64 {
    // Otherwise the figure may be as old as the last tick of the scheduler.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).map_or(0.0, |ns: f64| ns * 1e-9)
}

/// A buffer of pseudo-random numbers between -1 and 1.
fn filled(memory: &HostMemory, len: usize) -> HostBuffer {
    let values: Vec<f32> =
        (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761) as i32 as f32 * 4e-10).collect();
    let mut buffer = memory.allocate(Category::Activation, DType::F32, len).expect("no limit");
    memory.write(Queue::Compute, HostSlice::F32(&values), SliceMut::whole(&mut buffer)).expect("fits");
    buffer
}
