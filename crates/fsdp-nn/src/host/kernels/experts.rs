//! Kernels of mixtures of experts: routing, dispatch of rows, products per expert, weighted sums.

mod route;

use fsdp_core::Error;
use fsdp_core::memory::Slice;

use super::matmul::{Matrix, MatrixMut, matmul};
use crate::backend::Outcome;
use crate::host::HostMemory;
use crate::host::backend::Call;
use crate::host::buffer::HostBuffer;
use crate::host::element::{Element, Float};
use crate::host::floats::Target;
use crate::host::math::sum2;
use crate::host::raw::vectorized;
use crate::host::workers::{Workers, task_rows};
use crate::op::{Balance, Experts, Places, Routing};
use route::{Rows, route, route_backward};

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
                dispatch(workers, (&places, routing.top), width, x, y);
            }
            Experts::DispatchBackward { routing, width } => {
                let ([dy, routes], [dx], _) = operands.split();
                let (places, dy, add) =
                    (self.places(routing, routes)?, self.elements::<E>(dy)?, dx.accumulate);
                let one = |_| E::Acc::ONE;
                gather(workers, (&places, routing.top, width), dy, one, self.elements_mut(dx.slice)?, add);
            }
            Experts::Combine { routing, width } => {
                let ([x, weights, routes], [y], _) = operands.split();
                let (places, x) = (self.places(routing, routes)?, self.elements::<E>(x)?);
                let (weights, y) = (self.elements::<E>(weights)?, self.elements_mut(y.slice)?);
                gather(workers, (&places, routing.top, width), x, |route| weights[route].load(), y, false);
            }
            Experts::CombineBackward { routing, width } => {
                let ([x, weights, routes, dy], [dx, dweights], _) = operands.split();
                let (places, x) = (self.places(routing, routes)?, self.elements::<E>(x)?);
                let (weights, dy) = (self.elements::<E>(weights)?, self.elements(dy)?);
                let (dx, dweights) = (self.elements_mut(dx.slice)?, self.elements_mut(dweights.slice)?);
                combine_backward(workers, (&places, routing.top, width), x, weights, dy, dx, dweights);
            }
            Experts::Product { .. }
            | Experts::ProductBackwardInput { .. }
            | Experts::ProductBackwardWeight { .. } => self.expert_products::<E>(op, operands)?,
        }
        Ok(Outcome::Done)
    }

    fn routers<E: Element>(&self, op: &Experts, operands: Call<'_, '_>) -> Result<(), Error> {
        let workers = self.workers();
        match *op {
            Experts::Route { routing, normalized, load } => {
                let rows = load.map(|_| operands.batch.counted(routing.rows).collect::<Vec<bool>>());
                let ([logits], [weights, routes], mut load) = operands.split();
                let logits = self.elements::<E>(logits)?;
                let (weights, routes) = (self.elements_mut(weights.slice)?, self.elements_mut(routes.slice)?);
                let rows = Rows { routing, normalized, counted: rows.as_deref() };
                let found = route(workers, rows, logits, weights, routes);
                if let Some(load) = load.next() {
                    self.elements_mut::<f64>(load.slice)?.copy_from_slice(&found);
                }
            }
            Experts::RouteBackward { routing, normalized, balance } => {
                let counted = balance.map(|_| operands.batch.counted(routing.rows).collect::<Vec<bool>>());
                let (facts, loads) = (operands.batch, operands.reads.get(3).copied());
                let ([logits, routes, dweights], [dlogits], _) = operands.split();
                let slopes: Vec<E::Acc> = match balance.zip(loads) {
                    None => Vec::new(),
                    Some((balance, loads)) => {
                        let sums = balance.sums(self.elements(loads)?);
                        let slope = |count: &f64| E::Acc::of(balance.slope(facts) * count);
                        sums[..balance.experts].iter().map(slope).collect()
                    }
                };
                let (logits, routes) = (self.elements::<E>(logits)?, self.elements(routes)?);
                let (dweights, dlogits) = (self.elements(dweights)?, self.elements_mut(dlogits.slice)?);
                let rows = Rows { routing, normalized, counted: counted.as_deref() };
                route_backward(workers, rows, &slopes, (logits, routes, dweights), dlogits);
            }
            Experts::BalanceLoss { balance } => {
                let facts = operands.batch;
                let ([loads], [loss], _) = operands.split();
                let found = balance_loss(balance, self.elements(loads)?) * balance.scale(facts);
                self.elements_mut::<f64>(loss.slice)?[0] = found;
            }
            _ => unreachable!("the caller asks for routers only"),
        }
        Ok(())
    }

    fn expert_products<E: Element>(&self, op: &Experts, operands: Call<'_, '_>) -> Result<(), Error> {
        let (workers, reads) = (self.workers(), operands.reads);
        match *op {
            Experts::Product { routing, inputs, outputs } => {
                let ([x, routes], [y], _) = operands.split();
                let (places, weights) = (self.places(routing, routes)?, self.weights::<E>(&reads[2..])?);
                let (x, y) = (self.elements::<E>(x)?, self.elements_mut(y.slice)?);
                let weight = |weight| Matrix::new(weight, outputs, inputs, inputs).t();
                let weights = weights.into_iter().map(weight);
                products(workers, &places, weights, (x, inputs), (y, outputs), false);
            }
            Experts::ProductBackwardInput { routing, inputs, outputs } => {
                let ([dy, routes], [dx], _) = operands.split();
                let (places, weights) = (self.places(routing, routes)?, self.weights::<E>(&reads[2..])?);
                let (dy, add) = (self.elements::<E>(dy)?, dx.accumulate);
                let weights = weights.into_iter().map(|weight| Matrix::new(weight, outputs, inputs, inputs));
                let dx = self.elements_mut(dx.slice)?;
                products(workers, &places, weights, (dy, outputs), (dx, inputs), add);
            }
            Experts::ProductBackwardWeight { routing, inputs, outputs, expert } => {
                let ([x, dy, routes], [dweight], _) = operands.split();
                let slots = self.places(routing, routes)?.slots(expert);
                if slots.is_empty() {
                    // There is no product, but the gradient still has to be written.
                    let mut target = self.target(dweight)?;
                    target.put(0, &vec![E::Acc::ZERO; inputs * outputs]);
                    return Ok(());
                }
                let (x, dy) = (self.elements::<E>(x)?, self.elements::<E>(dy)?);
                let [x, dy] = [(x, inputs), (dy, outputs)]
                    .map(|(x, width)| Matrix::new(&x[slots.start * width..], slots.len(), width, width));
                matmul(workers, MatrixMut::dense(self.target(dweight)?, outputs, inputs), dy.t(), x);
            }
            _ => unreachable!("the caller asks for products only"),
        }
        Ok(())
    }

    fn places(&self, routing: Routing, routes: Slice<'_, HostBuffer>) -> Result<Places, Error> {
        Ok(routing.places(self.elements(routes)?))
    }

    fn weights<'a, E: Element>(&self, weights: &[Slice<'a, HostBuffer>]) -> Result<Vec<&'a [E]>, Error> {
        weights.iter().map(|weight| self.elements(*weight)).collect()
    }
}

