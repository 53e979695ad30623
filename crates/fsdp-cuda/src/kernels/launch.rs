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
pub(crate) enum Word<'a> {
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
        words: &[Word<'_>],
    ) -> Result<(), DeviceError> {
        let (t, s) = self.types;
        let vector = VECTOR_BYTES / t.size_bytes().max(s.size_bytes());
        let blocks = len.div_ceil(vector * ELEMENT_THREADS as usize);
        self.blocks(kernel, (self.at_most(blocks, BLOCKS_PER_PROCESSOR), 1), ELEMENT_THREADS, words)
    }

    /// Launches a kernel with one block per row of `width` elements.
    pub(crate) fn rows(
        &self,
        kernel: &'static str,
        rows: usize,
        width: usize,
        words: &[Word<'_>],
    ) -> Result<(), DeviceError> {
        let share = VECTORS_PER_THREAD * VECTOR_BYTES / self.types.0.size_bytes();
        let threads = width.div_ceil(share).next_multiple_of(32).clamp(32, ROW_THREADS_MAX) as u32;
        self.blocks(kernel, (self.at_most(rows, ROWS_PER_PROCESSOR), 1), threads, words)
    }

    /// Launches a kernel whose blocks stride over `count` work items.
    pub(crate) fn striding(
        &self,
        kernel: &'static str,
        count: usize,
        threads: u32,
        words: &[Word<'_>],
    ) -> Result<(), DeviceError> {
        self.blocks(kernel, (self.at_most(count, BLOCKS_PER_PROCESSOR), 1), threads, words)
    }

    /// Launches a kernel with the given grid.
    pub(crate) fn blocks(
        &self,
        kernel: &'static str,
        blocks: (u32, u32),
        threads: u32,
        words: &[Word<'_>],
    ) -> Result<(), DeviceError> {
        if blocks.0 == 0 || blocks.1 == 0 {
            return Ok(());
        }
        let function = self.kernels.get(self.source, kernel, self.types)?;
        let mut words: Vec<u64> = words.iter().map(|word| word.bits(self.types.0)).collect();
        self.stream.launch(function, Grid { blocks, threads }, &mut words)
    }

    fn at_most(&self, blocks: usize, per_processor: u32) -> u32 {
        let most = self.kernels.gpu().processors() * per_processor;
        u32::try_from(blocks).map_or(most, |blocks| blocks.min(most))
    }
}

impl Word<'_> {
    fn bits(self, t: DType) -> u64 {
        match self {
            Word::Range(range) => range.address(),
            Word::Null => 0,
            Word::Len(len) => len as u64,
            Word::Int(value) => u64::from(value),
            Word::Real(value) if t == DType::F64 => value.to_bits(),
            Word::Real(value) => u64::from((value as f32).to_bits()),
            Word::Double(value) => value.to_bits(),
        }
    }
}
