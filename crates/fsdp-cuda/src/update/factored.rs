//! The kernels of Adafactor over the pieces of a shard.

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::{Piece, SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::update::{Adafactor, AdafactorFactors};

use super::runs::{copy, refresh, types};
use crate::device::{CudaBuffer, CudaMemory};
use crate::kernels::{Arg, FACTORED, GRID_HEIGHT_MAX, Launch};

/// Rows whose column sums form one partial result; this and the next three constants are as in the kernels.
const ROWS: usize = 64;

/// Elements of a block of a parameter without rows.
const BLOCK: usize = 1024;

/// Elements of a parameter whose squares form one partial result.
const SQUARES: usize = 4096;

/// Rows that a thread block updates.
const TILE_ROWS: usize = 16;

/// Threads per block.
const THREADS: usize = 256;

/// A piece of a shard, and the start of its state.
struct Part {
    piece: Piece,
    factors: AdafactorFactors,
    rows: usize,
    cols: usize,
    full: usize,
}

/// The parts of a shard, in the order of its state.
fn parts(rule: &Adafactor, pieces: &[Piece], scalars: &StepScalars<'_, CudaBuffer>) -> Vec<Part> {
    let (mut rows, mut cols, mut full) = (0, 0, 0);
    let part = |piece: &Piece| {
        let factors = rule.factors(piece.param, scalars.step, scalars.lr);
        let part = Part { piece: *piece, factors, rows, cols, full };
        match factors.cols {
            Some(width) => {
                rows += piece.len / width;
                cols += width;
            }
            None => full += piece.len,
        }
        part
    };
    pieces.iter().map(part).collect()
}

/// Runs a stage of a rule for a shard.
pub(super) fn run(
    memory: &CudaMemory,
    rule: &Adafactor,
    stage: &mut Stage<'_, CudaBuffer>,
    shard: &mut SegmentShard<'_, CudaBuffer>,
    scalars: &StepScalars<'_, CudaBuffer>,
) -> Result<(), Error> {
    let pass = Pass::new(memory, shard, scalars)?;
    for part in parts(rule, shard.pieces, scalars) {
        match stage {
            Stage::Statistics { earlier: [], sums } => pass.moments(&part, shard, sums)?,
            Stage::Statistics { earlier: [moments, ..], sums } => pass.norms(&part, shard, moments, sums)?,
            Stage::Update { statistics: [moments, norms] } => pass.update(&part, shard, [moments, norms])?,
            Stage::Update { .. } | Stage::Direct { .. } => {
                panic!("a stage that a factored rule did not declare")
            }
        }
    }
    match stage {
        Stage::Update { .. } => refresh(memory, shard),
        Stage::Statistics { .. } | Stage::Direct { .. } => Ok(()),
    }
}

/// The context of one pass over a shard: kernels and common parameters.
struct Pass<'a> {
    memory: &'a CudaMemory,
    kernels: Launch<'a>,
    factors: Arg<'a>,
    /// The largest finite parameter.
    largest_param: Arg<'a>,
}

impl<'a> Pass<'a> {
    fn new(
        memory: &'a CudaMemory,
        shard: &SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'a, CudaBuffer>,
    ) -> Result<Self, Error> {
        let kernels = memory.kernels(Queue::Compute, &FACTORED, types(shard)?);
        Ok(Self {
            memory,
            kernels,
            factors: memory.input(scalars.factors)?,
            largest_param: Arg::Real(shard.largest_param()),
        })
    }

