//! [`Backend`] of a device, for the operations that have a kernel in this crate; the kernels run on the compute queue.

use fsdp_core::memory::{HostSlice, Memory, Slice, SliceMut};
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::{HeadChunks, Operands, Outcome, Write};
use fsdp_nn::layer::Rope;
use fsdp_nn::op::{Activation, Attention, AttentionDims, Dropout, Head, Linear, Norm, Op, Pass, Pointwise};
use fsdp_nn::update::Part;

use super::{Arg, CONVERT, GRID_HEIGHT_MAX, LOSS, Launch, NORMS, POINTWISE, Source};
use crate::device::{CudaBuffer, CudaMemory, expect_float};

type In<'a> = Slice<'a, CudaBuffer>;
type Out<'a> = SliceMut<'a, CudaBuffer>;
type Call<'o, 'a> = Operands<'o, 'a, CudaBuffer>;

/// Rows whose column sums form one partial result; as in `norms.cu`.
const PARTIAL_ROWS: usize = 128;

/// Threads per block of the kernels that sum columns, and columns per thread.
const COLUMN_THREADS: usize = 64;
const COLUMNS_PER_THREAD: usize = 4;

/// Columns of a block that combines partial sums, as in `convert.cu`, and its threads.
const COMBINED_COLUMNS: usize = 32;
const COMBINING_THREADS: u32 = 1024;

