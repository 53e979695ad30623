//! The gradient of a step, computed without sharding, layer by layer.
//!
//! All micro-batches go through a block, or back through a layer, before the next one: so its parameters are read from the
//! checkpoint once for all of them and given up, activations of a layer are recomputed in backward, and the gradient of a
//! parameter is finished, visited and given up with the last block that uses it. What is held is the largest layer with its
//! gradient, and the inputs of layers of all micro-batches; never the model, nor a whole gradient.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::layout::SegmentId;
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice, SliceMut, View};
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_core::program::{BlockCall, ForwardMode, Gradients, Params, Pass, Program, calls};
use fsdp_core::schedule::{Checkpointing, Round};
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Memory, Queue};
use fsdp_nn::HostMemory;
use fsdp_nn::cuts::Cuts;
use fsdp_nn::model::unsharded::make;
use fsdp_nn::model::{Architecture, ModelProgram, ProgramOptions};
use fsdp_nn::op::LossTerms;

use super::batch::{Documents, MicroBatch};
use super::state::blocks;
use super::sums::Around;
use crate::error::TrainError;

type Buffer = <HostMemory as Memory>::Buffer;

/// The shares of a gradient of a tied parameter that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TiedShare {
    Both,
    Head,
    Embedding,
}

/// What is computed.
pub(super) struct Computation<'a, A> {
    pub(super) architecture: &'a A,
    pub(super) terms: LossTerms,
    /// Dtype of parameters and activations.
    pub(super) dtype: DType,
    /// Dtype to which parameters are rounded first.
    pub(super) param_dtype: DType,
    /// Micro-batches, with the weight of each in the sum.
    pub(super) batches: &'a [(MicroBatch, f64)],
    pub(super) documents: Documents,
    pub(super) hides_padding: bool,
    /// Seed of dropout masks.
    pub(super) seed: u64,
    pub(super) tied: TiedShare,
}

