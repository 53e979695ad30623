//! Kernels of mixtures of experts: routing, dispatch of rows, products per expert, weighted sums.

mod route;
mod routers;

use fsdp_core::Error;
use fsdp_core::memory::Slice;

use super::dequantize::decode;
use super::linear::column_sums;
use super::matmul::{Matrix, MatrixMut, matmul};
use super::pointwise::accumulate;
use crate::backend::{Outcome, Write};
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::buffer::HostBuffer;
use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::math::sum2;
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::{ExpertDims, Experts, Orientation, Places, Routing};
use crate::quantized::Packed;

impl HostMemory {
    pub(in crate::host) fn experts<E: Element>(
        &self,
        op: &Experts,
        operands: Call<'_, '_>,
    ) -> Result<Outcome, Error> {
        let workers = self.workers();
        match *op {
            Experts::Route { .. } | Experts::RouteBackward { .. } | Experts::BalanceLoss { .. } => {
                self.routers::<E>(op, operands)?
            }
            Experts::Dispatch { routing, width } => {
                let ([x, routes], [y], _) = operands.split();
                let places = self.places(routing, routes)?;
                let (x, y) = (self.elements::<E>(x)?, self.elements_mut(y.slice)?);
                dispatch(workers, (&places, routing.top, width), x, y);
            }
            Experts::DispatchBackward { routing, width } => {
                let ([dy, routes], [dx], _) = operands.split();
                let (table, routes) = (self.places(routing, routes)?, self.elements(routes)?);
                let sums = Sums { routing, places: &table, routes, width };
                let (dy, add, one) = (self.elements::<E>(dy)?, dx.accumulate, |_| E::Acc::ONE);
                sums.gather(workers, dy, one, self.elements_mut(dx.slice)?, add);
            }
            Experts::Combine { routing, width } => {
                let ([x, weights, routes], [y], _) = operands.split();
                let (table, routes) = (self.places(routing, routes)?, self.elements(routes)?);
                let sums = Sums { routing, places: &table, routes, width };
                let (x, weights) = (self.elements::<E>(x)?, self.elements::<E>(weights)?);
                sums.gather(workers, x, |route| weights[route].load(), self.elements_mut(y.slice)?, false);
            }
            Experts::CombineBackward { routing, width } => {
                let ([x, weights, routes, dy], [dx, dweights], _) = operands.split();
                let (places, x) = (self.places(routing, routes)?, self.elements::<E>(x)?);
                let (weights, dy) = (self.elements::<E>(weights)?, self.elements(dy)?);
                let (dx, dweights) = (self.elements_mut(dx.slice)?, self.elements_mut(dweights.slice)?);
                combine_backward(workers, (&places, routing, width), x, weights, dy, dx, dweights);
            }
            Experts::Product { .. }
            | Experts::ProductBackwardInput { .. }
            | Experts::ProductBackwardWeight { .. } => self.expert_products::<E>(op, operands)?,
            Experts::AddBias { .. } | Experts::BiasBackward { .. } => {
                self.expert_biases::<E>(op, operands)?
            }
        }
        Ok(Outcome::Done)
    }