impl CudaMemory {
    /// A pointer parameter for reading.
    pub(crate) fn input<'a>(&self, slice: In<'a>) -> Result<Arg<'a>, Error> {
        Ok(Arg::Range(self.range(Queue::Compute, slice)?))
    }

    /// A pointer parameter for writing.
    pub(crate) fn output<'a>(&self, slice: Out<'a>) -> Result<Arg<'a>, Error> {
        Ok(Arg::Range(self.range_mut(Queue::Compute, slice)?))
    }

    /// Pointers to all operands in the usual order of kernels: those that are read, then those that are written.
    fn pointers<'o>(&self, operands: Call<'o, '_>) -> Result<Vec<Arg<'o>>, Error> {
        let reads = operands.reads.iter().map(|slice| self.input(*slice));
        reads.chain(operands.writes.iter_mut().map(|write| self.output(write.slice.reborrow()))).collect()
    }

    /// The kernels of a source for tensors of one dtype.
    pub(super) fn same_dtype_kernels(&self, source: &'static Source, dtype: DType) -> Launch<'_> {
        self.kernels(Queue::Compute, source, (dtype, dtype))
    }

    /// Sums the columns of `rows` x `width` elements of `dtype` with a kernel that computes partial sums, then combines
    /// them in the gradient. The kernel takes `reads`, the partial sums and both sizes, and `extra_arg`.
    fn column_sums(
        &self,
        (kernel, dtype): (&'static str, DType),
        [rows, width]: [usize; 2],
        reads: &[Arg<'_>],
        extra_arg: Option<Arg<'_>>,
        gradient: Write<'_, CudaBuffer>,
    ) -> Result<(), Error> {
        if rows == 0 {
            return Ok(());
        }
        let parts = rows.div_ceil(PARTIAL_ROWS);
        let mut partial = self.scratch(dtype.master(), parts * width)?;
        let mut args = reads.to_vec();
        args.extend([self.output(SliceMut::whole(&mut partial))?, Arg::Len(width), Arg::Len(rows)]);
        args.extend(extra_arg);
        let column_blocks = width.div_ceil(COLUMN_THREADS * COLUMNS_PER_THREAD) as u32;
        let blocks = (column_blocks, parts.min(GRID_HEIGHT_MAX) as u32);
        self.same_dtype_kernels(&NORMS, dtype).blocks(kernel, blocks, COLUMN_THREADS as u32, &args)?;
        let target = expect_float(gradient.slice.buffer);
        let args = [
            self.input(Slice::whole(&partial))?,
            self.output(gradient.slice)?,
            Arg::Len(width),
            Arg::Len(parts),
            Arg::Int(u32::from(gradient.accumulate)),
        ];
        let kernels = self.kernels(Queue::Compute, &CONVERT, (target, dtype.master()));
        let blocks = (width.div_ceil(COMBINED_COLUMNS) as u32, 1);
        Ok(kernels.blocks("combine", blocks, COMBINING_THREADS, &args)?)
    }

    /// Sums of columns, which are the gradient of a bias.
    fn bias_gradient(
        &self,
        [rows, columns, stride]: [usize; 3],
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let ([dy], [sums], _) = operands.split();
        let (kernel, stride) = (("bias_gradient", expect_float(dy.buffer)), Arg::Len(stride));
        self.column_sums(kernel, [rows, columns], &[self.input(dy)?], Some(stride), sums)?;
        Ok(Outcome::Done)
    }

    /// The gradient of a norm's weight.
    fn norm_weight(
        &self,
        kernel: &'static str,
        [rows, width]: [usize; 2],
        [x, statistics, dy]: [In<'_>; 3],
        gradient: Write<'_, CudaBuffer>,
    ) -> Result<(), Error> {
        let dtype = expect_float(x.buffer);
        let reads = [self.input(x)?, self.input(statistics)?, self.input(dy)?];
        self.column_sums((kernel, dtype), [rows, width], &reads, None, gradient)
    }

    fn norm(&self, op: &Norm, mut operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let dtype = expect_float(operands.reads[0].buffer);
        let (kernel, rows, width) = match *op {
            Norm::Rms { rows, width, .. } => ("rms_norm", rows, width),
            Norm::RmsBackward { rows, width, .. } => ("rms_norm_backward", rows, width),
            Norm::Layer { rows, width, .. } => ("layer_norm", rows, width),
            Norm::LayerBackwardInput { rows, width } => ("layer_norm_backward", rows, width),
            Norm::LayerBackwardWeight { rows, width } => {
                let (reads, [dweight], _) = operands.split();
                self.norm_weight("layer_norm_weight", [rows, width], reads, dweight)?;
                return Ok(Outcome::Done);
            }
        };
        let is_backward = matches!(op, Norm::RmsBackward { .. } | Norm::LayerBackwardInput { .. });
        let accumulate = is_backward.then_some(Arg::Int(u32::from(operands.writes[0].accumulate)));
        let has_weight_gradient = matches!(op, Norm::RmsBackward { weight: true, .. });
        let mut args = self.pointers(operands.reborrow())?;
        args.truncate(args.len() - usize::from(has_weight_gradient));
        if matches!(op, Norm::Layer { bias: false, .. }) {
            args.insert(2, Arg::Null);
        }
        args.extend([Arg::Len(width), Arg::Len(rows)]);
        args.extend(constants(&Op::Norm(*op)).into_iter().chain(accumulate));
        self.same_dtype_kernels(&NORMS, dtype).rows(kernel, rows, width, &args)?;
        if has_weight_gradient {
            let ([x, _, rstd, dy], [_, dweight], _) = operands.split();
            self.norm_weight("rms_norm_weight", [rows, width], [x, rstd, dy], dweight)?;
        }
        Ok(Outcome::Done)
    }

    fn activation(&self, op: Activation, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let dtype = expect_float(operands.reads[0].buffer);
        let mut operands = self.pointers(operands)?.into_iter();
        // Operands that the operation does not have become null pointers.
        let mut next = |is_present: bool| {
            let operand = if is_present { operands.next() } else { None };
            operand.unwrap_or(Arg::Null)
        };
        let mut args = vec![Arg::Int(op.function as u32), next(true), next(op.gated)];
        let kernel = match op.pass {
            Pass::Forward => {
                args.push(next(true));
                "activation"
            }
            Pass::Backward | Pass::BackwardRecompute => {
                let dy = next(true);
                let y = if op.pass == Pass::Backward { Arg::Null } else { dy };
                args.extend([dy, y, next(true), next(op.gated)]);
                "activation_backward"
            }
        };
        args.push(Arg::Len(op.len));
        self.same_dtype_kernels(&POINTWISE, dtype).elements(kernel, op.len, &args)?;
        Ok(Outcome::Done)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        (rope, below): (&Rope, Option<usize>),
        backward: bool,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let positions = operands.reads.first().map_or(Ok(Arg::Null), |slice| self.input(*slice))?;
        let ([], [x], _) = operands.split();
        let dtype = expect_float(x.slice.buffer);
        let table = self.rotations(dtype.master(), below.unwrap_or(dims.seq), rope)?;
        let (half, heads) = (rope.rotary_dim() / 2, dims.heads + dims.kv_heads);
        let args = [
            self.output(x.slice)?,
            self.input(Slice::whole(&table))?,
            positions,
            Arg::Len(dims.seq),
            Arg::Len(dims.rows()),
            Arg::Int(dims.packed() as u32),
            Arg::Int(heads as u32),
            Arg::Int(dims.head_dim as u32),
            Arg::Int(half as u32),
            Arg::Int(u32::from(backward)),
        ];
        self.same_dtype_kernels(&POINTWISE, dtype).elements("rope", dims.rows() * heads * half, &args)?;
        Ok(Outcome::Done)
    }

    fn apply_dropout(&self, dropout: Dropout<'_>, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let ([], [x], _) = operands.split();
        let (dtype, len) = (expect_float(x.slice.buffer), x.slice.len);
        // The kernel reads keys as unsigned 64-bit integers with the same bits.
        let keys: Vec<i64> = dropout.keys.iter().map(|&key| key as i64).collect();
        let mut device_keys = self.scratch(DType::I64, keys.len())?;
        self.write(Queue::Compute, HostSlice::I64(&keys), SliceMut::whole(&mut device_keys))?;
        let args = [
            self.output(x.slice)?,
            self.input(Slice::whole(&device_keys))?,
            Arg::Len(len / keys.len()),
            Arg::Len(keys.len()),
            Arg::Int(dropout.threshold()),
            Arg::Real(dropout.kept()),
        ];
        self.same_dtype_kernels(&POINTWISE, dtype).elements("dropout", len, &args)?;
        Ok(Outcome::Done)
    }

    /// The pointer for z-losses; null if there are none.
    fn z_losses<'a>(&self, write: Option<Write<'a, CudaBuffer>>) -> Result<Arg<'a>, Error> {
        write.map_or(Ok(Arg::Null), |write| self.output(write.slice))
    }

    /// Cross-entropy of a chunk of rows. The gradient replaces the logits, or goes to a separate buffer if it is
    /// rounded to another dtype.
    fn losses(&self, op: &Head, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let (Head::CrossEntropy { dims } | Head::CrossEntropyBackward { dims, .. }) = *op else {
            return Ok(Outcome::Unsupported);
        };
        let (logits, dtype, slopes, rounded, targets, losses, z_losses) =
            if let Head::CrossEntropy { .. } = op {
                let ([logits, targets], [losses], mut extra) = operands.split();
                let dtype = expect_float(logits.buffer);
                (self.input(logits)?, dtype, Arg::Null, dtype, targets, losses, self.z_losses(extra.next())?)
            } else {
                let ([targets], [logits, losses], mut extra) = operands.split();
                let dtype = expect_float(logits.slice.buffer);
                let logits = self.output(logits.slice)?;
                let is_rounded = matches!(op, Head::CrossEntropyBackward { is_rounded: true, .. });
                let (slopes, rounded) = match if is_rounded { extra.next() } else { None } {
                    None => (logits, dtype),
                    Some(rounded) => {
                        let dtype = expect_float(rounded.slice.buffer);
                        (self.output(rounded.slice)?, dtype)
                    }
                };
                (logits, dtype, slopes, rounded, targets, losses, self.z_losses(extra.next())?)
            };
        let (targets, losses) = (self.input(targets)?, self.output(losses.slice)?);
        let sizes = [dims.vocab, dims.rows].map(Arg::Len);
        let mut args = vec![logits, slopes, targets, losses, z_losses];
        args.extend(sizes);
        args.extend(constants(&Op::Head(*op)));
        let kernels = self.kernels(Queue::Compute, &LOSS, (dtype, rounded));
        kernels.rows("cross_entropy", dims.rows, dims.vocab, &args)?;
        Ok(Outcome::Done)
    }
}

/// The constants of an operation's formula, in the arithmetic type.
fn constants(op: &Op) -> Vec<Arg<'static>> {
    op.describe().constants.into_iter().map(Arg::Real).collect()
}

/// Matrix products, look-ups and attention are not supported here.
impl Backend for CudaMemory {
    fn execute(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        match op {
            Op::Linear(Linear::ColumnSums { rows, columns, stride }) => {
                self.bias_gradient([*rows, *columns, *stride], operands)
            }
            Op::Norm(op) => self.norm(op, operands),
            Op::Activation(op) => self.activation(*op, operands),
            Op::Attention(Attention::Rope { dims, rope, positions, backward }) => {
                self.rope(*dims, (rope, *positions), *backward, operands)
            }
            Op::Pointwise(Pointwise::Dropout { p, .. }) => {
                self.apply_dropout(Dropout { p: *p, keys: operands.batch.keys }, operands)
            }
            Op::Head(op) => self.losses(op, operands),
            _ => Ok(Outcome::Unsupported),
        }
    }

    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, CudaBuffer>,
        shard: &mut SegmentShard<'_, CudaBuffer>,
        scalars: &StepScalars<'_, CudaBuffer>,
    ) -> Result<Outcome, Error> {
        self.update_part(part, stage, shard, scalars)
    }

    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Large
    }
}
