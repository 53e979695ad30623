//! Which experts a row goes to, and with which weights.

use std::cmp::Reverse;

use crate::host::element::{Element, Float};
use crate::host::workers::{Workers, task_rows};
use crate::op::Routing;

/// The most probable experts of each row, and their probabilities.
pub(super) fn route<E: Element>(
    workers: &Workers,
    Routing { experts, top, .. }: Routing,
    normalized: bool,
    logits: &[E],
    weights: &mut [E],
    routes: &mut [u32],
) {
    let rows = task_rows(experts);
    let outputs = weights.chunks_mut(rows * top).zip(routes.chunks_mut(rows * top));
    workers.each(logits.chunks(rows * experts).zip(outputs), |(logits, (weights, routes))| {
        let (mut probabilities, mut order) = (vec![E::Acc::ZERO; experts], Vec::new());
        let rows = weights.chunks_exact_mut(top).zip(routes.chunks_exact_mut(top));
        for (logits, (weights, routes)) in logits.chunks_exact(experts).zip(rows) {
            softmax(logits, &mut probabilities);
            order.clear();
            order.extend(0..experts);
            // The sort is stable, so that the first of equal ones comes first.
            order.sort_by_key(|&expert| Reverse(ordered(probabilities[expert])));
            let chosen = &order[..top];
            let sum = if normalized {
                chosen.iter().map(|&expert| probabilities[expert]).sum::<E::Acc>()
            } else {
                E::Acc::ONE
            };
            for ((weight, route), &expert) in weights.iter_mut().zip(routes).zip(chosen) {
                (*weight, *route) = (E::store(probabilities[expert] / sum), expert as u32);
            }
        }
    });
}

/// A key in the order of numbers.
fn ordered<A: Float>(value: A) -> i64 {
    let bits = value.as_f64().to_bits() as i64;
    bits ^ (((bits >> 63) as u64) >> 1) as i64
}

/// Probabilities of all experts.
fn softmax<E: Element>(logits: &[E], probabilities: &mut [E::Acc]) {
    let most = logits.iter().fold(E::Acc::LOWEST, |most, x| if x.load() > most { x.load() } else { most });
    let mut sum = E::Acc::ZERO;
    for (p, x) in probabilities.iter_mut().zip(logits) {
        *p = (x.load() - most).exp();
        sum += *p;
    }
    probabilities.iter_mut().for_each(|p| *p = *p / sum);
}

/// The gradient of the logits of [`route`]. Normalised probabilities are a softmax over those that were chosen.
pub(super) fn route_backward<E: Element>(
    workers: &Workers,
    Routing { experts, top, .. }: Routing,
    normalized: bool,
    logits: &[E],
    routes: &[u32],
    dweights: &[E],
    dlogits: &mut [E],
) {
    let rows = task_rows(experts);
    let inputs =
        logits.chunks(rows * experts).zip(routes.chunks(rows * top)).zip(dweights.chunks(rows * top));
    workers.each(
        dlogits.chunks_mut(rows * experts).zip(inputs),
        |(dlogits, ((logits, routes), dweights))| {
            let mut probabilities = vec![E::Acc::ZERO; experts];
            let rows = routes.chunks_exact(top).zip(dweights.chunks_exact(top));
            let rows = logits.chunks_exact(experts).zip(rows).zip(dlogits.chunks_exact_mut(experts));
            for ((logits, (routes, dweights)), dlogits) in rows {
                softmax(logits, &mut probabilities);
                let chosen = || routes.iter().map(|&expert| probabilities[expert as usize]).zip(dweights);
                let sum = if normalized { chosen().map(|(p, _)| p).sum() } else { E::Acc::ONE };
                let mean = chosen().map(|(p, dw)| p / sum * dw.load()).sum::<E::Acc>();
                for (dlogit, &p) in dlogits.iter_mut().zip(&probabilities) {
                    *dlogit = E::store(if normalized { E::Acc::ZERO } else { -(p * mean) });
                }
                for (&expert, dw) in routes.iter().zip(dweights) {
                    let p = probabilities[expert as usize] / sum;
                    dlogits[expert as usize] = E::store(p * (dw.load() - mean));
                }
            }
        },
    );
}
