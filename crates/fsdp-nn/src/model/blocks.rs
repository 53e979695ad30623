//! The state between the block calls of a micro-batch.
//!
//! It consists of the activation (forward) or the gradient (backward) that travels from block to block; the places of
//! blocks whose backward or second forward is still to come; and, under checkpointing, the input of each layer. It
//! holds no parameters.

use std::collections::BTreeMap;
use std::sync::Arc;

use fsdp_core::Error;
use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::{BlockCall, ForwardMode};

use super::architecture::Architecture;
use super::kinds::{Kinds, Shape};
use crate::error::ModelError;
use crate::graph::{BlockPlan, Request, Route, Runner, walk};

/// The blocks of a model, and the state between their calls.
pub(crate) struct Blocks<A, H> {
    pub(crate) architecture: A,
    pub(crate) spec: Arc<ModelSpec>,
    kinds: Vec<(Shape, Kinds)>,
    state: State<H>,
}

struct State<H> {
    /// The output of the previous block, and whether it has another reader.
    activation: Option<(H, bool)>,
    gradient: Option<H>,
    frames: BTreeMap<BlockId, Frame<H>>,
    /// Inputs of layers that will be recomputed.
    checkpoints: BTreeMap<usize, H>,
}

/// The values that a block keeps.
struct Frame<H> {
    plan: Arc<BlockPlan>,
    places: Vec<Option<H>>,
}

impl<H> Default for State<H> {
    fn default() -> Self {
        Self { activation: None, gradient: None, frames: BTreeMap::new(), checkpoints: BTreeMap::new() }
    }
}

impl<A: Architecture, H: Clone> Blocks<A, H> {
    pub(crate) fn new(architecture: A, spec: ModelSpec) -> Self {
        Self { architecture, spec: Arc::new(spec), kinds: Vec::new(), state: State::default() }
    }

    /// Drops the state; a new micro-batch begins.
    pub(crate) fn begin(&mut self) {
        self.state = State::default();
    }

    /// Executes a call of a block.
    pub(crate) fn call<R: Runner<Handle = H>>(
        &mut self,
        call: BlockCall,
        shape: Shape,
        runner: &mut R,
    ) -> Result<(), Error> {
        match call {
            BlockCall::Forward(block, mode) => self.forward(block, mode, shape, runner),
            BlockCall::ForwardBackward(block) => {
                self.state.gradient = self.last(block, Route::ForwardBackward, shape, runner)?;
                Ok(())
            }
            BlockCall::Evaluate(block) => self.last(block, Route::Loss, shape, runner).map(drop),
            BlockCall::Backward(block) => self.backward(block, runner),
        }
    }

    fn forward<R: Runner<Handle = H>>(
        &mut self,
        block: BlockId,
        mode: ForwardMode,
        shape: Shape,
        runner: &mut R,
    ) -> Result<(), Error> {
        if is_checkpointing(mode) && self.spec.block(block).layer.is_none() {
            return Err(self.error(block, ModelError::NotInLayer));
        }
        let (mut input, input_shared) = self.take_input(block, mode)?;
        let gradient = self.state.gradient.as_ref().filter(|_| mode == ForwardMode::Recompute).cloned();
        if let (Some(input), Some(gradient)) = (&mut input, &gradient) {
            runner.recompute(input, gradient);
        }
        let earlier = match mode {
            ForwardMode::Recompute => {
                Some(self.take_frame(block, true, "recomputation", "a forward to replay")?)
            }
            _ => None,
        };
        let products = match &earlier {
            Some(frame) => frame.plan.keeps_products,
            None => mode == ForwardMode::CheckpointProducts,
        };
        let route = match mode {
            ForwardMode::Record => Route::Record,
            ForwardMode::Evaluate => Route::Evaluate,
            ForwardMode::Checkpoint | ForwardMode::CheckpointProducts => Route::Checkpoint { products },
            ForwardMode::Recompute => Route::Recompute { products },
        };
        // The backward of the layers above has already used the output of a recomputed layer.
        let output_read = !self.ends_layer(block);
        let plan = self.plan(block, Request { route, input_shared, output_read }, shape)?;
        let mut places = vec![None; plan.places.len()];
        if let Some(place) = plan.input {
            places[place] = input;
        }
        if let Some(mut earlier) = earlier {
            for (value, place) in &plan.sources {
                let kept = earlier.plan.kept.iter().find(|(kept, _)| kept == value);
                places[*place] = kept.and_then(|(_, place)| earlier.places[*place].take());
                if let (Some(kept), Some(gradient)) = (&mut places[*place], &gradient) {
                    runner.recompute(kept, gradient);
                }
            }
        }
        walk(&plan.forward, &plan.places, &mut places, runner)?;
        let is_kept = |place: usize| plan.kept.iter().any(|(_, kept)| *kept == place);
        self.state.activation = plan.output.and_then(|place| {
            let output = if is_kept(place) { places[place].clone() } else { places[place].take() };
            Some((output?, plan.output_shared))
        });
        if plan.backward.is_some() || matches!(route, Route::Checkpoint { .. }) {
            self.state.frames.insert(block, Frame { plan, places });
        }
        Ok(())
    }

