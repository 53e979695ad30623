//! Memory footprints of a model's block calls: their plans are walked with an account instead of a device.
//!
//! Three things stay allocated between calls, as [`Category::Activation`]: the activation or gradient that travels
//! from block to block, the values that blocks keep, and checkpointed inputs of layers. A block's input is freed by
//! its last owner, so the memory that a call frees depends on the calls before it; footprints therefore cover all
//! calls of a micro-batch, in order. The data of a step (tokens, targets, losses) is allocated before the first
//! micro-batch and stays allocated: see [`Footprints::data_bytes`].

use std::sync::Arc;

use fsdp_core::memory::{Category, Usage};
use fsdp_core::model::ModelSpec;
use fsdp_core::program::{CallFootprint, Pass};
use fsdp_core::{DType, Error};

use crate::accounting::Account;
use crate::backend::HeadChunks;
use crate::cuts::Cuts;
use crate::graph::Counting;
use crate::model::{Architecture, MicroBatchPlan, Shape, router_bytes, token_bytes};
use crate::op::LossTerms;

/// The shape of a micro-batch and the dtypes that a program runs with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunShape {
    /// Samples per micro-batch.
    pub samples: usize,
    /// Tokens per sample.
    pub seq: usize,
    /// The dtype of unsharded parameters and activations.
    pub dtype: DType,
    /// The dtype of gradient slots.
    pub gradient_dtype: DType,
    /// The chunk size that the backend uses for logits.
    pub head_chunks: HeadChunks,
    /// The loss terms that training adds.
    pub terms: LossTerms,
    /// Whether samples pack several documents that do not attend to each other.
    pub packed: bool,
    /// How samples and experts are cut, and which chunks are on the rank.
    pub cuts: Cuts,
}

impl RunShape {
    /// Returns the shape of the graphs of a pass.
    pub(crate) fn of(&self, pass: Pass) -> Shape {
        let Self { samples, seq: length, dtype, head_chunks, terms, packed, cuts, .. } = *self;
        let (seq, training) = (length / cuts.samples.count, pass != Pass::Evaluate);
        Shape { samples, seq, length, dtype, head_chunks, terms, training, packed, cuts }
    }
}

/// The memory that the calls of a micro-batch allocate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprints {
    /// One footprint per call, in order.
    pub calls: Vec<CallFootprint>,
    /// Bytes of activations per micro-batch of the step that
    /// [`ModelProgram::set_batches`](crate::model::ModelProgram::set_batches) keeps from step to step.
    pub data_bytes: usize,
}

/// Computes the footprints of the calls of one micro-batch.
///
/// # Errors
/// If operations of the model do not fit each other.
pub fn footprints<A: Architecture>(
    architecture: &A,
    spec: &ModelSpec,
    shape: RunShape,
    pass: Pass,
) -> Result<Footprints, Error> {
    let account = Arc::<Account>::default();
    let plan = MicroBatchPlan::new(architecture, spec, shape.of(pass), pass)?;
    let (mut values, mut footprints) = (vec![None; plan.values], Vec::with_capacity(plan.calls.len()));
    for call in &plan.calls {
        account.reset_peaks();
        let before = account.usage();
        call.run(&mut values, &mut Counting(Arc::clone(&account)))?;
        footprints.push(difference(before, account.usage()));
    }
    let (rows, reads_positions) = shape.cuts.samples.rows(shape.samples * shape.seq, shape.packed);
    let tokens = rows * token_bytes(reads_positions, shape.terms.z_loss > 0.0);
    let routers = architecture.description().router_terms(shape.terms);
    let data_bytes = tokens + routers.map_or(0, |terms| router_bytes(terms, shape.cuts.samples));
    Ok(Footprints { calls: footprints, data_bytes })
}

pub(crate) fn difference(before: Usage, after: Usage) -> CallFootprint {
    let live = |usage: &Usage| usage.live(Category::Activation);
    let above = |category| after.peak(category) - before.live(category);
    CallFootprint {
        activation_net: live(&after) as isize - live(&before) as isize,
        activation_peak: above(Category::Activation),
        workspace_peak: above(Category::Workspace),
        total_peak: after.device.total_peak_bytes - before.device.live_bytes.iter().sum::<usize>(),
    }
}