/// Receives rows of the finished gradient of a parameter, in their order.
pub(super) type Visit<'v> =
    dyn FnMut(&mut Around<'_>, ParamId, Range<usize>, &[f32]) -> Result<(), TrainError> + 'v;

/// Computes gradients of one model on the host.
pub(super) struct Sweep<'s, 'a> {
    pub(super) memory: &'s HostMemory,
    pub(super) stop: &'s AtomicBool,
    pub(super) around: &'s mut Around<'a>,
    /// Whether weights are those after the step.
    pub(super) is_after: bool,
}

/// A micro-batch on its way through the model.
struct Running<A: Architecture> {
    program: ModelProgram<HostMemory, A>,
    /// Its weight in the sum.
    weight: f64,
    /// Tokens of a row, and of all rows.
    shape: [usize; 2],
}

/// The sums over micro-batches of the gradients that are not finished.
type Totals = BTreeMap<ParamId, Vec<f32>>;

impl Sweep<'_, '_> {
    /// Computes the weighted sum of the gradients of all micro-batches, over all ranks; `visit` receives the gradient of a
    /// parameter as soon as it is finished.
    ///
    /// # Errors
    /// Errors of the model, of reading and of `visit`; [`TrainError::Stopped`].
    pub(super) fn gradient<A: Architecture + Clone>(
        &mut self,
        what: &Computation<'_, A>,
        visit: &mut Visit<'_>,
    ) -> Result<(), TrainError> {
        let spec = self.around.spec;
        let mut running = self.running(what)?;
        let calls = calls(spec, Pass::Train(Checkpointing::Full));
        let stages = stages(spec, &calls);
        let tied = tied(spec);
        let mut totals = Totals::new();
        // Freed storage is kept for buffers of the same size. That of sizes which do not come again soon is given back.
        let (mut lens, mut shape) = (Vec::new(), None);
        for (index, stage) in stages.iter().enumerate() {
            for &id in &stage.trained {
                totals.entry(id).or_insert_with(|| vec![0.0; spec.param(id).len()]);
            }
            let is_last = stage.calls.iter().any(|call| matches!(call, BlockCall::ForwardBackward(_)));
            let is_share = |id: &ParamId| match what.tied {
                TiedShare::Both => true,
                TiedShare::Head => !tied.contains(id) || is_last,
                TiedShare::Embedding => !tied.contains(id) || !is_last,
            };
            let of_stage = stage.params(spec).into_iter().map(|id| spec.param(id).len()).collect();
            if std::mem::replace(&mut lens, of_stage) != lens {
                self.memory.trim();
            }
            // A rank without micro-batches has only its part in the sums.
            let mut params = if running.is_empty() { Params::default() } else { self.params(stage, what)? };
            for running in &mut running {
                if shape.replace(running.shape).is_some_and(|last| last != running.shape) {
                    self.memory.trim();
                }
                let mut gradients = self.run(stage, &mut running.program, &mut params, what.dtype)?;
                for &id in &stage.trained {
                    let buffers = gradients.close(self.memory, UnitId(id.0))?.filter(|_| is_share(&id));
                    if let Some(buffers) = buffers {
                        self.add_to(
                            &buffers[0],
                            running.weight,
                            totals.get_mut(&id).expect("it was opened"),
                        )?;
                    }
                }
            }
            drop(params);
            let later = &stages[index + 1..];
            let is_done = |id: &ParamId| later.iter().all(|stage| stage.trained.binary_search(id).is_err());
            for &id in stage.trained.iter().filter(|id| is_done(id)) {
                let mut total = totals.remove(&id).expect("it was opened");
                let row_len = spec.param(id).row_len().unwrap_or(1);
                for rows in blocks(spec, id) {
                    let values = &mut total[rows.start * row_len..rows.end * row_len];
                    self.around.ranks.add_up(values)?;
                    visit(self.around, id, rows, values)?;
                }
            }
        }
        Ok(())
    }

    /// The micro-batches of this rank with a weight, each in a program of its own.
    fn running<A: Architecture + Clone>(
        &self,
        what: &Computation<'_, A>,
    ) -> Result<Vec<Running<A>>, TrainError> {
        let options =
            ProgramOptions { dtype: what.dtype, seed: what.seed, terms: what.terms, cuts: Cuts::WHOLE };
        let batches = what.batches.iter().filter(|(_, weight)| *weight != 0.0);
        let program = |(batch, weight): &(MicroBatch, f64)| {
            let shape = [batch.seq, batch.ids.len()];
            let (batch, facts) = batch.to_batch(what.documents, what.hides_padding);
            let mut program = ModelProgram::new(what.architecture.clone(), self.around.spec.clone(), options);
            program.set_row_facts(facts);
            program.set_batches(self.memory, 0, vec![batch])?;
            program.begin(self.memory, Round(0), Pass::Train(Checkpointing::Full))?;
            Ok(Running { program, weight: *weight, shape })
        };
        self.around.ranks.own(batches).map(program).collect()
    }

    /// Makes the calls of a stage for one micro-batch, and returns its gradients, each a unit of its own.
    fn run<A: Architecture + Clone>(
        &self,
        stage: &Stage<'_>,
        program: &mut ModelProgram<HostMemory, A>,
        params: &mut Params<Buffer>,
        dtype: DType,
    ) -> Result<Gradients<Buffer>, TrainError> {
        let mut gradients = Gradients::default();
        for &id in &stage.trained {
            let len = self.around.spec.param(id).len();
            let buffer = self.memory.allocate(Category::GradientSlot, dtype.master(), len)?;
            gradients.open(UnitId(id.0), vec![buffer], [(id, SegmentId(0), 0, len)]);
        }
        for call in stage.calls {
            if self.stop.load(Ordering::Relaxed) {
                return Err(TrainError::Stopped);
            }
            make(program, self.memory, *call, params, &mut gradients)?;
        }
        Ok(gradients)
    }

    /// The parameters of the blocks of a stage.
    fn params<A>(
        &mut self,
        stage: &Stage<'_>,
        what: &Computation<'_, A>,
    ) -> Result<Params<Buffer>, TrainError> {
        let (spec, is_after) = (self.around.spec, self.is_after);
        let state = if is_after { &mut self.around.after } else { &mut self.around.before };
        let mut params = Params::default();
        for id in stage.params(spec) {
            let (param, len) = (spec.param(id), spec.param(id).len());
            let [dtype, param_dtype] =
                [what.dtype, what.param_dtype].map(|dtype| param.gathered_dtype(dtype));
            let mut buffer = self.memory.allocate(Category::Unsharded, dtype, len)?;
            let mut offset = 0;
            for rows in blocks(spec, id) {
                let values = state.param(id, rows)?;
                let target = SliceMut::new(&mut buffer, offset, values.len());
                let mut rounded = self.memory.allocate(Category::Unsharded, param_dtype, values.len())?;
                self.memory.write(Queue::Compute, HostSlice::F64(&values), SliceMut::whole(&mut rounded))?;
                self.memory.copy(Queue::Compute, Slice::whole(&rounded), target)?;
                offset += values.len();
            }
            params.insert(id, View { buffer, offset: 0, len });
        }
        Ok(params)
    }

    fn add_to(&self, buffer: &Buffer, weight: f64, sum: &mut [f32]) -> Result<(), TrainError> {
        const BLOCK: usize = 1 << 16;
        let mut values = vec![0.0; BLOCK.min(sum.len())];
        for (index, sum) in sum.chunks_mut(BLOCK).enumerate() {
            let values = &mut values[..sum.len()];
            let part = Slice::new(buffer, index * BLOCK, sum.len());
            self.memory.read(Queue::Compute, part, HostSliceMut::F64(values))?;
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += (weight * *value) as f32);
        }
        Ok(())
    }
}

