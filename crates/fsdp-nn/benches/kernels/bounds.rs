//! What this machine can do at best, measured: the bounds that kernels are printed beside.

use std::hint::black_box;
use std::time::Instant;

use fsdp_core::memory::{Category, HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Queue};
use fsdp_nn::backend::{LinearDims, Orientation};
use fsdp_nn::conformance::Calls;
use fsdp_nn::{HostBuffer, HostMemory};

/// Rates of this machine with a number of threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    flops_per_s: f64,
    bytes_per_s: f64,
}

/// The work of one call of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// Floating-point operations of its products.
    Flops(f64),
    /// Bytes that it must read and write.
    Bytes(f64),
}

impl Bounds {
    /// Measures a big product and a big copy.
    pub(crate) fn measure(memory: &HostMemory) -> Self {
        let n = 2048;
        let dims =
            LinearDims { rows: n, inputs: n, outputs: n, y_stride: n, orientation: Orientation::InOut };
        let (a, b, mut y) = (filled(memory, n * n), filled(memory, n * n), filled(memory, n * n));
        let product = best(|| {
            memory
                .linear(dims, Slice::whole(&a), Slice::whole(&b), None, SliceMut::whole(&mut y))
                .expect("fits");
        });
        let len = 16 << 20;
        let (src, mut dst) = (filled(memory, len), filled(memory, len));
        let copy = best(|| {
            memory.copy(Queue::Compute, Slice::whole(&src), SliceMut::whole(&mut dst)).expect("fits");
        });
        Self { flops_per_s: 2.0 * (n * n * n) as f64 / product, bytes_per_s: 8.0 * len as f64 / copy }
    }

    /// Prints the rates.
    pub(crate) fn print(&self, threads: usize) {
        println!(
            "{threads} thread(s): product 2048^3 {:.0} GFLOP/s, copy {:.1} GB/s (read and written)",
            self.flops_per_s / 1e9,
            self.bytes_per_s / 1e9
        );
    }

    /// Runs `call` and prints its time beside the bound.
    pub(crate) fn report(&self, name: &str, work: Work, mut call: impl FnMut()) {
        let seconds = best(|| {
            call();
            black_box(());
        });
        let (bound, rate) = match work {
            Work::Flops(flops) => (flops / self.flops_per_s, format!("{:.0} GFLOP/s", flops / seconds / 1e9)),
            Work::Bytes(bytes) => (bytes / self.bytes_per_s, format!("{:.1} GB/s", bytes / seconds / 1e9)),
        };
        println!(
            "{name}: {:.3} ms, {rate}; bound {:.3} ms ({:.0} % of it)",
            seconds * 1e3,
            bound * 1e3,
            100.0 * bound / seconds
        );
    }
}

/// The shortest of several runs, in seconds.
fn best(mut run: impl FnMut()) -> f64 {
    run();
    let runs = (0..15).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    runs.fold(f64::INFINITY, f64::min)
}

/// A buffer of small pseudo-random numbers.
pub(crate) fn filled(memory: &HostMemory, len: usize) -> HostBuffer {
    let values: Vec<f32> =
        (0..len as u32).map(|i| i.wrapping_mul(2_654_435_761) as i32 as f32 * 4e-10).collect();
    let mut buffer = memory.allocate(Category::Activation, DType::F32, len).expect("no limit");
    memory.write(Queue::Compute, HostSlice::F32(&values), SliceMut::whole(&mut buffer)).expect("fits");
    buffer
}
