//! [`Backend`] for [`Torch`]: checks arguments, then calls our kernel or libtorch's operations.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::program::GradientTarget;
use fsdp_core::{DType, Error};
use fsdp_nn::backend::{AttentionDims, Backend, Dropout, HeadChunks, HeadDims, LinearDims};
use fsdp_nn::lengths;

use super::memory::Torch;
use super::ops::{HeadCall, HeadGradients};
use super::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;
type Gradient<'a, D> = GradientTarget<'a, <D as fsdp_core::Memory>::Buffer>;

/// That operands have one float dtype, and statistics its master dtype.
fn dtypes<B: Buffer>(operands: &[&B], statistics: &[&B]) -> Result<(), Error> {
    let expected = operands[0].dtype();
    if !expected.is_float() {
        return Err(lengths::not_a_float(expected));
    }
    let operands = operands.iter().map(|operand| (operand.dtype(), expected));
    let statistics = statistics.iter().map(|statistics| (statistics.dtype(), expected.master()));
    operands.chain(statistics).try_for_each(|(got, expected)| is(got, expected))
}

fn is(got: DType, expected: DType) -> Result<(), Error> {
    assert_eq!(got, expected, "a buffer of {got} is used where the other operands need {expected}");
    Ok(())
}

fn is_float(gradient: DType) -> Result<(), Error> {
    if gradient.is_float() { Ok(()) } else { Err(lengths::not_a_float(gradient)) }
}

impl<D: TorchStorage> Backend for Torch<D> {
    fn linear(
        &self,
        dims: LinearDims,
        x: In<'_, D>,
        weight: In<'_, D>,
        bias: Option<In<'_, D>>,
        y: Out<'_, D>,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(x.len), Some(weight.len), bias.map(|bias| bias.len), y.len)?;
        dtypes(&[x.buffer, weight.buffer, bias.map_or(x.buffer, |bias| bias.buffer), y.buffer], &[])?;
        self.run("linear", || self.aten_linear(dims, x, weight, bias, y))
    }

