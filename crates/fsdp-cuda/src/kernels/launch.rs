//! Kernel launches: element types, grid shapes and parameters.

use fsdp_core::DType;

use super::{Kernels, Source};
use crate::error::DeviceError;
use crate::ffi::driver::Range;
use crate::ffi::streams::{Grid, Stream};

/// Threads per block of elementwise kernels.
const ELEMENT_THREADS: u32 = 256;

/// Maximum number of blocks per multiprocessor for kernels that stride over their work: enough to hide latencies.
const BLOCKS_PER_PROCESSOR: u32 = 16;

/// The same for kernels over rows, whose blocks may be one warp.
const ROWS_PER_PROCESSOR: u32 = 64;

/// Vectors of a row for each thread, as in `norms.cu`, and the most threads per row.
const VECTORS_PER_THREAD: usize = 4;
const ROW_THREADS_MAX: usize = 512;

/// Maximum number of blocks in the second dimension of a grid.
pub(crate) const GRID_HEIGHT_MAX: usize = 65_535;

/// Width of the widest load of a thread, in bytes.
const VECTOR_BYTES: usize = 16;

/// One parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    /// A pointer.
    Range(Range<'a>),
    /// A null pointer.
    Null,
    /// `u64`.
    Len(usize),
    /// `u32`; flags are 0 and 1.
    Int(u32),
    /// A number in the arithmetic type of `T`.
    Real(f64),
    /// `double`.
    Double(f64),
}

/// The kernels, stream, source and types of a launch.
#[derive(Clone, Copy)]
pub(crate) struct Launch<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) stream: &'a Stream,
    pub(crate) source: &'static Source,
    /// The element types `T` and `S`.
    pub(crate) types: (DType, DType),
}

impl Launch<'_> {
    /// Launches a kernel over `len` elements, with one thread per vector.
    pub(crate) fn elements(
        &self,
        kernel: &'static str,
        len: usize,
        args: &[Arg<'_>],
    ) -> Result<(), DeviceError> {
        let (t, s) = self.types;
        let vector = VECTOR_BYTES / t.size_bytes().max(s.size_bytes());
        let blocks = len.div_ceil(vector * ELEMENT_THREADS as usize);
        self.blocks(kernel, (self.limit_blocks(blocks, BLOCKS_PER_PROCESSOR), 1), ELEMENT_THREADS, args)
    }

    /// Launches a kernel with one block per row of `width` elements.
    pub(crate) fn rows(
        &self,
        kernel: &'static str,
        rows: usize,
        width: usize,
        args: &[Arg<'_>],
    ) -> Result<(), DeviceError> {
        let share = VECTORS_PER_THREAD * VECTOR_BYTES / self.types.0.size_bytes();
        let threads = width.div_ceil(share).next_multiple_of(32).clamp(32, ROW_THREADS_MAX) as u32;
        self.blocks(kernel, (self.limit_blocks(rows, ROWS_PER_PROCESSOR), 1), threads, args)
    }

    /// Launches a kernel whose blocks stride over `count` work items.
    pub(crate) fn striding(
        &self,
        kernel: &'static str,
        count: usize,
        threads: u32,
        args: &[Arg<'_>],
    ) -> Result<(), DeviceError> {
        self.blocks(kernel, (self.limit_blocks(count, BLOCKS_PER_PROCESSOR), 1), threads, args)
    }

    /// Launches a kernel with the given grid.
    pub(crate) fn blocks(
        &self,
        kernel: &'static str,
        blocks: (u32, u32),
        threads: u32,
        args: &[Arg<'_>],
    ) -> Result<(), DeviceError> {
        if blocks.0 == 0 || blocks.1 == 0 {
            return Ok(());
        }
        let function = self.kernels.get(self.source, kernel, self.types)?;
        let mut args: Vec<u64> = args.iter().map(|arg| arg.bits(self.types.0)).collect();
        self.stream.launch(function, Grid { blocks, threads }, &mut args)
    }

    fn limit_blocks(&self, blocks: usize, per_processor: u32) -> u32 {
        let max_blocks = self.kernels.gpu().processors() * per_processor;
        u32::try_from(blocks).map_or(max_blocks, |blocks| blocks.min(max_blocks))
    }
}

impl Arg<'_> {
    fn bits(self, t: DType) -> u64 {
        match self {
            Arg::Range(range) => range.address(),
            Arg::Null => 0,
            Arg::Len(len) => len as u64,
            Arg::Int(value) => u64::from(value),
            Arg::Real(value) if t == DType::F64 => value.to_bits(),
            Arg::Real(value) => u64::from((value as f32).to_bits()),
            Arg::Double(value) => value.to_bits(),
        }
    }
}
