//! What the blocks of a model allocate, found by running them on a memory that only counts.
//!
//! Between calls live, as [`Category::Activation`]: the activation or gradient that travels from block to
//! block, what recordings keep, and checkpointed inputs of layers. A block's input belongs to whoever keeps
//! it, so a block gives up in backward what it *and the block before it* added in forward: only sums over a
//! whole micro-batch are zero. The data of a step (tokens, targets, losses) is allocated before the first
//! micro-batch and stays: see [`Footprints::data_bytes`].

use fsdp_core::memory::{Category, Memory, Usage};
use fsdp_core::model::ModelSpec;
use fsdp_core::program::{BlockFootprint, BlockFootprints, ForwardMode, Gradients, Params, Program};
use fsdp_core::{DType, Error};

use crate::backend::Backend;
use crate::model::unsharded::{Call, Pass, Whole, calls};
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
}

/// What a model allocates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprints {
    /// Per block.
    pub blocks: Vec<BlockFootprints>,
    /// Bytes of activations per micro-batch of the step that [`ModelProgram::set_batches`] keeps from step to
    /// step.
    pub data_bytes: usize,
}

/// Runs every call that a schedule may make of every block on a [`ShapeMemory`].
///
/// # Errors
/// Those of the model: a batch that it can not take, or operations that do not fit each other.
pub fn footprints<A: Architecture + Clone>(
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
) -> Result<Footprints, Error> {
    measure(&ShapeMemory::default(), ShapeMemory::reset_peaks, architecture, spec, shape)
}

/// [`footprints`] on any memory that can forget its peaks.
pub(crate) fn measure<M: Backend, A: Architecture + Clone>(
    memory: &M,
    reset_peaks: impl Fn(&M),
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
) -> Result<Footprints, Error> {
    let options = ProgramOptions { dtype: shape.dtype, seed: 0 };
    let mut program = ModelProgram::new(architecture.clone(), spec.clone(), options);
    let before = memory.usage().live(Category::Activation);
    program.set_batches(memory, 0, vec![batch(shape)])?;
    let data_bytes = memory.usage().live(Category::Activation) - before;
    let mut params = Whole::new(memory, spec, Category::Unsharded, shape.dtype)?.params();
    let gradients = Whole::new(memory, spec, Category::GradientSlot, shape.gradient_dtype)?;
    let mut gradients = gradients.into_gradients(spec);
    let mut blocks = vec![BlockFootprints::default(); spec.blocks.len()];
    for pass in [Pass::Train, Pass::TrainRecomputing, Pass::Evaluate] {
        program.begin(memory, 0)?;
        for call in calls(spec, pass) {
            reset_peaks(memory);
            let before = memory.usage();
            call.make(&mut program, memory, &mut params, &mut gradients)?;
            *entry(&mut blocks, call) = difference(before, memory.usage());
        }
    }
    Ok(Footprints { blocks, data_bytes })
}

fn batch(shape: RunShape) -> Batch {
    let rows = shape.samples * shape.seq;
    Batch { ids: vec![0; rows], targets: vec![0; rows], samples: vec![0; shape.samples], seq: shape.seq }
}

fn entry(blocks: &mut [BlockFootprints], call: Call) -> &mut BlockFootprint {
    let block = &mut blocks[call.block().0];
    match call {
        Call::Forward(_, ForwardMode::Record) => &mut block.record,
        Call::Forward(_, ForwardMode::Checkpoint) => &mut block.checkpoint,
        Call::Forward(_, ForwardMode::Recompute) => &mut block.recompute,
        Call::Forward(_, ForwardMode::Evaluate) | Call::Evaluate(_) => &mut block.evaluate,
        Call::Finish(_) | Call::Backward(_) => &mut block.backward,
    }
}

fn difference(before: Usage, after: Usage) -> BlockFootprint {
    let live = |usage: &Usage| usage.live(Category::Activation);
    let above = |category| after.peak(category) - before.live(category);
    BlockFootprint {
        activation_net: live(&after) as isize - live(&before) as isize,
        activation_peak: above(Category::Activation),
        workspace_peak: above(Category::Workspace),
        total_peak: after.total_peak_bytes - before.live_bytes.iter().sum::<usize>(),
    }
}