    fn linear_backward_input(
        &self,
        dims: LinearDims,
        dy: In<'_, D>,
        weight: In<'_, D>,
        dx: Out<'_, D>,
        accumulate: bool,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(dx.len), Some(weight.len), None, dy.len)?;
        dtypes(&[dy.buffer, weight.buffer, dx.buffer], &[])?;
        self.run("linear_backward_input", || {
            self.aten_linear_backward_input(dims, dy, weight, dx, accumulate)
        })
    }

    fn linear_backward_weight(
        &self,
        dims: LinearDims,
        x: In<'_, D>,
        dy: In<'_, D>,
        dweight: Gradient<'_, D>,
    ) -> Result<(), Error> {
        lengths::linear(dims, Some(x.len), Some(dweight.slice.len), None, dy.len)?;
        dtypes(&[x.buffer, dy.buffer], &[])?;
        is_float(dweight.slice.buffer.dtype())?;
        self.run("linear_backward_weight", || self.aten_linear_backward_weight(dims, x, dy, dweight))
    }

    fn linear_backward_bias(
        &self,
        dims: LinearDims,
        dy: In<'_, D>,
        dbias: Gradient<'_, D>,
    ) -> Result<(), Error> {
        lengths::linear(dims, None, None, Some(dbias.slice.len), dy.len)?;
        is_float(dbias.slice.buffer.dtype())?;
        self.run("linear_backward_bias", || self.aten_linear_backward_bias(dims, dy, dbias))
    }

    fn embedding(
        &self,
        width: usize,
        ids: In<'_, D>,
        table: In<'_, D>,
        y: Out<'_, D>,
        add: bool,
    ) -> Result<(), Error> {
        lengths::embedding(width, ids.len, table.len, y.len)?;
        is(ids.buffer.dtype(), DType::U32)?;
        dtypes(&[table.buffer, y.buffer], &[])?;
        self.run("embedding", || self.aten_embedding(width, ids, table, y, add))
    }

    fn embedding_backward(
        &self,
        width: usize,
        ids: In<'_, D>,
        dy: In<'_, D>,
        dtable: Gradient<'_, D>,
    ) -> Result<(), Error> {
        lengths::embedding(width, ids.len, dtable.slice.len, dy.len)?;
        is(ids.buffer.dtype(), DType::U32)?;
        is_float(dtable.slice.buffer.dtype())?;
        self.run("embedding_backward", || self.aten_embedding_backward(width, ids, dy, dtable))
    }

    fn rms_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_, D>,
        weight: In<'_, D>,
        y: Out<'_, D>,
        rstd: Out<'_, D>,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.rms_norm(width, eps, x, weight, y, rstd);
        }
        lengths::norm(width, &[x.len, y.len], &[weight.len], rstd.len, 1)?;
        dtypes(&[x.buffer, weight.buffer, y.buffer], &[rstd.buffer])?;
        self.run("rms_norm", || self.aten_rms_norm(width, eps, x, weight, y, rstd))
    }

    fn rms_norm_backward(
        &self,
        width: usize,
        x: In<'_, D>,
        weight: In<'_, D>,
        rstd: In<'_, D>,
        dy: In<'_, D>,
        dx: Out<'_, D>,
        accumulate: bool,
        dweight: Option<Gradient<'_, D>>,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.rms_norm_backward(width, x, weight, rstd, dy, dx, accumulate, dweight);
        }
        let dweight_len = dweight.as_ref().map_or(width, |target| target.slice.len);
        lengths::norm(width, &[x.len, dy.len, dx.len], &[weight.len, dweight_len], rstd.len, 1)?;
        dtypes(&[x.buffer, weight.buffer, dy.buffer, dx.buffer], &[rstd.buffer])?;
        self.run("rms_norm_backward", || {
            self.aten_rms_norm_backward(width, [x, weight, rstd, dy], dx, accumulate, dweight)
        })
    }

    fn layer_norm(
        &self,
        width: usize,
        eps: f64,
        x: In<'_, D>,
        weight: In<'_, D>,
        bias: In<'_, D>,
        y: Out<'_, D>,
        stats: Out<'_, D>,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.layer_norm(width, eps, x, weight, bias, y, stats);
        }
        lengths::norm(width, &[x.len, y.len], &[weight.len, bias.len], stats.len, 2)?;
        dtypes(&[x.buffer, weight.buffer, bias.buffer, y.buffer], &[stats.buffer])?;
        self.run("layer_norm", || self.aten_layer_norm(width, eps, [x, weight, bias], y, stats))
    }

    fn layer_norm_backward_input(
        &self,
        width: usize,
        x: In<'_, D>,
        weight: In<'_, D>,
        stats: In<'_, D>,
        dy: In<'_, D>,
        dx: Out<'_, D>,
        accumulate: bool,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.layer_norm_backward_input(width, x, weight, stats, dy, dx, accumulate);
        }
        lengths::norm(width, &[x.len, dy.len, dx.len], &[weight.len], stats.len, 2)?;
        dtypes(&[x.buffer, weight.buffer, dy.buffer, dx.buffer], &[stats.buffer])?;
        self.run("layer_norm_backward_input", || {
            self.aten_layer_norm_backward_input(width, [x, weight, stats, dy], dx, accumulate)
        })
    }

    fn layer_norm_backward_weight(
        &self,
        width: usize,
        x: In<'_, D>,
        stats: In<'_, D>,
        dy: In<'_, D>,
        dweight: Gradient<'_, D>,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.layer_norm_backward_weight(width, x, stats, dy, dweight);
        }
        lengths::norm(width, &[x.len, dy.len], &[dweight.slice.len], stats.len, 2)?;
        dtypes(&[x.buffer, dy.buffer], &[stats.buffer])?;
        self.run("layer_norm_backward_weight", || {
            self.aten_layer_norm_backward_weight(width, [x, stats, dy], dweight)
        })
    }

    fn rope(
        &self,
        dims: AttentionDims,
        inverse_frequencies: &[f32],
        qkv: Out<'_, D>,
        backward: bool,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.rope(dims, inverse_frequencies, qkv, backward);
        }
        lengths::attention(dims, None, &[qkv.len], &[], None)?;
        lengths::rope(dims, inverse_frequencies.len())?;
        self.run("rope", || self.aten_rope(dims, inverse_frequencies, qkv, backward))
    }

    fn attention(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_, D>,
        y: Out<'_, D>,
        lse: Out<'_, D>,
    ) -> Result<(), Error> {
        if let Some(own) = self.own_attention() {
            return own.attention(dims, dropout, qkv, y, lse);
        }
        lengths::attention(dims, dropout, &[qkv.len], &[y.len], Some(lse.len))?;
        dtypes(&[qkv.buffer, y.buffer], &[lse.buffer])?;
        self.run("attention", || self.aten_attention(dims, dropout, qkv, y, lse))
    }

    fn attention_backward(
        &self,
        dims: AttentionDims,
        dropout: Option<Dropout<'_>>,
        qkv: In<'_, D>,
        y: In<'_, D>,
        lse: In<'_, D>,
        dy: In<'_, D>,
        dqkv: Out<'_, D>,
    ) -> Result<(), Error> {
        if let Some(own) = self.own_attention() {
            return own.attention_backward(dims, dropout, qkv, y, lse, dy, dqkv);
        }
        lengths::attention(dims, dropout, &[qkv.len, dqkv.len], &[y.len, dy.len], Some(lse.len))?;
        dtypes(&[qkv.buffer, y.buffer, dy.buffer, dqkv.buffer], &[lse.buffer])?;
        self.run("attention_backward", || {
            self.aten_attention_backward(dims, dropout, [qkv, y, lse, dy], dqkv)
        })
    }

    fn swiglu(&self, gate: In<'_, D>, up: In<'_, D>, y: Out<'_, D>) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.swiglu(gate, up, y);
        }
        lengths::expect_equal("elements of swiglu", &[gate.len, up.len, y.len])?;
        dtypes(&[gate.buffer, up.buffer, y.buffer], &[])?;
        self.run("swiglu", || self.aten_swiglu(gate, up, y))
    }

    fn swiglu_backward(
        &self,
        gate: In<'_, D>,
        up: In<'_, D>,
        dy: In<'_, D>,
        dgate: Out<'_, D>,
        dup: Out<'_, D>,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.swiglu_backward(gate, up, dy, dgate, dup);
        }
        lengths::expect_equal("elements of swiglu", &[gate.len, up.len, dy.len, dgate.len, dup.len])?;
        dtypes(&[gate.buffer, up.buffer, dy.buffer, dgate.buffer, dup.buffer], &[])?;
        self.run("swiglu_backward", || self.aten_swiglu_backward([gate, up, dy], dgate, dup))
    }

    fn swiglu_backward_again(
        &self,
        gate: In<'_, D>,
        up: In<'_, D>,
        dy: Out<'_, D>,
        dgate: Out<'_, D>,
        dup: Out<'_, D>,
    ) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.swiglu_backward_again(gate, up, dy, dgate, dup);
        }
        self.swiglu_backward(gate, up, dy.as_slice(), dgate, dup)?;
        self.swiglu(gate, up, dy)
    }

    fn gelu(&self, x: In<'_, D>, y: Out<'_, D>) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.gelu(x, y);
        }
        lengths::expect_equal("elements of gelu", &[x.len, y.len])?;
        dtypes(&[x.buffer, y.buffer], &[])?;
        self.run("gelu", || self.aten_gelu(x, y))
    }

    fn gelu_backward(&self, x: In<'_, D>, dy: In<'_, D>, dx: Out<'_, D>) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.gelu_backward(x, dy, dx);
        }
        lengths::expect_equal("elements of gelu", &[x.len, dy.len, dx.len])?;
        dtypes(&[x.buffer, dy.buffer, dx.buffer], &[])?;
        self.run("gelu_backward", || self.aten_gelu_backward(x, dy, dx))
    }

    fn gelu_backward_again(&self, x: In<'_, D>, dy: Out<'_, D>, dx: Out<'_, D>) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.gelu_backward_again(x, dy, dx);
        }
        self.gelu_backward(x, dy.as_slice(), dx)?;
        self.gelu(x, dy)
    }

    fn add(&self, a: In<'_, D>, b: In<'_, D>, y: Out<'_, D>) -> Result<(), Error> {
        lengths::expect_equal("elements of a sum", &[a.len, b.len, y.len])?;
        dtypes(&[a.buffer, b.buffer, y.buffer], &[])?;
        self.run("add", || self.aten_add(a, b, y))
    }

    fn dropout(&self, dropout: Dropout<'_>, x: Out<'_, D>) -> Result<(), Error> {
        if let Some(fused) = self.fused() {
            return fused.dropout(dropout, x);
        }
        lengths::dropout(dropout, x.len)?;
        self.run("dropout", || self.aten_dropout(dropout, x))
    }

    fn head_chunks(&self) -> HeadChunks {
        self.storage().head_chunks()
    }

    fn head_loss(
        &self,
        dims: HeadDims,
        x: In<'_, D>,
        weight: In<'_, D>,
        targets: In<'_, D>,
        losses: Out<'_, D>,
        logits: Out<'_, D>,
    ) -> Result<(), Error> {
        lengths::head(dims, x.len, weight.len, Some((targets.len, losses.len)), logits.len, None)?;
        dtypes(&[x.buffer, weight.buffer], &[logits.buffer])?;
        is(losses.buffer.dtype(), DType::F64)?;
        is(targets.buffer.dtype(), DType::U32)?;
        let call = HeadCall { dims, x, weight, targets, losses, logits };
        self.run("head_loss", || self.head_by_torch(call, None))
    }

    fn head_loss_backward(
        &self,
        dims: HeadDims,
        x: In<'_, D>,
        weight: In<'_, D>,
        targets: In<'_, D>,
        losses: Out<'_, D>,
        logits: Out<'_, D>,
        dlogits: Option<Out<'_, D>>,
        dx: Out<'_, D>,
        dweight: Option<Gradient<'_, D>>,
    ) -> Result<(), Error> {
        let gradients = Some((dx.len, dweight.as_ref().map(|target| target.slice.len)));
        lengths::head(dims, x.len, weight.len, Some((targets.len, losses.len)), logits.len, gradients)?;
        dtypes(&[x.buffer, weight.buffer, dx.buffer], &[logits.buffer])?;
        if let Some(dlogits) = &dlogits {
            is(dlogits.buffer.dtype(), x.buffer.dtype())?;
            lengths::expect("gradients of logits", logits.len, dlogits.len)?;
        }
        is(losses.buffer.dtype(), DType::F64)?;
        is(targets.buffer.dtype(), DType::U32)?;
        let call = HeadCall { dims, x, weight, targets, losses, logits };
        self.run("head_loss_backward", || {
            self.head_by_torch(call, Some(HeadGradients { dlogits, dx, dweight }))
        })
    }

    fn head_logits(
        &self,
        dims: HeadDims,
        x: In<'_, D>,
        weight: In<'_, D>,
        logits: Out<'_, D>,
    ) -> Result<(), Error> {
        lengths::head(dims, x.len, weight.len, None, logits.len, None)?;
        dtypes(&[x.buffer, weight.buffer], &[logits.buffer])?;
        self.run("head_logits", || self.head_logits_by_torch(dims, x, weight, logits))
    }
}
