//! Stochastic gradient descent, computed like `torch.optim.SGD`.

use fsdp_core::memory::Buffer;
use fsdp_core::update::{Piece, RuleState, SegmentShard, StateTensor, StepScalars, UpdateRule};
use fsdp_core::{DType, Error};

use super::elementwise::{HostScalars, Scale, each_block};
use super::finite_check::FiniteCheck;
use super::groups::{GroupSettings, Groups};
use crate::host::element::Float;
use crate::host::raw::vectorized;
use crate::host::{HostBuffer, HostMemory};

/// SGD with momentum and coupled weight decay. State: `momentum_buffer`, if there is momentum.
#[derive(Clone, Debug)]
pub struct Sgd {
    /// Momentum; 0 for none.
    pub momentum: f64,
    /// Dampening of the gradient in the momentum; not applied in step 1.
    pub dampening: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Learning rate scales and weight decay (added to the gradient) by parameter.
    pub groups: Groups,
}

impl Default for Sgd {
    fn default() -> Self {
        Self { momentum: 0.0, dampening: 0.0, nesterov: false, groups: Groups::uniform(0.0) }
    }
}

/// The factors of one step, in the master dtype.
#[derive(Clone, Copy)]
struct Factors<A> {
    scale: Scale<A>,
    decay: A,
    momentum: A,
    undamped: A,
    nesterov: bool,
    first: bool,
    lr: A,
}

vectorized! {
    fn plain_step<A: Float>(f: Factors<A>, gradient: &[A], params: &mut [A]) -> FiniteCheck<A> {
        let mut largest = FiniteCheck::none();
        for (p, &g) in params.iter_mut().zip(gradient) {
            *p += -f.lr * (f.scale.of(g) + f.decay * *p);
            largest.param(*p);
        }
        largest
    }
}

vectorized! {
    fn momentum_step<A: Float>(
        f: Factors<A>,
        gradient: &[A],
        params: &mut [A],
        momentum: &mut [A],
    ) -> FiniteCheck<A> {
        let mut largest = FiniteCheck::none();
        for ((p, buffer), &g) in params.iter_mut().zip(momentum).zip(gradient) {
            let g = f.scale.of(g) + f.decay * *p;
            let average = if f.first { g } else { *buffer * f.momentum + f.undamped * g };
            let direction = if f.nesterov { g + f.momentum * average } else { average };
            *buffer = average;
            *p += -f.lr * direction;
            // A non-finite momentum makes the parameter non-finite.
            largest.param(*p);
        }
        largest
    }
}

impl Sgd {
    fn factors<A: Float>(&self, piece: &Piece, scalars: &HostScalars) -> Factors<A> {
        let group = self.groups.of(piece.param);
        let GroupSettings { lr_scale, weight_decay, .. } = group;
        Factors {
            scale: Scale::new(scalars),
            decay: A::of(weight_decay),
            momentum: A::of(self.momentum),
            undamped: A::of(1.0 - self.dampening),
            nesterov: self.nesterov,
            first: group.own_step(scalars.step) == 1,
            lr: A::of(scalars.lr * lr_scale),
        }
    }

    fn typed<A: Float>(
        &self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &HostScalars,
    ) -> Result<(), Error> {
        if self.momentum == 0.0 {
            return each_block(memory, shard, |piece, gradient, params, []| {
                plain_step(self.factors::<A>(piece, scalars), gradient, params)
            });
        }
        each_block(memory, shard, |piece, gradient, params, [momentum]| {
            momentum_step(self.factors::<A>(piece, scalars), gradient, params, momentum)
        })
    }
}

impl RuleState for Sgd {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        if self.momentum == 0.0 {
            return Vec::new();
        }
        vec![StateTensor::elementwise("momentum_buffer", pieces, shard_len, dtype)]
    }
}

impl UpdateRule<HostMemory> for Sgd {
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