    fn read<'b>(&self, buffer: &'b CudaBuffer, offset: usize, len: usize) -> Result<Arg<'b>, Error> {
        self.memory.input(Slice::new(buffer, offset, len))
    }

    fn write<'b>(&self, buffer: &'b mut CudaBuffer, offset: usize, len: usize) -> Result<Arg<'b>, Error> {
        self.memory.output(SliceMut::new(buffer, offset, len))
    }

    /// Launches a kernel with one warp per item.
    fn warps(&self, kernel: &'static str, count: usize, args: &[Arg<'_>]) -> Result<(), Error> {
        Ok(self.kernels.striding(kernel, count.div_ceil(THREADS / 32), THREADS as u32, args)?)
    }

    /// Launches a kernel with one thread per item.
    fn threads(&self, kernel: &'static str, count: usize, args: &[Arg<'_>]) -> Result<(), Error> {
        Ok(self.kernels.striding(kernel, count.div_ceil(THREADS), THREADS as u32, args)?)
    }

    /// Adds `count` partial results to the sum at index `at`.
    fn add(&self, partial: &CudaBuffer, count: usize, sums: &mut CudaBuffer, at: usize) -> Result<(), Error> {
        let args = [self.read(partial, 0, count)?, Arg::Len(count), self.write(sums, at, 1)?, self.factors];
        Ok(self.kernels.blocks("add_partial", (1, 1), THREADS as u32, &args)?)
    }

    /// Sums the squares of the parameters, and the squares of the gradient by rows and columns.
    fn moments(
        &self,
        part: &Part,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        sums: &mut CudaBuffer,
    ) -> Result<(), Error> {
        let Part { piece: Piece { offset, len, .. }, factors, full, .. } = *part;
        let count = len.div_ceil(SQUARES);
        let mut partial = self.memory.scratch(DType::F64, count)?;
        let args = [
            self.read(shard.params, offset, len)?,
            self.write(&mut partial, 0, count)?,
            Arg::Len(len),
            self.factors,
        ];
        self.warps("parameter_squares", count, &args)?;
        self.add(&partial, count, sums, factors.start)?;
        if let Some(width) = factors.cols {
            self.row_means(part, width, shard, sums)?;
            return self.column_sums(part, width, shard, sums);
        }
        let args = [
            self.read(shard.gradient, offset, len)?,
            self.write(&mut shard.state[2], full, len)?,
            Arg::Len(len),
            self.factors,
            self.write(shard.not_finite, 0, 1)?,
            self.largest_param,
            Arg::Real(factors.beta2),
            Arg::Real(factors.eps),
        ];
        Ok(self.kernels.elements("advance_full", len, &args)?)
    }

    fn row_means(
        &self,
        part: &Part,
        width: usize,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        sums: &mut CudaBuffer,
    ) -> Result<(), Error> {
        let Part { piece: Piece { offset, len, .. }, factors, .. } = *part;
        let rows = len / width;
        let args = [
            self.read(shard.gradient, offset, len)?,
            self.write(&mut shard.state[0], part.rows, rows)?,
            Arg::Len(width),
            Arg::Len(rows),
            self.factors,
            self.write(shard.not_finite, 0, 1)?,
            self.largest_param,
            Arg::Real(factors.beta2),
            Arg::Real(factors.eps),
        ];
        self.warps("advance_rows", rows, &args)?;
        let args = [
            self.read(&shard.state[0], part.rows, rows)?,
            Arg::Len(rows),
            self.write(sums, factors.start + 1, 1)?,
            self.factors,
        ];
        Ok(self.kernels.blocks("add_rows", (1, 1), THREADS as u32, &args)?)
    }

    fn column_sums(
        &self,
        part: &Part,
        width: usize,
        shard: &SegmentShard<'_, CudaBuffer>,
        sums: &mut CudaBuffer,
    ) -> Result<(), Error> {
        let Part { piece: Piece { offset, len, .. }, factors, .. } = *part;
        let rows = len / width;
        let groups = rows.div_ceil(ROWS);
        let mut partial = self.memory.scratch(DType::F64, groups * width)?;
        let args = [
            self.read(shard.gradient, offset, len)?,
            self.write(&mut partial, 0, groups * width)?,
            Arg::Len(width),
            Arg::Len(rows),
            self.factors,
            Arg::Real(factors.eps),
        ];
        let blocks = (width.div_ceil(THREADS) as u32, groups.min(GRID_HEIGHT_MAX) as u32);
        self.kernels.blocks("column_squares", blocks, THREADS as u32, &args)?;
        let args = [
            self.read(&partial, 0, groups * width)?,
            self.write(sums, factors.start + 2, width)?,
            Arg::Len(width),
            Arg::Len(groups),
            self.factors,
        ];
        self.threads("add_columns", width, &args)
    }

    /// Computes the sum of squares of the update before clipping.
    fn norms(
        &self,
        part: &Part,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        moments: &CudaBuffer,
        sums: &mut CudaBuffer,
    ) -> Result<(), Error> {
        let Part { piece: Piece { param, offset, len, .. }, factors, full, .. } = *part;
        if let Some(width) = factors.cols {
            return self.factored_norms(part, width, shard, moments, sums);
        }
        let count = len.div_ceil(BLOCK);
        let mut partial = self.memory.scratch(DType::F64, count)?;
        let args = [
            self.read(shard.gradient, offset, len)?,
            self.write(&mut partial, 0, count)?,
            Arg::Len(len),
            self.read(&shard.state[2], full, len)?,
            self.factors,
        ];
        self.warps("block_updates", count, &args)?;
        self.add(&partial, count, sums, param.0)
    }

    fn factored_norms(
        &self,
        part: &Part,
        width: usize,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        moments: &CudaBuffer,
        sums: &mut CudaBuffer,
    ) -> Result<(), Error> {
        let Part { piece: Piece { param, offset, len, .. }, factors, cols, .. } = *part;
        let (rows, total) = (len / width, Arg::Double((factors.len / width) as f64));
        let mut roots = self.memory.scratch(self.kernels.types.0, width)?;
        let args = [
            self.write(&mut shard.state[1], cols, width)?,
            self.write(&mut roots, 0, width)?,
            Arg::Len(width),
            self.read(moments, factors.start + 2, width)?,
            total,
            self.factors,
            self.write(shard.not_finite, 0, 1)?,
            self.largest_param,
            Arg::Real(factors.beta2),
        ];
        self.threads("advance_columns", width, &args)?;
        let mut partial = self.memory.scratch(DType::F64, rows)?;
        let args = [
            self.read(shard.gradient, offset, len)?,
            self.write(&mut partial, 0, rows)?,
            Arg::Len(width),
            Arg::Len(rows),
            self.read(&shard.state[0], part.rows, rows)?,
            self.read(&roots, 0, width)?,
            self.read(moments, factors.start + 1, 1)?,
            total,
            self.factors,
        ];
        self.warps("row_updates", rows, &args)?;
        self.add(&partial, rows, sums, param.0)
    }

    fn update(
        &self,
        part: &Part,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        [moments, norms]: [&CudaBuffer; 2],
    ) -> Result<(), Error> {
        let Part { piece: Piece { param, offset, len, .. }, factors, cols, full, .. } = *part;
        let (state, averages) = shard.state.split_at_mut(3);
        let average = match averages {
            [average] => self.write(average, offset, len)?,
            _ => Arg::Null,
        };
        let copy = copy(self.memory, shard.low.as_deref_mut(), offset, len)?;
        let not_finite = self.write(shard.not_finite, 0, 1)?;
        let gradient = self.read(shard.gradient, offset, len)?;
        let mut args = vec![gradient, self.write(shard.params, offset, len)?, average, copy];
        let norm = self.read(norms, param.0, 1)?;
        let Some(width) = factors.cols else {
            args.extend([Arg::Len(len), self.read(&state[2], full, len)?]);
            args.extend([self.read(moments, factors.start, 1)?, norm]);
            args.extend(self.step_args(&factors, not_finite));
            return Ok(self.kernels.elements("full_update", len, &args)?);
        };
        let rows = len / width;
        args.extend([Arg::Len(width), Arg::Len(rows)]);
        args.extend([self.read(&state[0], part.rows, rows)?, self.read(&state[1], cols, width)?]);
        args.extend([self.read(moments, factors.start, 2)?, norm]);
        args.push(Arg::Double((factors.len / width) as f64));
        args.extend(self.step_args(&factors, not_finite));
        // One thread per vector in a row, up to a useful maximum.
        let threads = width.div_ceil(4).next_multiple_of(32).min(THREADS / 2);
        let tiles = rows.div_ceil(TILE_ROWS).min(GRID_HEIGHT_MAX);
        let blocks = (width.div_ceil(4 * threads) as u32, tiles as u32);
        Ok(self.kernels.blocks("factored_update", blocks, threads as u32, &args)?)
    }

    /// The last parameters of both update kernels.
    fn step_args<'b>(&self, factors: &AdafactorFactors, not_finite: Arg<'b>) -> [Arg<'b>; 9]
    where
        'a: 'b,
    {
        [
            Arg::Double(factors.len as f64),
            self.factors,
            not_finite,
            self.largest_param,
            Arg::Double(factors.rate),
            Arg::Double(factors.least_rms.unwrap_or(-1.0)),
            Arg::Double(factors.decay),
            Arg::Double(factors.clip_threshold),
            Arg::Real(factors.beta1.unwrap_or(0.0)),
        ]
    }
}
