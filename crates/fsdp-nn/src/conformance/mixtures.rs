//! Tests the operations on routed rows of mixtures whose experts are cut, in every dtype, each source and expert apart.
//!
//! The reference lists the terms of every number, from routes that are sorted. Unused slots have NaN before a call, and what
//! they have afterwards is not read.

use super::Subject;
use super::kit::{Kit, Operand, numbers};
use super::precision::{FLOATS, absolute_error, unit};
use super::routed::{Routed, cut};
use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::op::{ExpertDims, Experts, Op, Orientation};

/// With it, no single row has a route to the last chunk of experts.
const SEED: u64 = 13;
/// Number of columns of rows, and of the outputs of experts.
const WIDTHS: [usize; 2] = [9, 6];

/// Checks that operations on routed rows are within the bounds of their roundings where experts are cut, and do not read
/// unused slots.
///
/// # Panics
/// If one is not.
pub fn cut_mixtures_are_precise<M: Backend>(subject: &Subject<'_, M>) {
    // With few rows, a rank may have no routes to its experts of one source, or of any.
    assert!(Routed::new(cut(1)[2], SEED).route_of_slot.iter().all(Option::is_none));
    for (rows, seed) in [(1, SEED), (2, SEED + 1), (3, SEED + 2), (33, SEED)] {
        for (routing, dtype) in cut(rows).into_iter().flat_map(|routing| FLOATS.map(|dtype| (routing, dtype)))
        {
            for base in [None, Some(1.5)] {
                let kit = Kit { base, ..Kit::new((subject.memory)(), dtype) };
                let mixture = Mixture::new(&kit, Routed::new(routing, seed));
                mixture.rows();
                mixture.slots();
                mixture.products();
                mixture.weights();
            }
        }
    }
}

/// A mixture with inputs.
struct Mixture<'a, M> {
    kit: &'a Kit<M>,
    routed: Routed,
    /// Values of rows.
    x: Vec<f64>,
    /// Values of slots: inputs of experts, and outputs.
    inputs: Vec<f64>,
    outputs: Vec<f64>,
    /// Of every route.
    weights: Vec<f64>,
    /// The matrices of the experts.
    experts: Vec<Vec<f64>>,
}

impl<'a, M: Backend> Mixture<'a, M> {
    fn new(kit: &'a Kit<M>, routed: Routed) -> Self {
        let (routing, [width, outer]) = (routed.routing, WIDTHS);
        Self {
            kit,
            x: numbers(1, routing.all_rows() * width),
            inputs: numbers(2, routing.slots() * width),
            outputs: numbers(3, routing.slots() * outer),
            weights: numbers(4, routing.routes()),
            experts: routing.here().map(|expert| numbers(5 + expert as u64, width * outer)).collect(),
            routed,
        }
    }

    /// Runs an operation; returns what it has written.
    fn run(
        &self,
        op: Experts,
        reads: Vec<Operand<M::Buffer>>,
        mut writes: Vec<Operand<M::Buffer>>,
        adds: bool,
    ) -> Vec<Operand<M::Buffer>> {
        let reads: Vec<_> = reads.iter().map(Operand::read).collect();
        let accumulate = adds && self.kit.accumulates();
        let mut targets: Vec<_> =
            writes.iter_mut().map(|write| Write { slice: write.write(), accumulate }).collect();
        let operands = Operands { reads: &reads, writes: &mut targets, batch: BatchFacts::default() };
        self.kit.memory.run(&Op::Experts(op), operands).unwrap();
        writes
    }

    /// Compares numbers with the sums of their terms, of which each is rounded to the dtype of results so often.
    fn expect(&self, what: &str, got: &[f64], roundings: f64, terms: impl Fn(usize) -> Vec<f64>) {
        let dtype = self.kit.dtype;
        for (at, got) in got.iter().enumerate() {
            let terms = terms(at);
            let (sum, magnitude) =
                (terms.iter().sum::<f64>(), terms.iter().map(|term| term.abs()).sum::<f64>());
            // The reference rounds, too, which matters in double precision.
            let arithmetic = 2.0 * (terms.len() + 1) as f64 * unit(dtype.master());
            let bound = 1.02 * (arithmetic + roundings * unit(dtype)) * magnitude + absolute_error(dtype);
            assert!(
                (got - sum).abs() <= bound,
                "{what} {at}, {dtype} {:?}: {got} for {sum}, more than {bound}",
                self.routed.routing
            );
        }
    }

    /// What sums begin with that are added.
    fn base(&self) -> impl Iterator<Item = f64> {
        self.kit.base.into_iter()
    }

    /// The row of a route.
    fn row(&self, route: usize) -> usize {
        route / self.routed.routing.top
    }

    /// The slots in use, with their routes.
    fn used(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.routed.route_of_slot.iter().enumerate().filter_map(|(slot, route)| Some((slot, (*route)?)))
    }

    /// The number of an expert among those here.
    fn expert(&self, route: usize) -> usize {
        self.routed.routes[route] as usize - self.routed.routing.here().start
    }

    /// Compares numbers of slots; those of unused slots may be anything.
    fn expect_slots(
        &self,
        what: &str,
        operand: &Operand<M::Buffer>,
        width: usize,
        terms: impl Fn(usize, usize, usize) -> Vec<f64>,
    ) {
        let got = self.routed.get(self.kit, operand, 0.0);
        self.expect(what, &got, 1.0, |at| match self.routed.route_of_slot[at / width] {
            Some(route) => terms(at / width, route, at % width),
            None => Vec::new(),
        });
    }

