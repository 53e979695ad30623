//! What the calls of a model's blocks allocate, found by running them on a memory that only counts.
//!
//! Between calls live, as [`Category::Activation`]: the activation or gradient that travels from block to
//! block, what recordings keep, and checkpointed inputs of layers. A block's input belongs to whoever keeps
//! it, so what a call gives up depends on the calls before it: footprints are those of a whole micro-batch's
//! calls in order. The data of a step (tokens, targets, losses) is allocated before the first micro-batch and
//! stays: see [`Footprints::data_bytes`].

use fsdp_core::memory::{Category, Usage};
use fsdp_core::model::ModelSpec;
use fsdp_core::program::{CallFootprint, Program};
use fsdp_core::{DType, Error};

use crate::backend::{Backend, HeadChunks};
use crate::model::unsharded::{Call, Whole};
use crate::model::{Architecture, Batch, ModelProgram, ProgramOptions};
use crate::shape::ShapeMemory;

/// The shape of a micro-batch and the dtypes that a program is run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunShape {
    /// Samples of a micro-batch.
    pub samples: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// The dtype of unsharded parameters and values.
    pub dtype: DType,
    /// The dtype of gradient slots.
    pub gradient_dtype: DType,
    /// Which chunks of logits the backend of the run wants.
    pub head_chunks: HeadChunks,
}

/// What the calls of a micro-batch allocate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprints {
    /// Per call, in order.
    pub calls: Vec<CallFootprint>,
    /// Bytes of activations per micro-batch of the step that [`ModelProgram::set_batches`] keeps from step to
    /// step.
    pub data_bytes: usize,
}

/// Runs the calls of one micro-batch on a [`ShapeMemory`].
///
/// # Errors
/// Those of the model: a batch that it can not take, or operations that do not fit each other.
pub fn footprints<A: Architecture + Clone>(
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
    calls: &[Call],
) -> Result<Footprints, Error> {
    measure(&ShapeMemory::new(shape.head_chunks), ShapeMemory::reset_peaks, architecture, spec, shape, calls)
}

/// [`footprints`] on any memory that can forget its peaks.
pub(crate) fn measure<M: Backend, A: Architecture + Clone>(
    memory: &M,
    reset_peaks: impl Fn(&M),
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
    calls: &[Call],
) -> Result<Footprints, Error> {
    let options = ProgramOptions { dtype: shape.dtype, seed: 0 };
    let mut program = ModelProgram::new(architecture.clone(), spec.clone(), options);
    let before = memory.usage().live(Category::Activation);
    program.set_batches(memory, 0, vec![batch(shape)])?;
    let data_bytes = memory.usage().live(Category::Activation) - before;
    let mut params = Whole::new(memory, spec, Category::Unsharded, shape.dtype)?;
    params.zero(memory)?;
    let mut params = params.params();
    let gradients = Whole::new(memory, spec, Category::GradientSlot, shape.gradient_dtype)?;
    let mut gradients = gradients.into_gradients(spec);
    program.begin(memory, 0)?;
    let mut footprints = Vec::with_capacity(calls.len());
    for call in calls {
        reset_peaks(memory);
        let before = memory.usage();
        call.make(&mut program, memory, &mut params, &mut gradients)?;
        footprints.push(difference(before, memory.usage()));
    }
    Ok(Footprints { calls: footprints, data_bytes })
}

fn batch(shape: RunShape) -> Batch {
    let rows = shape.samples * shape.seq;
    Batch { ids: vec![0; rows], targets: vec![0; rows], samples: vec![0; shape.samples], seq: shape.seq }
}

fn difference(before: Usage, after: Usage) -> CallFootprint {
    let live = |usage: &Usage| usage.live(Category::Activation);
    let above = |category| after.peak(category) - before.live(category);
    CallFootprint {
        activation_net: live(&after) as isize - live(&before) as isize,
        activation_peak: above(Category::Activation),
        workspace_peak: above(Category::Workspace),
        total_peak: after.device.total_peak_bytes - before.device.live_bytes.iter().sum::<usize>(),
    }
}
