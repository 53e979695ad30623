//! Groups the blocks of a model into kinds: identical blocks share a graph and its plans.

use std::sync::Arc;

use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::{DType, Error};

use super::architecture::Architecture;
use crate::backend::HeadChunks;
use crate::cuts::Cuts;
use crate::error::ModelError;
use crate::graph::{BlockGraph, BlockPlan, Builder, HeadCall, Request, Tensor, Trained};
use crate::layer::Rope;
use crate::op::{HeadDims, LossTerms};

/// The shape and settings that graphs depend on, beside the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// Samples per micro-batch.
    pub(crate) samples: usize,
    /// Tokens per sample, or of one chunk of it.
    pub(crate) seq: usize,
    /// Total tokens of the text: more than `seq` if samples are cut into chunks, or keys of earlier tokens were cached.
    pub(crate) length: usize,
    /// The dtype of values.
    pub(crate) dtype: DType,
    /// The chunk size that the backend uses for logits.
    pub(crate) head_chunks: HeadChunks,
    /// The loss terms that training adds.
    pub(crate) terms: LossTerms,
    /// Whether dropout is active.
    pub(crate) training: bool,
    /// Whether samples pack several documents.
    pub(crate) packed: bool,
    /// How samples and experts are cut.
    pub(crate) cuts: Cuts,
}

/// A group of identical blocks.
#[derive(Clone, Debug)]
struct Kind {
    graph: BlockGraph,
    trained: Trained,
    head: Option<HeadCall>,
    plans: Vec<(Request, Arc<BlockPlan>)>,
}

/// All blocks of a model, by kind.
#[derive(Clone, Debug)]
pub(crate) struct Kinds {
    kinds: Vec<Kind>,
    of_block: Vec<usize>,
}

impl Kinds {
    /// Runs the model's code for every block.
    ///
    /// # Errors
    /// If operations do not fit each other, or a parameter does not belong to its block.
    pub(crate) fn new<A: Architecture>(
        architecture: &A,
        spec: &ModelSpec,
        shape: Shape,
    ) -> Result<Self, Error> {
        let mut kinds = Self { kinds: Vec::new(), of_block: Vec::new() };
        let first_trainable = spec.first_trainable_block();
        let last = spec.blocks.len() - 1;
        let description = architecture.description();
        let terms = description.router_terms(shape.terms);
        let mut width = 0;
        for block in (0..=last).map(BlockId) {
            let Shape { samples, seq, length, dtype, training, packed, .. } = shape;
            let mut builder =
                Builder::new((spec, block), description, (samples, seq, length), dtype, (training, packed))
                    .with_router_terms(terms)
                    .cut(shape.cuts);
            let input = (block.0 > 0).then(|| builder.rows(width));
            let output = match input {
                None => architecture.first(&mut builder)?,
                Some(x) if block.0 == last => architecture.last(&mut builder, x)?,
                Some(x) => architecture.middle(block, &mut builder, x)?,
            };
            width = output.width();
            let head =
                (block.0 == last).then(|| head(architecture, spec, shape, &builder, output)).transpose()?;
            let params = spec.block(block).params.iter().map(|id| spec.param(*id).trainable).collect();
            let trained = Trained { params, input: first_trainable.is_some_and(|first| first < block) };
            kinds.add(Kind { graph: builder.finish(input, output), trained, head, plans: Vec::new() });
        }
        Ok(kinds)
    }

    fn add(&mut self, kind: Kind) {
        let is_identical = |other: &Kind| {
            other.graph == kind.graph && other.trained == kind.trained && other.head == kind.head
        };
        let index = self.kinds.iter().position(is_identical).unwrap_or_else(|| {
            self.kinds.push(kind);
            self.kinds.len() - 1
        });
        self.of_block.push(index);
    }

    /// Number of kinds.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Returns the rotations of queries and keys, in block order.
    pub(crate) fn ropes(&self) -> Vec<Rope> {
        self.of_block.iter().flat_map(|&kind| self.kinds[kind].graph.ropes()).cloned().collect()
    }

    /// The graph of a block, and which parts of it are trained.
    pub(crate) fn graph(&self, block: BlockId) -> (&BlockGraph, &Trained) {
        let kind = &self.kinds[self.of_block[block.0]];
        (&kind.graph, &kind.trained)
    }

    /// The head after the last block.
    pub(crate) fn head(&self) -> HeadCall {
        let head = self.of_block.last().and_then(|&kind| self.kinds[kind].head);
        head.expect("the last block has a head")
    }

    /// Returns a plan for a block; it is made once per kind.
    pub(crate) fn plan(&mut self, block: BlockId, request: Request) -> Arc<BlockPlan> {
        let kind = &mut self.kinds[self.of_block[block.0]];
        if let Some((_, plan)) = kind.plans.iter().find(|(other, _)| *other == request) {
            return Arc::clone(plan);
        }
        let plan = Arc::new(BlockPlan::new(&kind.graph, &kind.trained, kind.head, request));
        kind.plans.push((request, Arc::clone(&plan)));
        plan
    }
}

fn head<A: Architecture>(
    architecture: &A,
    spec: &ModelSpec,
    shape: Shape,
    builder: &Builder<'_>,
    rows: Tensor,
) -> Result<HeadCall, Error> {
    let head = architecture.head();
    if rows.width() != head.hidden {
        let source = ModelError::Width { op: "head", expected: head.hidden, got: rows.width() };
        return Err(builder.error(source));
    }
    let params = &spec.block(builder.block()).params;
    let weight = params.iter().position(|&param| param == head.weight);
    let weight = weight.ok_or_else(|| Error::Parameter {
        block: spec.block(builder.block()).name.clone(),
        param: spec.param(head.weight).fqn.clone(),
        why: "is not in the block's list of parameters",
    })?;
    let (rows, vocab) = (shape.samples * shape.seq, head.vocab);
    let chunk_rows = shape.head_chunks.rows(rows, vocab);
    let dims =
        HeadDims { rows, hidden: head.hidden, vocab, chunk_rows, softcap: head.softcap, terms: shape.terms };
    let (trained, is_rounded) = (spec.param(head.weight).trainable, shape.head_chunks.round(shape.dtype));
    Ok(HeadCall { dims, weight, trained, is_rounded, routers: builder.router_terms() })
}
