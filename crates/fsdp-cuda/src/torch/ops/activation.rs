//! Activations, with and without gates, in the arithmetic type.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::{Operands, Outcome};
use fsdp_nn::op::{Activation, CLAMP, Function, Pass, SWISH_SCALE};
use tch::Tensor;

use super::size::int;
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

/// `sqrt(2 / pi)` and the cubic coefficient of the tanh form of GELU.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBIC: f64 = 0.044_715;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn activation(
        &self,
        op: Activation,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<Outcome, Failure> {
        let inputs = operands.reads.iter().map(|read| self.flat(*read));
        let inputs = inputs.collect::<Result<Vec<Tensor>, Failure>>()?;
        match (op.pass, &inputs[..]) {
            (Pass::Forward, [x, up @ ..]) => {
                let ([], [y], _) = operands.split();
                let value = value(op.function, x)?;
                let gated = up.first().map(|up| value.f_mul(up)).transpose()?;
                self.write_flat(y.slice, gated.as_ref().unwrap_or(&value))?;
            }
            (Pass::Backward, [x, dy]) => {
                let ([], [dx], _) = operands.split();
                self.write_flat(dx.slice, &backward(op.function, x, dy)?)?;
            }
            (Pass::Backward, [gate, up, dy]) => {
                let ([], [dgate, dup], _) = operands.split();
                self.write_flat(dup.slice, &value(op.function, gate)?.f_mul(dy)?)?;
                self.write_flat(dgate.slice, &backward(op.function, gate, &dy.f_mul(up)?)?)?;
            }
            _ => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    /// All elements, in the arithmetic type.
    fn flat(&self, slice: Slice<'_, D::Buffer>) -> Result<Tensor, Failure> {
        let kind = arithmetic(slice.buffer.dtype())?;
        Ok(self.view(slice, &[int(slice.len)])?.f_to_kind(kind)?)
    }

    fn write_flat(&self, slice: SliceMut<'_, D::Buffer>, values: &Tensor) -> Result<(), Failure> {
        let len = int(slice.len);
        self.view_mut(slice, &[len])?.f_copy_(values)?;
        Ok(())
    }
}

/// `1 / sqrt(2 pi)`.
const DENSITY: f64 = 0.398_942_280_401_432_7;

/// The standard normal distribution function. ATen's GELU instead adds 1 to an error function near -1, which loses
/// digits.
fn normal(x: &Tensor) -> Result<Tensor, Failure> {
    Ok(x.f_mul_scalar(-std::f64::consts::FRAC_1_SQRT_2)?.f_erfc()?.f_mul_scalar(0.5)?)
}

/// `function(x)`.
fn value(function: Function, x: &Tensor) -> Result<Tensor, Failure> {
    Ok(match function {
        Function::Silu => x.f_silu()?,
        Function::GeluTanh => gelu_logistic(x)?.f_mul(x)?,
        Function::Gelu => normal(x)?.f_mul(x)?,
        Function::Relu => x.f_relu()?,
        Function::ClampedSwish => {
            let z = x.f_clamp_max(CLAMP)?;
            z.f_mul_scalar(SWISH_SCALE)?.f_sigmoid()?.f_mul(&z)?
        }
        Function::ClampedPlusOne => x.f_clamp(-CLAMP, CLAMP)?.f_add_scalar(1.0)?,
        Function::Logistic => x.f_sigmoid()?,
    })
}

/// `dy` times the derivative of `function` at `x`.
fn backward(function: Function, x: &Tensor, dy: &Tensor) -> Result<Tensor, Failure> {
    Ok(match function {
        Function::Silu => x.f_silu_backward(dy)?,
        Function::GeluTanh => {
            let s = gelu_logistic(x)?;
            let slope =
                x.f_square()?.f_mul_scalar(6.0 * GELU_CUBIC * GELU_SCALE)?.f_add_scalar(2.0 * GELU_SCALE)?;
            let tail = s.f_neg()?.f_add_scalar(1.0)?.f_mul(&s)?.f_mul(x)?.f_mul(&slope)?;
            dy.f_mul(&s.f_add(&tail)?)?
        }
        Function::Gelu => {
            let density = x.f_square()?.f_mul_scalar(-0.5)?.f_exp()?.f_mul_scalar(DENSITY)?;
            dy.f_mul(&normal(x)?.f_add(&density.f_mul(x)?)?)?
        }
        Function::Relu => dy.f_mul(&x.f_gt(0.0)?)?,
        Function::ClampedSwish => {
            let z = x.f_clamp_max(CLAMP)?;
            let s = z.f_mul_scalar(SWISH_SCALE)?.f_sigmoid()?;
            let tail = s.f_neg()?.f_add_scalar(1.0)?.f_mul(&s)?.f_mul(&z)?.f_mul_scalar(SWISH_SCALE)?;
            dy.f_mul(&s.f_add(&tail)?)?.f_mul(&x.f_le(CLAMP)?)?
        }
        Function::ClampedPlusOne => dy.f_mul(&x.f_abs()?.f_le(CLAMP)?)?,
        Function::Logistic => {
            let s = x.f_sigmoid()?;
            dy.f_mul(&s.f_neg()?.f_add_scalar(1.0)?.f_mul(&s)?)?
        }
    })
}

/// `(1 + tanh u) / 2` as `logistic(2 u)`: ATen's GELU adds 1 to a hyperbolic tangent near -1, and loses the digits of
/// small results.
fn gelu_logistic(x: &Tensor) -> Result<Tensor, Failure> {
    let cubic = x.f_square()?.f_mul_scalar(GELU_CUBIC)?.f_add_scalar(1.0)?.f_mul(x)?;
    Ok(cubic.f_mul_scalar(2.0 * GELU_SCALE)?.f_sigmoid()?)
}
