//! The operations of routers under test.

use fsdp_core::DType;

use super::calls::Calls;
use super::cases::{Sizes, magnitudes};
use super::kit::{Case, Kit, Operand, integers, numbers};
use crate::backend::{Backend, BatchFacts, Operands, Write};
use crate::op::{Experts, Gating, Groups, Op, RouterTerms, Routing, Scoring};

const EXPERTS: usize = 6;

/// Returns all operations of routers at these sizes.
pub(super) fn all<M: Backend>(sizes: Sizes) -> [Case<M>; 12] {
    let [softmax, normalized] = [false, true].map(Gating::softmax);
    let sigmoid = Gating { scoring: Scoring::Sigmoid, ..softmax };
    let deepseek = Gating { biased: true, groups: Groups { count: 3, top: 2 }, normalized: true, ..sigmoid };
    let [z_loss, sequence] = [[0.5, 0.0], [0.0, 0.5]];
    [
        route(sizes, 1, softmax),
        route(sizes, 2, softmax),
        route(sizes, 3, normalized),
        route(sizes, 2, sigmoid),
        route(sizes, 3, deepseek),
        route(sizes, 2, Gating { biased: true, ..softmax }),
        balance(sizes, normalized),
        balance(sizes, Gating { normalized: true, ..sigmoid }),
        of_one("router_z_loss", sizes, normalized, z_loss),
        of_one("router_z_loss", sizes, sigmoid, z_loss),
        of_one("router_sequence_loss", sizes, normalized, sequence),
        of_one("router_sequence_loss", sizes, sigmoid, sequence),
    ]
}

fn routing(sizes: Sizes, top: usize) -> Routing {
    Routing::whole(sizes.rows, EXPERTS, top)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |max, value| value.abs().max(max))
}

/// Returns logits that are so far apart that rounding does not change their order.
fn logits(seed: u64, rows: usize) -> Vec<f64> {
    let first = integers(seed, rows, EXPERTS);
    let apart = |expert: usize, first: u32| ((expert as u32 * 5 + first) % EXPERTS as u32) as f64 * 0.5;
    let noise: Vec<f64> = numbers(seed + 1, rows * EXPERTS);
    let logit = |i: usize| apart(i % EXPERTS, first[i / EXPERTS]) + noise[i].clamp(-1.0, 1.0) / 16.0;
    (0..rows * EXPERTS)
        .map(|i| half::f16::from_f64(half::bf16::from_f64(logit(i)).to_f64()).to_f64())
        .collect()
}

/// Computes the load and the routes of a mixture whose last row does not count.
fn loaded<M: Backend>(
    kit: &Kit<M>,
    (routing, gating, load): (Routing, Gating, RouterTerms),
    facts: BatchFacts<'_>,
    logits: &Operand<M::Buffer>,
) -> (Vec<f64>, Operand<M::Buffer>) {
    let (mut weights, mut routes) = (kit.result(routing.slots()), kit.allocate(DType::U32, routing.slots()));
    let mut loads = kit.allocate(DType::F64, load.load_len());
    let op = Op::Experts(Experts::Route { routing, gating, load: Some(load) });
    let writes = &mut [&mut weights, &mut routes, &mut loads].map(|operand| Write::over(operand.write()));
    kit.memory.run(&op, Operands { reads: &[logits.read()], writes, batch: facts }).unwrap();
    (kit.get(&loads), routes)
}

/// Facts about one sample, whose counted rows have targets.
fn facts(lengths: &[usize; 1]) -> BatchFacts<'_> {
    BatchFacts { targets: lengths[0] as u64, counted_rows: lengths[0], lengths, ..BatchFacts::default() }
}

/// Terms with a scale of their gradients, which changes no loss.
fn with_scale(terms: RouterTerms) -> RouterTerms {
    RouterTerms { loss_scale: 8.0, ..terms }
}

