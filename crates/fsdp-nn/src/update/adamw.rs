//! AdamW, computed like `torch.optim.AdamW`, operation by operation.

use fsdp_core::memory::Buffer;
use fsdp_core::model::ParamId;
use fsdp_core::update::{Piece, RuleState, SegmentShard, StateTensor, StepScalars, UpdateRule};
use fsdp_core::{DType, Error};

use super::elementwise::{HostScalars, Scale, each_block};
use super::finite_check::FiniteCheck;
use super::groups::{GroupSettings, Groups};
use crate::host::element::Float;
use crate::host::raw::vectorized;
use crate::host::{HostBuffer, HostMemory};

/// Adam with decoupled weight decay. State: `exp_avg` and `exp_avg_sq`.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// Decay rates of the running averages of the gradient and of its square.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Learning rate scales and weight decay by parameter.
    pub groups: Groups,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, groups: Groups::uniform(0.01) }
    }
}

/// The factors of one step of [`AdamW`] for a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWFactors {
    /// Factor of the parameter: one minus its weight decay.
    pub keep: f64,
    /// Weight of the gradient in its running average.
    pub weight: f64,
    /// Whether the average is interpolated from its end, as PyTorch does for weights of at least one half.
    pub by_end: bool,
    /// Factor of the running average of squares.
    pub beta2: f64,
    /// Weight of the squared gradient in it.
    pub square: f64,
    /// Divisor of the square root of that average.
    pub root_correction: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Factor of the quotient; negative.
    pub step_size: f64,
}

vectorized! {
    pub(super) fn step<A: Float>(
        f: AdamWFactors,
        scale: Scale<A>,
        gradient: &[A],
        params: &mut [A],
        mean: &mut [A],
        square: &mut [A],
    ) -> FiniteCheck<A> {
        let [keep, weight, beta2, square_weight] = [f.keep, f.weight, f.beta2, f.square].map(A::of);
        let [root_correction, eps, step_size] = [f.root_correction, f.eps, f.step_size].map(A::of);
        let rest = A::of(1.0) - weight;
        let mut largest = FiniteCheck::none();
        for (((p, m), v), &g) in params.iter_mut().zip(mean).zip(square).zip(gradient) {
            let g = scale.of(g);
            let average = if f.by_end { g - (g - *m) * rest } else { *m + weight * (g - *m) };
            let variance = *v * beta2 + square_weight * g * g;
            let denominator = variance.sqrt() / root_correction + eps;
            *p = *p * keep + step_size * average / denominator;
            *m = average;
            *v = variance;
            // A non-finite average makes the parameter non-finite; a non-finite variance may not.
            largest.param(*p);
            largest.state(variance);
        }
        largest
    }
}

impl AdamW {
    /// Returns the factors of a step of the run for a parameter.
    pub fn factors(&self, param: ParamId, step: u64, lr: f64) -> AdamWFactors {
        let group = self.groups.of(param);
        let GroupSettings { lr_scale, weight_decay, .. } = group;
        let ((beta1, beta2), step, lr) = (self.betas, group.own_step(step) as f64, lr * lr_scale);
        let (correction1, correction2) = (1.0 - beta1.powf(step), 1.0 - beta2.powf(step));
        let weight = 1.0 - beta1;
        AdamWFactors {
            keep: 1.0 - lr * weight_decay,
            weight,
            by_end: weight >= 0.5,
            beta2,
            square: 1.0 - beta2,
            root_correction: correction2.sqrt(),
            eps: self.eps,
            step_size: -(lr / correction1),
        }
    }

    fn typed<A: Float>(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
    ) -> Result<(), Error> {
        let scale = Scale::<A>::new(scalars);
        each_block(memory, shard, |piece, gradient, params, [mean, square]| {
            let factors = self.factors(piece.param, scalars.step, scalars.lr);
            step(factors, scale, gradient, params, mean, square)
        })
    }
}

impl RuleState for AdamW {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        ["exp_avg", "exp_avg_sq"].map(|name| StateTensor::elementwise(name, pieces, shard_len, dtype)).into()
    }
}

impl UpdateRule<HostMemory> for AdamW {
    fn update(
        &mut self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &StepScalars<'_, HostBuffer>,
        _statistics: &[HostBuffer],
    ) -> Result<(), Error> {
        let Some(scalars) = &HostScalars::read(memory, scalars)? else { return Ok(()) };
        match shard.params.dtype() {
            DType::F64 => self.typed::<f64>(memory, shard, scalars)?,
            _ => self.typed::<f32>(memory, shard, scalars)?,
        }
        shard.refresh(memory)
    }
}
