//! Selection of experts and their weights for each row.

use std::cmp::Reverse;

use crate::host::element::{Element, Float};
use crate::host::workers::{Workers, task_rows};
use crate::op::Routing;

/// The routing and options for a set of rows.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) routing: Routing,
    pub(super) normalized: bool,
    /// Which rows contribute to loads and their loss; `None` if these are not computed.
    pub(super) counted: Option<&'a [bool]>,
}

impl Rows<'_> {
    fn counts(&self, row: usize) -> bool {
        self.counted.is_some_and(|counted| counted[row])
    }
}

/// Selects the most probable experts of each row, and their probabilities. Returns the load: the number of routes to
/// each expert, and the sums of probabilities, added in row order within blocks of rows, then in block order.
pub(super) fn route<E: Element>(
    workers: &Workers,
    options: Rows<'_>,
    logits: &[E],
    weights: &mut [E],
    routes: &mut [u32],
) -> Vec<f64> {
    let Routing { rows: row_count, experts, top, .. } = options.routing;
    let rows = task_rows(experts);
    let mut loads = vec![0.0; row_count.div_ceil(rows) * 2 * experts];
    let outputs = weights.chunks_mut(rows * top).zip(routes.chunks_mut(rows * top));
    let outputs = outputs.zip(loads.chunks_mut(2 * experts)).enumerate();
    workers.each(logits.chunks(rows * experts).zip(outputs), |(logits, (task, (outputs, load)))| {
        let (mut probabilities, mut order) = (vec![E::Acc::ZERO; experts], Vec::new());
        let outputs = outputs.0.chunks_exact_mut(top).zip(outputs.1.chunks_exact_mut(top));
        for (row, (logits, (weights, routes))) in logits.chunks_exact(experts).zip(outputs).enumerate() {
            softmax(logits, &mut probabilities);
            order.clear();
            order.extend(0..experts);
            // The sort is stable, so of equal probabilities the first expert comes first.
            order.sort_by_key(|&expert| Reverse(ordered(probabilities[expert])));
            let chosen = &order[..top];
            let sum = if options.normalized {
                chosen.iter().map(|&expert| probabilities[expert]).sum::<E::Acc>()
            } else {
                E::Acc::ONE
            };
            for ((weight, route), &expert) in weights.iter_mut().zip(routes).zip(chosen) {
                (*weight, *route) = (E::store(probabilities[expert] / sum), expert as u32);
            }
            if options.counts(task * rows + row) {
                add_load(load, &probabilities, chosen);
            }
        }
    });
    let (first, others) = loads.split_at_mut(2 * experts);
    for load in others.chunks_exact(2 * experts) {
        first.iter_mut().zip(load).for_each(|(sum, value)| *sum += value);
    }
    loads.truncate(2 * experts);
    loads
}

/// Adds the contribution of a row to a load.
fn add_load<A: Float>(load: &mut [f64], probabilities: &[A], chosen: &[usize]) {
    let (routes, sums) = load.split_at_mut(probabilities.len());
    chosen.iter().for_each(|&expert| routes[expert] += 1.0);
    sums.iter_mut().zip(probabilities).for_each(|(sum, p)| *sum += p.as_f64());
}

/// Maps a number to an integer with the same order.
fn ordered<A: Float>(value: A) -> i64 {
    let bits = value.as_f64().to_bits() as i64;
    bits ^ (((bits >> 63) as u64) >> 1) as i64
}

/// Computes the probabilities of all experts.
fn softmax<E: Element>(logits: &[E], probabilities: &mut [E::Acc]) {
    let max = logits.iter().fold(E::Acc::LOWEST, |max, x| if x.load() > max { x.load() } else { max });
    let mut sum = E::Acc::ZERO;
    for (p, x) in probabilities.iter_mut().zip(logits) {
        *p = (x.load() - max).exp();
        sum += *p;
    }
    probabilities.iter_mut().for_each(|p| *p = *p / sum);
}

/// Computes the gradient of the logits of [`route`]. Normalized probabilities are a softmax over the chosen ones.
/// `slopes` are the derivatives of the balancing loss with respect to the probabilities of each counted row.
pub(super) fn route_backward<E: Element>(
    workers: &Workers,
    options: Rows<'_>,
    slopes: &[E::Acc],
    (logits, routes, dweights): (&[E], &[u32], &[E]),
    dlogits: &mut [E],
) {
    let Routing { experts, top, .. } = options.routing;
    let rows = task_rows(experts);
    let inputs =
        logits.chunks(rows * experts).zip(routes.chunks(rows * top)).zip(dweights.chunks(rows * top));
    workers.each(
        dlogits.chunks_mut(rows * experts).zip(inputs).enumerate(),
        |(task, (dlogits, ((logits, routes), dweights)))| {
            let mut probabilities = vec![E::Acc::ZERO; experts];
            let mut gradients = probabilities.clone();
            let inputs = routes.chunks_exact(top).zip(dweights.chunks_exact(top));
            let inputs = logits.chunks_exact(experts).zip(inputs).zip(dlogits.chunks_exact_mut(experts));
            for (row, ((logits, (routes, dweights)), dlogits)) in inputs.enumerate() {
                softmax(logits, &mut probabilities);
                logit_gradients::<E>(options.normalized, &probabilities, (routes, dweights), &mut gradients);
                if options.counts(task * rows + row) {
                    add_slopes(&probabilities, slopes, &mut gradients);
                }
                for (dlogit, &gradient) in dlogits.iter_mut().zip(&gradients) {
                    *dlogit = E::store(gradient);
                }
            }
        },
    );
}

/// Computes the gradient of a row's logits from the gradients of its experts' weights.
fn logit_gradients<E: Element>(
    normalized: bool,
    probabilities: &[E::Acc],
    (routes, dweights): (&[u32], &[E]),
    gradients: &mut [E::Acc],
) {
    let chosen = || routes.iter().map(|&expert| probabilities[expert as usize]).zip(dweights);
    let sum = if normalized { chosen().map(|(p, _)| p).sum() } else { E::Acc::ONE };
    let mean = chosen().map(|(p, dw)| p / sum * dw.load()).sum::<E::Acc>();
    for (gradient, &p) in gradients.iter_mut().zip(probabilities) {
        *gradient = if normalized { E::Acc::ZERO } else { -(p * mean) };
    }
    for (&expert, dw) in routes.iter().zip(dweights) {
        let p = probabilities[expert as usize] / sum;
        gradients[expert as usize] = p * (dw.load() - mean);
    }
}

/// Adds the gradient through a softmax, given the derivatives with respect to its probabilities.
fn add_slopes<A: Float>(probabilities: &[A], slopes: &[A], gradients: &mut [A]) {
    let mean = probabilities.iter().zip(slopes).map(|(&p, &slope)| p * slope).sum::<A>();
    for (gradient, (&p, &slope)) in gradients.iter_mut().zip(probabilities.iter().zip(slopes)) {
        *gradient += p * (slope - mean);
    }
}
