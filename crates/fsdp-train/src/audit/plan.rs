//! What a judgement needs of memory, before it starts.

use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamSpec};
use fsdp_nn::backend::HeadChunks;
use fsdp_nn::footprint::{RunShape, footprints};
use fsdp_nn::model::Architecture;
use fsdp_nn::model::unsharded::{Pass, calls};
use fsdp_nn::op::LossTerms;

use super::batch::MicroBatch;
use crate::error::TrainError;

/// Bytes that a judgement needs at most, about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditMemory {
    /// One gradient in `f32`; two where the balancing loss of routers is tried.
    pub gradients: u64,
    /// The parameters and the gradients of the largest block.
    pub block: u64,
    /// Inputs of layers, and activations of one layer.
    pub activations: u64,
}

impl AuditMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.gradients + self.block + self.activations
    }

    pub(super) fn of<A: Architecture + Clone>(
        architecture: &A,
        spec: &ModelSpec,
        terms: LossTerms,
        [dtype, param_dtype]: [DType; 2],
        batches: &[MicroBatch],
    ) -> Result<Self, TrainError> {
        let trained = |params: &mut dyn Iterator<Item = &ParamSpec>| -> usize {
            params.filter(|param| param.trainable).map(ParamSpec::len).sum()
        };
        let count = if terms.router_loss == 0.0 { 1 } else { 2 };
        let gradients = count * trained(&mut spec.params.iter()) * DType::F32.size_bytes();
        let block = |block: &fsdp_core::model::BlockSpec| {
            let params = || block.params.iter().map(|id| spec.param(*id));
            // Parameters are rounded to the dtype of the run first.
            let read = dtype.size_bytes() + param_dtype.size_bytes();
            params().map(ParamSpec::len).sum::<usize>() * read + trained(&mut params()) * dtype.size_bytes()
        };
        let block = spec.blocks.iter().map(block).max().unwrap_or(0);
        let calls = calls(spec, Pass::TrainRecomputing);
        let mut activations = 0;
        let largest = batches.iter().max_by_key(|batch| batch.ids.len()).expect("there are micro-batches");
        let shape = RunShape {
            samples: largest.ids.len() / largest.seq,
            seq: largest.seq,
            dtype,
            gradient_dtype: dtype.master(),
            head_chunks: HeadChunks::default(),
            terms,
            packed: largest.positions.is_some(),
        };
        let mut live = 0;
        for call in &footprints(architecture, spec, shape, &calls)?.calls {
            activations = activations.max(live + call.total_peak);
            live = call.after(live);
        }
        Ok(Self { gradients: gradients as u64, block: block as u64, activations: activations as u64 })
    }
}