/// The balancing loss of two mixtures.
fn balance<M: Backend>(sizes: Sizes, gating: Gating) -> Case<M> {
    let (routing, rows) = (routing(sizes, 2), sizes.rows);
    let terms = RouterTerms {
        layers: 2,
        experts: EXPERTS,
        balance: 0.5,
        z_loss: 0.0,
        sequence: 0.0,
        loss_scale: 1.0,
    };
    let lengths = [rows - 1];
    Case {
        name: "balance_loss",
        inputs: vec![logits(sizes.seed, rows), logits(sizes.seed + 9, rows)],
        doutput: vec![1.5],
        forward: Box::new(move |kit, inputs| {
            let terms = with_scale(terms);
            let load = |logits: &Vec<f64>| {
                loaded(kit, (routing, gating, terms), facts(&lengths), &kit.put(logits)).0
            };
            let loads = kit.put_as(DType::F64, &inputs.iter().flat_map(load).collect::<Vec<f64>>());
            let mut loss = kit.allocate(DType::F64, 1);
            let writes = &mut [Write::over(loss.write())];
            let op = Op::Experts(Experts::BalanceLoss { terms });
            let operands = Operands { reads: &[loads.read()], writes, batch: facts(&lengths) };
            kit.memory.run(&op, operands).unwrap();
            kit.get(&loss)
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let (facts, logits) = (facts(&lengths), [0, 1].map(|i| kit.put(&inputs[i])));
            let found = [0, 1].map(|i| loaded(kit, (routing, gating, terms), facts, &logits[i]));
            let loads: Vec<f64> = found.iter().flat_map(|(load, _)| load.clone()).collect();
            let (loads, dweights) = (kit.put_as(DType::F64, &loads), kit.put(&vec![0.0; routing.slots()]));
            let terms = RouterTerms { balance: terms.balance * dy[0], ..terms };
            let gradient = |(logits, (_, routes)): (&Operand<M::Buffer>, &(Vec<f64>, _))| {
                let routes: &Operand<M::Buffer> = routes;
                let mut dx = kit.result(rows * EXPERTS);
                let op = Op::Experts(Experts::RouteBackward { routing, gating, terms: Some(terms) });
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

/// A term that one of two mixtures has for itself: its z-loss or its sequence-wise loss, with these coefficients.
fn of_one<M: Backend>(
    name: &'static str,
    sizes: Sizes,
    gating: Gating,
    [z_loss, sequence]: [f64; 2],
) -> Case<M> {
    let (routing, rows) = (routing(sizes, 2), sizes.rows);
    let terms = RouterTerms { layers: 2, experts: EXPERTS, balance: 0.0, z_loss, sequence, loss_scale: 1.0 };
    // The first row is a document.
    let documents: Vec<_> = [0..1, 1..rows].into_iter().filter(|rows| !rows.is_empty()).collect();
    let lengths = [rows - 1];
    Case {
        name,
        inputs: vec![logits(sizes.seed, rows)],
        doutput: vec![1.5],
        forward: Box::new({
            let documents = documents.clone();
            move |kit, inputs| {
                let facts = BatchFacts { documents: &documents, ..facts(&lengths) };
                let terms = with_scale(terms);
                let (load, _) = loaded(kit, (routing, gating, terms), facts, &kit.put(&inputs[0]));
                vec![load[2 * EXPERTS]]
            }
        }),
        backward: Box::new(move |kit, inputs, dy| {
            let facts = BatchFacts { documents: &documents, ..facts(&lengths) };
            let logits = kit.put(&inputs[0]);
            let (_, routes) = loaded(kit, (routing, gating, terms), facts, &logits);
            let (dweights, mut dx) = (kit.put(&vec![0.0; routing.slots()]), kit.result(rows * EXPERTS));
            let terms = RouterTerms { z_loss: z_loss * dy[0], sequence: sequence * dy[0], ..terms };
            let op = Op::Experts(Experts::RouteBackward { routing, gating, terms: Some(terms) });
            let reads = &[logits.read(), routes.read(), dweights.read()];
            let writes = &mut [Write::over(dx.write())];
            kit.memory.run(&op, Operands { reads, writes, batch: facts }).unwrap();
            vec![kit.get(&dx)]
        }),
        // As for routes; also a logarithm of each row, which is then squared.
        bound: Box::new(|inputs, y| (4.0 * largest(&inputs[0]) + 16.0, magnitudes(y))),
    }
}

/// Corrections that reorder experts, and leave scores apart.
fn bias(gating: Gating) -> Option<Vec<f64>> {
    gating.biased.then(|| (0..EXPERTS).map(|expert| 2.0 * (expert % 3) as f64 - 1.0).collect())
}

fn route<M: Backend>(sizes: Sizes, top: usize, gating: Gating) -> Case<M> {
    let (routing, rows) = (routing(sizes, top), sizes.rows);
    let run = move |kit: &Kit<M>, logits: &[f64]| {
        let (logits, mut weights) = (kit.put(logits), kit.result(routing.slots()));
        let bias = bias(gating).map(|bias| kit.put(&bias));
        let mut routes = kit.allocate(DType::U32, routing.slots());
        let op = Op::Experts(Experts::Route { routing, gating, load: None });
        let reads: Vec<_> = [Some(&logits), bias.as_ref()].into_iter().flatten().map(Operand::read).collect();
        kit.memory.call(op, &reads, [weights.write(), routes.write()]).unwrap();
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
            let op = Op::Experts(Experts::RouteBackward { routing, gating, terms: None });
            kit.memory.call(op, &[logits.read(), routes.read(), dy.read()], [dx.write()]).unwrap();
            vec![kit.get(&dx)]
        }),
        // Differences of logits up to twice the largest, exponentials, two sums of six terms, two quotients.
        bound: Box::new(|inputs, y| (4.0 * largest(&inputs[0]) + 16.0, magnitudes(y))),
    }
}