    fn expert_products<E: Element>(&self, op: &Experts, operands: Call<'_, '_>) -> Result<(), Error> {
        let (workers, reads) = (self.workers(), operands.reads);
        match *op {
            Experts::Product { routing, dims } => {
                let ([x, routes], [y], decoded) = operands.split();
                let mut weights = self.expert_weights::<E>(dims, &reads[2..], decoded)?;
                let (places, x, add) = (self.places(routing, routes)?, self.elements::<E>(x)?, y.accumulate);
                let y = (self.elements_mut(y.slice)?, dims.outputs, add);
                for_each_expert(&places, (x, dims.inputs), y, |expert, x, y| {
                    matmul(workers, y, x, weights.matrix(workers, expert));
                });
            }
            Experts::ProductBackwardInput { routing, dims } => {
                let ([dy, routes], [dx], decoded) = operands.split();
                let mut weights = self.expert_weights::<E>(dims, &reads[2..], decoded)?;
                let (places, dy, add) =
                    (self.places(routing, routes)?, self.elements::<E>(dy)?, dx.accumulate);
                let dx = (self.elements_mut(dx.slice)?, dims.inputs, add);
                for_each_expert(&places, (dy, dims.outputs), dx, |expert, dy, dx| {
                    matmul(workers, dx, dy, weights.matrix(workers, expert).t());
                });
            }
            Experts::ProductBackwardWeight { routing, dims, source, expert } => {
                let ExpertDims { inputs, outputs, orientation, .. } = dims;
                let ([x, dy, routes], [dweight], _) = operands.split();
                let slots = routing.slots_of(self.elements(routes)?, source, expert);
                if slots.is_empty() {
                    // There is no product, but the gradient still has to be written.
                    let mut target = self.target(dweight)?;
                    target.put(0, &vec![E::Acc::ZERO; inputs * outputs]);
                    return Ok(());
                }
                let (x, dy) = (self.elements::<E>(x)?, self.elements::<E>(dy)?);
                let [x, dy] = [(x, inputs), (dy, outputs)]
                    .map(|(x, width)| Matrix::new(&x[slots.start * width..], slots.len(), width, width));
                let target = self.target(dweight)?;
                match orientation {
                    Orientation::OutIn => {
                        matmul(workers, MatrixMut::dense(target, outputs, inputs), dy.t(), x)
                    }
                    Orientation::InOut => {
                        matmul(workers, MatrixMut::dense(target, inputs, outputs), x.t(), dy)
                    }
                }
            }
            _ => unreachable!("the caller asks for products only"),
        }
        Ok(())
    }

    fn expert_biases<E: Element>(&self, op: &Experts, operands: Call<'_, '_>) -> Result<(), Error> {
        let (workers, reads) = (self.workers(), operands.reads);
        match *op {
            Experts::AddBias { routing, width } => {
                let ([routes], [y], _) = operands.split();
                let (places, biases) = (self.places(routing, routes)?, self.weights::<E>(&reads[1..])?);
                let y = self.elements_mut::<E>(y.slice)?;
                for (expert, slots) in places.all_slots() {
                    let rows = y[slots.start * width..slots.end * width].chunks_mut(task_rows(width) * width);
                    workers.each(rows, |rows| {
                        rows.chunks_exact_mut(width).for_each(|row| accumulate(biases[expert], row));
                    });
                }
            }
            Experts::BiasBackward { routing, width, source, expert } => {
                let ([dy, routes], [dbias], _) = operands.split();
                let slots = routing.slots_of(self.elements(routes)?, source, expert);
                let (dy, mut target) = (self.elements::<E>(dy)?, self.target(dbias)?);
                match slots.is_empty() {
                    true => target.put(0, &vec![E::Acc::ZERO; width]),
                    false => {
                        column_sums(
                            workers,
                            [width, width],
                            &dy[slots.start * width..slots.end * width],
                            target,
                        );
                    }
                }
            }
            _ => unreachable!("the caller asks for biases only"),
        }
        Ok(())
    }

    fn places(&self, routing: Routing, routes: Slice<'_, HostBuffer>) -> Result<Places, Error> {
        Ok(routing.places(self.elements(routes)?))
    }

    fn weights<'a, E: Element>(&self, weights: &[Slice<'a, HostBuffer>]) -> Result<Vec<&'a [E]>, Error> {
        weights.iter().map(|weight| self.elements(*weight)).collect()
    }

    /// The weights of experts; packed ones are decoded into the last operand that is written.
    fn expert_weights<'a, E: Element>(
        &self,
        dims: ExpertDims,
        weights: &[Slice<'a, HostBuffer>],
        mut decoded: impl Iterator<Item = Write<'a, HostBuffer>>,
    ) -> Result<Weights<'a, E>, Error> {
        let Some((matrix, decoded)) = dims.packed().zip(decoded.next()) else {
            return Ok(Weights::Floats(dims, self.weights(weights)?));
        };
        let bytes = weights.iter().map(|weight| self.elements(*weight)).collect::<Result<_, _>>()?;
        Ok(Weights::Packed { matrix, bytes, decoded: self.elements_mut(decoded.slice)? })
    }
}

