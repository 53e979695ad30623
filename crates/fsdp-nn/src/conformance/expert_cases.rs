//! The operations of mixtures of experts under test: those on routed rows of whole mixtures, and of some that are cut.

use fsdp_core::memory::Slice;

use super::calls::Calls;
use super::cases::{Sizes, magnitudes};
use super::kit::{Case, Operand, numbers};
use super::routed::{Routed, cut};
use super::router_cases;
use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::op::{ExpertDims, Experts, Op, Orientation, Routing};

/// Returns all operations of mixtures at these sizes. One expert has no rows.
pub(super) fn all<M: Backend>(sizes: Sizes) -> impl Iterator<Item = Case<M>> {
    let routings = std::iter::once(Routing::whole(sizes.rows, 5, 2)).chain(cut(sizes.rows));
    let of_routed = routings.map(move |routing| Routed::new(routing, sizes.seed)).flat_map(move |routed| {
        [
            dispatch(sizes, routed.clone()),
            product(sizes, routed.clone(), Orientation::OutIn),
            product(sizes, routed.clone(), Orientation::InOut),
            add_bias(sizes, routed.clone()),
            combine(sizes, routed),
        ]
    });
    router_cases::all(sizes).into_iter().chain(of_routed)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |max, value| value.abs().max(max))
}

fn dispatch<M: Backend>(sizes: Sizes, routed: Routed) -> Case<M> {
    let (routing, width) = (routed.routing, sizes.inner);
    let (len, slots) = (routing.all_rows() * width, routing.slots() * width);
    let of_backward = routed.clone();
    Case {
        name: "dispatch",
        inputs: vec![numbers(sizes.seed, len)],
        doutput: numbers(sizes.seed + 1, slots),
        forward: Box::new(move |kit, inputs| {
            let (x, routes, mut y) = (kit.put(&inputs[0]), routed.ids(kit), kit.result(slots));
            let op = Op::Experts(Experts::Dispatch { routing, width });
            kit.memory.call(op, &[x.read(), routes.read()], [y.write()]).unwrap();
            routed.get(kit, &y, 0.0)
        }),
        backward: Box::new(move |kit, _, dy| {
            let (dy, routes) = (of_backward.put(kit, dy), of_backward.ids(kit));
            let mut dx = kit.input_gradient(len);
            let op = Op::Experts(Experts::DispatchBackward { routing, width });
            let add = kit.accumulates();
            kit.memory.call_adding(op, &[dy.read(), routes.read()], dx.write(), add).unwrap();
            vec![kit.get(&dx)]
        }),
        bound: Box::new(|_, y| (0.0, magnitudes(y))),
    }
}

fn product<M: Backend>(sizes: Sizes, routed: Routed, orientation: Orientation) -> Case<M> {
    let Sizes { inner: inputs, outer: outputs, seed, .. } = sizes;
    let dims = ExpertDims { inputs, outputs, orientation, format: None };
    let (routing, experts) = (routed.routing, routed.routing.here().len());
    let slots = routing.slots();
    let of_backward = routed.clone();
    let weights: Vec<Vec<f64>> =
        (0..experts as u64).map(|i| numbers(seed + 10 + i, inputs * outputs)).collect();
    fn reads<'a, M: Backend>(
        x: &'a Operand<M::Buffer>,
        routes: &'a Operand<M::Buffer>,
        weights: &'a [Operand<M::Buffer>],
    ) -> Vec<Slice<'a, M::Buffer>> {
        [x, routes].into_iter().chain(weights).map(Operand::read).collect()
    }
    Case {
        name: "expert_product",
        inputs: std::iter::once(numbers(seed, slots * inputs)).chain(weights).collect(),
        doutput: numbers(seed + 1, slots * outputs),
        forward: Box::new(move |kit, values| {
            let (x, routes) = (routed.put(kit, &values[0]), routed.ids(kit));
            let mut y = kit.result(slots * outputs);
            let weights: Vec<_> = values[1..].iter().map(|weight| kit.put(weight)).collect();
            let op = Op::Experts(Experts::Product { routing, dims });
            kit.memory.call(op, &reads::<M>(&x, &routes, &weights), [y.write()]).unwrap();
            routed.get(kit, &y, 0.0)
        }),
        backward: Box::new(move |kit, values, dy| {
            let routed = &of_backward;
            let (x, routes, dy) = (routed.put(kit, &values[0]), routed.ids(kit), routed.put(kit, dy));
            let weights: Vec<_> = values[1..].iter().map(|weight| kit.put(weight)).collect();
            let mut dx = routed.gradient(kit, inputs);
            let op = Op::Experts(Experts::ProductBackwardInput { routing, dims });
            let all = reads::<M>(&dy, &routes, &weights);
            kit.memory.call_adding(op, &all, dx.write(), kit.accumulates()).unwrap();
            let weight = |expert| {
                let mut dweight = kit.slot(inputs * outputs);
                for source in 0..routing.sources() {
                    let op = Experts::ProductBackwardWeight { routing, dims, source, expert };
                    let accumulate = kit.accumulates() || source > 0;
                    let writes = &mut [Write { slice: dweight.write(), accumulate }];
                    let reads = &[x.read(), dy.read(), routes.read()];
                    let operands = Operands { reads, writes, batch: BatchFacts::default() };
                    kit.memory.run(&Op::Experts(op), operands).unwrap();
                }
                kit.get(&dweight)
            };
            let weights = (0..experts).map(weight).collect::<Vec<_>>();
            let dx = routed.get(kit, &dx, kit.base.unwrap_or(0.0));
            std::iter::once(dx).chain(weights).collect()
        }),
        bound: Box::new(move |values, y| {
            let max = values[1..].iter().map(|weight| largest(weight)).fold(0.0, f64::max);
            (inputs as f64 + 2.0, vec![inputs as f64 * largest(&values[0]) * max; y.len()])
        }),
    }
}

