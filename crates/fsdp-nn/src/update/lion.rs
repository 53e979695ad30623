//! Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, program 1): the sign of a running average
//! of the gradient, with decoupled weight decay, operation by operation as in the authors' `lion_pytorch.py`.

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

/// Lion. State: `exp_avg`.
#[derive(Clone, Debug)]
pub struct Lion {
    /// Weight of the running average: in the direction of a step, and in the new average.
    pub betas: (f64, f64),
    /// Learning rate scales and weight decay by parameter.
    pub groups: Groups,
}

impl Default for Lion {
    fn default() -> Self {
        Self { betas: (0.9, 0.99), groups: Groups::uniform(0.0) }
    }
}

/// The factors of one step of [`Lion`] for a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionFactors {
    /// Factor of the parameter: one minus its weight decay.
    pub keep: f64,
    /// Weights of the average and of the gradient in the direction.
    pub direction: [f64; 2],
    /// Weights of the average and of the gradient in the new average.
    pub average: [f64; 2],
    /// Factor of the sign; negative.
    pub step_size: f64,
}

vectorized! {
    fn step<A: Float>(
        f: LionFactors,
        scale: Scale<A>,
        gradient: &[A],
        params: &mut [A],
        averages: &mut [A],
    ) -> FiniteCheck<A> {
        let [keep, step_size] = [f.keep, f.step_size].map(A::of);
        let [[old, new], [kept, added]] = [f.direction, f.average].map(|weights| weights.map(A::of));
        let mut largest = FiniteCheck::none();
        for ((p, m), &g) in params.iter_mut().zip(averages).zip(gradient) {
            let g = scale.of(g);
            let direction = *m * old + new * g;
            let up = if direction > A::ZERO { step_size } else { A::ZERO };
            let down = if direction < A::ZERO { step_size } else { A::ZERO };
            *p = *p * keep + (up - down);
            *m = *m * kept + added * g;
            // The sign of a non-finite number is finite, so the average is checked too.
            largest.param(*p);
            largest.state(*m);
        }
        largest
    }
}

impl Lion {
    /// Returns the factors of a step for a parameter.
    pub fn factors(&self, param: ParamId, lr: f64) -> LionFactors {
        let GroupSettings { lr_scale, weight_decay, .. } = self.groups.of(param);
        let ((beta1, beta2), lr) = (self.betas, lr * lr_scale);
        LionFactors {
            keep: 1.0 - lr * weight_decay,
            direction: [beta1, 1.0 - beta1],
            average: [beta2, 1.0 - beta2],
            step_size: -lr,
        }
    }

    fn typed<A: Float>(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
    ) -> Result<(), Error> {
        let scale = Scale::<A>::new(scalars);
        each_block(memory, shard, |piece, gradient, params, [averages]| {
            step(self.factors(piece.param, scalars.lr), scale, gradient, params, averages)
        })
    }
}

impl RuleState for Lion {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        vec![StateTensor::elementwise("exp_avg", pieces, shard_len, dtype)]
    }
}

impl UpdateRule<HostMemory> for Lion {
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
