//! Checks a plan: places are live when they are accessed, nothing is lost, and losses and gradients are those that the
//! graphs of blocks define.
//!
//! What they define is computed without a plan: every value of every block has a place of its own that lasts, nothing is
//! computed twice or in place, and backward is what the rules of operations derive. That, and the calls as they are
//! planned, are executed symbolically.

use fsdp_core::model::{BlockId, ModelSpec};
use fsdp_core::program::Pass;

use super::super::kinds::Kinds;
use super::{Input, MicroBatchPlan, PlannedCall};
use crate::error::PlanFault;
use crate::graph::{Contents, Redistribution, Route, Symbols};

impl MicroBatchPlan {
    /// Compares the plan with the graphs it was made from.
    ///
    /// # Errors
    /// The call with the fault; [`PlanFault::Left`] and [`PlanFault::Differs`] are found after the last one.
    pub(super) fn check(
        &self,
        kinds: &Kinds,
        spec: &ModelSpec,
        pass: Pass,
    ) -> Result<(), (BlockId, PlanFault)> {
        let mut symbols = Symbols::default();
        let mut values = vec![None; self.values];
        for call in &self.calls {
            let block = call.call.block();
            call.trace(&mut symbols, spec, &mut values).map_err(|fault| (block, fault))?;
        }
        let last = BlockId(spec.blocks.len() - 1);
        if values.iter().any(Option::is_some) {
            return Err((last, PlanFault::Left));
        }
        let found = std::mem::take(&mut symbols.tables);
        define(kinds, spec, pass, &mut symbols).map_err(|fault| (last, fault))?;
        let same = found.len() == symbols.tables.len()
            && found.iter().zip(&symbols.tables).all(|((table, contents), (expected, defined))| {
                table == expected && contents.terms() == defined.terms()
            });
        if same { Ok(()) } else { Err((last, PlanFault::Differs)) }
    }
}

impl PlannedCall {
    /// Executes the call symbolically, as [`PlannedCall::run`] does on a device.
    fn trace(
        &self,
        symbols: &mut Symbols,
        spec: &ModelSpec,
        values: &mut [Option<Contents>],
    ) -> Result<(), PlanFault> {
        for &value in &self.unread {
            values[value].take().ok_or(PlanFault::NotLive)?;
        }
        let mut places: Vec<Option<Contents>> = vec![None; self.plan.places.len()];
        for &Input { place, value, is_last } in &self.inputs {
            let contents = if is_last { values[value].take() } else { values[value].clone() };
            let before = places[place].replace(contents.ok_or(PlanFault::NotLive)?);
            expect_free(&before)?;
        }
        let block = self.call.block();
        let (list, of_block) = (self.list(), (block, spec.block(block).params.as_slice()));
        let end = |places: &mut [Option<Contents>], id: usize| places[id].take().ok_or(PlanFault::NotLive);
        for &id in &list.unread {
            end(&mut places, id)?;
        }
        let mut in_flight: Vec<Redistribution> = Vec::new();
        for step in &list.steps {
            for &id in &step.begins {
                expect_free(&places[id].replace(Contents::default()))?;
            }
            if in_flight.iter().any(|redistribution| redistribution.conflicts_with(&step.call)) {
                return Err(PlanFault::InFlight);
            }
            symbols.execute(&step.call, of_block, &mut places)?;
            in_flight.extend(step.call.redistribution());
            for &id in &step.arrivals {
                let arrived = in_flight.iter().position(|redistribution| redistribution.to == id);
                in_flight.swap_remove(arrived.ok_or(PlanFault::InFlight)?);
            }
            for &id in &step.ends {
                if in_flight
                    .iter()
                    .any(|redistribution| [redistribution.from, redistribution.to].contains(&id))
                {
                    return Err(PlanFault::InFlight);
                }
                end(&mut places, id)?;
            }
        }
        if !in_flight.is_empty() {
            return Err(PlanFault::InFlight);
        }
        for &(place, value) in &self.outputs {
            values[value] = Some(end(&mut places, place)?);
        }
        // Only values that others still read are also in places.
        for &Input { place, .. } in self.inputs.iter().filter(|input| !input.is_last) {
            places[place] = None;
        }
        if places.iter().any(Option::is_some) { Err(PlanFault::Left) } else { Ok(()) }
    }
}

fn expect_free(before: &Option<Contents>) -> Result<(), PlanFault> {
    if before.is_none() { Ok(()) } else { Err(PlanFault::Live) }
}

/// Executes the graphs of all blocks, and leaves losses and gradients in the tables of `symbols`.
fn define(kinds: &Kinds, spec: &ModelSpec, pass: Pass, symbols: &mut Symbols) -> Result<(), PlanFault> {
    let block = |index: usize| (BlockId(index), spec.blocks[index].params.as_slice());
    let last = spec.blocks.len() - 1;
    let (mut values, mut output) = (Vec::new(), None);
    for index in 0..=last {
        let (graph, _) = kinds.graph(BlockId(index));
        values.push(graph.define(symbols, block(index), output)?);
        output = graph.output_of(&values[index]);
    }
    let route = if pass == Pass::Evaluate { Route::Loss } else { Route::ForwardBackward };
    let head = kinds.head();
    let (graph, _) = kinds.graph(BlockId(last));
    let mut gradient = graph.define_head(head, route, symbols, block(last), &values[last])?;
    for index in (0..=last).rev() {
        if gradient.is_none() {
            break;
        }
        let (graph, trained) = kinds.graph(BlockId(index));
        gradient = graph.define_backward(trained, symbols, block(index), &values[index], gradient)?;
    }
    Ok(())
}
