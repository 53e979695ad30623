//! Element-wise rules, composed of libtorch's operations.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::scalars::GradientFactors;
use fsdp_core::update::{SegmentShard, StepScalars};
use fsdp_nn::update::{Calculation, ElementwiseRule, Groups, Input};
use tch::{Kind, Tensor};

use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::ops::{BLOCK, int};
use crate::torch::storage::TorchStorage;
use crate::update::runs;

/// Updates a shard, block by block.
pub(super) fn update<D: TorchStorage>(
    memory: &Torch<D>,
    rule: &dyn ElementwiseRule,
    shard: &mut SegmentShard<'_, D::Buffer>,
    scalars: &StepScalars<'_, D::Buffer>,
) -> Result<(), Failure> {
    let kind = arithmetic(shard.params.dtype())?;
    let factors = memory.view(scalars.factors, &[int(GradientFactors::LEN)])?;
    let finite = factors.f_select(0, 2)?.f_ne(0.0)?;
    let factors = factors.f_to_kind(kind)?;
    let [scale, clip] = [factors.f_select(0, 0)?, factors.f_select(0, 1)?];
    let [largest, largest_state] = [shard.largest_param(), shard.params.dtype().largest()];
    let mut not_finite = memory.view_mut(SliceMut::whole(shard.not_finite), &[1])?;
    let (formula, constants) = rule.formula();
    // On a device: a number of the host would turn quotients into products with a reciprocal. libtorch refuses numbers that
    // are infinite only after rounding.
    let rounded = |value: f64| if kind == Kind::Float { f64::from(value as f32) } else { value };
    let number = |value: f64| Tensor::f_scalar_tensor(rounded(value), (kind, finite.device()));
    let constants = constants.into_iter().map(number).collect::<Result<Vec<_>, _>>()?;
    for run in runs(shard.pieces, rule.groups().unwrap_or(&Groups::uniform(0.0))) {
        let own = rule.factors_of(run.param, scalars.step, scalars.lr);
        let own = own.into_iter().map(number).collect::<Result<Vec<_>, _>>()?;
        for start in (0..run.len).step_by(BLOCK) {
            let (offset, len) = (run.offset + start, BLOCK.min(run.len - start));
            let sizes = [int(len)];
            let gradient = memory.view(Slice::new(shard.gradient, offset, len), &sizes)?.f_to_kind(kind)?;
            let gradient = gradient.f_mul(&scale)?.f_mul(&clip)?;
            let params = memory.view_mut(SliceMut::new(shard.params, offset, len), &sizes)?;
            let state = shard.state.iter_mut();
            let state = state
                .map(|buffer| memory.view_mut(SliceMut::new(buffer, offset, len), &sizes))
                .collect::<Result<Vec<_>, _>>()?;
            let input = |input| match input {
                Input::Gradient => gradient.shallow_clone(),
                Input::Param => params.shallow_clone(),
                Input::State(index) => state[index].shallow_clone(),
                Input::Factor(index) => own[index].shallow_clone(),
                Input::Constant(index) => constants[index].shallow_clone(),
            };
            let (new_params, new_state) = formula.run(|of| Operand(input(of)), calculate)?;
            let slots = new_params.into_iter().map(|Operand(new)| (params.shallow_clone(), new, largest));
            let states = state.iter().zip(new_state);
            let slots =
                slots.chain(states.map(|(slot, Operand(new))| (slot.shallow_clone(), new, largest_state)));
            // A result may be an old value of another slot, so all are read before any is written.
            let mut results = Vec::new();
            for (slot, new, largest) in slots {
                results.push((new.f_where_self(&finite, &slot)?, slot, new, largest));
            }
            for (kept, mut slot, new, largest) in results {
                slot.f_copy_(&kept)?;
                // The maximum with a NaN is NaN, which is not at most anything.
                let exceeds = new.f_abs()?.f_max()?.f_le(largest)?.f_logical_not()?.f_logical_and(&finite)?;
                not_finite.f_logical_or_(&exceeds).done()?;
            }
        }
    }
    Ok(())
}

/// A tensor; a clone shares its storage.
struct Operand(Tensor);

impl Clone for Operand {
    fn clone(&self) -> Self {
        Self(self.0.shallow_clone())
    }
}

fn calculate(calculation: Calculation<Operand>) -> Result<Operand, Failure> {
    let result = match calculation {
        Calculation::Add(Operand(a), Operand(b)) => a.f_add(&b)?,
        Calculation::Subtract(Operand(a), Operand(b)) => a.f_sub(&b)?,
        Calculation::Multiply(Operand(a), Operand(b)) => a.f_mul(&b)?,
        Calculation::Divide(Operand(a), Operand(b)) => a.f_divide(&b)?,
        Calculation::SquareRoot(Operand(a)) => root(&a)?,
        Calculation::IfLess(Operand(a), Operand(b), Operand(then), Operand(otherwise)) => {
            then.f_where_self(&a.f_lt_tensor(&b)?, &otherwise)?
        }
    };
    Ok(Operand(result))
}

/// Correctly rounded square roots in single precision. The root of a number with 24 bits differs by at least a share of
/// `2^-51` from any point where its rounding to 24 bits changes, and the error of libtorch's roots of doubles is below
/// `2^-52`.
fn root(values: &Tensor) -> Result<Tensor, Failure> {
    Ok(values.f_to_kind(Kind::Double)?.f_sqrt()?.f_to_kind(Kind::Float)?)
}
