//! Routers: which experts a row is sent to, and the loss that balances their loads.

use fsdp_core::memory::Buffer;
use fsdp_nn::backend::{BatchFacts, Operands};
use fsdp_nn::op::{Balance, Experts, Routing};
use tch::{Device, Kind, Tensor};

use super::{In, To};
use crate::torch::error::Failure;
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::ops::int;
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(super) fn routers(&self, op: &Experts, operands: Operands<'_, '_, D::Buffer>) -> Result<(), Failure> {
        let reads = operands.reads;
        match *op {
            Experts::Route { routing, normalized, .. } => {
                let facts = operands.batch;
                let ([logits], [weights, routes], mut load) = operands.split();
                let (probabilities, order) = self.aten_route(routing, normalized, logits, weights, routes)?;
                match load.next() {
                    None => Ok(()),
                    Some(load) => self.put(load, &expert_loads(routing, facts, &probabilities, &order)?),
                }
            }
            Experts::RouteBackward { routing, normalized, balance } => {
                let (facts, loads) = (operands.batch, reads.get(3).copied());
                let (reads, [dlogits], _) = operands.split();
                let slopes = match balance.zip(loads) {
                    None => None,
                    Some((balance, loads)) => Some(self.slopes(balance, facts, loads)?),
                };
                self.aten_route_backward((routing, normalized), (facts, slopes), reads, dlogits)
            }
            Experts::BalanceLoss { balance } => {
                let facts = operands.batch;
                let ([loads], [loss], _) = operands.split();
                let product = self.sums(balance, loads)?.f_prod_dim_int(0, false, None)?;
                let sum = product.f_sum_dim_intlist(0_i64, true, None)?;
                self.put(loss, &sum.f_mul_scalar(balance.slope(facts))?)
            }
            _ => unreachable!("the caller asks for routers only"),
        }
    }

    /// The probabilities of all experts, in the arithmetic type.
    fn probabilities(&self, routing: Routing, logits: In<'_, D>) -> Result<Tensor, Failure> {
        let kind = arithmetic(logits.buffer.dtype())?;
        Ok(self.view(logits, &[int(routing.rows), int(routing.experts)])?.f_softmax(-1, kind)?)
    }

    /// Routes and probabilities of each expert, summed over all mixtures: 2 x experts.
    fn sums(&self, balance: Balance, loads: In<'_, D>) -> Result<Tensor, Failure> {
        let loads = self.view(loads, &[int(balance.layers), 2, int(balance.experts)])?;
        Ok(loads.f_sum_dim_intlist(0_i64, false, None)?)
    }

    /// The derivatives of the balancing loss with respect to the probabilities of a counted row.
    fn slopes(&self, balance: Balance, facts: BatchFacts<'_>, loads: In<'_, D>) -> Result<Tensor, Failure> {
        Ok(self.sums(balance, loads)?.f_select(0, 0)?.f_mul_scalar(balance.slope(facts))?)
    }

    /// Computes weights and routes; returns all probabilities, and the chosen experts of each row.
    fn aten_route(
        &self,
        routing: Routing,
        normalized: bool,
        logits: In<'_, D>,
        weights: To<'_, D>,
        routes: To<'_, D>,
    ) -> Result<(Tensor, Tensor), Failure> {
        let probabilities = self.probabilities(routing, logits)?;
        let (sorted, order) = probabilities.f_sort_stable(true, -1, true)?;
        let (chosen, order) =
            (sorted.f_narrow(1, 0, int(routing.top))?, order.f_narrow(1, 0, int(routing.top))?);
        self.put(weights, &if normalized { shares(&chosen)? } else { chosen })?;
        self.put(routes, &order)?;
        Ok((probabilities, order))
    }

    fn aten_route_backward(
        &self,
        (routing, normalized): (Routing, bool),
        (facts, slopes): (BatchFacts<'_>, Option<Tensor>),
        [logits, routes, dweights]: [In<'_, D>; 3],
        dlogits: To<'_, D>,
    ) -> Result<(), Failure> {
        let probabilities = self.probabilities(routing, logits)?;
        let sizes = [int(routing.rows), int(routing.top)];
        let order = self.view(routes, &sizes)?.f_to_kind(Kind::Int64)?;
        let chosen = probabilities.f_gather(1, &order, false)?;
        let chosen = if normalized { shares(&chosen)? } else { chosen };
        let dweights = self.view(dweights, &sizes)?.f_to_kind(chosen.f_kind()?)?;
        let mean = chosen.f_mul(&dweights)?.f_sum_dim_intlist(1_i64, true, None)?;
        let gradient = chosen.f_mul(&dweights.f_sub(&mean)?)?;
        let others =
            if normalized { probabilities.f_zeros_like()? } else { probabilities.f_mul(&mean)?.f_neg()? };
        let mut gradients = others.f_scatter(1, &order, &gradient)?;
        if let Some(slopes) = slopes {
            let slopes = slopes.f_to_kind(probabilities.f_kind()?)?;
            let mean = probabilities.f_mul(&slopes)?.f_sum_dim_intlist(1_i64, true, None)?;
            let balance = probabilities.f_mul(&slopes.f_sub(&mean)?)?;
            gradients = gradients.f_add(&balance.f_mul(&row_mask(routing, facts, balance.device())?)?)?;
        }
        self.put(dlogits, &gradients)
    }
}

/// The load of each expert: the number of routes to it, and the sum of its probabilities, over all counted rows.
fn expert_loads(
    routing: Routing,
    facts: BatchFacts<'_>,
    probabilities: &Tensor,
    order: &Tensor,
) -> Result<Tensor, Failure> {
    let rows = row_mask(routing, facts, probabilities.device())?.f_to_kind(Kind::Double)?;
    let probabilities = probabilities.f_to_kind(Kind::Double)?;
    let routes = probabilities.f_zeros_like()?.f_scatter_value(1, order, 1.0)?;
    let both = Tensor::f_cat(&[routes, probabilities], 1)?;
    Ok(both.f_mul(&rows)?.f_sum_dim_intlist(0_i64, false, None)?)
}

/// 1 for each counted row, 0 for the others: rows x 1.
fn row_mask(routing: Routing, facts: BatchFacts<'_>, device: Device) -> Result<Tensor, Failure> {
    let rows: Vec<f32> = facts.counted(routing.rows).map(|counts| f32::from(u8::from(counts))).collect();
    Ok(Tensor::f_from_slice(&rows)?.f_view([-1, 1])?.f_to_device(device)?)
}

/// Each number's share of the sum of its row.
fn shares(numbers: &Tensor) -> Result<Tensor, Failure> {
    Ok(numbers.f_div(&numbers.f_sum_dim_intlist(1_i64, true, None)?)?)
}
