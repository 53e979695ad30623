//! The plan of a micro-batch: its calls, and the values that are live between them.
//!
//! These are the activation (forward) or the gradient (backward) that travels from block to block, what blocks keep for
//! backward or for a second forward, and, under checkpointing, the input of each layer. Parameters are not among them.

mod check;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::{BlockCall, ForwardMode, Pass, calls};

use super::architecture::Architecture;
use super::kinds::{Kinds, Shape};
use crate::error::ModelError;
use crate::graph::{BlockPlan, List, Request, Route, Runner, walk};

/// Index of a value that is live between calls.
pub(crate) type ValueId = usize;

/// A value that a call begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Input {
    /// Its place in the block's plan.
    pub(crate) place: usize,
    pub(crate) value: ValueId,
    /// Whether no later call reads it, so that it ends within this one.
    pub(crate) is_last: bool,
}

/// A call of a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedCall {
    pub(crate) call: BlockCall,
    pub(crate) plan: Arc<BlockPlan>,
    pub(crate) inputs: Vec<Input>,
    /// Values that were kept for this call, which does not read them.
    pub(crate) unread: Vec<ValueId>,
    /// For a second forward, the gradient that the backward after it begins with.
    pub(crate) recomputes_for: Option<ValueId>,
    /// The places of the values that the call computes and that are live after it.
    pub(crate) outputs: Vec<(usize, ValueId)>,
}

/// A planned micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MicroBatchPlan {
    pub(crate) calls: Vec<PlannedCall>,
    /// Number of values.
    pub(crate) values: usize,
}

impl PlannedCall {
    /// The operations of the call.
    pub(crate) fn list(&self) -> &List {
        match (&self.plan.backward, self.call) {
            (Some(backward), BlockCall::Backward(_)) => &backward.list,
            _ => &self.plan.forward,
        }
    }

    /// Executes the call.
    pub(crate) fn run<R: Runner>(
        &self,
        values: &mut [Option<R::Handle>],
        runner: &mut R,
    ) -> Result<(), Error> {
        self.unread.iter().for_each(|&value| values[value] = None);
        let mut places = vec![None; self.plan.places.len()];
        for &Input { place, value, is_last } in &self.inputs {
            // Backward, too, reads what is marked here.
            let gradient = self.recomputes_for.and_then(|gradient| values[gradient].clone());
            if let (Some(kept), Some(gradient)) = (&mut values[value], gradient) {
                runner.recompute(kept, &gradient);
            }
            places[place] = if is_last { values[value].take() } else { values[value].clone() };
        }
        walk(self.list(), &self.plan.places, &mut places, runner)?;
        for &(place, value) in &self.outputs {
            values[value] = places[place].take();
        }
        Ok(())
    }
}

impl MicroBatchPlan {
    /// Plans the calls of a pass.
    ///
    /// # Errors
    /// If operations of the model do not fit each other; [`ModelError::Plan`] if the plan is wrong, which is a bug in this
    /// project.
    pub(crate) fn new<A: Architecture>(
        architecture: &A,
        spec: &ModelSpec,
        shape: Shape,
        pass: Pass,
    ) -> Result<Self, Error> {
        let (plan, kinds) = Self::unchecked(Kinds::new(architecture, spec, shape)?, spec, pass);
        plan.check(&kinds, spec, pass).map_err(|(block, fault)| {
            let source = Box::new(ModelError::Plan { fault });
            Error::Program { block: spec.block(block).name.clone(), source }
        })?;
        let here = shape.cuts.samples.here;
        Ok(if here > 1 { plan.over_chunks(here) } else { plan })
    }

    /// Repeats all calls for `here` chunks.
    fn over_chunks(self, here: usize) -> Self {
        // Calls of identical blocks share a plan, also afterwards.
        let mut made: Vec<(Arc<BlockPlan>, Arc<BlockPlan>)> = Vec::new();
        let mut over = |plan: Arc<BlockPlan>| {
            let known = made.iter().find(|(of, _)| Arc::ptr_eq(of, &plan));
            known.map(|(_, over)| Arc::clone(over)).unwrap_or_else(|| {
                let all = Arc::new(plan.over_chunks(here));
                made.push((plan, Arc::clone(&all)));
                all
            })
        };
        let calls = self.calls.into_iter().map(|call| PlannedCall { plan: over(call.plan), ..call });
        Self { calls: calls.collect(), values: self.values }
    }