/// The weights of experts.
enum Weights<'a, E> {
    Floats(ExpertDims, Vec<&'a [E]>),
    /// Bytes, and room for one decoded weight.
    Packed {
        matrix: Packed,
        bytes: Vec<&'a [u8]>,
        decoded: &'a mut [E],
    },
}

impl<E: Element> Weights<'_, E> {
    /// The weight of an expert as `inputs x outputs`.
    fn matrix(&mut self, workers: &Workers, expert: usize) -> Matrix<'_, E> {
        match self {
            Weights::Floats(ExpertDims { inputs, outputs, orientation, .. }, weights) => match orientation {
                Orientation::OutIn => Matrix::new(weights[expert], *outputs, *inputs, *inputs).t(),
                Orientation::InOut => Matrix::new(weights[expert], *inputs, *outputs, *outputs),
            },
            Weights::Packed { matrix, bytes, decoded } => {
                decode(workers, *matrix, bytes[expert], decoded);
                Matrix::new(decoded, matrix.rows, matrix.columns, matrix.columns).t()
            }
        }
    }
}

/// Gives each expert its slots of `x` and `y`, source by source.
fn for_each_expert<E: Element>(
    places: &Places,
    (x, inputs): (&[E], usize),
    (y, outputs, accumulate): (&mut [E], usize, bool),
    mut product: impl FnMut(usize, Matrix<'_, E>, MatrixMut<'_>),
) {
    for (expert, slots) in places.all_slots().filter(|(_, slots)| !slots.is_empty()) {
        let x = Matrix::new(&x[slots.start * inputs..slots.end * inputs], slots.len(), inputs, inputs);
        let data = E::floats_mut(&mut y[slots.start * outputs..slots.end * outputs]);
        product(expert, x, MatrixMut::dense(Target { data, accumulate }, slots.len(), outputs));
    }
}

/// Copies the routed row to every slot that is in use.
fn dispatch<E: Element>(
    workers: &Workers,
    (places, top, width): (&Places, usize, usize),
    x: &[E],
    y: &mut [E],
) {
    let rows = task_rows(width);
    let tasks = y.chunks_mut(rows * width).zip(places.route_of_slot.chunks(rows));
    workers.each(tasks, |(y, routes)| {
        for (y, route) in y.chunks_exact_mut(width).zip(routes) {
            if let Some(route) = route {
                y.copy_from_slice(&x[route / top * width..][..width]);
            }
        }
    });
}

/// Sums over the slots of rows.
#[derive(Clone, Copy)]
struct Sums<'a> {
    routing: Routing,
    places: &'a Places,
    routes: &'a [u32],
    width: usize,
}

impl Sums<'_> {
    /// Sums the slots of every row, each times a factor of its route.
    fn gather<E: Element>(
        self,
        workers: &Workers,
        x: &[E],
        factor: impl Fn(usize) -> E::Acc + Sync + Send,
        y: &mut [E],
        accumulate: bool,
    ) {
        let (rows, width, top) = (task_rows(self.width), self.width, self.routing.top);
        let chunks = self.routing.chunks;
        let each = self.routing.experts / chunks.count;
        workers.each(y.chunks_mut(rows * width).enumerate(), |(task, y)| {
            let mut sum = workers.scratch::<E::Acc>(width);
            let mut parts =
                vec![E::store(E::Acc::ZERO); if chunks.count > 1 { chunks.here * width } else { 0 }];
            for (row, y) in y.chunks_exact_mut(width).enumerate() {
                let routes = (task * rows + row) * top..(task * rows + row + 1) * top;
                if chunks.count == 1 {
                    begin(y, accumulate, &mut sum);
                    routes.for_each(|route| self.add(route, factor(route), x, &mut sum));
                    store_row(&sum, y);
                    continue;
                }
                for (part, chunk) in parts.chunks_exact_mut(width).zip(chunks.first..) {
                    sum.fill(E::Acc::ZERO);
                    let in_chunk = |route: &usize| self.routes[*route] as usize / each == chunk;
                    routes
                        .clone()
                        .filter(in_chunk)
                        .for_each(|route| self.add(route, factor(route), x, &mut sum));
                    store_row(&sum, part);
                }
                add_parts(&mut parts, width);
                begin(y, accumulate, &mut sum);
                add_row(E::Acc::ONE, &parts[..width], &mut sum);
                store_row(&sum, y);
            }
        });
    }

    /// Adds the slot of a route.
    fn add<E: Element>(self, route: usize, factor: E::Acc, x: &[E], sum: &mut [E::Acc]) {
        let slot = self.places.slot_of_route[route].expect("the experts of these chunks are here");
        add_row(factor, &x[slot * self.width..][..self.width], sum);
    }
}

