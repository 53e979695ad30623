//! Mixtures of experts. The positions of rows are computed on the host, which waits for the routes.

use fsdp_core::memory::{Buffer, Slice};
use fsdp_nn::backend::{BatchFacts, Operands, Write};
use fsdp_nn::op::{Balance, Experts, Places, Routing};
use tch::{Device, Kind, Tensor};

use super::linear::product;
use super::size::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type To<'a, D> = Write<'a, <D as fsdp_core::Memory>::Buffer>;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn experts(
        &self,
        op: &Experts,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let reads = operands.reads;
        match *op {
            Experts::Route { .. } | Experts::RouteBackward { .. } | Experts::BalanceLoss { .. } => {
                self.routers(op, operands)
            }
            Experts::Dispatch { routing, width } => {
                let ([x, routes], [y], _) = operands.split();
                let x = self.view(x, &[int(routing.rows), int(width)])?;
                let routes = self.places(routing, routes)?.route_of_slot;
                let rows = index(routes.into_iter().map(|route| route / routing.top), x.device())?;
                self.put(y, &x.f_index_select(0, &rows)?)
            }
            Experts::DispatchBackward { routing, width } => {
                let ([dy, routes], [dx], _) = operands.split();
                let by_route = self.by_route(routing, width, dy, routes)?;
                self.put(dx, &by_route.f_sum_dim_intlist(1_i64, false, None)?)
            }
            Experts::Combine { routing, width } => {
                let ([x, weights, routes], [y], _) = operands.split();
                let weights = self.route_weights(routing, weights)?;
                let by_route = self.by_route(routing, width, x, routes)?.f_mul(&weights)?;
                self.put(y, &by_route.f_sum_dim_intlist(1_i64, false, None)?)
            }
            Experts::CombineBackward { routing, width } => {
                let (reads, [dx, dweights], _) = operands.split();
                self.aten_combine_backward(routing, width, reads, dx, dweights)
            }
            Experts::Product { routing, inputs, outputs } => {
                let ([x, routes], [y], _) = operands.split();
                self.aten_expert_products(routing, [inputs, outputs], (x, routes, &reads[2..]), true, y)
            }
            Experts::ProductBackwardInput { routing, inputs, outputs } => {
                let ([dy, routes], [dx], _) = operands.split();
                self.aten_expert_products(routing, [inputs, outputs], (dy, routes, &reads[2..]), false, dx)
            }
            Experts::ProductBackwardWeight { routing, inputs, outputs, expert } => {
                let ([x, dy, routes], [dweight], _) = operands.split();
                let slots = self.places(routing, routes)?.slots(expert);
                let mut target = self.target(dweight, &[int(outputs), int(inputs)])?;
                if slots.is_empty() {
                    if !target.accumulate {
                        target.slot.f_zero_().done()?;
                    }
                    return Ok(());
                }
                let expert_rows = |slice, width| -> Result<Tensor, Failure> {
                    let all = self.view(slice, &[int(routing.slots()), int(width)])?;
                    Ok(all.f_narrow(0, int(slots.start), int(slots.len()))?)
                };
                product(&expert_rows(dy, outputs)?.f_tr()?, &expert_rows(x, inputs)?, target)
            }
        }
    }

    fn routers(&self, op: &Experts, operands: Operands<'_, '_, D::Buffer>) -> Result<(), Failure> {
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

    fn places(&self, routing: Routing, routes: In<'_, D>) -> Result<Places, Failure> {
        let routes = self.view(routes, &[int(routing.slots())])?;
        let routes = routes.f_to_device(Device::Cpu)?.f_to_kind(Kind::Int64)?;
        let routes: Vec<i64> = Vec::try_from(&routes)?;
        let routes: Vec<u32> = routes.into_iter().map(|expert| expert as u32).collect();
        Ok(routing.places(&routes))
    }

    /// Slots in the order of routes, in the arithmetic type: rows x top x width.
    fn by_route(
        &self,
        routing: Routing,
        width: usize,
        x: In<'_, D>,
        routes: In<'_, D>,
    ) -> Result<Tensor, Failure> {
        let kind = arithmetic(x.buffer.dtype())?;
        let x = self.view(x, &[int(routing.slots()), int(width)])?;
        let slots = index(self.places(routing, routes)?.slot_of_route, x.device())?;
        let sizes = [routing.rows, routing.top, width].map(int);
        Ok(x.f_index_select(0, &slots)?.f_to_kind(kind)?.f_view(sizes)?)
    }

    /// The weights of routes, in the arithmetic type: rows x top x 1.
    fn route_weights(&self, routing: Routing, weights: In<'_, D>) -> Result<Tensor, Failure> {
        let kind = arithmetic(weights.buffer.dtype())?;
        Ok(self.view(weights, &[int(routing.rows), int(routing.top), 1])?.f_to_kind(kind)?)
    }

    fn put(&self, to: To<'_, D>, values: &Tensor) -> Result<(), Failure> {
        self.target(to, &values.size())?.put(values)
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

    fn aten_combine_backward(
        &self,
        routing: Routing,
        width: usize,
        [x, weights, routes, dy]: [In<'_, D>; 4],
        dx: To<'_, D>,
        dweights: To<'_, D>,
    ) -> Result<(), Failure> {
        let by_route = self.by_route(routing, width, x, routes)?;
        let dy = self.view(dy, &[int(routing.rows), 1, int(width)])?.f_to_kind(by_route.f_kind()?)?;
        let dots = by_route.f_mul(&dy)?.f_sum_dim_intlist(-1_i64, false, None)?;
        self.put(dweights, &dots)?;
        let sizes = [int(routing.slots()), int(width)];
        let gradients = dy.f_mul(&self.route_weights(routing, weights)?)?.f_view(sizes)?;
        let routes = index(self.places(routing, routes)?.route_of_slot, gradients.device())?;
        self.put(dx, &gradients.f_index_select(0, &routes)?)
    }

    /// Multiplies the slots of each expert by its weight: forward, or for the gradient of the input.
    fn aten_expert_products(
        &self,
        routing: Routing,
        [inputs, outputs]: [usize; 2],
        (x, routes, weights): (In<'_, D>, In<'_, D>, &[In<'_, D>]),
        is_forward: bool,
        y: To<'_, D>,
    ) -> Result<(), Failure> {
        let (from, to) = if is_forward { (inputs, outputs) } else { (outputs, inputs) };
        let places = self.places(routing, routes)?;
        let x = self.view(x, &[int(routing.slots()), int(from)])?;
        let accumulate = y.accumulate;
        let y = self.view_mut(y.slice, &[int(routing.slots()), int(to)])?;
        for (expert, weight) in weights.iter().enumerate() {
            let slots = places.slots(expert);
            if slots.is_empty() {
                continue;
            }
            let (start, len) = (int(slots.start), int(slots.len()));
            let weight = self.view(*weight, &[int(outputs), int(inputs)])?;
            let weight = if is_forward { weight.f_tr()? } else { weight.shallow_clone() };
            let (x, mut y) = (x.f_narrow(0, start, len)?, y.f_narrow(0, start, len)?);
            if accumulate {
                y.f_addmm_(&x, &weight).done()?;
            } else {
                x.f_mm_out(&y, &weight).done()?;
            }
        }
        Ok(())
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

fn index(numbers: impl IntoIterator<Item = usize>, device: Device) -> Result<Tensor, Failure> {
    let numbers: Vec<i64> = numbers.into_iter().map(int).collect();
    Ok(Tensor::f_from_slice(&numbers)?.f_to_device(device)?)
}
