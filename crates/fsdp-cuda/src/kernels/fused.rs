//! [`Backend`] of a device, for the operations that have a kernel in this crate; the kernels run on the compute queue.

use fsdp_core::memory::{HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::{HeadChunks, Operands, Outcome, Write};
use fsdp_nn::layer::Rope;
use fsdp_nn::op::{Activation, Attention, AttentionDims, Dropout, Head, Linear, Norm, Op, Pass, Pointwise};

use super::{CONVERT, GRID_HEIGHT_MAX, LOSS, Launch, NORMS, POINTWISE, Source, Word};
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
    pub(crate) fn input<'a>(&self, slice: In<'a>) -> Result<Word<'a>, Error> {
        Ok(Word::Range(self.range(Queue::Compute, slice)?))
    }

    /// A pointer parameter for writing.
    pub(crate) fn output<'a>(&self, slice: Out<'a>) -> Result<Word<'a>, Error> {
        Ok(Word::Range(self.range_mut(Queue::Compute, slice)?))
    }

    /// Pointers to all operands in the usual order of kernels: those that are read, then those that are written.
    fn pointers<'o>(&self, operands: Call<'o, '_>) -> Result<Vec<Word<'o>>, Error> {
        let reads = operands.reads.iter().map(|slice| self.input(*slice));
        reads.chain(operands.writes.iter_mut().map(|write| self.output(write.slice.reborrow()))).collect()
    }

    /// The kernels of a source for tensors of one dtype.
    pub(super) fn same(&self, source: &'static Source, dtype: DType) -> Launch<'_> {
        self.kernels(Queue::Compute, source, (dtype, dtype))
    }

    /// Sums the columns of `rows` x `width` elements of `dtype` with a kernel that computes partial sums, then combines
    /// them in the gradient. The kernel takes `reads`, the partial sums and both sizes, and `more`.
    fn column_sums(
        &self,
        (kernel, dtype): (&'static str, DType),
        [rows, width]: [usize; 2],
        reads: &[Word<'_>],
        more: Option<Word<'_>>,
        gradient: Write<'_, CudaBuffer>,
    ) -> Result<(), Error> {
        if rows == 0 {
            return Ok(());
        }
        let parts = rows.div_ceil(PARTIAL_ROWS);
        let mut partial = self.scratch(dtype.master(), parts * width)?;
        let mut words = reads.to_vec();
        words.extend([self.output(SliceMut::whole(&mut partial))?, Word::Len(width), Word::Len(rows)]);
        words.extend(more);
        let across = width.div_ceil(COLUMN_THREADS * COLUMNS_PER_THREAD) as u32;
        let blocks = (across, parts.min(GRID_HEIGHT_MAX) as u32);
        self.same(&NORMS, dtype).blocks(kernel, blocks, COLUMN_THREADS as u32, &words)?;
        let target = expect_float(gradient.slice.buffer);
        let words = [
            self.input(Slice::whole(&partial))?,
            self.output(gradient.slice)?,
            Word::Len(width),
            Word::Len(parts),
            Word::Int(u32::from(gradient.accumulate)),
        ];
        let kernels = self.kernels(Queue::Compute, &CONVERT, (target, dtype.master()));
        let blocks = (width.div_ceil(COMBINED_COLUMNS) as u32, 1);
        Ok(kernels.blocks("combine", blocks, COMBINING_THREADS, &words)?)
    }

    /// Sums of columns, which are the gradient of a bias.
    fn bias_gradient(
        &self,
        [rows, columns, stride]: [usize; 3],
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let ([dy], [sums], _) = operands.split();
        let (kernel, stride) = (("bias_gradient", expect_float(dy.buffer)), Word::Len(stride));
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
        let accumulate = is_backward.then_some(Word::Int(u32::from(operands.writes[0].accumulate)));
        let trains = matches!(op, Norm::RmsBackward { weight: true, .. });
        let mut words = self.pointers(operands.reborrow())?;
        words.truncate(words.len() - usize::from(trains));
        words.extend([Word::Len(width), Word::Len(rows)]);
        words.extend(constants(&Op::Norm(*op)).into_iter().chain(accumulate));
        self.same(&NORMS, dtype).rows(kernel, rows, width, &words)?;
        if trains {
            let ([x, _, rstd, dy], [_, dweight], _) = operands.split();
            self.norm_weight("rms_norm_weight", [rows, width], [x, rstd, dy], dweight)?;
        }
        Ok(Outcome::Done)
    }

    fn activation(&self, op: Activation, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let dtype = expect_float(operands.reads[0].buffer);
        let mut operands = self.pointers(operands)?.into_iter();
        // Operands that the operation does not have become null pointers.
        let mut next = |is_there: bool| {
            let operand = if is_there { operands.next() } else { None };
            operand.unwrap_or(Word::Null)
        };
        let mut words = vec![Word::Int(op.function as u32), next(true), next(op.gated)];
        let kernel = match op.pass {
            Pass::Forward => {
                words.push(next(true));
                "activation"
            }
            Pass::Backward | Pass::BackwardRecompute => {
                let dy = next(true);
                let y = if op.pass == Pass::Backward { Word::Null } else { dy };
                words.extend([dy, y, next(true), next(op.gated)]);
                "activation_backward"
            }
        };
        words.push(Word::Len(op.len));
        self.same(&POINTWISE, dtype).elements(kernel, op.len, &words)?;
        Ok(Outcome::Done)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        rope: &Rope,
        backward: bool,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let positions = operands.reads.first().map_or(Ok(Word::Null), |slice| self.input(*slice))?;
        let ([], [x], _) = operands.split();
        let dtype = expect_float(x.slice.buffer);
        let table = self.rotations(dtype.master(), dims.seq, rope)?;
        let (half, heads) = (rope.rotary_dim() / 2, dims.heads + dims.kv_heads);
        let words = [
            self.output(x.slice)?,
            self.input(Slice::whole(&table))?,
            positions,
            Word::Len(dims.seq),
            Word::Len(dims.rows()),
            Word::Int(dims.packed() as u32),
            Word::Int(heads as u32),
            Word::Int(dims.head_dim as u32),
            Word::Int(half as u32),
            Word::Int(u32::from(backward)),
        ];
        self.same(&POINTWISE, dtype).elements("rope", dims.rows() * heads * half, &words)?;
        Ok(Outcome::Done)
    }

    fn drop_elements(&self, dropout: Dropout<'_>, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let ([], [x], _) = operands.split();
        let (dtype, len) = (expect_float(x.slice.buffer), x.slice.len);
        // The kernel reads keys as unsigned 64-bit integers with the same bits.
        let keys: Vec<i64> = dropout.keys.iter().map(|&key| key as i64).collect();
        let mut on_device = self.scratch(DType::I64, keys.len())?;
        self.write(Queue::Compute, HostSlice::I64(&keys), SliceMut::whole(&mut on_device))?;
        let words = [
            self.output(x.slice)?,
            self.input(Slice::whole(&on_device))?,
            Word::Len(len / keys.len()),
            Word::Len(keys.len()),
            Word::Int(dropout.threshold()),
            Word::Real(dropout.kept()),
        ];
        self.same(&POINTWISE, dtype).elements("dropout", len, &words)?;
        Ok(Outcome::Done)
    }

    /// The pointer for z-losses; null if there are none.
    fn z_losses<'a>(&self, write: Option<Write<'a, CudaBuffer>>) -> Result<Word<'a>, Error> {
        write.map_or(Ok(Word::Null), |write| self.output(write.slice))
    }

    /// Cross-entropy of a chunk of rows. The gradient replaces the logits, or goes to a separate buffer if it is
    /// rounded to another dtype.
    fn losses(&self, op: &Head, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let (Head::CrossEntropy { dims } | Head::CrossEntropyBackward { dims, .. }) = *op else {
            return Ok(Outcome::Unsupported);
        };
        let (logits, dtype, slopes, rounded, targets, losses, z_losses) =
            if let Head::CrossEntropy { .. } = op {
                let ([logits, targets], [losses], mut more) = operands.split();
                let dtype = expect_float(logits.buffer);
                (self.input(logits)?, dtype, Word::Null, dtype, targets, losses, self.z_losses(more.next())?)
            } else {
                let ([targets], [logits, losses], mut more) = operands.split();
                let dtype = expect_float(logits.slice.buffer);
                let logits = self.output(logits.slice)?;
                let is_rounded = matches!(op, Head::CrossEntropyBackward { is_rounded: true, .. });
                let (slopes, rounded) = match if is_rounded { more.next() } else { None } {
                    None => (logits, dtype),
                    Some(rounded) => {
                        let dtype = expect_float(rounded.slice.buffer);
                        (self.output(rounded.slice)?, dtype)
                    }
                };
                (logits, dtype, slopes, rounded, targets, losses, self.z_losses(more.next())?)
            };
        let (targets, losses) = (self.input(targets)?, self.output(losses.slice)?);
        let sizes = [dims.vocab, dims.rows].map(Word::Len);
        let mut words = vec![logits, slopes, targets, losses, z_losses];
        words.extend(sizes);
        words.extend(constants(&Op::Head(*op)));
        let kernels = self.kernels(Queue::Compute, &LOSS, (dtype, rounded));
        kernels.rows("cross_entropy", dims.rows, dims.vocab, &words)?;
        Ok(Outcome::Done)
    }
}

/// The constants of an operation's formula, in the arithmetic type.
fn constants(op: &Op) -> Vec<Word<'static>> {
    op.describe().constants.into_iter().map(Word::Real).collect()
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
            Op::Attention(Attention::Rope { dims, rope, backward, .. }) => {
                self.rope(*dims, rope, *backward, operands)
            }
            Op::Pointwise(Pointwise::Dropout { p, .. }) => {
                self.drop_elements(Dropout { p: *p, keys: operands.batch.keys }, operands)
            }
            Op::Head(op) => self.losses(op, operands),
            _ => Ok(Outcome::Unsupported),
        }
    }

    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Large
    }
}
