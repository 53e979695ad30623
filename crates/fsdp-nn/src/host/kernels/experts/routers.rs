//! Operations of routers: what they decide, and what they add to the loss.

use fsdp_core::Error;
use fsdp_core::memory::Slice;

use super::route::{Rows, Slopes, route, route_backward, sequence_sum, z_sum};
use crate::backend::BatchFacts;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::buffer::HostBuffer;
use crate::host::element::{Element, Float};
use crate::op::{Experts, Gating, RouterTerms, Routing};

impl HostMemory {
    pub(super) fn routers<E: Element>(&self, op: &Experts, operands: Call<'_, '_>) -> Result<(), Error> {
        match *op {
            Experts::Route { routing, gating, load } => self.route::<E>((routing, gating), load, operands),
            Experts::RouteBackward { routing, gating, terms } => {
                let (facts, loads) = (operands.batch, operands.reads.get(3).copied());
                let counted = terms.map(|_| counted(facts, routing));
                let ([logits, routes, dweights], [dlogits], _) = operands.split();
                let (logits, routes) = (self.elements::<E>(logits)?, self.elements(routes)?);
                let slopes = match terms {
                    None => Slopes::default(),
                    Some(terms) => self.slopes(terms, facts, (routing, routes), loads)?,
                };
                let (dweights, dlogits) = (self.elements(dweights)?, self.elements_mut(dlogits.slice)?);
                let rows = Rows { routing, gating, counted: counted.as_deref() };
                route_backward(self.workers(), rows, &slopes, (logits, routes, dweights), dlogits);
                Ok(())
            }
            Experts::BalanceLoss { terms } => {
                let facts = operands.batch;
                let ([loads], [loss], _) = operands.split();
                let found = balance_loss(terms, self.elements(loads)?) * terms.balance_scale(facts);
                self.elements_mut::<f64>(loss.slice)?[0] = found;
                Ok(())
            }
            _ => unreachable!("the caller asks for routers only"),
        }
    }

    fn route<E: Element>(
        &self,
        (routing, gating): (Routing, Gating),
        load: Option<RouterTerms>,
        operands: Call<'_, '_>,
    ) -> Result<(), Error> {
        let (workers, facts) = (self.workers(), operands.batch);
        let counted = load.map(|_| counted(facts, routing));
        let bias: &[E] = operands.reads.get(1).map_or(Ok(&[][..]), |bias| self.elements(*bias))?;
        let ([logits], [weights, routes], mut write) = operands.split();
        let logits = self.elements::<E>(logits)?;
        let (weights, routes) = (self.elements_mut(weights.slice)?, self.elements_mut(routes.slice)?);
        let rows = Rows { routing, gating, counted: counted.as_deref() };
        let found = route(workers, rows, (logits, bias), weights, routes);
        let Some((terms, write)) = load.zip(write.next()) else { return Ok(()) };
        let load = self.elements_mut::<f64>(write.slice)?;
        load[..2 * terms.experts].copy_from_slice(&found);
        if let (Some(at), Some(counted)) = (terms.z_loss_at(), rows.counted) {
            load[at] = z_sum(workers, counted, logits) * terms.z_scale(facts);
        }
        if let Some(at) = terms.sequence_at() {
            let sequences = terms.sequences(facts, routing);
            load[at] = sequence_sum(workers, rows, &sequences, (logits, routes));
        }
        Ok(())
    }

    /// The derivatives of the terms of the loss.
    fn slopes<A: Float>(
        &self,
        terms: RouterTerms,
        facts: BatchFacts<'_>,
        (routing, routes): (Routing, &[u32]),
        loads: Option<Slice<'_, HostBuffer>>,
    ) -> Result<Slopes<A>, Error> {
        let sums = loads.map(|loads| Ok::<_, Error>(terms.sums(self.elements(loads)?))).transpose()?;
        let balance =
            |expert: usize| sums.as_ref().map_or(0.0, |sums| terms.balance_slope(facts) * sums[expert]);
        let balance = (0..terms.experts).map(balance);
        let z = (terms.z_loss != 0.0).then(|| A::of(terms.z_slope(facts)));
        if terms.sequence == 0.0 {
            let probabilities = if sums.is_some() { balance.map(A::of).collect() } else { Vec::new() };
            return Ok(Slopes { probabilities, set_of_row: Vec::new(), z });
        }
        let sequences = terms.sequences(facts, routing);
        let (mut probabilities, mut set_of_row) = (Vec::new(), vec![0; routing.rows]);
        for (set, (rows, scale)) in sequences.into_iter().enumerate() {
            let mut slopes: Vec<f64> = balance.clone().collect();
            for &expert in &routes[rows.start * routing.top..rows.end * routing.top] {
                slopes[expert as usize] += scale * terms.loss_scale;
            }
            probabilities.extend(slopes.into_iter().map(A::of));
            set_of_row[rows].fill(set);
        }
        Ok(Slopes { probabilities, set_of_row, z })
    }
}

/// For each row, whether it counts.
fn counted(facts: BatchFacts<'_>, routing: Routing) -> Vec<bool> {
    facts.counted(routing.rows).collect()
}

/// Returns the sum over experts of routes times probabilities.
fn balance_loss(terms: RouterTerms, loads: &[f64]) -> f64 {
    let sums = terms.sums(loads);
    let (routes, probabilities) = sums.split_at(terms.experts);
    routes.iter().zip(probabilities).map(|(routes, probability)| routes * probability).sum()
}