/// Begins a sum with the contents of a row, or with zero.
fn begin<E: Element>(row: &[E], accumulate: bool, sum: &mut [E::Acc]) {
    match accumulate {
        true => load_row(row, sum),
        false => sum.fill(E::Acc::ZERO),
    }
}

/// Adds rows, a power of two of them, in the order of the tree, as communicators do: every sum is rounded. The first
/// becomes the total.
pub(super) fn add_parts<E: Element>(parts: &mut [E], width: usize) {
    let count = parts.len() / width;
    let mut distance = 1;
    while distance < count {
        for pair in parts.chunks_exact_mut(2 * distance * width) {
            let (left, right) = pair.split_at_mut(distance * width);
            for (left, right) in left[..width].iter_mut().zip(&right[..width]) {
                *left = E::store(left.load() + right.load());
            }
        }
        distance *= 2;
    }
}

/// Computes the gradients of slots, and of the weights of routes.
fn combine_backward<E: Element>(
    workers: &Workers,
    (places, routing, width): (&Places, Routing, usize),
    x: &[E],
    weights: &[E],
    dy: &[E],
    dx: &mut [E],
    dweights: &mut [E],
) {
    let (rows, top) = (task_rows(width), routing.top);
    let tasks = dx.chunks_mut(rows * width).zip(places.route_of_slot.chunks(rows));
    workers.each(tasks, |(dx, routes)| {
        for (dx, &route) in dx.chunks_exact_mut(width).zip(routes) {
            if let Some(route) = route {
                scaled_row(weights[route].load(), &dy[route / top * width..][..width], dx);
            }
        }
    });
    // Where experts are cut, those of other chunks add a zero to what is stored: it makes a negative zero positive.
    let is_cut = routing.chunks.count > 1;
    workers.each(dweights.chunks_mut(rows).enumerate(), |(task, dweights)| {
        for (route, dweight) in dweights.iter_mut().enumerate() {
            let route = task * rows + route;
            let product = places.slot_of_route[route].map(|slot| {
                let (x, dy) = (&x[slot * width..][..width], &dy[route / top * width..][..width]);
                sum2(x, dy, |x, dy| x.load() * dy.load())
            });
            *dweight = E::store(product.unwrap_or(E::Acc::ZERO));
            if is_cut {
                *dweight = E::store(dweight.load() + E::Acc::ZERO);
            }
        }
    });
}

vectorized! {
    fn load_row<E: Element>(row: &[E], sum: &mut [E::Acc]) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum = value.load();
        }
    }
}

vectorized! {
    fn add_row<E: Element>(factor: E::Acc, row: &[E], sum: &mut [E::Acc]) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += value.load() * factor;
        }
    }
}

vectorized! {
    fn store_row<E: Element>(sum: &[E::Acc], row: &mut [E]) {
        for (value, &sum) in row.iter_mut().zip(sum) {
            *value = E::store(sum);
        }
    }
}

vectorized! {
    fn scaled_row<E: Element>(factor: E::Acc, from: &[E], row: &mut [E]) {
        for (value, from) in row.iter_mut().zip(from) {
            *value = E::store(from.load() * factor);
        }
    }
}
