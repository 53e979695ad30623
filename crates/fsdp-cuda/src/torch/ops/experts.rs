//! Mixtures of experts. Where rows lie is worked out on the host, which waits for the routes.

use fsdp_core::memory::{Buffer, Slice};
use fsdp_nn::backend::{Operands, Write};
use fsdp_nn::op::{Experts, Places, Routing};
use tch::{Device, Kind, Tensor};

use super::int;
use super::linear::product;
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
            Experts::Route { routing, normalized } => {
                let ([logits], [weights, routes], _) = operands.split();
                self.aten_route(routing, normalized, logits, weights, routes)
            }
            Experts::RouteBackward { routing, normalized } => {
                let (reads, [dlogits], _) = operands.split();
                self.aten_route_backward(routing, normalized, reads, dlogits)
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
                let of = |slice, width| -> Result<Tensor, Failure> {
                    let all = self.view(slice, &[int(routing.slots()), int(width)])?;
                    Ok(all.f_narrow(0, int(slots.start), int(slots.len()))?)
                };
                product(&of(dy, outputs)?.f_tr()?, &of(x, inputs)?, target)
            }
        }
    }

    fn places(&self, routing: Routing, routes: In<'_, D>) -> Result<Places, Failure> {
        let routes = self.view(routes, &[int(routing.slots())])?;
        let routes = routes.f_to_device(Device::Cpu)?.f_to_kind(Kind::Int64)?;
        let routes: Vec<i64> = Vec::try_from(&routes)?;
        let routes: Vec<u32> = routes.into_iter().map(|expert| expert as u32).collect();
        Ok(routing.places(&routes))
    }

    /// Slots in the order of routes, in the type of arithmetic: rows x top x width.
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

    /// The weights of routes, in the type of arithmetic: rows x top x 1.
    fn route_weights(&self, routing: Routing, weights: In<'_, D>) -> Result<Tensor, Failure> {
        let kind = arithmetic(weights.buffer.dtype())?;
        Ok(self.view(weights, &[int(routing.rows), int(routing.top), 1])?.f_to_kind(kind)?)
    }

    fn put(&self, to: To<'_, D>, values: &Tensor) -> Result<(), Failure> {
        self.target(to, &values.size())?.put(values)
    }

    /// The probabilities of all experts, in the type of arithmetic.
    fn probabilities(&self, routing: Routing, logits: In<'_, D>) -> Result<Tensor, Failure> {
        let kind = arithmetic(logits.buffer.dtype())?;
        Ok(self.view(logits, &[int(routing.rows), int(routing.experts)])?.f_softmax(-1, kind)?)
    }

    fn aten_route(
        &self,
        routing: Routing,
        normalized: bool,
        logits: In<'_, D>,
        weights: To<'_, D>,
        routes: To<'_, D>,
    ) -> Result<(), Failure> {
        let probabilities = self.probabilities(routing, logits)?;
        let (sorted, order) = probabilities.f_sort_stable(true, -1, true)?;
        let (chosen, order) =
            (sorted.f_narrow(1, 0, int(routing.top))?, order.f_narrow(1, 0, int(routing.top))?);
        self.put(weights, &if normalized { shares(&chosen)? } else { chosen })?;
        self.put(routes, &order)
    }

    fn aten_route_backward(
        &self,
        routing: Routing,
        normalized: bool,
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
        self.put(dlogits, &others.f_scatter(1, &order, &gradient)?)
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

    /// The slots of each expert times its weight: forward, or by the other side backward.
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

/// What of a row's sum each number is.
fn shares(numbers: &Tensor) -> Result<Tensor, Failure> {
    Ok(numbers.f_div(&numbers.f_sum_dim_intlist(1_i64, true, None)?)?)
}

fn index(numbers: impl IntoIterator<Item = usize>, device: Device) -> Result<Tensor, Failure> {
    let numbers: Vec<i64> = numbers.into_iter().map(int).collect();
    Ok(Tensor::f_from_slice(&numbers)?.f_to_device(device)?)
}