    fn unchecked(kinds: Kinds, spec: &ModelSpec, pass: Pass) -> (Self, Kinds) {
        let mut planner = Planner {
            spec,
            kinds,
            plan: Self::default(),
            activation: None,
            gradient: None,
            frames: BTreeMap::new(),
            checkpoints: BTreeMap::new(),
        };
        calls(spec, pass).into_iter().for_each(|call| planner.call(call));
        let Planner { mut plan, kinds, .. } = planner;
        plan.mark_last_reads();
        (plan, kinds)
    }

    fn mark_last_reads(&mut self) {
        let mut is_read = vec![false; self.values];
        for input in self.calls.iter_mut().rev().flat_map(|call| call.inputs.iter_mut().rev()) {
            input.is_last = !std::mem::replace(&mut is_read[input.value], true);
        }
    }
}

/// Plans calls one after the other.
struct Planner<'a> {
    spec: &'a ModelSpec,
    kinds: Kinds,
    plan: MicroBatchPlan,
    /// The output of the previous block, and whether it has another reader.
    activation: Option<(ValueId, bool)>,
    gradient: Option<ValueId>,
    frames: BTreeMap<BlockId, Frame>,
    /// Inputs of layers that will be recomputed.
    checkpoints: BTreeMap<usize, ValueId>,
}

/// What a block keeps: per value of its graph, the place and the value of the micro-batch.
struct Frame {
    plan: Arc<BlockPlan>,
    kept: Vec<(usize, usize, ValueId)>,
}

const ORDER: &str = "the calls of a pass come after those whose values they need";

