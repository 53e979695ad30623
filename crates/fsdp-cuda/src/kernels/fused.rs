//! [`FusedOps`] of a device: arguments are checked, and kernels given to the compute queue.

use fsdp_core::memory::{HostSlice, Memory, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::backend::{AttentionDims, Dropout};
use fsdp_nn::lengths;

use super::{CONVERT, GRID_HEIGHT_MAX, LOSS, Launch, NORMS, POINTWISE, Source, Word};
use crate::device::{CudaBuffer, CudaMemory, expect_dtype, expect_float};
use crate::fused::FusedOps;

type In<'a> = Slice<'a, CudaBuffer>;
type Out<'a> = SliceMut<'a, CudaBuffer>;
type Gradient<'a> = GradientTarget<'a, CudaBuffer>;

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
        gradient: Gradient<'_>,
    ) -> Result<(), Error> {
        let (dtype, target) = (expect_float(x.buffer)?, expect_float(gradient.slice.buffer)?);
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

    /// Cross-entropy of a chunk of rows. The gradient goes to a place of elements of a dtype, if there is one.
    fn losses(
        &self,
        vocab: usize,
        (logits, dtype): (Word<'_>, DType),
        targets: In<'_>,
        losses: Out<'_>,
        gradient: Option<(Word<'_>, DType)>,
    ) -> Result<(), Error> {
        let rows = targets.len;
        lengths::expect("losses of a chunk", losses.len, rows)?;
        expect_dtype(targets.buffer, DType::U32)?;
        expect_dtype(losses.buffer, DType::F64)?;
        let (slopes, rounded) = gradient.unwrap_or((Word::Null, dtype));
        let words =
            [logits, slopes, self.input(targets)?, self.output(losses)?, Word::Len(vocab), Word::Len(rows)];
        let kernels = self.kernels(Queue::Compute, &LOSS, (dtype, rounded));
        Ok(kernels.rows("cross_entropy", rows, vocab, &words)?)
    }
}

/// Checks that tensors have the dtype of the first, and that it is a float.
fn one_float(first: &CudaBuffer, others: &[&CudaBuffer]) -> Result<DType, Error> {
    let dtype = expect_float(first)?;
    others.iter().try_for_each(|other| expect_dtype(other, dtype))?;
    Ok(dtype)
}

impl FusedOps<CudaBuffer> for CudaMemory {
    fn rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_>,
        weight: In<'_>,
        y: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, y.len], &[weight.len], rstd.len, 1)?;
        let dtype = one_float(x.buffer, &[weight.buffer, y.buffer])?;
        expect_dtype(rstd.buffer, dtype.master())?;
        let rows = x.len / width;
        let pointers = [self.input(x)?, self.input(weight)?, self.output(y)?, self.output(rstd)?];
        let words = [&pointers[..], &[Word::Len(width), Word::Len(rows), Word::Real(eps)]].concat();
        Ok(self.same(&NORMS, dtype).rows("rms_norm", rows, width, &words)?)
    }

    fn rms_norm_backward(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        rstd: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
        dweight: Option<Gradient<'_>>,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, dy.len, dx.len], &[weight.len], rstd.len, 1)?;
        let dtype = one_float(x.buffer, &[weight.buffer, dy.buffer, dx.buffer])?;
        expect_dtype(rstd.buffer, dtype.master())?;
        let rows = x.len / width;
        let pointers =
            [self.input(x)?, self.input(weight)?, self.input(rstd)?, self.input(dy)?, self.output(dx)?];
        let sizes = [Word::Len(width), Word::Len(rows), Word::Int(u32::from(accumulate))];
        let words = [&pointers[..], &sizes].concat();
        self.same(&NORMS, dtype).rows("rms_norm_backward", rows, width, &words)?;
        let Some(dweight) = dweight else { return Ok(()) };
        lengths::expect("elements of the gradient of a norm", dweight.slice.len, width)?;
        self.column_sums("rms_norm_weight", width, [x, rstd, dy], dweight)
    }

    fn layer_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_>,
        weight: In<'_>,
        bias: In<'_>,
        y: Out<'_>,
        stats: Out<'_>,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, y.len], &[weight.len, bias.len], stats.len, 2)?;
        let dtype = one_float(x.buffer, &[weight.buffer, bias.buffer, y.buffer])?;
        expect_dtype(stats.buffer, dtype.master())?;
        let rows = x.len / width;
        let pointers =
            [self.input(x)?, self.input(weight)?, self.input(bias)?, self.output(y)?, self.output(stats)?];
        let words = [&pointers[..], &[Word::Len(width), Word::Len(rows), Word::Real(eps)]].concat();
        Ok(self.same(&NORMS, dtype).rows("layer_norm", rows, width, &words)?)
    }

    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: In<'_>,
        weight: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, dy.len, dx.len], &[weight.len], stats.len, 2)?;
        let dtype = one_float(x.buffer, &[weight.buffer, dy.buffer, dx.buffer])?;
        expect_dtype(stats.buffer, dtype.master())?;
        let rows = x.len / width;
        let pointers =
            [self.input(x)?, self.input(weight)?, self.input(stats)?, self.input(dy)?, self.output(dx)?];
        let sizes = [Word::Len(width), Word::Len(rows), Word::Int(u32::from(accumulate))];
        let words = [&pointers[..], &sizes].concat();
        Ok(self.same(&NORMS, dtype).rows("layer_norm_backward", rows, width, &words)?)
    }

    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: In<'_>,
        stats: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        lengths::norm(width, &[x.len, dy.len], &[dweight.slice.len], stats.len, 2)?;
        let dtype = one_float(x.buffer, &[dy.buffer])?;
        expect_dtype(stats.buffer, dtype.master())?;
        self.column_sums("layer_norm_weight", width, [x, stats, dy], dweight)
    }

    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: Out<'_>,
        backward: bool,
    ) -> Result<(), Error> {
        lengths::rope(dims, inverse_frequencies.len())?;
        lengths::attention(dims, None, &[qkv.len], &[], None)?;
        let dtype = expect_float(qkv.buffer)?;
        let table = self.rotations(dtype.master(), dims.seq, inverse_frequencies)?;
        let (half, heads) = (dims.head_dim / 2, dims.heads + dims.kv_heads);
        let words = [
            self.output(qkv)?,
            self.input(Slice::whole(&table))?,
            Word::Len(dims.seq),
            Word::Len(dims.rows()),
            Word::Int(dims.packed() as u32),
            Word::Int(heads as u32),
            Word::Int(half as u32),
            Word::Int(u32::from(backward)),
        ];
        Ok(self.same(&POINTWISE, dtype).elements("rope", dims.rows() * heads * half, &words)?)
    }

    fn swiglu(&self, gate: In<'_>, up: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of a gated activation", &[y.len, gate.len, up.len])?;
        let dtype = one_float(gate.buffer, &[up.buffer, y.buffer])?;
        let len = y.len;
        let words = [self.input(gate)?, self.input(up)?, self.output(y)?, Word::Len(len)];
        Ok(self.same(&POINTWISE, dtype).elements("swiglu", len, &words)?)
    }

    fn swiglu_backward(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: In<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        let lens = [gate.len, up.len, dy.len, dgate.len, dup.len];
        lengths::expect_equal("elements of a gated activation", &lens)?;
        let dtype = one_float(gate.buffer, &[up.buffer, dy.buffer, dgate.buffer, dup.buffer])?;
        let inputs = [self.input(gate)?, self.input(up)?, self.input(dy)?, Word::Null];
        let words = [&inputs[..], &[self.output(dgate)?, self.output(dup)?, Word::Len(lens[0])]].concat();
        Ok(self.same(&POINTWISE, dtype).elements("swiglu_backward", lens[0], &words)?)
    }

    fn swiglu_backward_again(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: Out<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        let lens = [gate.len, up.len, dy.len, dgate.len, dup.len];
        lengths::expect_equal("elements of a gated activation", &lens)?;
        let dtype = one_float(gate.buffer, &[up.buffer, dy.buffer, dgate.buffer, dup.buffer])?;
        let dy = self.output(dy)?;
        let inputs = [self.input(gate)?, self.input(up)?, dy, dy];
        let words = [&inputs[..], &[self.output(dgate)?, self.output(dup)?, Word::Len(lens[0])]].concat();
        Ok(self.same(&POINTWISE, dtype).elements("swiglu_backward", lens[0], &words)?)
    }

    fn gelu(&self, x: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of an activation", &[y.len, x.len])?;
        let dtype = one_float(x.buffer, &[y.buffer])?;
        let len = y.len;
        let words = [self.input(x)?, self.output(y)?, Word::Len(len)];
        Ok(self.same(&POINTWISE, dtype).elements("gelu", len, &words)?)
    }

    fn gelu_backward(&self, x: In<'_>, dy: In<'_>, dx: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of an activation", &[dx.len, x.len, dy.len])?;
        let dtype = one_float(x.buffer, &[dy.buffer, dx.buffer])?;
        let len = dx.len;
        let words = [self.input(x)?, self.input(dy)?, Word::Null, self.output(dx)?, Word::Len(len)];
        Ok(self.same(&POINTWISE, dtype).elements("gelu_backward", len, &words)?)
    }

    fn gelu_backward_again(&self, x: In<'_>, dy: Out<'_>, dx: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of an activation", &[dx.len, x.len, dy.len])?;
        let dtype = one_float(x.buffer, &[dy.buffer, dx.buffer])?;
        let len = dx.len;
        let dy = self.output(dy)?;
        let words = [self.input(x)?, dy, dy, self.output(dx)?, Word::Len(len)];
        Ok(self.same(&POINTWISE, dtype).elements("gelu_backward", len, &words)?)
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_>) -> Result<(), Error> {
        lengths::dropout(dropout, x.len)?;
        let dtype = expect_float(x.buffer)?;
        // The words of a 64-bit integer are those of a key.
        let keys: Vec<i64> = dropout.keys.iter().map(|&key| key as i64).collect();
        let mut on_device = self.scratch(DType::I64, keys.len())?;
        self.write(Queue::Compute, HostSlice::I64(&keys), SliceMut::whole(&mut on_device))?;
        let (len, samples) = (x.len, keys.len());
        let words = [
            self.output(x)?,
            self.input(Slice::whole(&on_device))?,
            Word::Len(len / samples),
            Word::Len(samples),
            Word::Int(dropout.threshold()),
            Word::Real(dropout.kept()),
        ];
        Ok(self.same(&POINTWISE, dtype).elements("dropout", len, &words)?)
    }

    fn cross_entropy(
        &self,
        vocab: usize,
        logits: In<'_>,
        targets: In<'_>,
        losses: Out<'_>,
    ) -> Result<(), Error> {
        lengths::expect("logits of a chunk", logits.len, targets.len * vocab)?;
        self.losses(vocab, (self.input(logits)?, expect_float(logits.buffer)?), targets, losses, None)
    }

    fn cross_entropy_backward(
        &self,
        vocab: usize,
        logits: Out<'_>,
        targets: In<'_>,
        losses: Out<'_>,
        gradient: Option<Out<'_>>,
    ) -> Result<(), Error> {
        lengths::expect("logits of a chunk", logits.len, targets.len * vocab)?;
        let dtype = expect_float(logits.buffer)?;
        let Some(gradient) = gradient else {
            let logits = self.output(logits)?;
            return self.losses(vocab, (logits, dtype), targets, losses, Some((logits, dtype)));
        };
        lengths::expect("gradient of the logits of a chunk", gradient.len, logits.len)?;
        let rounded = expect_float(gradient.buffer)?;
        expect_dtype(logits.buffer, rounded.master())?;
        let (logits, slopes) = (self.input(logits.as_slice())?, self.output(gradient)?);
        self.losses(vocab, (logits, dtype), targets, losses, Some((slopes, rounded)))
    }
}