/// Returns the sum over experts of routes times probabilities.
fn balance_loss(balance: Balance, loads: &[f64]) -> f64 {
    let sums = balance.sums(loads);
    let (routes, probabilities) = sums.split_at(balance.experts);
    routes.iter().zip(probabilities).map(|(routes, probability)| routes * probability).sum()
}

/// Multiplies each expert's slots of `x` by its matrix.
fn products<'a, E: Element>(
    workers: &Workers,
    places: &Places,
    weights: impl Iterator<Item = Matrix<'a, E>>,
    (x, inputs): (&[E], usize),
    (y, outputs): (&mut [E], usize),
    accumulate: bool,
) {
    for (expert, weight) in weights.enumerate() {
        let slots = places.slots(expert);
        if slots.is_empty() {
            continue;
        }
        let x = Matrix::new(&x[slots.start * inputs..slots.end * inputs], slots.len(), inputs, inputs);
        let data = E::floats_mut(&mut y[slots.start * outputs..slots.end * outputs]);
        let target = Target { data, accumulate };
        matmul(workers, MatrixMut::dense(target, slots.len(), outputs), x, weight);
    }
}

/// Copies the routed row to every slot.
fn dispatch<E: Element>(
    workers: &Workers,
    (places, top): (&Places, usize),
    width: usize,
    x: &[E],
    y: &mut [E],
) {
    let rows = task_rows(width);
    let tasks = y.chunks_mut(rows * width).zip(places.route_of_slot.chunks(rows));
    workers.each(tasks, |(y, routes)| {
        for (y, route) in y.chunks_exact_mut(width).zip(routes) {
            y.copy_from_slice(&x[route / top * width..][..width]);
        }
    });
}

/// Sums the slots of every row, each times a factor of its route.
fn gather<E: Element>(
    workers: &Workers,
    (places, top, width): (&Places, usize, usize),
    x: &[E],
    factor: impl Fn(usize) -> E::Acc + Sync + Send,
    y: &mut [E],
    accumulate: bool,
) {
    let rows = task_rows(width);
    workers.each(y.chunks_mut(rows * width).enumerate(), |(task, y)| {
        let mut sum = workers.scratch::<E::Acc>(width);
        for (row, y) in y.chunks_exact_mut(width).enumerate() {
            let row = task * rows + row;
            if accumulate {
                load_row(y, &mut sum)
            } else {
                sum.fill(E::Acc::ZERO)
            }
            for route in row * top..(row + 1) * top {
                add_row(factor(route), &x[places.slot_of_route[route] * width..][..width], &mut sum);
            }
            store_row(&sum, y);
        }
    });
}

/// Computes the gradients of slots, and of the weights of routes.
fn combine_backward<E: Element>(
    workers: &Workers,
    (places, top, width): (&Places, usize, usize),
    x: &[E],
    weights: &[E],
    dy: &[E],
    dx: &mut [E],
    dweights: &mut [E],
) {
    let rows = task_rows(width);
    let tasks = dx.chunks_mut(rows * width).zip(places.route_of_slot.chunks(rows));
    workers.each(tasks, |(dx, routes)| {
        for (dx, &route) in dx.chunks_exact_mut(width).zip(routes) {
            scaled_row(weights[route].load(), &dy[route / top * width..][..width], dx);
        }
    });
    workers.each(dweights.chunks_mut(rows).enumerate(), |(task, dweights)| {
        for (route, dweight) in dweights.iter_mut().enumerate() {
            let route = task * rows + route;
            let x = &x[places.slot_of_route[route] * width..][..width];
            let dy = &dy[route / top * width..][..width];
            *dweight = E::store(sum2(x, dy, |x, dy| x.load() * dy.load()));
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
