//! Operations element by element, in the type of arithmetic.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::Dropout;
use fsdp_nn::random;
use tch::Tensor;

use super::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

impl<D: TorchStorage> Torch<D> {
    /// All elements, in the type of arithmetic.
    fn flat(&self, slice: In<'_, D>) -> Result<Tensor, Failure> {
        let kind = arithmetic(slice.buffer.dtype())?;
        Ok(self.view(slice, &[int(slice.len)])?.f_to_kind(kind)?)
    }

    fn write_flat(&self, slice: Out<'_, D>, values: &Tensor) -> Result<(), Failure> {
        let len = int(slice.len);
        self.view_mut(slice, &[len])?.f_copy_(values)?;
        Ok(())
    }

    pub(in crate::torch) fn aten_swiglu(
        &self,
        gate: In<'_, D>,
        up: In<'_, D>,
        y: Out<'_, D>,
    ) -> Result<(), Failure> {
        let product = self.flat(gate)?.f_silu()?.f_mul(&self.flat(up)?)?;
        self.write_flat(y, &product)
    }

    pub(in crate::torch) fn aten_swiglu_backward(
        &self,
        [gate, up, dy]: [In<'_, D>; 3],
        dgate: Out<'_, D>,
        dup: Out<'_, D>,
    ) -> Result<(), Failure> {
        let [gate, up, dy] = [self.flat(gate)?, self.flat(up)?, self.flat(dy)?];
        self.write_flat(dup, &gate.f_silu()?.f_mul(&dy)?)?;
        self.write_flat(dgate, &gate.f_silu_backward(&dy.f_mul(&up)?)?)
    }

    pub(in crate::torch) fn aten_gelu(&self, x: In<'_, D>, y: Out<'_, D>) -> Result<(), Failure> {
        self.write_flat(y, &self.flat(x)?.f_gelu("tanh")?)
    }

    pub(in crate::torch) fn aten_gelu_backward(
        &self,
        x: In<'_, D>,
        dy: In<'_, D>,
        dx: Out<'_, D>,
    ) -> Result<(), Failure> {
        self.write_flat(dx, &self.flat(x)?.f_gelu_backward(&self.flat(dy)?, "tanh")?)
    }

    pub(in crate::torch) fn aten_add(
        &self,
        a: In<'_, D>,
        b: In<'_, D>,
        y: Out<'_, D>,
    ) -> Result<(), Failure> {
        let len = int(y.len);
        let (a, b) = (self.view(a, &[len])?, self.view(b, &[len])?);
        a.f_add_out(&*self.view_mut(y, &[len])?, &b).done()?;
        Ok(())
    }

    pub(in crate::torch) fn aten_dropout(&self, dropout: Dropout<'_>, x: Out<'_, D>) -> Result<(), Failure> {
        let kind = arithmetic(x.buffer.dtype())?;
        let len = x.len;
        let factors = factors(dropout, len / dropout.keys.len())?;
        let mut x = self.view_mut(x, &[int(len)])?;
        let factors = factors.f_to_kind(kind)?.f_to_device(x.device())?;
        x.f_mul_(&factors).done()?;
        Ok(())
    }
}

/// The factors of `sample_len` elements of every sample, on the host: 0 where dropped.
pub(in crate::torch) fn factors(dropout: Dropout<'_>, sample_len: usize) -> Result<Tensor, Failure> {
    let (threshold, kept) = (dropout.threshold(), dropout.kept());
    let mut words = vec![0; sample_len];
    let mut factors = Vec::with_capacity(sample_len * dropout.keys.len());
    for &key in dropout.keys {
        random::words(key, 0, &mut words);
        factors.extend(words.iter().map(|&word| if word < threshold { 0.0 } else { kept }));
    }
    Ok(Tensor::f_from_slice::<f64>(&factors)?)
}