    /// Sums over the slots of rows: each chunk's sum is rounded, then every level of the tree over two or four chunks, and the
    /// result.
    fn rows(&self) {
        let (kit, [width, _], routing) = (self.kit, WIDTHS, self.routed.routing);
        let len = routing.all_rows() * width;
        let terms = |at: usize| {
            let of_row = self.used().filter(move |&(_, route)| self.row(route) == at / width);
            of_row.map(move |(slot, route)| (self.inputs[slot * width + at % width], self.weights[route]))
        };
        let reads = vec![self.routed.put(kit, &self.inputs), kit.put(&self.weights), self.routed.ids(kit)];
        let y = self.run(Experts::Combine { routing, width }, reads, vec![kit.result(len)], false);
        self.expect("combine", &kit.get(&y[0]), 4.0, |at| terms(at).map(|(x, weight)| x * weight).collect());
        let reads = vec![self.routed.put(kit, &self.inputs), self.routed.ids(kit)];
        let op = Experts::DispatchBackward { routing, width };
        let dx = self.run(op, reads, vec![kit.input_gradient(len)], true);
        self.expect("dispatch_backward", &kit.get(&dx[0]), 4.0, |at| {
            self.base().chain(terms(at).map(|(dy, _)| dy)).collect()
        });
    }

    /// What is computed of each slot.
    fn slots(&self) {
        let (kit, [width, _], routing) = (self.kit, WIDTHS, self.routed.routing);
        let slots = || kit.result(routing.slots() * width);
        let reads = vec![kit.put(&self.x), self.routed.ids(kit)];
        let y = self.run(Experts::Dispatch { routing, width }, reads, vec![slots()], false);
        let x = |route: usize, column: usize| self.x[self.row(route) * width + column];
        self.expect_slots("dispatch", &y[0], width, |_, route, column| vec![x(route, column)]);
        let weights = kit.put(&self.weights);
        let reads = vec![self.routed.put(kit, &self.inputs), weights, self.routed.ids(kit), kit.put(&self.x)];
        let writes = vec![slots(), kit.result(routing.routes())];
        let gradients = self.run(Experts::CombineBackward { routing, width }, reads, writes, false);
        self.expect_slots("combine_backward", &gradients[0], width, |_, route, column| {
            vec![x(route, column) * self.weights[route]]
        });
        self.expect("dweights", &kit.get(&gradients[1]), 1.0, |route| {
            let slot = self.used().find(|&(_, of_slot)| of_slot == route);
            slot.map_or(Vec::new(), |(slot, _)| {
                (0..width).map(|column| self.inputs[slot * width + column] * x(route, column)).collect()
            })
        });
    }

    fn products(&self) {
        let (kit, [inputs, outputs], routing) = (self.kit, WIDTHS, self.routed.routing);
        let dims = ExpertDims { inputs, outputs, orientation: Orientation::OutIn, format: None };
        let with_weights = |x: &[f64]| {
            let reads = [self.routed.put(kit, x), self.routed.ids(kit)];
            reads.into_iter().chain(self.experts.iter().map(|weight| kit.put(weight))).collect()
        };
        let op = Experts::Product { routing, dims };
        let y = vec![kit.result(routing.slots() * outputs)];
        let y = self.run(op, with_weights(&self.inputs), y, false);
        self.expect_slots("expert_product", &y[0], outputs, |slot, route, column| {
            let weight = &self.experts[self.expert(route)][column * inputs..][..inputs];
            self.inputs[slot * inputs..][..inputs].iter().zip(weight).map(|(x, weight)| x * weight).collect()
        });
        let op = Experts::ProductBackwardInput { routing, dims };
        let dx = vec![self.routed.gradient(kit, inputs)];
        let dx = self.run(op, with_weights(&self.outputs), dx, true);
        self.expect_slots("expert_product_backward_input", &dx[0], inputs, |slot, route, column| {
            let weight = self.experts[self.expert(route)][column..].iter().step_by(inputs);
            let dy = &self.outputs[slot * outputs..][..outputs];
            self.base().chain(dy.iter().zip(weight).map(|(dy, weight)| dy * weight)).collect()
        });
    }

    /// The gradients of the matrices, over the rows of each source.
    fn weights(&self) {
        let (kit, [inputs, outputs], routing) = (self.kit, WIDTHS, self.routed.routing);
        let dims = ExpertDims { inputs, outputs, orientation: Orientation::OutIn, format: None };
        let routes_of_source = routing.rows * routing.top;
        for (source, expert) in (0..routing.sources())
            .flat_map(|source| (0..self.experts.len()).map(move |expert| (source, expert)))
        {
            let [x, dy] = [&self.inputs, &self.outputs].map(|values| self.routed.put(kit, values));
            let op = Experts::ProductBackwardWeight { routing, dims, source, expert };
            let dweight = vec![kit.slot(inputs * outputs)];
            let dweight = self.run(op, vec![x, dy, self.routed.ids(kit)], dweight, true);
            let what = format!("gradient of expert {expert}, source {source},");
            self.expect(&what, &kit.get(&dweight[0]), 1.0, |at| {
                let (row, column) = (at / inputs, at % inputs);
                let own = self
                    .used()
                    .filter(|&(_, route)| route / routes_of_source == source && self.expert(route) == expert);
                let term =
                    |(slot, _)| self.outputs[slot * outputs + row] * self.inputs[slot * inputs + column];
                self.base().chain(own.map(term)).collect()
            });
        }
    }
}
