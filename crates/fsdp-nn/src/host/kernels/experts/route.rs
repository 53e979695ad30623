//! Selection of experts and their weights for each row.

use std::cmp::Reverse;

use crate::host::element::{Element, Float};
use crate::host::workers::{Workers, task_rows};
use crate::op::{Gating, Groups, Routing, SCORES_EPS, Scoring};

/// The routing and options for a set of rows.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) routing: Routing,
    pub(super) gating: Gating,
    /// Which rows contribute to loads and their loss; `None` if these are not computed.
    pub(super) counted: Option<&'a [bool]>,
}

impl Rows<'_> {
    fn counts(&self, row: usize) -> bool {
        self.counted.is_some_and(|counted| counted[row])
    }
}

/// Selects the best experts of each row, and their weights; `bias` is empty if none is added. Returns the load: the number
/// of routes to each expert, and the sums of probabilities, added in row order within blocks of rows, then in block order.
pub(super) fn route<E: Element>(
    workers: &Workers,
    options: Rows<'_>,
    (logits, bias): (&[E], &[E]),
    weights: &mut [E],
    routes: &mut [u32],
) -> Vec<f64> {
    let Routing { rows: row_count, experts, top, .. } = options.routing;
    let rows = task_rows(experts);
    let mut loads = vec![0.0; row_count.div_ceil(rows) * 2 * experts];
    let outputs = weights.chunks_mut(rows * top).zip(routes.chunks_mut(rows * top));
    let outputs = outputs.zip(loads.chunks_mut(2 * experts)).enumerate();
    workers.each(logits.chunks(rows * experts).zip(outputs), |(logits, (task, (outputs, load)))| {
        let (mut scores, mut order) = (vec![E::Acc::ZERO; experts], Vec::new());
        let outputs = outputs.0.chunks_exact_mut(top).zip(outputs.1.chunks_exact_mut(top));
        for (row, (logits, (weights, routes))) in logits.chunks_exact(experts).zip(outputs).enumerate() {
            score(options.gating.scoring, logits, &mut scores);
            choose::<E>(options.gating.groups, &scores, bias, &mut order);
            let chosen = &order[..top];
            let divisor = divisor(options.gating, chosen.iter().map(|&expert| scores[expert]));
            for ((weight, route), &expert) in weights.iter_mut().zip(routes).zip(chosen) {
                (*weight, *route) = (E::store(scores[expert] / divisor), expert as u32);
            }
            if options.counts(task * rows + row) {
                add_load(load, probabilities(options.gating.scoring, &mut scores), chosen);
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

/// Orders the experts, best first: by score plus bias, those of the best groups alone.
fn choose<E: Element>(groups: Groups, scores: &[E::Acc], bias: &[E], order: &mut Vec<usize>) {
    let biased = |expert: usize| match bias {
        [] => scores[expert],
        _ => scores[expert] + bias[expert].load(),
    };
    order.clear();
    if groups.restrict() {
        let size = scores.len() / groups.count;
        let worth = |group: usize| {
            let mut members: Vec<E::Acc> = (group * size..(group + 1) * size).map(biased).collect();
            members.sort_by_key(|&score| Reverse(ordered(score)));
            members.into_iter().take(2).sum::<E::Acc>()
        };
        let mut best: Vec<usize> = (0..groups.count).collect();
        best.sort_by_cached_key(|&group| Reverse(ordered(worth(group))));
        best.truncate(groups.top);
        best.sort_unstable();
        order.extend(best.into_iter().flat_map(|group| group * size..(group + 1) * size));
    } else {
        order.extend(0..scores.len());
    }
    // The sort is stable, so of equal scores the first expert comes first.
    order.sort_by_key(|&expert| Reverse(ordered(biased(expert))));
}

/// What the scores of the chosen experts are divided by.
fn divisor<A: Float>(gating: Gating, chosen: impl Iterator<Item = A>) -> A {
    match (gating.normalized, gating.scoring) {
        (false, _) => A::ONE,
        (true, Scoring::Softmax) => chosen.sum(),
        (true, Scoring::Sigmoid) => chosen.sum::<A>() + A::of(SCORES_EPS),
    }
}

/// Turns scores into numbers that sum to one, for the balancing loss.
fn probabilities<A: Float>(scoring: Scoring, scores: &mut [A]) -> &[A] {
    if scoring == Scoring::Sigmoid {
        let sum = scores.iter().copied().sum::<A>() + A::of(SCORES_EPS);
        scores.iter_mut().for_each(|score| *score = *score / sum);
    }
    scores
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

/// Computes the scores of all experts.
fn score<E: Element>(scoring: Scoring, logits: &[E], scores: &mut [E::Acc]) {
    if scoring == Scoring::Sigmoid {
        let logistic = |x: E::Acc| E::Acc::ONE / (E::Acc::ONE + (-x).exp());
        return scores.iter_mut().zip(logits).for_each(|(score, x)| *score = logistic(x.load()));
    }
    let max = logits.iter().fold(E::Acc::LOWEST, |max, x| if x.load() > max { x.load() } else { max });
    let mut sum = E::Acc::ZERO;
    for (score, x) in scores.iter_mut().zip(logits) {
        *score = (x.load() - max).exp();
        sum += *score;
    }
    scores.iter_mut().for_each(|score| *score = *score / sum);
}

/// Computes the gradient of the logits of [`route`].
/// `slopes` are the derivatives of the balancing loss with respect to the probabilities of each counted row.
pub(super) fn route_backward<E: Element>(
    workers: &Workers,
    options: Rows<'_>,
    slopes: &[E::Acc],
    (logits, routes, dweights): (&[E], &[u32], &[E]),
    dlogits: &mut [E],
) {
    let (Routing { experts, top, .. }, gating) = (options.routing, options.gating);
    let rows = task_rows(experts);
    let inputs =
        logits.chunks(rows * experts).zip(routes.chunks(rows * top)).zip(dweights.chunks(rows * top));
    workers.each(
        dlogits.chunks_mut(rows * experts).zip(inputs).enumerate(),
        |(task, (dlogits, ((logits, routes), dweights)))| {
            let mut scores = vec![E::Acc::ZERO; experts];
            let mut gradients = scores.clone();
            let inputs = routes.chunks_exact(top).zip(dweights.chunks_exact(top));
            let inputs = logits.chunks_exact(experts).zip(inputs).zip(dlogits.chunks_exact_mut(experts));
            for (row, ((logits, (routes, dweights)), dlogits)) in inputs.enumerate() {
                score(gating.scoring, logits, &mut scores);
                let slopes = if options.counts(task * rows + row) { slopes } else { &[] };
                match gating.scoring {
                    Scoring::Softmax => {
                        softmax_gradients::<E>(gating, &scores, (routes, dweights), &mut gradients);
                        add_slopes(&scores, slopes, &mut gradients);
                    }
                    Scoring::Sigmoid => {
                        sigmoid_gradients::<E>(gating, &scores, (routes, dweights), slopes, &mut gradients);
                    }
                }
                for (dlogit, &gradient) in dlogits.iter_mut().zip(&gradients) {
                    *dlogit = E::store(gradient);
                }
            }
        },
    );
}

/// Computes the gradient of a row's logits from the gradients of its experts' weights. Normalized probabilities are a
/// softmax over the chosen ones.
fn softmax_gradients<E: Element>(
    gating: Gating,
    probabilities: &[E::Acc],
    (routes, dweights): (&[u32], &[E]),
    gradients: &mut [E::Acc],
) {
    let chosen = || routes.iter().map(|&expert| probabilities[expert as usize]).zip(dweights);
    let sum = divisor(gating, chosen().map(|(p, _)| p));
    let mean = chosen().map(|(p, dw)| p / sum * dw.load()).sum::<E::Acc>();
    for (gradient, &p) in gradients.iter_mut().zip(probabilities) {
        *gradient = if gating.normalized { E::Acc::ZERO } else { -(p * mean) };
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

/// As [`softmax_gradients`] and [`add_slopes`], for logistic scores.
fn sigmoid_gradients<E: Element>(
    gating: Gating,
    scores: &[E::Acc],
    (routes, dweights): (&[u32], &[E]),
    slopes: &[E::Acc],
    gradients: &mut [E::Acc],
) {
    let all = scores.iter().copied().sum::<E::Acc>() + E::Acc::of(SCORES_EPS);
    let mean = scores.iter().zip(slopes).map(|(&score, &slope)| score / all * slope).sum::<E::Acc>();
    gradients.fill(E::Acc::ZERO);
    for (gradient, &slope) in gradients.iter_mut().zip(slopes) {
        *gradient = (slope - mean) / all;
    }
    let chosen = || routes.iter().map(|&expert| scores[expert as usize]).zip(dweights);
    let sum = divisor(gating, chosen().map(|(score, _)| score));
    let mean = match gating.normalized {
        true => chosen().map(|(score, dw)| score / sum * dw.load()).sum::<E::Acc>(),
        false => E::Acc::ZERO,
    };
    for (&expert, dw) in routes.iter().zip(dweights) {
        gradients[expert as usize] += (dw.load() - mean) / sum;
    }
    for (gradient, &score) in gradients.iter_mut().zip(scores) {
        *gradient *= score * (E::Acc::ONE - score);
    }
}