    /// Runs the last block; returns its result.
    pub(crate) fn last<R: Runner<Handle = H>>(
        &mut self,
        block: BlockId,
        route: Route,
        shape: Shape,
        runner: &mut R,
    ) -> Result<Option<H>, Error> {
        let (input, input_shared) = self.take_activation(block)?;
        let plan = self.plan(block, Request { route, input_shared, output_read: true }, shape)?;
        let mut places = vec![None; plan.places.len()];
        if let Some(place) = plan.input {
            places[place] = Some(input);
        }
        walk(&plan.forward, &plan.places, &mut places, runner)?;
        Ok(plan.output.and_then(|place| places[place].take()))
    }

    fn backward<R: Runner<Handle = H>>(&mut self, block: BlockId, runner: &mut R) -> Result<(), Error> {
        let Frame { plan, mut places } = self.take_frame(block, false, "backward", "a recorded forward")?;
        let gradient = self.state.gradient.take();
        let gradient = gradient
            .ok_or_else(|| self.out_of_order(block, "backward", "the gradient of the block above"))?;
        let Some(backward) = &plan.backward else { return Ok(()) };
        places[backward.from] = Some(gradient);
        walk(&backward.list, &plan.places, &mut places, runner)?;
        self.state.gradient = backward.to.and_then(|place| places[place].take());
        Ok(())
    }

    fn plan(&mut self, block: BlockId, request: Request, shape: Shape) -> Result<Arc<BlockPlan>, Error> {
        let index = match self.kinds.iter().position(|(other, _)| *other == shape) {
            Some(index) => index,
            None => {
                let kinds = Kinds::new(&self.architecture, &self.spec, shape)?;
                self.kinds.push((shape, kinds));
                self.kinds.len() - 1
            }
        };
        Ok(self.kinds[index].1.plan(block, request))
    }

    /// Takes the values that a block kept, for a second forward or for backward.
    fn take_frame(
        &mut self,
        block: BlockId,
        for_recomputation: bool,
        call: &'static str,
        missing: &'static str,
    ) -> Result<Frame<H>, Error> {
        let fits = self
            .state
            .frames
            .get(&block)
            .is_some_and(|frame| frame.plan.backward.is_none() == for_recomputation);
        let frame = if fits { self.state.frames.remove(&block) } else { None };
        frame.ok_or_else(|| self.out_of_order(block, call, missing))
    }

    fn take_activation(&mut self, block: BlockId) -> Result<(H, bool), Error> {
        let activation = self.state.activation.take();
        activation.ok_or_else(|| self.out_of_order(block, "forward", "the output of the previous block"))
    }

    /// Takes the input of a block's forward, and whether it has another reader; the first block has no input.
    fn take_input(&mut self, block: BlockId, mode: ForwardMode) -> Result<(Option<H>, bool), Error> {
        if block.0 == 0 {
            return Ok((None, false));
        }
        let layer = self.spec.block(block).layer;
        let is_first = self.spec.blocks[block.0 - 1].layer != layer;
        let Some(layer) = layer.filter(|_| is_first && is_checkpointing(mode)) else {
            return self.take_activation(block).map(|(input, shared)| (Some(input), shared));
        };
        if mode == ForwardMode::Recompute {
            let checkpoint = self.state.checkpoints.remove(&layer);
            let missing = || self.out_of_order(block, "recomputation", "the layer's checkpointed input");
            return checkpoint.ok_or_else(missing).map(|input| (Some(input), false));
        }
        let (input, _) = self.take_activation(block)?;
        self.state.checkpoints.insert(layer, input.clone());
        Ok((Some(input), true))
    }

    /// Whether a block is the last one of its layer.
    fn ends_layer(&self, block: BlockId) -> bool {
        let next = self.spec.blocks.get(block.0 + 1);
        next.is_none_or(|next| next.layer != self.spec.block(block).layer)
    }

    fn out_of_order(&self, block: BlockId, call: &'static str, missing: &'static str) -> Error {
        self.error(block, ModelError::OutOfOrder { call, missing })
    }

    fn error(&self, block: BlockId, source: ModelError) -> Error {
        Error::Program { block: self.spec.block(block).name.clone(), source: Box::new(source) }
    }
}

/// Whether a forward will be recomputed, or is a recomputation.
fn is_checkpointing(mode: ForwardMode) -> bool {
    matches!(mode, ForwardMode::Checkpoint | ForwardMode::CheckpointProducts | ForwardMode::Recompute)
}
