//! [`Backend`] on the host: checks lengths, finds the typed slices and calls the kernel.

use fsdp_core::Error;
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::program::GradientTarget;

use super::buffer::HostBuffer;
use super::element::{Element, for_float};
use super::floats::Target;
use super::kernels::{attention, embedding, head, linear, norm, pointwise, rope};
use super::memory::HostMemory;
use crate::backend::{AttentionDims, Backend, Dropout, HeadDims, LinearDims};
use crate::lengths;

type In<'a> = Slice<'a, HostBuffer>;
type Out<'a> = SliceMut<'a, HostBuffer>;
type Gradient<'a> = GradientTarget<'a, HostBuffer>;

impl HostMemory {
    fn target<'a>(&self, gradient: Gradient<'a>) -> Result<Target<'a>, Error> {
        Ok(Target { data: self.floats_mut(gradient.slice)?, accumulate: gradient.accumulate })
    }

    fn head_gradients<'a, E: Element>(
        &self,
        dx: Out<'a>,
        dweight: Option<Gradient<'a>>,
    ) -> Result<head::HeadGradients<'a, E>, Error> {
        let dweight = dweight.map(|target| self.target(target)).transpose()?;
        Ok(head::HeadGradients { dx: self.elements_mut(dx)?, dweight })
    }

    fn head<'a, E: Element>(
        &self,
        dims: HeadDims,
        [x, weight, targets]: [In<'_>; 3],
        [losses, logits]: [Out<'_>; 2],
        gradients: Option<head::HeadGradients<'a, E>>,
    ) -> Result<(), Error> {
        let targets = self.elements(targets)?;
        head::check_targets(targets, dims.vocab)?;
        let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
        let (losses, logits) = (self.elements_mut(losses)?, self.elements_mut(logits)?);
        head::loss(self.workers(), dims, x, weight, targets, losses, logits, gradients);
        Ok(())
    }
}

impl Backend for HostMemory {
    fn linear(
        &self,
        dims: LinearDims,
        x: In<'_>,
        weight: In<'_>,
        bias: Option<In<'_>>,
        y: Out<'_>,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(x.len), Some(weight.len), bias.map(|bias| bias.len), y.len)?;
        for_float!(x.buffer.dtype(), E => {
            let bias = bias.map(|bias| self.elements::<E>(bias)).transpose()?;
            let (x, weight) = (self.elements(x)?, self.elements(weight)?);
            linear::forward(self.workers(), dims, x, weight, bias, self.elements_mut(y)?);
            Ok(())
        })
    }

