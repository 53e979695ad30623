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
        let x = self.flat(x)?;
        self.write_flat(y, &gelu_logistic(&x)?.f_mul(&x)?)
    }

    pub(in crate::torch) fn aten_gelu_backward(
        &self,
        x: In<'_, D>,
        dy: In<'_, D>,
        dx: Out<'_, D>,
    ) -> Result<(), Failure> {
        let x = self.flat(x)?;
        let s = gelu_logistic(&x)?;
        let slope =
            x.f_square()?.f_mul_scalar(6.0 * GELU_CUBIC * GELU_SCALE)?.f_add_scalar(2.0 * GELU_SCALE)?;
        let tail = s.f_neg()?.f_add_scalar(1.0)?.f_mul(&s)?.f_mul(&x)?.f_mul(&slope)?;
        self.write_flat(dx, &self.flat(dy)?.f_mul(&s.f_add(&tail)?)?)
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
        let factors = factors(dropout, &vec![0; dropout.keys.len()], len / dropout.keys.len())?;
        let mut x = self.view_mut(x, &[int(len)])?;
        let factors = factors.f_to_kind(kind)?.f_to_device(x.device())?;
        x.f_mul_(&factors).done()?;
        Ok(())
    }
}

/// `sqrt(2 / pi)` and the cubic coefficient of the tanh form of GELU.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

/// `(1 + tanh u) / 2` as `logistic(2 u)`: ATen's GELU adds 1 to a hyperbolic tangent near -1, and loses the digits of small
/// results.
fn gelu_logistic(x: &Tensor) -> Result<Tensor, Failure> {
    let cubic = x.f_square()?.f_mul_scalar(GELU_CUBIC)?.f_add_scalar(1.0)?.f_mul(x)?;
    Ok(cubic.f_mul_scalar(2.0 * GELU_SCALE)?.f_sigmoid()?)
}

/// The factors of runs of `run_len` elements, side by side, on the host: 0 where dropped. Run `i` has the elements from
/// `firsts[i]` of the sample whose key is `runs.keys[i]`.
pub(in crate::torch) fn factors(
    runs: Dropout<'_>,
    firsts: &[u64],
    run_len: usize,
) -> Result<Tensor, Failure> {
    let (threshold, kept) = (runs.threshold(), runs.kept());
    let mut words = vec![0; run_len];
    let mut factors = Vec::with_capacity(run_len * runs.keys.len());
    for (&key, &first) in runs.keys.iter().zip(firsts) {
        random::words(key, first, &mut words);
        factors.extend(words.iter().map(|&word| if word < threshold { 0.0 } else { kept }));
    }
    Ok(Tensor::f_from_slice::<f64>(&factors)?)
}
