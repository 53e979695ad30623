//! The operations of mixtures of experts under test.

use fsdp_core::DType;
use fsdp_core::memory::Slice;

use super::calls::Calls;
use super::cases::{Sizes, magnitudes};
use super::kit::{Case, Kit, Operand, integers, numbers};
use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::op::{Balance, Experts, Op, Routing};

const EXPERTS: usize = 5;

/// Returns all operations of mixtures at these sizes. One expert has no rows.
pub(super) fn all<M: Backend>(sizes: Sizes) -> impl Iterator<Item = Case<M>> {
    let routed = [route(sizes, 1, false), route(sizes, 2, false), route(sizes, 3, true)];
    routed.into_iter().chain([balance(sizes), dispatch(sizes), product(sizes), combine(sizes)])
}

fn routing(sizes: Sizes, top: usize) -> Routing {
    Routing::whole(sizes.rows, EXPERTS, top)
}

/// Returns two different experts for every row, never the second one.
fn routes(sizes: Sizes) -> Vec<u32> {
    let first = integers(sizes.seed + 7, sizes.rows, EXPERTS);
    let other = |first: u32| if first == 1 { [2, 4] } else { [first, if first == 0 { 3 } else { 0 }] };
    first.into_iter().flat_map(other).collect()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |max, value| value.abs().max(max))
}

/// Returns logits that are so far apart that rounding does not change their order.
fn logits(seed: u64, rows: usize) -> Vec<f64> {
    let first = integers(seed, rows, EXPERTS);
    let apart = |expert: usize, first: u32| ((expert as u32 * 2 + first) % EXPERTS as u32) as f64 * 0.5;
    let noise: Vec<f64> = numbers(seed + 1, rows * EXPERTS);
    let logit = |i: usize| apart(i % EXPERTS, first[i / EXPERTS]) + noise[i].clamp(-1.0, 1.0) / 16.0;
    (0..rows * EXPERTS)
        .map(|i| half::f16::from_f64(half::bf16::from_f64(logit(i)).to_f64()).to_f64())
        .collect()
}

/// Computes the load and the routes of a mixture whose last row does not count.
fn loaded<M: Backend>(
    kit: &Kit<M>,
    (routing, load): (Routing, Balance),
    facts: BatchFacts<'_>,
    logits: &Operand<M::Buffer>,
) -> (Vec<f64>, Operand<M::Buffer>) {
    let (mut weights, mut routes) = (kit.result(routing.slots()), kit.allocate(DType::U32, routing.slots()));
    let mut loads = kit.allocate(DType::F64, load.load_len());
    let op = Op::Experts(Experts::Route { routing, normalized: true, load: Some(load) });
    let writes = &mut [&mut weights, &mut routes, &mut loads].map(|operand| Write::over(operand.write()));
    kit.memory.run(&op, Operands { reads: &[logits.read()], writes, batch: facts }).unwrap();
    (kit.get(&loads), routes)
}

