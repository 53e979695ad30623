//! The values of a whole model, and the pieces of it that one rank holds.

use fsdp_core::engine::Engine;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::program::Program;
use fsdp_core::{Memory, Queue};
use fsdp_nn::Backend;
use fsdp_nn::model::Architecture;

use crate::error::TrainError;
use crate::oracle::Oracle;
use crate::shard_runs::{Kind, Run, runs};

/// All values of a model, indexed by parameter.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) params: Vec<Vec<f64>>,
    /// Sums of micro-batch gradients, unscaled; `None` for frozen parameters.
    pub(super) gradients: Vec<Option<Vec<f64>>>,
    pub(super) states: Vec<Vec<Vec<f64>>>,
}

impl Snapshot {
    pub(super) fn of_oracle<M: Backend, A: Architecture + Clone>(
        oracle: &Oracle<'_, M, A>,
        spec: &ModelSpec,
    ) -> Result<Self, TrainError> {
        let ids = || (0..spec.params.len()).map(ParamId);
        Ok(Self {
            params: ids().map(|id| oracle.param(id)).collect::<Result<_, _>>()?,
            gradients: ids().map(|id| oracle.gradient(id)).collect::<Result<_, _>>()?,
            states: ids().map(|id| oracle.state(id)).collect::<Result<_, _>>()?,
        })
    }
}

/// Contiguous values that one rank holds; for a gradient, the sum of micro-batch gradients even if ranks average them.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) kind: Kind,
    pub(super) param: ParamId,
    /// Index of the first value among all values of this kind that the parameter has.
    pub(super) first: usize,
    pub(super) values: Vec<f64>,
}

/// All values that one rank holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    pub(super) values: Vec<Held>,
}

impl Pieces {
    pub(super) fn of_rank<M: Memory, P: Program<M>>(engine: &Engine<M, P>) -> Result<Self, TrainError> {
        let ranks = engine.plan().step.averaged_ranks as f64;
        let read = |run: Run<'_, M::Buffer>| {
            let mut values = vec![0.0; run.slice.len];
            engine.memory().read_numbers(Queue::Compute, run.slice, &mut values)?;
            if run.kind == Kind::Gradient {
                values.iter_mut().for_each(|value| *value *= ranks);
            }
            Ok(Held { kind: run.kind, param: run.param, first: run.first, values })
        };
        Ok(Pieces { values: runs(engine).map(read).collect::<Result<_, TrainError>>()? })
    }
}
