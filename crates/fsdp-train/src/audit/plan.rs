//! What a judgement needs of memory, before it starts.

use fsdp_core::DType;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::out_of_memory::Size;
use fsdp_core::program::{Pass, calls};
use fsdp_core::schedule::Checkpointing;
use fsdp_nn::backend::HeadChunks;
use fsdp_nn::cuts::Cuts;
use fsdp_nn::footprint::{RunShape, footprints};
use fsdp_nn::model::Architecture;
use fsdp_nn::op::LossTerms;

use super::batch::MicroBatch;
use super::ranks::dealt;
use super::sample::{Sample, WHOLE_SAMPLES};
use super::state::BLOCK_ELEMS;
use super::sweep::{Stage, stages, tied};
use crate::error::TrainError;
use crate::memory::Available;

/// Bytes that a judgement needs at most, about: at the moment that needs most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditMemory {
    /// The parameters of a layer, and its gradients where it computes them.
    pub layer: u64,
    /// Inputs of layers of all micro-batches, and activations of one layer.
    pub activations: u64,
    /// Samples of gradients, and what is read of checkpoints at a time.
    pub samples: u64,
    /// Of several steps that are done here: weights and moments in `f64` and a gradient in `f32`, each twice.
    pub states: u64,
}

/// Values of an element: its weight, and at most two moments.
const STATES: usize = 3;

impl AuditMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.layer + self.activations + self.samples + self.states
    }

    /// Refuses a step that the memory cannot hold which is left.
    ///
    /// # Errors
    /// [`TrainError::Input`] if it cannot.
    pub(super) fn expect(self, ranks: usize, available: Option<Available>) -> Result<(), TrainError> {
        let needed = (self.layer + self.activations + self.states).saturating_mul(ranks as u64);
        let Some(available) = available.filter(|available| needed > available.bytes) else { return Ok(()) };
        let [needed, layer, activations, states] =
            [needed, self.layer, self.activations, self.states].map(|bytes| Size(bytes as usize));
        Err(TrainError::Input(format!(
            "{ranks} rank(s) need {needed} of memory at once, but {available}: each {layer} for the largest layer and its \
             gradient, {activations} for activations and {states} for the states of several steps. Fewer or shorter \
             micro-batches need less for activations; fewer ranks on this machine need less in all, and so do more ranks on \
             other machines (`fsdp launch`, srun or torchrun), to which the micro-batches are dealt; a layer has to fit each \
             rank"
        )))
    }

    /// That of the rank of a world which needs most.
    pub(super) fn of<A: Architecture + Clone>(
        (architecture, spec): (&A, &ModelSpec),
        terms: LossTerms,
        dtype: DType,
        (batches, world): (&[MicroBatch], usize),
        are_several: bool,
    ) -> Result<Self, TrainError> {
        let calls = calls(spec, Pass::Train(Checkpointing::Full));
        let stages = stages(spec, &calls);
        // Held from its first use to its last one.
        let tied: usize = tied(spec).iter().map(|id| spec.param(*id).len() * size_of::<f32>()).sum();
        let elements: usize =
            spec.params.iter().filter(|param| param.trainable).map(|param| param.len()).sum();
        let element = STATES * size_of::<f64>() + size_of::<f32>();
        let states = if are_several { 2 * element * elements } else { 0 };
        let peak = |(stage, activations): (&Stage<'_>, usize)| {
            let layer = layer(spec, stage, dtype) + tied;
            Self {
                layer: layer as u64,
                activations: activations as u64,
                samples: samples(spec, batches.len()) as u64,
                states: states as u64,
            }
        };
        let mut peaks = Vec::new();
        for rank in 0..world.min(batches.len()) {
            let own = dealt(batches.iter(), rank, world);
            let activations = activations((architecture, spec, &stages), terms, dtype, own)?;
            peaks.extend(stages.iter().zip(activations).map(peak));
        }
        Ok(peaks.into_iter().max_by_key(Self::total).unwrap_or_default())
    }
}

/// Bytes of the parameters and gradients of a stage.
fn layer(spec: &ModelSpec, stage: &Stage<'_>, dtype: DType) -> usize {
    let elements = |ids: &mut dyn Iterator<Item = ParamId>| ids.map(|id| spec.param(id).len()).sum::<usize>();
    let trained = elements(&mut stage.trained.iter().copied());
    let gradients = trained * (dtype.master().size_bytes() + size_of::<f32>());
    elements(&mut stage.params(spec).into_iter()) * dtype.size_bytes() + gradients
}

/// Bytes of activations at the peak of each stage.
fn activations<'b, A: Architecture + Clone>(
    (architecture, spec, stages): (&A, &ModelSpec, &[Stage<'_>]),
    terms: LossTerms,
    dtype: DType,
    batches: impl Iterator<Item = &'b MicroBatch>,
) -> Result<Vec<usize>, TrainError> {
    let mut kept = vec![0; stages.len()];
    let mut within = vec![0; stages.len()];
    for batch in batches {
        let shape = RunShape {
            samples: batch.ids.len() / batch.seq,
            seq: batch.seq,
            dtype,
            gradient_dtype: dtype.master(),
            head_chunks: HeadChunks::default(),
            terms,
            packed: batch.positions.is_some(),
            cuts: Cuts::WHOLE,
        };
        let footprints = footprints(architecture, spec, shape, Pass::Train(Checkpointing::Full))?;
        let mut calls = footprints.calls.iter();
        let mut live = footprints.data_bytes;
        for (index, stage) in stages.iter().enumerate() {
            let (before, mut peak) = (live, live);
            for call in calls.by_ref().take(stage.calls.len()) {
                peak = peak.max(live + call.total_peak);
                live = call.after(live);
            }
            let both = before.max(live);
            kept[index] += both;
            within[index] = peak.saturating_sub(both).max(within[index]);
        }
    }
    Ok(kept.into_iter().zip(within).map(|(kept, within)| kept + within).collect())
}

/// Bytes of samples, of which micro-batches take some, and of the blocks of rows that are compared.
fn samples(spec: &ModelSpec, micro_batches: usize) -> usize {
    /// Moments before and after the step, parameters, and the gradient in passing, in `f64`.
    const BLOCKS: usize = 5;
    (2 + micro_batches.min(WHOLE_SAMPLES)) * Sample::bytes(spec) + BLOCKS * BLOCK_ELEMS * size_of::<f64>()
}

#[cfg(test)]
mod tests;