/// The balancing loss of two mixtures.
fn balance<M: Backend>(sizes: Sizes) -> Case<M> {
    let (routing, rows) = (routing(sizes, 2), sizes.rows);
    let balance = Balance { layers: 2, experts: EXPERTS, coefficient: 0.5, loss_scale: 1.0 };
    let lengths = [rows - 1];
    fn facts(lengths: &[usize; 1]) -> BatchFacts<'_> {
        BatchFacts { targets: lengths[0] as u64, counted_rows: lengths[0], lengths, ..BatchFacts::default() }
    }
    Case {
        name: "balance_loss",
        inputs: vec![logits(sizes.seed, rows), logits(sizes.seed + 9, rows)],
        doutput: vec![1.5],
        forward: Box::new(move |kit, inputs| {
            let load =
                |logits: &Vec<f64>| loaded(kit, (routing, balance), facts(&lengths), &kit.put(logits)).0;
            let loads = kit.put_as(DType::F64, &inputs.iter().flat_map(load).collect::<Vec<f64>>());
            let mut loss = kit.allocate(DType::F64, 1);
            let writes = &mut [Write::over(loss.write())];
            let op = Op::Experts(Experts::BalanceLoss { balance });
            let operands = Operands { reads: &[loads.read()], writes, batch: facts(&lengths) };
            kit.memory.run(&op, operands).unwrap();
            kit.get(&loss)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let (facts, logits) = (facts(&lengths), [0, 1].map(|i| kit.put(&inputs[i])));
            let found = [0, 1].map(|i| loaded(kit, (routing, balance), facts, &logits[i]));
            let loads: Vec<f64> = found.iter().flat_map(|(load, _)| load.clone()).collect();
            let (loads, dweights) = (kit.put_as(DType::F64, &loads), kit.put(&vec![0.0; routing.slots()]));
            let balance = Balance { coefficient: balance.coefficient * dy[0], ..balance };
            let gradient = |(logits, (_, routes)): (&Operand<M::Buffer>, &(Vec<f64>, _))| {
                let routes: &Operand<M::Buffer> = routes;
                let mut dx = kit.result(rows * EXPERTS);
                let op =
                    Op::Experts(Experts::RouteBackward { routing, normalized: true, balance: Some(balance) });
                let reads = &[logits.read(), routes.read(), dweights.read(), loads.read()];
                let writes = &mut [Write::over(dx.write())];
                kit.memory.run(&op, Operands { reads, writes, batch: facts }).unwrap();
                kit.get(&dx)
            };
            logits.iter().zip(&found).map(gradient).collect()
        }),
        // As for routes; sums are in double precision.
        bound: Box::new(|inputs, y| {
            (4.0 * largest(&inputs[0]).max(largest(&inputs[1])) + 16.0, magnitudes(y))
        }),
    }
}

fn route<M: Backend>(sizes: Sizes, top: usize, normalized: bool) -> Case<M> {
    let (routing, rows) = (routing(sizes, top), sizes.rows);
    let run = move |kit: &Kit<M>, logits: &[f64]| {
        let (logits, mut weights) = (kit.put(logits), kit.result(routing.slots()));
        let mut routes = kit.allocate(DType::U32, routing.slots());
        let op = Op::Experts(Experts::Route { routing, normalized, load: None });
        kit.memory.call(op, &[logits.read()], [weights.write(), routes.write()]).unwrap();
        (logits, weights, routes)
    };
    Case {
        name: "route",
        inputs: vec![logits(sizes.seed, rows)],
        doutput: numbers(sizes.seed + 2, routing.slots()),
        forward: Box::new(move |kit, inputs| kit.get(&run(kit, &inputs[0]).1)),
        backward: Box::new(move |kit, inputs, dy| {
            let (logits, _, routes) = run(kit, &inputs[0]);
            let (dy, mut dx) = (kit.put(dy), kit.result(rows * EXPERTS));
            let op = Op::Experts(Experts::RouteBackward { routing, normalized, balance: None });
            kit.memory.call(op, &[logits.read(), routes.read(), dy.read()], [dx.write()]).unwrap();
            vec![kit.get(&dx)]
        }),
        // Differences of logits up to twice the largest, exponentials, two sums of five terms, two quotients.
        bound: Box::new(|inputs, y| (4.0 * largest(&inputs[0]) + 16.0, magnitudes(y))),
    }
}

