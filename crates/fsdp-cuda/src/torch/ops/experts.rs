//! Mixtures of experts. The positions of rows are computed on the host, which waits for the routes once per operation.
//!
//! Slots that are unused may hold anything, so they are not read: a product with zero would leave what is not finite.

mod router_terms;
mod routers;

use std::ops::Range;

use fsdp_core::memory::{Buffer, Slice};
use fsdp_nn::backend::{Operands, Write};
use fsdp_nn::op::{ExpertDims, Experts, Orientation, Places, Routing};
use tch::{Device, Kind, Tensor};

use super::dequantize::decode;
use super::linear::product;
use super::size::int;
use crate::ffi::torch::View;
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
                self.aten_dispatch(routing, width, [x, routes], y)
            }
            Experts::DispatchBackward { routing, width } => {
                let ([dy, routes], [dx], _) = operands.split();
                self.aten_sum_slots(routing, width, (dy, routes, None), dx)
            }
            Experts::Combine { routing, width } => {
                let ([x, weights, routes], [y], _) = operands.split();
                self.aten_sum_slots(routing, width, (x, routes, Some(weights)), y)
            }
            Experts::CombineBackward { routing, width } => {
                let (reads, [dx, dweights], _) = operands.split();
                self.aten_combine_backward(routing, width, reads, dx, dweights)
            }
            Experts::Product { routing, dims } => {
                let ([x, routes], [y], mut decoded) = operands.split();
                let read = (x, routes, &reads[2..]);
                self.aten_expert_products(routing, dims, read, true, (y, decoded.next()))
            }
            Experts::ProductBackwardInput { routing, dims } => {
                let ([dy, routes], [dx], mut decoded) = operands.split();
                let read = (dy, routes, &reads[2..]);
                self.aten_expert_products(routing, dims, read, false, (dx, decoded.next()))
            }
            Experts::ProductBackwardWeight { routing, dims, source, expert } => {
                let ([x, dy, routes], [dweight], _) = operands.split();
                let slots = routing.slots_of(&self.routes(routing, routes)?, source, expert);
                self.aten_expert_gradient((routing, dims, slots), [x, dy], dweight)
            }
            Experts::AddBias { routing, width } => {
                let ([routes], [y], _) = operands.split();
                let places = routing.places(&self.routes(routing, routes)?);
                let y = self.view_mut(y.slice, &[int(routing.slots()), int(width)])?;
                for (expert, slots) in places.all_slots().filter(|(_, slots)| !slots.is_empty()) {
                    let bias = self.view(reads[1 + expert], &[1, int(width)])?;
                    narrow(&y, &slots)?.f_add_(&bias).done()?;
                }
                Ok(())
            }
            Experts::BiasBackward { routing, width, source, expert } => {
                let ([dy, routes], [dbias], _) = operands.split();
                let slots = routing.slots_of(&self.routes(routing, routes)?, source, expert);
                let kind = arithmetic(dy.buffer.dtype())?;
                let dy = narrow(&*self.slots(routing, width, dy)?, &slots)?;
                self.put(dbias, &dy.f_sum_dim_intlist(0_i64, false, kind)?)
            }
        }
    }

    /// The expert of every route, on the host.
    fn routes(&self, routing: Routing, routes: In<'_, D>) -> Result<Vec<u32>, Failure> {
        let routes = self.view(routes, &[int(routing.routes())])?;
        let routes = routes.f_to_device(Device::Cpu)?.f_to_kind(Kind::Int64)?;
        let routes: Vec<i64> = Vec::try_from(&routes)?;
        Ok(routes.into_iter().map(|expert| expert as u32).collect())
    }

    /// Values of slots: slots x width.
    fn slots<'a>(&self, routing: Routing, width: usize, x: In<'a, D>) -> Result<View<'a>, Failure> {
        self.view(x, &[int(routing.slots()), int(width)])
    }

    /// The weights of some routes, in the arithmetic type: routes x 1.
    fn route_weights(
        &self,
        routing: Routing,
        weights: In<'_, D>,
        routes: &Tensor,
    ) -> Result<Tensor, Failure> {
        let kind = arithmetic(weights.buffer.dtype())?;
        let weights = self.view(weights, &[int(routing.routes()), 1])?;
        Ok(weights.f_index_select(0, routes)?.f_to_kind(kind)?)
    }

    fn put(&self, to: To<'_, D>, values: &Tensor) -> Result<(), Failure> {
        self.target(to, &values.size())?.put(values)
    }

    fn aten_dispatch(
        &self,
        routing: Routing,
        width: usize,
        [x, routes]: [In<'_, D>; 2],
        y: To<'_, D>,
    ) -> Result<(), Failure> {
        let places = routing.places(&self.routes(routing, routes)?);
        let x = self.view(x, &[int(routing.all_rows()), int(width)])?;
        let y = self.view_mut(y.slice, &[int(routing.slots()), int(width)])?;
        for (slots, routes) in used(routing, &places, x.device())? {
            let rows = routes.f_floor_divide_scalar(int(routing.top))?;
            x.f_index_select_out(&narrow(&y, &slots)?, 0, &rows).done()?;
        }
        Ok(())
    }

    /// Sums the slots of every row, times the weights of their routes if there are any: over the experts of each chunk, then
    /// over chunks in the order of the tree.
    fn aten_sum_slots(
        &self,
        routing: Routing,
        width: usize,
        (x, routes, weights): (In<'_, D>, In<'_, D>, Option<In<'_, D>>),
        y: To<'_, D>,
    ) -> Result<(), Failure> {
        let kind = arithmetic(x.buffer.dtype())?;
        let x = self.slots(routing, width, x)?;
        let terms = Terms::of(routing, &self.routes(routing, routes)?, x.device())?;
        let mut values = x.f_index_select(0, &terms.slots)?.f_to_kind(kind)?;
        if let Some(weights) = weights {
            values = values.f_mul(&self.route_weights(routing, weights, &terms.routes)?)?;
        }
        let (rows, width) = (int(routing.all_rows()), int(width));
        if routing.chunks.count == 1 {
            let of_row = values.f_view([rows, int(routing.top), width])?;
            return self.put(y, &of_row.f_sum_dim_intlist(1_i64, false, None)?);
        }
        let ends = Some(&terms.ends);
        let sums = Tensor::f_segment_reduce(&values, "sum", None, None, ends, 0, true, 0.0)?;
        // As parts that come from other ranks, they have the dtype of results.
        let parts = sums.f_to_kind(x.f_kind()?)?;
        let sum = add_by_tree(parts, int(routing.chunks.here), rows * width)?;
        self.put(y, &sum.f_view([rows, width])?)
    }

    fn aten_combine_backward(
        &self,
        routing: Routing,
        width: usize,
        [x, weights, routes, dy]: [In<'_, D>; 4],
        dx: To<'_, D>,
        dweights: To<'_, D>,
    ) -> Result<(), Failure> {
        let kind = arithmetic(x.buffer.dtype())?;
        let places = routing.places(&self.routes(routing, routes)?);
        let x = self.slots(routing, width, x)?;
        let dy = self.view(dy, &[int(routing.all_rows()), int(width)])?;
        let dx = self.view_mut(dx.slice, &[int(routing.slots()), int(width)])?;
        let mut dots = Tensor::f_zeros([int(routing.routes())], (kind, x.device()))?;
        for (slots, routes) in used(routing, &places, x.device())? {
            let rows = routes.f_floor_divide_scalar(int(routing.top))?;
            let dy = dy.f_index_select(0, &rows)?.f_to_kind(kind)?;
            let products = narrow(&x, &slots)?.f_mul(&dy)?;
            dots.f_index_copy_(0, &routes, &products.f_sum_dim_intlist(-1_i64, false, None)?).done()?;
            let gradients = dy.f_mul(&self.route_weights(routing, weights, &routes)?)?;
            narrow(&dx, &slots)?.f_copy_(&gradients)?;
        }
        // Where experts are cut, those of other ranks add a zero: it makes a negative zero positive.
        let dots = if routing.chunks.count > 1 { dots.f_add_scalar(0.0)? } else { dots };
        self.put(dweights, &dots)
    }

    /// Multiplies the slots of each expert by its weight: forward, or for the gradient of the input. Packed weights are decoded
    /// one after the other.
    fn aten_expert_products(
        &self,
        routing: Routing,
        dims: ExpertDims,
        (x, routes, weights): (In<'_, D>, In<'_, D>, &[In<'_, D>]),
        is_forward: bool,
        (y, decoded): (To<'_, D>, Option<To<'_, D>>),
    ) -> Result<(), Failure> {
        let ExpertDims { inputs, outputs, orientation, .. } = dims;
        let decoded = decoded.map(|to| self.view_mut(to.slice, &[outputs, inputs].map(int))).transpose()?;
        let (from, to) = if is_forward { (inputs, outputs) } else { (outputs, inputs) };
        let places = routing.places(&self.routes(routing, routes)?);
        let x = self.slots(routing, from, x)?;
        let accumulate = y.accumulate;
        let y = self.view_mut(y.slice, &[int(routing.slots()), int(to)])?;
        for (expert, slots) in places.all_slots().filter(|(_, slots)| !slots.is_empty()) {
            let weight = match dims.packed().zip(decoded.as_ref()) {
                None => self.view(weights[expert], &stored(dims))?.shallow_clone(),
                Some((matrix, decoded)) => {
                    let bytes = [matrix.rows, matrix.stored().row_bytes].map(int);
                    decode(matrix, &*self.view(weights[expert], &bytes)?, decoded)?;
                    decoded.shallow_clone()
                }
            };
            let is_turned = is_forward == (orientation == Orientation::OutIn);
            let weight = if is_turned { weight.f_tr()? } else { weight };
            let (x, mut y) = (narrow(&x, &slots)?, narrow(&y, &slots)?);
            if accumulate {
                y.f_addmm_(&x, &weight).done()?;
            } else {
                x.f_mm_out(&y, &weight).done()?;
            }
        }
        Ok(())
    }

    /// The gradient of an expert's weight, from some slots.
    fn aten_expert_gradient(
        &self,
        (routing, dims, slots): (Routing, ExpertDims, Range<usize>),
        [x, dy]: [In<'_, D>; 2],
        dweight: To<'_, D>,
    ) -> Result<(), Failure> {
        let mut target = self.target(dweight, &stored(dims))?;
        if slots.is_empty() {
            if !target.accumulate {
                target.slot.f_zero_().done()?;
            }
            return Ok(());
        }
        let (x, dy) = (self.slots(routing, dims.inputs, x)?, self.slots(routing, dims.outputs, dy)?);
        let (x, dy) = (narrow(&x, &slots)?, narrow(&dy, &slots)?);
        match dims.orientation {
            Orientation::OutIn => product(&dy.f_tr()?, &x, target),
            Orientation::InOut => product(&x.f_tr()?, &dy, target),
        }
    }
}

/// The sizes of a weight as it is stored.
fn stored(dims: ExpertDims) -> [i64; 2] {
    match dims.orientation {
        Orientation::OutIn => [dims.outputs, dims.inputs].map(int),
        Orientation::InOut => [dims.inputs, dims.outputs].map(int),
    }
}

/// Adds parts, a power of two of them, in the order of the tree.
pub(super) fn add_by_tree(mut parts: Tensor, mut count: i64, len: i64) -> Result<Tensor, Failure> {
    while count > 1 {
        count /= 2;
        let pairs = parts.f_view([count, 2, len])?;
        parts = pairs.f_select(1, 0)?.f_add(&pairs.f_select(1, 1)?)?;
    }
    Ok(parts)
}

/// The slots that each source uses, with their routes; without sources that use none.
fn used(routing: Routing, places: &Places, device: Device) -> Result<Vec<(Range<usize>, Tensor)>, Failure> {
    let of_source = routing.rows * routing.slots_per_row();
    let routes: Vec<usize> = places.route_of_slot.iter().flatten().copied().collect();
    let routes = index(&routes, device)?;
    let (mut parts, mut first) = (Vec::new(), 0);
    for (source, slots) in places.route_of_slot.chunks(of_source).enumerate() {
        let len = slots.iter().flatten().count();
        if len > 0 {
            let slots = source * of_source..source * of_source + len;
            parts.push((slots, narrow(&routes, &(first..first + len))?));
        }
        first += len;
    }
    Ok(parts)
}

/// The terms of sums over the experts of a chunk, chunk by chunk and row by row, each sum in the order of its routes.
struct Terms {
    slots: Tensor,
    routes: Tensor,
    /// Where each sum ends; before them, a zero.
    ends: Tensor,
}

impl Terms {
    fn of(routing: Routing, routes: &[u32], device: Device) -> Result<Self, Failure> {
        let (chunks, places) = (routing.chunks, routing.places(routes));
        let each = routing.experts / chunks.count;
        let (mut slots, mut terms, mut ends) = (Vec::new(), Vec::new(), vec![0]);
        for chunk in chunks.first..chunks.first + chunks.here {
            for row in 0..routing.all_rows() {
                let of_row = row * routing.top..(row + 1) * routing.top;
                for route in of_row.filter(|&route| routes[route] as usize / each == chunk) {
                    slots.extend(places.slot_of_route[route]);
                    terms.push(route);
                }
                ends.push(terms.len());
            }
        }
        // In one transfer.
        let all = index(&[&slots[..], &terms, &ends].concat(), device)?;
        let at = [slots.len(), 2 * slots.len(), 2 * slots.len() + ends.len()];
        let [slots, routes, ends] = [0..at[0], at[0]..at[1], at[1]..at[2]].map(|part| narrow(&all, &part));
        Ok(Self { slots: slots?, routes: routes?, ends: ends? })
    }
}

/// Some rows of a tensor.
fn narrow(x: &Tensor, rows: &Range<usize>) -> Result<Tensor, Failure> {
    Ok(x.f_narrow(0, int(rows.start), int(rows.len()))?)
}

fn index(numbers: &[usize], device: Device) -> Result<Tensor, Failure> {
    let numbers: Vec<i64> = numbers.iter().copied().map(int).collect();
    Ok(Tensor::f_from_slice(&numbers)?.f_to_device(device)?)
}
