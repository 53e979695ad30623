//! Executes the graph of a block symbolically without a plan: every value has a place of its own that lasts.

use fsdp_core::model::{BlockId, ParamId};

use super::list::Draft;
use super::plan::Derived;
use super::symbolic::{Contents, Symbols};
use super::{BlockGraph, HeadCall, Route, Trained};
use crate::error::PlanFault;

/// A block and its parameters.
pub(crate) type Block<'a> = (BlockId, &'a [ParamId]);

impl BlockGraph {
    /// Computes all values from the output of the previous block.
    pub(crate) fn define(
        &self,
        symbols: &mut Symbols,
        block: Block<'_>,
        input: Option<Contents>,
    ) -> Result<Vec<Option<Contents>>, PlanFault> {
        let mut values = vec![Some(Contents::default()); self.values.len()];
        if let Some(id) = self.input {
            values[id] = input;
        }
        for node in &self.nodes {
            let (main, others) = node.calls.split_last().expect("a node has a call");
            for call in others {
                symbols.execute(call, block, &mut values)?;
            }
            if let (Some(input), Some(output)) = (node.update, main.writes[0].0.local()) {
                values[output] = values[input].clone();
            }
            symbols.execute(main, block, &mut values)?;
        }
        Ok(values)
    }

    /// The output among all values.
    pub(crate) fn output_of(&self, values: &[Option<Contents>]) -> Option<Contents> {
        values[self.output].clone()
    }

    /// Computes the gradients of parameters from that of the output; returns that of the input, if it has one. `None`
    /// if the output has none.
    pub(crate) fn define_backward(
        &self,
        trained: &Trained,
        symbols: &mut Symbols,
        block: Block<'_>,
        values: &[Option<Contents>],
        gradient: Option<Contents>,
    ) -> Result<Option<Contents>, PlanFault> {
        let Some(Derived { calls, places, from, to, .. }) = Derived::new(self, trained) else {
            return Ok(None);
        };
        let mut values = values.to_vec();
        values.resize(places.len(), Some(Contents::default()));
        values[from] = gradient;
        for call in &calls {
            symbols.execute(call, block, &mut values)?;
        }
        Ok(to.and_then(|to| values[to].take()))
    }

    /// Computes the loss from all values, and the gradient of the output, if the route has one.
    pub(crate) fn define_head(
        &self,
        head: HeadCall,
        route: Route,
        symbols: &mut Symbols,
        block: Block<'_>,
        values: &[Option<Contents>],
    ) -> Result<Option<Contents>, PlanFault> {
        let mut draft = Draft { places: self.values.clone(), calls: Vec::new() };
        let result = head.emit(&mut draft, self.output, route);
        let mut values = values.to_vec();
        values.resize(draft.places.len(), Some(Contents::default()));
        for call in &draft.calls {
            symbols.execute(call, block, &mut values)?;
        }
        Ok(result.and_then(|place| values[place].take()))
    }
}