fn dispatch<M: Backend>(sizes: Sizes) -> Case<M> {
    let (routing, width) = (routing(sizes, 2), sizes.inner);
    let (len, slots) = (sizes.rows * width, routing.slots() * width);
    let routes = routes(sizes);
    let backward_routes = routes.clone();
    Case {
        name: "dispatch",
        inputs: vec![numbers(sizes.seed, len)],
        doutput: numbers(sizes.seed + 1, slots),
        forward: Box::new(move |kit, inputs| {
            let (x, routes, mut y) = (kit.put(&inputs[0]), kit.ids(&routes), kit.result(slots));
            let op = Op::Experts(Experts::Dispatch { routing, width });
            kit.memory.call(op, &[x.read(), routes.read()], [y.write()]).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, _, dy| {
            let (dy, routes, mut dx) = (kit.put(dy), kit.ids(&backward_routes), kit.input_gradient(len));
            let op = Op::Experts(Experts::DispatchBackward { routing, width });
            let add = kit.accumulates();
            kit.memory.call_adding(op, &[dy.read(), routes.read()], dx.write(), add).unwrap();
            vec![kit.get(&dx)]
        }),
        bound: Box::new(|_, y| (0.0, magnitudes(y))),
    }
}

fn product<M: Backend>(sizes: Sizes) -> Case<M> {
    let Sizes { inner: inputs, outer: outputs, seed, .. } = sizes;
    let routing = routing(sizes, 2);
    let slots = routing.slots();
    let routes = routes(sizes);
    let backward_routes = routes.clone();
    let weights: Vec<Vec<f64>> =
        (0..EXPERTS as u64).map(|i| numbers(seed + 10 + i, inputs * outputs)).collect();
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
            let (x, routes, mut y) = (kit.put(&values[0]), kit.ids(&routes), kit.result(slots * outputs));
            let weights: Vec<_> = values[1..].iter().map(|weight| kit.put(weight)).collect();
            let op = Op::Experts(Experts::Product { routing, inputs, outputs });
            kit.memory.call(op, &reads::<M>(&x, &routes, &weights), [y.write()]).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, values, dy| {
            let (x, routes, dy) = (kit.put(&values[0]), kit.ids(&backward_routes), kit.put(dy));
            let weights: Vec<_> = values[1..].iter().map(|weight| kit.put(weight)).collect();
            let mut dx = kit.input_gradient(slots * inputs);
            let op = Op::Experts(Experts::ProductBackwardInput { routing, inputs, outputs });
            let all = reads::<M>(&dy, &routes, &weights);
            kit.memory.call_adding(op, &all, dx.write(), kit.accumulates()).unwrap();
            let weight = |expert| {
                let mut dweight = kit.slot(inputs * outputs);
                let op = Op::Experts(Experts::ProductBackwardWeight {
                    routing,
                    inputs,
                    outputs,
                    source: 0,
                    expert,
                });
                let writes = &mut [Write::from(kit.target(&mut dweight))];
                let reads = &[x.read(), dy.read(), routes.read()];
                kit.memory.run(&op, Operands { reads, writes, batch: BatchFacts::default() }).unwrap();
                kit.get(&dweight)
            };
            let weights = (0..EXPERTS).map(weight).collect::<Vec<_>>();
            std::iter::once(kit.get(&dx)).chain(weights).collect()
        }),
        bound: Box::new(move |values, y| {
            let max = values[1..].iter().map(|weight| largest(weight)).fold(0.0, f64::max);
            (inputs as f64 + 2.0, vec![inputs as f64 * largest(&values[0]) * max; y.len()])
        }),
    }
}

fn combine<M: Backend>(sizes: Sizes) -> Case<M> {
    let (routing, width) = (routing(sizes, 2), sizes.inner);
    let (len, slots) = (sizes.rows * width, routing.slots());
    let routes = routes(sizes);
    let backward_routes = routes.clone();
    Case {
        name: "combine",
        inputs: vec![numbers(sizes.seed, slots * width), numbers(sizes.seed + 1, slots)],
        doutput: numbers(sizes.seed + 2, len),
        forward: Box::new(move |kit, inputs| {
            let ([x, weights], routes) = ([0, 1].map(|i| kit.put(&inputs[i])), kit.ids(&routes));
            let mut y = kit.result(len);
            let op = Op::Experts(Experts::Combine { routing, width });
            kit.memory.call(op, &[x.read(), weights.read(), routes.read()], [y.write()]).unwrap();
            kit.get(&y)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let ([x, weights], routes) = ([0, 1].map(|i| kit.put(&inputs[i])), kit.ids(&backward_routes));
            let (dy, mut dx, mut dweights) = (kit.put(dy), kit.result(slots * width), kit.result(slots));
            let op = Op::Experts(Experts::CombineBackward { routing, width });
            let reads = &[x.read(), weights.read(), routes.read(), dy.read()];
            kit.memory.call(op, reads, [dx.write(), dweights.write()]).unwrap();
            vec![kit.get(&dx), kit.get(&dweights)]
        }),
        bound: Box::new(|inputs, y| (4.0, vec![2.0 * largest(&inputs[0]) * largest(&inputs[1]); y.len()])),
    }
}
