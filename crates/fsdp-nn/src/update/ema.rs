//! An exponential moving average of the parameters (Polyak and Juditsky 1992 for averages; with decay, Tarvainen and
//! Valpola 2017), computed like `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`.

use fsdp_core::memory::Buffer;
use fsdp_core::update::{Piece, RuleState, SegmentShard, StateTensor, StepScalars, UpdateRule};
use fsdp_core::{DType, Error};

use super::elementwise::{HostScalars, each_block};
use super::finite_check::FiniteCheck;
use crate::host::element::Float;
use crate::host::raw::vectorized;
use crate::host::{HostBuffer, HostMemory};

/// Averages the parameters that another rule has updated, without changing them. State: `ema`, initially the
/// parameters after step 1, then `ema + (1 - decay) (parameter - ema)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ema {
    /// Weight of the previous average in a step: at least 0 and below 1.
    pub decay: f64,
}

impl Ema {
    /// The name of the state tensor.
    pub const STATE: &'static str = "ema";

    /// Returns the weight of the parameters in the average of a step, counted from 1.
    pub fn weight(&self, step: u64) -> f64 {
        if step == 1 { 1.0 } else { 1.0 - self.decay }
    }

    fn typed<A: Float>(
        self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        step: u64,
    ) -> Result<(), Error> {
        let weight = self.weight(step);
        each_block(memory, shard, |_, _, params, [average]| follow(A::of(weight), params, average))
    }
}

vectorized! {
    /// Interpolates like PyTorch's `lerp`: from the end for weights of at least one half.
    fn follow<A: Float>(weight: A, params: &mut [A], average: &mut [A]) -> FiniteCheck<A> {
        let mut largest = FiniteCheck::none();
        let rest = A::ONE - weight;
        let by_end = weight >= A::of(0.5);
        for (average, &mut p) in average.iter_mut().zip(params) {
            let away = p - *average;
            *average = if by_end { p - away * rest } else { *average + weight * away };
            largest.state(*average);
        }
        largest
    }
}

impl RuleState for Ema {
    fn state(&self, pieces: &[Piece], shard_len: usize, dtype: DType) -> Vec<StateTensor> {
        vec![StateTensor::elementwise(Self::STATE, pieces, shard_len, dtype)]
    }
}

impl UpdateRule<HostMemory> for Ema {
    fn update(
        &mut self,
        memory: &HostMemory,
        shard: &mut SegmentShard<'_, HostBuffer>,
        scalars: &StepScalars<'_, HostBuffer>,
        _statistics: &[HostBuffer],
    ) -> Result<(), Error> {
        let Some(HostScalars { step, .. }) = HostScalars::read(memory, scalars)? else { return Ok(()) };
        match shard.params.dtype() {
            DType::F64 => self.typed::<f64>(memory, shard, step),
            _ => self.typed::<f32>(memory, shard, step),
        }
    }
}
