//! [`Backend`] of a device, as far as it has kernels of ours: they are given to the compute queue.

use fsdp_core::memory::{HostSlice, Memory, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::backend::{HeadChunks, Operands, Outcome, Write};
use fsdp_nn::op::Op;

use super::{CONVERT, GRID_HEIGHT_MAX, LOSS, Launch, NORMS, POINTWISE, Source, Word};
use crate::device::{CudaBuffer, CudaMemory, expect_float};

type In<'a> = Slice<'a, CudaBuffer>;
type Out<'a> = SliceMut<'a, CudaBuffer>;
type Call<'o, 'a> = Operands<'o, 'a, CudaBuffer>;

/// Rows whose column sums are one partial result; as in `norms.cu`.
const PARTIAL_ROWS: usize = 128;

/// Threads of a block that sums columns, and columns of a thread.
const COLUMN_THREADS: usize = 64;
const COLUMNS_PER_THREAD: usize = 4;

impl CudaMemory {
    /// A pointer to read from.
    pub(super) fn input<'a>(&self, slice: In<'a>) -> Result<Word<'a>, Error> {
        Ok(Word::Range(self.range(Queue::Compute, slice)?))
    }

    /// A pointer to write to.
    pub(super) fn output<'a>(&self, slice: Out<'a>) -> Result<Word<'a>, Error> {
        Ok(Word::Range(self.range_mut(Queue::Compute, slice)?))
    }

    /// Pointers to all operands, as most kernels take them: what is read, then what is written.
    fn pointers<'o>(&self, operands: Call<'o, '_>) -> Result<Vec<Word<'o>>, Error> {
        let reads = operands.reads.iter().map(|slice| self.input(*slice));
        reads.chain(operands.writes.iter_mut().map(|write| self.output(write.slice.reborrow()))).collect()
    }

    /// Kernels of a source for tensors of one dtype.
    pub(super) fn same(&self, source: &'static Source, dtype: DType) -> Launch<'_> {
        self.kernels(Queue::Compute, source, (dtype, dtype))
    }

    /// Sums of columns by a kernel that leaves partial sums, put where the gradient belongs.
    fn column_sums(
        &self,
        kernel: &'static str,
        width: usize,
        [x, statistics, dy]: [In<'_>; 3],
        gradient: Write<'_, CudaBuffer>,
    ) -> Result<(), Error> {
        let (dtype, target) = (expect_float(x.buffer), expect_float(gradient.slice.buffer));
        let rows = x.len / width;
        if rows == 0 {
            return Ok(());
        }
        let parts = rows.div_ceil(PARTIAL_ROWS);
        let mut partial = self.scratch(dtype.master(), parts * width)?;
        let words = [
            self.input(x)?,
            self.input(statistics)?,
            self.input(dy)?,
            self.output(SliceMut::whole(&mut partial))?,
            Word::Len(width),
            Word::Len(rows),
        ];
        let across = width.div_ceil(COLUMN_THREADS * COLUMNS_PER_THREAD) as u32;
        let blocks = (across, parts.min(GRID_HEIGHT_MAX) as u32);
        self.same(&NORMS, dtype).blocks(kernel, blocks, COLUMN_THREADS as u32, &words)?;
        let words = [
            self.input(Slice::whole(&partial))?,
            self.output(gradient.slice)?,
            Word::Len(width),
            Word::Len(parts),
            Word::Int(u32::from(gradient.accumulate)),
        ];
        let kernels = self.kernels(Queue::Compute, &CONVERT, (target, dtype.master()));
        let threads = COLUMN_THREADS as u32;
        Ok(kernels.striding("combine", width.div_ceil(COLUMN_THREADS), threads, &words)?)
    }

    fn run_norm(&self, op: &Op, mut operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let x = operands.reads[0];
        let dtype = expect_float(x.buffer);
        let accumulate = Word::Int(u32::from(operands.writes[0].accumulate));
        let (kernel, rows, width, last) = match *op {
            Op::RmsNorm { rows, width, eps } => ("rms_norm", rows, width, Word::Real(eps)),
            Op::RmsNormBackward { rows, width, .. } => ("rms_norm_backward", rows, width, accumulate),
            Op::LayerNorm { rows, width, eps } => ("layer_norm", rows, width, Word::Real(eps)),
            Op::LayerNormBackwardInput { rows, width } => ("layer_norm_backward", rows, width, accumulate),
            Op::LayerNormBackwardWeight { width, .. } => {
                let (reads, [dweight], _) = operands.split();
                self.column_sums("layer_norm_weight", width, reads, dweight)?;
                return Ok(Outcome::Done);
            }
            _ => return Ok(Outcome::Unsupported),
        };
        let trains = matches!(op, Op::RmsNormBackward { weight: true, .. });
        let mut words = self.pointers(operands.reborrow())?;
        words.truncate(words.len() - usize::from(trains));
        words.extend([Word::Len(width), Word::Len(rows), last]);
        self.same(&NORMS, dtype).rows(kernel, rows, width, &words)?;
        if trains {
            let ([x, _, rstd, dy], [_, dweight], _) = operands.split();
            self.column_sums("rms_norm_weight", width, [x, rstd, dy], dweight)?;
        }
        Ok(Outcome::Done)
    }

    fn run_activation(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let dtype = expect_float(operands.reads[0].buffer);
        let mut words = self.pointers(operands)?;
        // Kernels of backward take a place for the output after the gradient of it, or none.
        let (kernel, len) = match *op {
            Op::Swiglu { len } => ("swiglu", len),
            Op::Gelu { len } => ("gelu", len),
            Op::SwigluBackward { len } => {
                words.insert(3, Word::Null);
                ("swiglu_backward", len)
            }
            Op::SwigluBackwardAgain { len } => {
                words.insert(3, words[2]);
                ("swiglu_backward", len)
            }
            Op::GeluBackward { len } => {
                words.insert(2, Word::Null);
                ("gelu_backward", len)
            }
            Op::GeluBackwardAgain { len } => {
                words.insert(2, words[1]);
                ("gelu_backward", len)
            }
            _ => return Ok(Outcome::Unsupported),
        };
        words.push(Word::Len(len));
        self.same(&POINTWISE, dtype).elements(kernel, len, &words)?;
        Ok(Outcome::Done)
    }

    fn run_in_place(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let (keys, dropout) = (operands.keys, op.dropout(operands.keys));
        let ([], [x], _) = operands.split();
        let dtype = expect_float(x.slice.buffer);
        match op {
            Op::Rope { dims, inverse_frequencies, backward } => {
                let table = self.rotations(dtype.master(), dims.seq, inverse_frequencies)?;
                let (half, heads) = (dims.head_dim / 2, dims.heads + dims.kv_heads);
                let words = [
                    self.output(x.slice)?,
                    self.input(Slice::whole(&table))?,
                    Word::Len(dims.seq),
                    Word::Len(dims.rows()),
                    Word::Int(dims.packed() as u32),
                    Word::Int(heads as u32),
                    Word::Int(half as u32),
                    Word::Int(u32::from(*backward)),
                ];
                self.same(&POINTWISE, dtype).elements("rope", dims.rows() * heads * half, &words)?;
            }
            Op::Dropout { len, samples, .. } => {
                let Some(dropout) = dropout else { return Ok(Outcome::Done) };
                // The words of a 64-bit integer are those of a key.
                let keys: Vec<i64> = keys.iter().map(|&key| key as i64).collect();
                let mut on_device = self.scratch(DType::I64, keys.len())?;
                self.write(Queue::Compute, HostSlice::I64(&keys), SliceMut::whole(&mut on_device))?;
                let words = [
                    self.output(x.slice)?,
                    self.input(Slice::whole(&on_device))?,
                    Word::Len(len / samples),
                    Word::Len(*samples),
                    Word::Int(dropout.threshold()),
                    Word::Real(dropout.kept()),
                ];
                self.same(&POINTWISE, dtype).elements("dropout", *len, &words)?;
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    /// Cross-entropy of a chunk of rows. The gradient goes to a place of elements of a dtype, if there is one.
    fn run_losses(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let (Op::CrossEntropy { rows, vocab } | Op::CrossEntropyBackward { rows, vocab, .. }) = *op else {
            return Ok(Outcome::Unsupported);
        };
        let (logits, dtype, slopes, rounded, targets, losses) = if matches!(op, Op::CrossEntropy { .. }) {
            let ([logits, targets], [losses], _) = operands.split();
            let dtype = expect_float(logits.buffer);
            (self.input(logits)?, dtype, Word::Null, dtype, targets, losses)
        } else {
            let ([targets], [logits, losses], mut more) = operands.split();
            let dtype = expect_float(logits.slice.buffer);
            let logits = self.output(logits.slice)?;
            let (slopes, rounded) = match more.next() {
                None => (logits, dtype),
                Some(rounded) => {
                    let dtype = expect_float(rounded.slice.buffer);
                    (self.output(rounded.slice)?, dtype)
                }
            };
            (logits, dtype, slopes, rounded, targets, losses)
        };
        let (targets, losses) = (self.input(targets)?, self.output(losses.slice)?);
        let words = [logits, slopes, targets, losses, Word::Len(vocab), Word::Len(rows)];
        let kernels = self.kernels(Queue::Compute, &LOSS, (dtype, rounded));
        kernels.rows("cross_entropy", rows, vocab, &words)?;
        Ok(Outcome::Done)
    }
}

/// Products, look-ups and attention are left to others.
impl Backend for CudaMemory {
    fn execute(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        match op {
            Op::RmsNorm { .. }
            | Op::RmsNormBackward { .. }
            | Op::LayerNorm { .. }
            | Op::LayerNormBackwardInput { .. }
            | Op::LayerNormBackwardWeight { .. } => self.run_norm(op, operands),
            Op::Swiglu { .. }
            | Op::SwigluBackward { .. }
            | Op::SwigluBackwardAgain { .. }
            | Op::Gelu { .. }
            | Op::GeluBackward { .. }
            | Op::GeluBackwardAgain { .. } => self.run_activation(op, operands),
            Op::Rope { .. } | Op::Dropout { .. } => self.run_in_place(op, operands),
            Op::CrossEntropy { .. } | Op::CrossEntropyBackward { .. } => self.run_losses(op, operands),
            _ => Ok(Outcome::Unsupported),
        }
    }

    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Large
    }
}