/// Calls that one micro-batch makes before the next one makes them: a block forward, or a layer backward, whose activations
/// are recomputed and given up at once.
pub(super) struct Stage<'c> {
    pub(super) calls: &'c [BlockCall],
    /// The parameters whose gradients are computed, in order.
    pub(super) trained: Vec<ParamId>,
}

impl Stage<'_> {
    /// The parameters that the calls read.
    pub(super) fn params(&self, spec: &ModelSpec) -> BTreeSet<ParamId> {
        self.calls.iter().flat_map(|call| &spec.block(call.block()).params).copied().collect()
    }
}

/// Divides the calls of a micro-batch.
pub(super) fn stages<'c>(spec: &ModelSpec, calls: &'c [BlockCall]) -> Vec<Stage<'c>> {
    let layer_backward = |call: BlockCall| match call {
        BlockCall::Forward(block, ForwardMode::Recompute) | BlockCall::Backward(block) => {
            spec.block(block).layer
        }
        _ => None,
    };
    let is_same = |left: &BlockCall, right: &BlockCall| {
        layer_backward(*left).is_some() && layer_backward(*left) == layer_backward(*right)
    };
    let trained = |calls: &[BlockCall]| {
        let backward = calls
            .iter()
            .filter(|call| matches!(call, BlockCall::Backward(_) | BlockCall::ForwardBackward(_)));
        let params: BTreeSet<ParamId> =
            backward.flat_map(|call| &spec.block(call.block()).params).copied().collect();
        params.into_iter().filter(|id| spec.param(*id).trainable).collect()
    };
    calls.chunk_by(is_same).map(|calls| Stage { calls, trained: trained(calls) }).collect()
}

/// The parameters that the last block shares with an earlier one.
pub(super) fn tied(spec: &ModelSpec) -> Vec<ParamId> {
    let (last, earlier) = spec.blocks.split_last().expect("a model has blocks");
    let is_tied =
        |id: &ParamId| spec.param(*id).trainable && earlier.iter().any(|block| block.params.contains(id));
    last.params.iter().copied().filter(is_tied).collect()
}

#[cfg(test)]
mod tests;