/// Adds the bias of each expert; what is added to is an input, too.
fn add_bias<M: Backend>(sizes: Sizes, routed: Routed) -> Case<M> {
    let Sizes { inner: width, seed, .. } = sizes;
    let (routing, experts) = (routed.routing, routed.routing.here().len());
    let slots = routing.slots();
    let of_backward = routed.clone();
    let biases = (0..experts as u64).map(|i| numbers(seed + 10 + i, width));
    Case {
        name: "expert_bias",
        inputs: std::iter::once(numbers(seed, slots * width)).chain(biases).collect(),
        doutput: numbers(seed + 1, slots * width),
        forward: Box::new(move |kit, values| {
            let (mut y, routes) = (routed.put(kit, &values[0]), routed.ids(kit));
            let biases: Vec<_> = values[1..].iter().map(|bias| kit.put(bias)).collect();
            let reads: Vec<_> = std::iter::once(&routes).chain(&biases).map(Operand::read).collect();
            kit.memory.call(Op::Experts(Experts::AddBias { routing, width }), &reads, [y.write()]).unwrap();
            routed.get(kit, &y, 0.0)
        }),
        backward: Box::new(move |kit, _, dy| {
            let (gradient, routes) = (of_backward.put(kit, dy), of_backward.ids(kit));
            let bias = |expert| {
                let mut dbias = kit.slot(width);
                for source in 0..routing.sources() {
                    let op = Op::Experts(Experts::BiasBackward { routing, width, source, expert });
                    let writes =
                        &mut [Write { slice: dbias.write(), accumulate: kit.accumulates() || source > 0 }];
                    let reads = &[gradient.read(), routes.read()];
                    kit.memory.run(&op, Operands { reads, writes, batch: BatchFacts::default() }).unwrap();
                }
                kit.get(&dbias)
            };
            let same = of_backward.get(kit, &gradient, 0.0);
            std::iter::once(same).chain((0..experts).map(bias)).collect()
        }),
        bound: Box::new(move |_, y| (slots as f64, magnitudes(y))),
    }
}

fn combine<M: Backend>(sizes: Sizes, routed: Routed) -> Case<M> {
    let (routing, width) = (routed.routing, sizes.inner);
    let (len, slots, routes) = (routing.all_rows() * width, routing.slots(), routing.routes());
    let of_backward = routed.clone();
    Case {
        name: if routing.chunks.count > 1 { "combine of chunks" } else { "combine" },
        inputs: vec![numbers(sizes.seed, slots * width), numbers(sizes.seed + 1, routes)],
        doutput: numbers(sizes.seed + 2, len),
        forward: Box::new(move |kit, inputs| {
            let (x, weights) = (routed.put(kit, &inputs[0]), kit.put(&inputs[1]));
            let (routes, mut y) = (routed.ids(kit), kit.result(len));
            let op = Op::Experts(Experts::Combine { routing, width });
            kit.memory.call(op, &[x.read(), weights.read(), routes.read()], [y.write()]).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let (x, weights) = (of_backward.put(kit, &inputs[0]), kit.put(&inputs[1]));
            let (routes_of_rows, dy) = (of_backward.ids(kit), kit.put(dy));
            let (mut dx, mut dweights) = (kit.result(slots * width), kit.result(routes));
            let op = Op::Experts(Experts::CombineBackward { routing, width });
            let reads = &[x.read(), weights.read(), routes_of_rows.read(), dy.read()];
            kit.memory.call(op, reads, [dx.write(), dweights.write()]).unwrap();
            vec![of_backward.get(kit, &dx, 0.0), kit.get(&dweights)]
        }),
        bound: Box::new(move |inputs, y| {
            let terms = routing.top as f64;
            (2.0 * terms, vec![terms * largest(&inputs[0]) * largest(&inputs[1]); y.len()])
        }),
    }
}
