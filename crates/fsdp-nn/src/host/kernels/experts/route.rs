//! Selection of experts and their weights for each row.

use std::cmp::Reverse;
use std::ops::Range;

use crate::host::element::{Element, Float};
use crate::host::workers::{Workers, task_rows};
use crate::op::{Gating, Groups, Routing, SCORES_EPS, Scoring};

/// The routing and options for a set of rows.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) routing: Routing,
    pub(super) gating: Gating,
    /// Which rows contribute to loads and to the terms of the loss; `None` if there are neither.
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
                let chosen = chosen.iter().copied();
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
fn add_load<A: Float>(load: &mut [f64], probabilities: &[A], chosen: impl Iterator<Item = usize>) {
    let (routes, sums) = load.split_at_mut(probabilities.len());
    chosen.for_each(|expert| routes[expert] += 1.0);
    sums.iter_mut().zip(probabilities).for_each(|(sum, p)| *sum += p.as_f64());
}

/// Maps a number to an integer with the same order.
fn ordered<A: Float>(value: A) -> i64 {
    let bits = value.as_f64().to_bits() as i64;
    bits ^ (((bits >> 63) as u64) >> 1) as i64
}

/// Returns the sum of the squared log-sum-exp of the counted rows, added in row order within blocks of rows, then in block
/// order.
pub(super) fn z_sum<E: Element>(workers: &Workers, counted: &[bool], logits: &[E]) -> f64 {
    let (experts, rows) = (logits.len() / counted.len(), task_rows(logits.len() / counted.len()));
    let mut sums = vec![0.0; counted.len().div_ceil(rows)];
    let tasks = logits.chunks(rows * experts).zip(counted.chunks(rows)).zip(&mut sums);
    workers.each(tasks, |((logits, counted), sum)| {
        let rows = logits.chunks_exact(experts).zip(counted).filter(|(_, counts)| **counts);
        *sum = rows.map(|(logits, _)| log_sum_exp(logits).powi(2)).sum();
    });
    sums.iter().sum()
}

/// Returns the sum over sequences of the products of each expert's routes and probabilities, times the sequence's factor: added
/// in row order, then in the order of sequences.
pub(super) fn sequence_sum<E: Element>(
    workers: &Workers,
    options: Rows<'_>,
    sequences: &[(Range<usize>, f64)],
    (logits, routes): (&[E], &[u32]),
) -> f64 {
    let (Routing { experts, top, .. }, scoring) = (options.routing, options.gating.scoring);
    let mut losses = vec![0.0; sequences.len()];
    workers.each(sequences.iter().zip(&mut losses), |((rows, scale), loss)| {
        let (mut scores, mut load) = (vec![E::Acc::ZERO; experts], vec![0.0; 2 * experts]);
        for row in rows.clone() {
            score(scoring, &logits[row * experts..][..experts], &mut scores);
            let chosen = routes[row * top..][..top].iter().map(|&expert| expert as usize);
            add_load(&mut load, probabilities(scoring, &mut scores), chosen);
        }
        let (routes, probabilities) = load.split_at(experts);
        *loss = scale * routes.iter().zip(probabilities).map(|(routes, p)| routes * p).sum::<f64>();
    });
    losses.iter().sum()
}

/// The logarithm of the sum of the exponentials of a row's logits.
fn log_sum_exp<E: Element>(logits: &[E]) -> f64 {
    let max = largest(logits);
    let sum = logits.iter().map(|x| (x.load() - max).exp()).sum::<E::Acc>();
    max.as_f64() + sum.as_f64().ln()
}

fn largest<E: Element>(logits: &[E]) -> E::Acc {
    logits.iter().fold(E::Acc::LOWEST, |max, x| if x.load() > max { x.load() } else { max })
}

/// Computes the scores of all experts.
fn score<E: Element>(scoring: Scoring, logits: &[E], scores: &mut [E::Acc]) {
    if scoring == Scoring::Sigmoid {
        let logistic = |x: E::Acc| E::Acc::ONE / (E::Acc::ONE + (-x).exp());
        return scores.iter_mut().zip(logits).for_each(|(score, x)| *score = logistic(x.load()));
    }
    let max = largest(logits);
    let mut sum = E::Acc::ZERO;
    for (score, x) in scores.iter_mut().zip(logits) {
        *score = (x.load() - max).exp();
        sum += *score;
    }
    scores.iter_mut().for_each(|score| *score = *score / sum);
}

/// The derivatives of the terms of the loss at counted rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Slopes<A> {
    /// Those of balancing losses with respect to the probabilities of a row, in sets that rows share; empty if there is no
    /// such loss.
    pub(super) probabilities: Vec<A>,
    /// The set of each row; empty if there is one for all.
    pub(super) set_of_row: Vec<usize>,
    /// That of the z-loss with respect to logits, without the factors log-sum-exp and softmax.
    pub(super) z: Option<A>,
}

impl<A> Slopes<A> {
    /// The set of a row with so many experts.
    fn of_row(&self, row: usize, experts: usize) -> &[A] {
        let set = self.set_of_row.get(row).copied().unwrap_or(0);
        if self.probabilities.is_empty() { &[] } else { &self.probabilities[set * experts..][..experts] }
    }
}

/// Computes the gradient of the logits of [`route`].
pub(super) fn route_backward<E: Element>(
    workers: &Workers,
    options: Rows<'_>,
    slopes: &Slopes<E::Acc>,
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
                let counts = options.counts(task * rows + row);
                let balance = if counts { slopes.of_row(task * rows + row, experts) } else { &[] };
                match gating.scoring {
                    Scoring::Softmax => {
                        softmax_gradients::<E>(gating, &scores, (routes, dweights), &mut gradients);
                        add_slopes(&scores, balance, &mut gradients);
                    }
                    Scoring::Sigmoid => {
                        sigmoid_gradients::<E>(gating, &scores, (routes, dweights), balance, &mut gradients);
                    }
                }
                if let Some(slope) = slopes.z.filter(|_| counts) {
                    add_z_gradient(logits, slope, &mut gradients);
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

/// Adds the gradient of the z-loss of a row.
fn add_z_gradient<E: Element>(logits: &[E], slope: E::Acc, gradients: &mut [E::Acc]) {
    let normalizer = E::Acc::of(log_sum_exp(logits));
    for (gradient, x) in gradients.iter_mut().zip(logits) {
        *gradient += slope * normalizer * (x.load() - normalizer).exp();
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
