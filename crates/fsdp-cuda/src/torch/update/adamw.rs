//! AdamW: composed in single precision only, where square roots can be rounded correctly. libtorch's own square roots
//! are occasionally off by a unit in the last place on CPUs.

use fsdp_core::memory::Buffer;
use fsdp_core::update::{SegmentShard, StepScalars, UpdateRule};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::update::{AdamW, AdamWFactors};
use tch::{Kind, Tensor};

use super::blocks::{Block, each_block};
use crate::torch::error::Failure;
use crate::torch::memory::Torch;
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> UpdateRule<Torch<D>> for AdamW
where
    AdamW: UpdateRule<D>,
{
    fn update(
        &mut self,
        memory: &Torch<D>,
        shard: &mut SegmentShard<'_, D::Buffer>,
        scalars: &StepScalars<'_, D::Buffer>,
        statistics: &[D::Buffer],
    ) -> Result<(), Error> {
        if shard.params.dtype() != DType::F32 || !memory.must_compose(&[shard.params]) {
            return UpdateRule::<D>::update(self, memory.storage(), shard, scalars, statistics);
        }
        memory.in_torch(Queue::Compute, "adamw", || {
            each_block(memory, shard, scalars.factors, &self.groups, |param, block| {
                step(self.factors(param, scalars.step, scalars.lr), block)
            })
        })?;
        shard.refresh(memory)
    }
}

fn step(factors: AdamWFactors, mut block: Block<'_>) -> Result<(), Failure> {
    let AdamWFactors { keep, weight, by_end, beta2, square, root_correction, eps, step_size } = factors;
    let gradient = &block.gradient;
    let [mean, squares] = &block.state[..] else { block.wrong_state(2) };

    let rest = f64::from(1.0 - weight as f32);
    let difference = gradient.f_sub(mean)?;
    let average = if by_end {
        gradient.f_sub(&difference.f_mul_scalar(rest)?)?
    } else {
        mean.f_add(&difference.f_mul_scalar(weight)?)?
    };
    let scaled_square = gradient.f_mul_scalar(square)?.f_mul(gradient)?;
    let variance = squares.f_mul_scalar(beta2)?.f_add(&scaled_square)?;
    // On a device, division by a host scalar would become multiplication by its reciprocal.
    let root_correction = Tensor::f_scalar_tensor(root_correction, (Kind::Float, gradient.device()))?;
    let denominator = root(&variance)?.f_divide(&root_correction)?.f_add_scalar(eps)?;
    let change = average.f_mul_scalar(step_size)?.f_divide(&denominator)?;
    let params = block.params.f_mul_scalar(keep)?.f_add(&change)?;
    block.put(&params, &[average, variance])
}

/// Correctly rounded square roots. The root of a number with 24 bits differs by at least a share of `2^-51` from any
/// point where its rounding to 24 bits changes, and the error of libtorch's roots of doubles is below `2^-52`.
fn root(values: &Tensor) -> Result<Tensor, Failure> {
    Ok(values.f_to_kind(Kind::Double)?.f_sqrt()?.f_to_kind(Kind::Float)?)
}
