//! The map to logits and its cross-entropy, chunk by chunk: only one chunk's logits exist at a time.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::{BatchFacts, Operands, Outcome, Write};
use fsdp_nn::op::{Head, HeadDims, IGNORED_TARGET, LogitsDims, LossTerms, Op};
use tch::{Kind, Tensor};

use super::linear::product;
use super::size::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Target, Torch, kind};
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

/// The operands of a call of the head, and its scratch.
struct HeadCall<'a, D: TorchStorage> {
    dims: HeadDims,
    x: In<'a, D>,
    weight: In<'a, D>,
    targets: In<'a, D>,
    losses: Out<'a, D>,
    /// The z-loss part of the losses, if requested.
    z_losses: Option<Out<'a, D>>,
    logits: Out<'a, D>,
}

/// The destinations of the head's gradients.
struct HeadGradients<'a, D: TorchStorage> {
    /// Scratch for the gradient of a chunk's logits in the dtype of the products, if it differs from the dtype of the
    /// logits. Only the memory's own kernel fills it.
    dlogits: Option<Out<'a, D>>,
    dx: Out<'a, D>,
    dweight: Option<Write<'a, D::Buffer>>,
}

/// A part of a writable range.
fn part<'a, B: Buffer>(slice: &'a mut SliceMut<'_, B>, start: usize, len: usize) -> SliceMut<'a, B> {
    let offset = slice.offset + start;
    SliceMut::new(&mut *slice.buffer, offset, len)
}

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn head(
        &self,
        op: &Head,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<Outcome, Failure> {
        match *op {
            Head::Loss { dims } => {
                let ([x, weight, targets], [losses, logits], mut extra) = operands.split();
                let (losses, logits) = (losses.slice, logits.slice);
                let z_losses = extra.next().map(|write| write.slice);
                self.chunked_head(HeadCall { dims, x, weight, targets, losses, z_losses, logits }, None)?;
            }
            Head::LossBackward { dims, weight: has_weight_gradient, is_rounded } => {
                let ([x, weight, targets], [losses, logits, dx], mut extra) = operands.split();
                let (losses, logits, dx) = (losses.slice, logits.slice, dx.slice);
                let dweight = if has_weight_gradient { extra.next() } else { None };
                let dlogits = if is_rounded { extra.next().map(|write| write.slice) } else { None };
                let z_losses = extra.next().map(|write| write.slice);
                let gradients = HeadGradients { dlogits, dx, dweight };
                let call = HeadCall { dims, x, weight, targets, losses, z_losses, logits };
                self.chunked_head(call, Some(gradients))?;
            }
            Head::Logits { dims } => {
                let ([x, weight], [logits], _) = operands.split();
                self.all_logits(dims, x, weight, logits.slice)?;
            }
            // Only code that computes its own logits requests these, directly from the underlying memory.
            Head::CrossEntropy { .. } | Head::CrossEntropyBackward { .. } => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    /// Multiplies the rows of `x` by the weight, in the arithmetic type.
    fn chunk_logits(
        &self,
        dims: HeadDims,
        x: In<'_, D>,
        weight: In<'_, D>,
        logits: Out<'_, D>,
    ) -> Result<(), Failure> {
        let (rows, hidden, vocab) = (int(x.len / dims.hidden), int(dims.hidden), int(dims.vocab));
        let slot = self.view_mut(logits, &[rows, vocab])?;
        let (x, weight) = (self.view(x, &[rows, hidden])?, self.view(weight, &[vocab, hidden])?);
        product(&x, &weight.f_tr()?, Target { slot, accumulate: false })
    }

    fn all_logits(
        &self,
        dims: HeadDims,
        x: In<'_, D>,
        weight: In<'_, D>,
        mut logits: Out<'_, D>,
    ) -> Result<(), Failure> {
        let len = dims.rows * dims.vocab;
        self.chunk_logits(dims, x, weight, part(&mut logits, 0, len))?;
        if let Some(cap) = dims.softcap {
            let mut logits = self.view_mut(part(&mut logits, 0, len), &[int(len)])?;
            logits.f_mul_scalar_(1.0 / cap)?.f_tanh_()?.f_mul_scalar_(cap).done()?;
        }
        Ok(())
    }

    /// Computes the losses, and the gradients if requested.
    fn chunked_head(
        &self,
        mut call: HeadCall<'_, D>,
        mut gradients: Option<HeadGradients<'_, D>>,
    ) -> Result<(), Failure> {
        let dims = call.dims;
        let chunk = dims.chunk_rows.clamp(1, dims.rows.max(1));
        for start in (0..dims.rows).step_by(chunk) {
            let rows = chunk.min(dims.rows - start);
            let x = Slice::new(call.x.buffer, call.x.offset + start * dims.hidden, rows * dims.hidden);
            let targets = Slice::new(call.targets.buffer, call.targets.offset + start, rows);
            let mut logits = part(&mut call.logits, 0, rows * dims.vocab);
            self.chunk_logits(dims, x, call.weight, logits.reborrow())?;
            let losses = part(&mut call.losses, start, rows);
            let z_losses = call.z_losses.as_mut().map(|losses| part(losses, start, rows));
            let Some(HeadGradients { dlogits, dx, dweight }) = &mut gradients else {
                self.losses(dims.logits(rows), logits, targets, (losses, z_losses))?;
                continue;
            };
            let mut dlogits = match dlogits {
                Some(dlogits) if self.uses_fused_kernels() => Some(part(dlogits, 0, rows * dims.vocab)),
                _ => None,
            };
            let rounded = dlogits.as_mut().map(SliceMut::reborrow);
            self.losses_backward(dims.logits(rows), logits.reborrow(), targets, (losses, z_losses), rounded)?;
            let dlogits = dlogits.as_ref().unwrap_or(&logits).as_slice();
            let dx = part(dx, start * dims.hidden, rows * dims.hidden);
            self.head_gradients(dims, dlogits, x, call.weight, dx, dweight.as_mut())?;
        }
        Ok(())
    }

    /// The losses of a chunk; may overwrite its logits.
    fn losses(
        &self,
        dims: LogitsDims,
        logits: Out<'_, D>,
        targets: In<'_, D>,
        (mut losses, mut z_losses): (Out<'_, D>, Option<Out<'_, D>>),
    ) -> Result<(), Failure> {
        let op = Op::Head(Head::CrossEntropy { dims });
        let reads = &[logits.as_slice(), targets];
        let written =
            [losses.reborrow()].into_iter().chain(z_losses.as_mut().map(|losses| losses.reborrow()));
        let mut writes: Vec<_> = written.map(Write::over).collect();
        let operands = Operands { reads, writes: &mut writes, batch: BatchFacts::default() };
        if self.execute_fused(&op, operands)? == Outcome::Done {
            return Ok(());
        }
        drop(writes);
        self.aten_cross_entropy(dims, logits, targets, (losses, z_losses), false)
    }

    /// The losses of a chunk, and their gradients: in `dlogits`, or in place of the logits if that is `None`.
    fn losses_backward(
        &self,
        dims: LogitsDims,
        logits: Out<'_, D>,
        targets: In<'_, D>,
        (losses, z_losses): (Out<'_, D>, Option<Out<'_, D>>),
        dlogits: Option<Out<'_, D>>,
    ) -> Result<(), Failure> {
        let is_rounded = dlogits.is_some();
        let op = Op::Head(Head::CrossEntropyBackward { dims, is_rounded });
        let writes = [logits, losses].into_iter().chain(dlogits).chain(z_losses);
        let mut writes: Vec<_> = writes.map(Write::over).collect();
        let operands = Operands { reads: &[targets], writes: &mut writes, batch: BatchFacts::default() };
        if self.execute_fused(&op, operands)? == Outcome::Done {
            return Ok(());
        }
        let mut writes = writes.into_iter().map(|write| write.slice);
        let (Some(logits), Some(losses)) = (writes.next(), writes.next()) else { return Ok(()) };
        // Only the memory's own kernel rounds.
        let z_losses = writes.nth(usize::from(is_rounded));
        self.aten_cross_entropy(dims, logits, targets, (losses, z_losses), true)
    }

    fn aten_cross_entropy(
        &self,
        dims: LogitsDims,
        logits: Out<'_, D>,
        targets: In<'_, D>,
        (losses, z_losses): (Out<'_, D>, Option<Out<'_, D>>),
        with_gradient: bool,
    ) -> Result<(), Failure> {
        let rows = int(dims.rows);
        let mut logits = self.view_mut(logits, &[rows, int(dims.vocab)])?;
        let mut slopes = None;
        if let Some(cap) = dims.softcap {
            logits.f_mul_scalar_(1.0 / cap)?.f_tanh_().done()?;
            if with_gradient {
                slopes = Some(logits.f_square()?.f_neg()?.f_add_scalar(1.0)?);
            }
            logits.f_mul_scalar_(cap).done()?;
        }
        let targets = self.view(targets, &[rows, 1])?.f_to_kind(Kind::Int64)?;
        let ignored = targets.f_eq(i64::from(IGNORED_TARGET as i32))?;
        let classes = targets.f_clamp_min(0)?;
        let sums = logits.f_logsumexp(1_i64, true)?;
        let target_logits = logits.f_gather(1, &classes, false)?;
        let LossTerms { label_smoothing, z_loss, loss_scale, .. } = dims.terms;
        let [normalizers, target_logits] =
            [sums.f_to_kind(Kind::Double)?, target_logits.f_to_kind(Kind::Double)?];
        let mut row_losses = normalizers.f_sub(&target_logits)?;
        if label_smoothing > 0.0 {
            let means = logits.f_mean_dim(1_i64, true, Kind::Double)?;
            row_losses = row_losses.f_add(&target_logits.f_sub(&means)?.f_mul_scalar(label_smoothing)?)?;
        }
        if z_loss > 0.0 {
            let row_z_losses = normalizers.f_square()?.f_mul_scalar(z_loss)?;
            row_losses = row_losses.f_add(&row_z_losses)?;
            if let Some(z_losses) = z_losses {
                self.view_mut(z_losses, &[rows, 1])?.f_copy_(&row_z_losses.f_masked_fill(&ignored, 0.0)?)?;
            }
        }
        self.view_mut(losses, &[rows, 1])?.f_copy_(&row_losses.f_masked_fill(&ignored, 0.0)?)?;
        if with_gradient {
            logits.f_sub_(&sums).done()?;
            logits.f_exp_().done()?;
            if z_loss > 0.0 {
                let gain = normalizers.f_mul_scalar(2.0 * z_loss)?.f_add_scalar(1.0)?;
                let gain = gain.f_to_kind(logits.f_kind()?)?;
                logits.f_mul_(&gain).done()?;
            }
            if label_smoothing > 0.0 {
                logits.f_sub_scalar_(label_smoothing / dims.vocab as f64).done()?;
            }
            let target_slope = label_smoothing - 1.0;
            let target_slopes = Tensor::f_full([rows, 1], target_slope, (logits.f_kind()?, logits.device()))?;
            logits.f_scatter_add_(1, &classes, &target_slopes).done()?;
            if let Some(slopes) = slopes {
                logits.f_mul_(&slopes).done()?;
            }
            if loss_scale != 1.0 {
                logits.f_mul_scalar_(loss_scale).done()?;
            }
            logits.f_masked_fill_(&ignored, 0.0).done()?;
        }
        Ok(())
    }

    /// `dx = dlogits W` and `dW += dlogits^T x` for a chunk; the first chunk overwrites `dW` unless the target
    /// accumulates.
    fn head_gradients(
        &self,
        dims: HeadDims,
        dlogits: In<'_, D>,
        x: In<'_, D>,
        weight: In<'_, D>,
        dx: Out<'_, D>,
        dweight: Option<&mut Write<'_, D::Buffer>>,
    ) -> Result<(), Failure> {
        let (rows, hidden, vocab) = (int(x.len / dims.hidden), int(dims.hidden), int(dims.vocab));
        // Rounded to the dtype of the operands: there are no kernels for products of mixed dtypes.
        let dlogits = self.view(dlogits, &[rows, vocab])?.f_to_kind(kind(x.buffer.dtype()))?;
        let (x, weight) = (self.view(x, &[rows, hidden])?, self.view(weight, &[vocab, hidden])?);
        product(&dlogits, &weight, Target { slot: self.view_mut(dx, &[rows, hidden])?, accumulate: false })?;
        let Some(dweight) = dweight else { return Ok(()) };
        let slot = self.view_mut(dweight.slice.reborrow(), &[vocab, hidden])?;
        product(&dlogits.f_tr()?, &x, Target { slot, accumulate: dweight.accumulate })?;
        dweight.accumulate = true;
        Ok(())
    }
}