impl Planner<'_> {
    fn call(&mut self, call: BlockCall) {
        match call {
            BlockCall::Forward(block, mode) => self.forward(block, mode),
            BlockCall::ForwardBackward(block) => self.last(block, call, Route::ForwardBackward),
            BlockCall::Evaluate(block) => self.last(block, call, Route::Loss),
            BlockCall::Backward(block) => self.backward(block),
        }
    }

    fn forward(&mut self, block: BlockId, mode: ForwardMode) {
        let (input, input_shared) = self.take_input(block, mode);
        let earlier = (mode == ForwardMode::Recompute).then(|| self.frames.remove(&block).expect(ORDER));
        let route = match (mode, &earlier) {
            (ForwardMode::Record, _) => Route::Record,
            (ForwardMode::Evaluate, _) => Route::Evaluate,
            (ForwardMode::Checkpoint, _) => Route::Checkpoint { products: false },
            (ForwardMode::CheckpointProducts, _) => Route::Checkpoint { products: true },
            (ForwardMode::Recompute, earlier) => {
                let products = earlier.as_ref().is_some_and(|frame| frame.plan.keeps_products);
                Route::Recompute { products }
            }
        };
        // The backward of the layers above has already used the output of a recomputed layer.
        let output_read = !self.ends_layer(block);
        let plan = self.kinds.plan(block, Request { route, input_shared, output_read });
        let mut inputs: Vec<(usize, ValueId)> = plan.input.zip(input).into_iter().collect();
        let mut unread = Vec::new();
        for (kept, _, value) in earlier.into_iter().flat_map(|frame| frame.kept) {
            match plan.sources.iter().find(|(source, _)| *source == kept) {
                Some(&(_, place)) => inputs.push((place, value)),
                None => unread.push(value),
            }
        }
        let mut outputs: Vec<usize> = plan.kept.iter().map(|(_, place)| *place).collect();
        outputs.extend(plan.output);
        let recomputes_for = self.gradient.filter(|_| mode == ForwardMode::Recompute);
        let live =
            self.push(BlockCall::Forward(block, mode), &plan, inputs, &outputs, recomputes_for, unread);
        self.activation = plan.output.map(|place| (live[&place], plan.output_shared));
        if plan.backward.is_some() || matches!(route, Route::Checkpoint { .. }) {
            let kept = plan.kept.iter().map(|&(value, place)| (value, place, live[&place])).collect();
            self.frames.insert(block, Frame { plan, kept });
        }
    }

    /// The last block, whose result is the gradient of its input, if any.
    fn last(&mut self, block: BlockId, call: BlockCall, route: Route) {
        let (input, input_shared) = self.activation.take().expect(ORDER);
        let plan = self.kinds.plan(block, Request { route, input_shared, output_read: true });
        let inputs = plan.input.map(|place| (place, input)).into_iter().collect();
        let outputs: Vec<usize> = plan.output.into_iter().collect();
        let live = self.push(call, &plan, inputs, &outputs, None, Vec::new());
        self.gradient = plan.output.map(|place| live[&place]);
    }

    fn backward(&mut self, block: BlockId) {
        let Frame { plan, kept } = self.frames.remove(&block).expect(ORDER);
        let gradient = self.gradient.take().expect(ORDER);
        let backward = plan.backward.as_ref().expect(ORDER);
        let mut inputs: Vec<(usize, ValueId)> =
            kept.iter().map(|&(_, place, value)| (place, value)).collect();
        inputs.push((backward.from, gradient));
        let outputs: Vec<usize> = backward.to.into_iter().collect();
        let live = self.push(BlockCall::Backward(block), &plan, inputs, &outputs, None, Vec::new());
        self.gradient = backward.to.map(|place| live[&place]);
    }

    /// Adds a call that leaves the contents of some places; returns their values. Contents that the call does not
    /// change remain the same value.
    fn push(
        &mut self,
        call: BlockCall,
        plan: &Arc<BlockPlan>,
        inputs: Vec<(usize, ValueId)>,
        leaves: &[usize],
        recomputes_for: Option<ValueId>,
        unread: Vec<ValueId>,
    ) -> BTreeMap<usize, ValueId> {
        let mut planned = PlannedCall {
            call,
            plan: Arc::clone(plan),
            inputs: inputs.iter().map(|&(place, value)| Input { place, value, is_last: false }).collect(),
            unread,
            recomputes_for,
            outputs: Vec::new(),
        };
        let is_written = |place: usize| planned.list().steps.iter().any(|step| step.call.writes_to(place));
        let unchanged = inputs.into_iter().filter(|(place, _)| leaves.contains(place) && !is_written(*place));
        let mut live: BTreeMap<usize, ValueId> = unchanged.collect();
        for &place in leaves {
            live.entry(place).or_insert_with(|| {
                planned.outputs.push((place, self.plan.values));
                self.plan.values += 1;
                self.plan.values - 1
            });
        }
        self.plan.calls.push(planned);
        live
    }

    /// Takes the input of a block's forward, and whether it has another reader; the first block has no input.
    fn take_input(&mut self, block: BlockId, mode: ForwardMode) -> (Option<ValueId>, bool) {
        if block.0 == 0 {
            return (None, false);
        }
        let layer = self.spec.block(block).layer;
        let is_first = self.spec.blocks[block.0 - 1].layer != layer;
        let Some(layer) = layer.filter(|_| is_first && is_checkpointing(mode)) else {
            let (input, is_shared) = self.activation.take().expect(ORDER);
            return (Some(input), is_shared);
        };
        if mode == ForwardMode::Recompute {
            return (Some(self.checkpoints.remove(&layer).expect(ORDER)), false);
        }
        let (input, _) = self.activation.take().expect(ORDER);
        self.checkpoints.insert(layer, input);
        (Some(input), true)
    }

    /// Whether a block is the last one of its layer.
    fn ends_layer(&self, block: BlockId) -> bool {
        let next = self.spec.blocks.get(block.0 + 1);
        next.is_none_or(|next| next.layer != self.spec.block(block).layer)
    }
}

/// Whether a forward will be recomputed, or is a recomputation.
fn is_checkpointing(mode: ForwardMode) -> bool {
    matches!(mode, ForwardMode::Checkpoint | ForwardMode::CheckpointProducts | ForwardMode::Recompute)
}