    fn linear_backward_input(
        &self,
        dims: LinearDims,
        dy: In<'_>,
        weight: In<'_>,
        dx: Out<'_>,
        accumulate: bool,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(dx.len), Some(weight.len), None, dy.len)?;
        for_float!(dy.buffer.dtype(), E => {
            let (dy, weight) = (self.elements::<E>(dy)?, self.elements(weight)?);
            linear::backward_input(self.workers(), dims, dy, weight, self.elements_mut(dx)?, accumulate);
            Ok(())
        })
    }

    fn linear_backward_weight(
        &self,
        dims: LinearDims,
        x: In<'_>,
        dy: In<'_>,
        dweight: Gradient<'_>,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(x.len), Some(dweight.slice.len), None, dy.len)?;
        for_float!(x.buffer.dtype(), E => {
            let (x, dy) = (self.elements::<E>(x)?, self.elements(dy)?);
            linear::backward_weight(self.workers(), dims, x, dy, self.target(dweight)?);
            Ok(())
        })
    }

    fn linear_backward_bias(&self, dims: LinearDims, dy: In<'_>, dbias: Gradient<'_>) -> Result<(), Error> {
        lengths::linear(dims, None, None, Some(dbias.slice.len), dy.len)?;
        for_float!(dy.buffer.dtype(), E => {
            let dy = self.elements::<E>(dy)?;
            linear::backward_bias(self.workers(), dims, dy, self.target(dbias)?);
            Ok(())
        })
    }

    fn embedding(
        &self,
        width: usize,
        ids: In<'_>,
        table: In<'_>,
        y: Out<'_>,
        add: bool,
    ) -> Result<(), Error> {
        lengths::embedding(width, ids.len, table.len, y.len)?;
        let ids = self.elements(ids)?;
        embedding::check_ids(ids, table.len / width)?;
        for_float!(table.buffer.dtype(), E => {
            let table = self.elements::<E>(table)?;
            embedding::forward(self.workers(), width, ids, table, self.elements_mut(y)?, add);
            Ok(())
        })
    }

    fn embedding_backward(
        &self,
        width: usize,
        ids: In<'_>,
        dy: In<'_>,
        dtable: Gradient<'_>,
    ) -> Result<(), Error> {
        lengths::embedding(width, ids.len, dtable.slice.len, dy.len)?;
        let ids = self.elements(ids)?;
        embedding::check_ids(ids, dtable.slice.len / width)?;
        for_float!(dy.buffer.dtype(), E => {
            let dy = self.elements::<E>(dy)?;
            embedding::backward(self.workers(), width, ids, dy, self.target(dtable)?);
            Ok(())
        })
    }

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
        for_float!(x.buffer.dtype(), E => {
            let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
            let (y, rstd) = (self.elements_mut(y)?, self.elements_mut(rstd)?);
            norm::rms(self.workers(), width, eps, x, weight, y, rstd);
            Ok(())
        })
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
        let dweight_len = dweight.as_ref().map_or(width, |target| target.slice.len);
        lengths::norm(width, &[x.len, dy.len, dx.len], &[weight.len, dweight_len], rstd.len, 1)?;
        for_float!(x.buffer.dtype(), E => {
            let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
            let (rstd, dy) = (self.elements(rstd)?, self.elements(dy)?);
            let dx = self.elements_mut(dx)?;
            norm::rms_backward_input(self.workers(), width, x, weight, rstd, dy, dx, accumulate);
            if let Some(dweight) = dweight {
                norm::rms_backward_weight(self.workers(), width, x, rstd, dy, self.target(dweight)?);
            }
            Ok(())
        })
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
        for_float!(x.buffer.dtype(), E => {
            let (x, weight, bias) = (self.elements::<E>(x)?, self.elements(weight)?, self.elements(bias)?);
            let (y, stats) = (self.elements_mut(y)?, self.elements_mut(stats)?);
            norm::layer(self.workers(), width, eps, x, weight, bias, y, stats);
            Ok(())
        })
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
        for_float!(x.buffer.dtype(), E => {
            let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
            let (stats, dy) = (self.elements(stats)?, self.elements(dy)?);
            let dx = self.elements_mut(dx)?;
            norm::layer_backward_input(self.workers(), width, x, weight, stats, dy, dx, accumulate);
            Ok(())
        })
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
        for_float!(x.buffer.dtype(), E => {
            let (x, stats, dy) = (self.elements::<E>(x)?, self.elements(stats)?, self.elements(dy)?);
            norm::layer_backward_weight(self.workers(), width, x, stats, dy, self.target(dweight)?);
            Ok(())
        })
    }

    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: Out<'_>,
        backward: bool,
    ) -> Result<(), Error> {
        lengths::attention(dims, None, &[qkv.len], &[], None)?;
        lengths::rope(dims, inverse_frequencies.len())?;
        for_float!(qkv.buffer.dtype(), E => {
            let qkv = self.elements_mut::<E>(qkv)?;
            rope::rope(self.workers(), dims, inverse_frequencies, qkv, backward);
            Ok(())
        })
    }

    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: Out<'_>,
        lse: Out<'_>,
    ) -> Result<(), Error> {
        lengths::attention(dims, dropout, &[qkv.len], &[y.len], Some(lse.len))?;
        for_float!(qkv.buffer.dtype(), E => {
            let qkv = self.elements::<E>(qkv)?;
            let (y, lse) = (self.elements_mut(y)?, self.elements_mut(lse)?);
            attention::forward(self.workers(), dims, dropout, qkv, y, lse);
            Ok(())
        })
    }

    fn attention_backward(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_>,
        y: In<'_>,
        lse: In<'_>,
        dy: In<'_>,
        dqkv: Out<'_>,
    ) -> Result<(), Error> {
        lengths::attention(dims, dropout, &[qkv.len, dqkv.len], &[y.len, dy.len], Some(lse.len))?;
        for_float!(qkv.buffer.dtype(), E => {
            let recorded = attention::Recorded {
                qkv: self.elements::<E>(qkv)?,
                y: self.elements(y)?,
                lse: self.elements(lse)?,
                dy: self.elements(dy)?,
            };
            attention::backward(self.workers(), dims, dropout, recorded, self.elements_mut(dqkv)?);
            Ok(())
        })
    }

    fn swiglu(&self, gate: In<'_>, up: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of swiglu", &[gate.len, up.len, y.len])?;
        for_float!(gate.buffer.dtype(), E => {
            let (gate, up) = (self.elements::<E>(gate)?, self.elements(up)?);
            pointwise::swiglu(self.workers(), gate, up, self.elements_mut(y)?);
            Ok(())
        })
    }

    fn swiglu_backward(
        &self,
        gate: In<'_>,
        up: In<'_>,
        dy: In<'_>,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<(), Error> {
        lengths::expect_equal("elements of swiglu", &[gate.len, up.len, dy.len, dgate.len, dup.len])?;
        for_float!(gate.buffer.dtype(), E => {
            let (gate, up, dy) = (self.elements::<E>(gate)?, self.elements(up)?, self.elements(dy)?);
            let (dgate, dup) = (self.elements_mut(dgate)?, self.elements_mut(dup)?);
            pointwise::swiglu_backward(self.workers(), gate, up, dy, dgate, dup);
            Ok(())
        })
    }

    fn gelu(&self, x: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of gelu", &[x.len, y.len])?;
        for_float!(x.buffer.dtype(), E => {
            let x = self.elements::<E>(x)?;
            pointwise::gelu(self.workers(), x, self.elements_mut(y)?);
            Ok(())
        })
    }

    fn gelu_backward(&self, x: In<'_>, dy: In<'_>, dx: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of gelu", &[x.len, dy.len, dx.len])?;
        for_float!(x.buffer.dtype(), E => {
            let (x, dy) = (self.elements::<E>(x)?, self.elements(dy)?);
            pointwise::gelu_backward(self.workers(), x, dy, self.elements_mut(dx)?);
            Ok(())
        })
    }

    fn add(&self, a: In<'_>, b: In<'_>, y: Out<'_>) -> Result<(), Error> {
        lengths::expect_equal("elements of a sum", &[a.len, b.len, y.len])?;
        for_float!(a.buffer.dtype(), E => {
            let (a, b) = (self.elements::<E>(a)?, self.elements(b)?);
            pointwise::add(self.workers(), a, b, self.elements_mut(y)?);
            Ok(())
        })
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_>) -> Result<(), Error> {
        lengths::dropout(dropout, x.len)?;
        for_float!(x.buffer.dtype(), E => {
            pointwise::dropout(self.workers(), dropout, self.elements_mut::<E>(x)?);
            Ok(())
        })
    }

    fn head_loss(
        &self,
        dims: HeadDims,
        x: In<'_>,
        weight: In<'_>,
        targets: In<'_>,
        losses: Out<'_>,
        logits: Out<'_>,
    ) -> Result<(), Error> {
        lengths::head(dims, x.len, weight.len, Some((targets.len, losses.len)), logits.len, None)?;
        for_float!(x.buffer.dtype(), E => {
            self.head::<E>(dims, [x, weight, targets], [losses, logits], None)
        })
    }

    fn head_loss_backward(
        &self,
        dims: HeadDims,
        x: In<'_>,
        weight: In<'_>,
        targets: In<'_>,
        losses: Out<'_>,
        logits: Out<'_>,
        _dlogits: Option<Out<'_>>,
        dx: Out<'_>,
        dweight: Option<Gradient<'_>>,
    ) -> Result<(), Error> {
        let gradients = Some((dx.len, dweight.as_ref().map(|target| target.slice.len)));
        lengths::head(dims, x.len, weight.len, Some((targets.len, losses.len)), logits.len, gradients)?;
        for_float!(x.buffer.dtype(), E => {
            let gradients = self.head_gradients::<E>(dx, dweight)?;
            self.head(dims, [x, weight, targets], [losses, logits], Some(gradients))
        })
    }

    fn head_logits(&self, dims: HeadDims, x: In<'_>, weight: In<'_>, logits: Out<'_>) -> Result<(), Error> {
        lengths::head(dims, x.len, weight.len, None, logits.len, None)?;
        for_float!(x.buffer.dtype(), E => {
            let (x, weight) = (self.elements::<E>(x)?, self.elements(weight)?);
            head::logits(self.workers(), dims, x, weight, self.elements_mut(logits)?);
            Ok(())
        })
    }
}
