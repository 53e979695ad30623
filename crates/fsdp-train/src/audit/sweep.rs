//! The gradient of a step, computed without sharding, layer by layer.
//!
//! Parameters are read from the checkpoint for each call of a block and given up after it, activations of a layer are
//! recomputed in backward, and the gradient of a parameter is added to the total when the last block that uses it is
//! done. So what is held is one gradient in `f32`, the largest block, and the inputs of layers.

use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_core::layout::SegmentId;
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice, SliceMut, View};
use fsdp_core::model::{BlockId, ModelSpec, ParamId};
use fsdp_core::program::{Gradients, Params, Program};
use fsdp_core::schedule::Round;
use fsdp_core::wrap::UnitId;
use fsdp_core::{DType, Memory, Queue};
use fsdp_nn::HostMemory;
use fsdp_nn::model::unsharded::{BlockCall, Pass, calls};
use fsdp_nn::model::{Architecture, ModelProgram, ProgramOptions};
use fsdp_nn::op::LossTerms;

use super::batch::{Documents, MicroBatch};
use super::state::{State, blocks};
use crate::error::TrainError;

type Buffer = <HostMemory as Memory>::Buffer;

/// A gradient: the values of each trained parameter, by its index; those of frozen ones are empty.
pub(super) type Gradient = Vec<Vec<f32>>;

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

/// Computes gradients of one model on the host.
pub(super) struct Sweep<'a> {
    pub(super) spec: &'a ModelSpec,
    pub(super) memory: &'a HostMemory,
    pub(super) stop: &'a AtomicBool,
}

impl Sweep<'_> {
    /// Computes the weighted sum of the gradients of all micro-batches.
    ///
    /// # Errors
    /// Errors of the model and of reading; [`TrainError::Stopped`].
    pub(super) fn gradient<A: Architecture + Clone>(
        &self,
        state: &mut State<'_>,
        what: &Computation<'_, A>,
    ) -> Result<Gradient, TrainError> {
        let len = |param: &fsdp_core::model::ParamSpec| if param.trainable { param.len() } else { 0 };
        let mut total: Gradient = self.spec.params.iter().map(|param| vec![0.0; len(param)]).collect();
        let options = ProgramOptions { dtype: what.dtype, seed: what.seed, terms: what.terms };
        let mut program = ModelProgram::new(what.architecture.clone(), self.spec.clone(), options);
        for (batch, weight) in what.batches.iter().filter(|(_, weight)| *weight != 0.0) {
            let (batch, facts) = batch.to_batch(what.documents, what.hides_padding);
            program.set_row_facts(facts);
            program.set_batches(self.memory, 0, vec![batch])?;
            self.add(&mut program, state, (what, *weight), &mut total)?;
        }
        Ok(total)
    }

    /// Adds the gradient of the program's micro-batch, times a weight.
    fn add<A: Architecture + Clone>(
        &self,
        program: &mut ModelProgram<HostMemory, A>,
        state: &mut State<'_>,
        (what, weight): (&Computation<'_, A>, f64),
        total: &mut Gradient,
    ) -> Result<(), TrainError> {
        let mut gradients = Gradients::default();
        let calls = calls(self.spec, Pass::TrainRecomputing);
        let tied = tied(self.spec);
        program.begin(self.memory, Round(0))?;
        for (index, call) in calls.iter().enumerate() {
            if self.stop.load(Ordering::Relaxed) {
                return Err(TrainError::Stopped);
            }
            let is_backward = matches!(call, BlockCall::Backward(_) | BlockCall::ForwardBackward(_));
            if is_backward {
                self.open(&mut gradients, call.block(), what.dtype)?;
            }
            let mut params = self.params(state, call.block(), what)?;
            call.make(program, self.memory, &mut params, &mut gradients)?;
            if !is_backward {
                continue;
            }
            let is_last = matches!(call, BlockCall::ForwardBackward(_));
            for &id in &self.spec.block(call.block()).params {
                let is_tied = tied.contains(&id);
                let is_share = match what.tied {
                    TiedShare::Both => true,
                    TiedShare::Head => !is_tied || is_last,
                    TiedShare::Embedding => !is_tied || !is_last,
                };
                let is_used_later = calls[index + 1..]
                    .iter()
                    .any(|call| matches!(call, BlockCall::Backward(block) if self.spec.block(*block).params.contains(&id)));
                if is_used_later && what.tied == TiedShare::Both {
                    continue;
                }
                if let Some(buffers) = gradients.close(self.memory, UnitId(id.0))?.filter(|_| is_share) {
                    self.add_to(&buffers[0], weight, &mut total[id.0])?;
                }
            }
        }
        Ok(())
    }

    /// The parameters of a block.
    fn params<A>(
        &self,
        state: &mut State<'_>,
        block: BlockId,
        what: &Computation<'_, A>,
    ) -> Result<Params<Buffer>, TrainError> {
        let mut params = Params::default();
        for &id in &self.spec.block(block).params {
            let len = self.spec.param(id).len();
            let mut rounded = self.memory.allocate(Category::Unsharded, what.param_dtype, len)?;
            let mut offset = 0;
            for rows in blocks(self.spec, id) {
                let values = state.param(id, rows)?;
                let target = SliceMut::new(&mut rounded, offset, values.len());
                self.memory.write(Queue::Compute, HostSlice::F64(&values), target)?;
                offset += values.len();
            }
            let buffer = if what.param_dtype == what.dtype {
                rounded
            } else {
                let mut wide = self.memory.allocate(Category::Unsharded, what.dtype, len)?;
                self.memory.copy(Queue::Compute, Slice::whole(&rounded), SliceMut::whole(&mut wide))?;
                wide
            };
            params.insert(id, View { buffer, offset: 0, len });
        }
        Ok(params)
    }

    /// Opens the gradients of a block that are not open yet, each as a unit of its own.
    fn open(
        &self,
        gradients: &mut Gradients<Buffer>,
        block: BlockId,
        dtype: DType,
    ) -> Result<(), TrainError> {
        for &id in &self.spec.block(block).params {
            let param = self.spec.param(id);
            if param.trainable && !gradients.wants(id) {
                let buffer = self.memory.allocate(Category::GradientSlot, dtype.master(), param.len())?;
                gradients.open(UnitId(id.0), vec![buffer], [(id, SegmentId(0), 0, param.len())]);
            }
        }
        Ok(())
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

/// The parameters that the last block shares with an earlier one.
pub(super) fn tied(spec: &ModelSpec) -> Vec<ParamId> {
    let (last, earlier) = spec.blocks.split_last().expect("a model has blocks");
    let is_tied =
        |id: &ParamId| spec.param(*id).trainable && earlier.iter().any(|block| block.params.contains(id));
    last.params.iter().copied().filter(is_tied).collect()
}
