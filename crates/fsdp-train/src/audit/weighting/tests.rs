use proptest::prelude::*;

use super::*;

/// Elements of a gradient.
const LEN: usize = 40;

/// The squared distance that precision makes, relative to the square of the used gradient.
const BOUND2: f64 = 1e-9;

fn product(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

fn sum(parts: &[Vec<f64>], counts: &[f64]) -> Vec<f64> {
    (0..LEN).map(|at| parts.iter().zip(counts).map(|(part, count)| count * part[at]).sum()).collect()
}

fn products(parts: &[Vec<f64>], used: &[f64]) -> Products {
    Products {
        pairs: parts.iter().map(|left| parts.iter().map(|right| product(left, right)).collect()).collect(),
        used: parts.iter().map(|part| product(part, used)).collect(),
        used2: product(used, used),
    }
}

fn explained(
    parts: &[Vec<f64>],
    tokens: &[usize],
    used: &[f64],
    grad_clip: Option<f64>,
) -> Option<Weighting> {
    let products = products(parts, used);
    let bound2 = BOUND2 * product(used, used);
    MicroBatches { tokens, relative: &products, each: &[], plain: &products, grad_clip, bound2 }.explained()
}

fn parts(count: usize) -> impl Strategy<Value = Vec<Vec<f64>>> {
    prop::collection::vec(prop::collection::vec(-1.0f64..1.0, LEN), count)
}

/// Gradients of micro-batches, and how often each counts.
fn weighted() -> impl Strategy<Value = (Vec<Vec<f64>>, Vec<f64>)> {
    (2usize..7).prop_flat_map(|count| (parts(count), prop::collection::vec(-2.0f64..3.0, count)))
}

/// Tokens with which means of means differ from the mean.
const TOKENS: [usize; 4] = [3, 11, 20, 6];

proptest! {
    #[test]
    fn planted_weights_are_recovered((parts, counts) in weighted()) {
        let found = products(&parts, &sum(&parts, &counts)).nearest();
        for (found, count) in found.iter().zip(&counts) {
            prop_assert!((found - count).abs() < 1e-5, "{found} instead of {count}");
        }
    }

    #[test]
    fn no_weights_are_nearer_than_the_nearest(
        (parts, counts) in weighted(),
        used in prop::collection::vec(-1.0f64..1.0, LEN),
    ) {
        let distance2 = |counts: &[f64]| -> f64 {
            used.iter().zip(sum(&parts, counts)).map(|(used, sum)| (used - sum).powi(2)).sum()
        };
        let nearest = products(&parts, &used).nearest();
        prop_assert!(distance2(&nearest) <= distance2(&counts) + 1e-9);
    }

    #[test]
    fn one_other_weight_is_named(parts in parts(4), at in 0usize..4, factor in prop_oneof![1.05f64..4.0, 0.2..0.95]) {
        let mut counts = vec![1.0; 4];
        counts[at] = factor;
        let found = explained(&parts, &TOKENS, &sum(&parts, &counts), None).expect("it is explained");
        prop_assert_eq!(found.cause, Cause::GradientScaled);
        prop_assert!((found.factor.unwrap() - factor).abs() < 1e-4, "{}", found.text);
        let text = format!("micro-batch {at} of 4");
        prop_assert!(found.text.contains(&text), "{}", found.text);
    }

    #[test]
    fn missing_micro_batches_are_named(parts in parts(4), is_there in prop::collection::vec(any::<bool>(), 4)) {
        prop_assume!(is_there.iter().any(|there| *there) && is_there.iter().any(|there| !there));
        let counts: Vec<f64> = is_there.iter().map(|there| f64::from(*there)).collect();
        let found = explained(&parts, &TOKENS, &sum(&parts, &counts), None).expect("it is explained");
        prop_assert_eq!(found.cause, Cause::GradientMissing, "{}", found.text);
        prop_assert_eq!(found.counts, counts);
    }

    #[test]
    fn clipped_micro_batches_are_clipping(parts in parts(3), max in 0.5f64..2.5) {
        let counts: Vec<f64> = parts.iter().map(|part| clip(Some(max), product(part, part).sqrt())).collect();
        let found = explained(&parts, &TOKENS[..3], &sum(&parts, &counts), Some(max)).expect("it is explained");
        prop_assert_eq!(found.cause, Cause::Clipping, "{}", found.text);
        prop_assert!(found.text.starts_with("each micro-batch was clipped"), "{}", found.text);
    }

    #[test]
    fn foreign_gradient_is_not_explained(parts in parts(4), used in prop::collection::vec(-1.0f64..1.0, LEN)) {
        prop_assert!(explained(&parts, &TOKENS, &used, Some(0.5)).is_none());
    }
}

/// Gradients of four micro-batches without chance.
fn fixed() -> Vec<Vec<f64>> {
    let part = |index: usize| (0..LEN).map(|at| ((at * (index + 3) + index) % 7) as f64 - 3.0).collect();
    (0..4).map(part).collect()
}

#[test]
fn means_of_means_are_told_by_their_groups() {
    let all = TOKENS.iter().sum::<usize>() as f64;
    let used = |groups: [usize; 4], count: f64| {
        let size = |group: usize| -> f64 {
            (0..4).filter(|&at| groups[at] == group).map(|at| TOKENS[at] as f64).sum()
        };
        sum(&fixed(), &groups.map(|group| all / size(group) / count))
    };
    for (groups, count, text) in [
        ([0, 1, 2, 3], 4.0, "4 means of micro-batches"),
        ([0, 0, 1, 1], 2.0, "2 ranks (micro-batches dealt one rank after the other)"),
        ([0, 1, 0, 1], 2.0, "2 ranks (micro-batches dealt in turn)"),
        // Not divided by their number.
        ([0, 1, 2, 3], 1.0, "4 means of micro-batches"),
    ] {
        let found = explained(&fixed(), &TOKENS, &used(groups, count), None).unwrap();
        assert_eq!(found.cause, Cause::LossMeanOfMeans);
        assert!(found.text.contains(text), "{}", found.text);
    }
}

#[test]
fn factors_of_parameters_do_not_hide_means_of_means() {
    let all = TOKENS.iter().sum::<usize>() as f64;
    let counts = TOKENS.map(|tokens| all / tokens as f64 / 4.0);
    let used = |factor: f64| sum(&fixed(), &counts.map(|count| factor * count));
    let each = [products(&fixed(), &used(1.0)), products(&fixed(), &used(20.0))];
    let (both, bound2) = (Products::sum(&each), BOUND2 * product(&used(1.0), &used(1.0)));
    let explained = |each: &[Products]| {
        MicroBatches { tokens: &TOKENS, relative: &both, each, plain: &both, grad_clip: None, bound2 }
            .explained()
    };
    let found = explained(&each).unwrap();
    assert_eq!(found.cause, Cause::LossMeanOfMeans, "{}", found.text);
    assert!((0..4).all(|at| (found.counts[at] - counts[at]).abs() < 1e-9), "{:?}", found.counts);
    let other = [products(&fixed(), &used(1.0)), products(&fixed(), &sum(&fixed(), &[1.0, 2.0, 3.0, 5.0]))];
    assert!(other.iter().map(|param| param.distance2(&counts)).sum::<f64>() > bound2);
}

#[test]
fn any_weights_are_listed() {
    let counts = [0.5, 2.0, 1.0, 1.5];
    let found = explained(&fixed(), &TOKENS, &sum(&fixed(), &counts), None).unwrap();
    assert_eq!((found.cause, found.factor), (Cause::GradientScaled, None));
    assert!(found.text.contains("count 0.5, 2, 1, 1.5 times"), "{}", found.text);
}

#[test]
fn alike_micro_batches_count_alike() {
    let mut parts = fixed();
    parts[1] = parts[0].clone();
    let found = products(&parts, &sum(&parts, &[1.0, 0.0, 1.0, 1.0])).nearest();
    for (found, count) in found.iter().zip([0.5, 0.5, 1.0, 1.0]) {
        assert!((found - count).abs() < 1e-3, "{found} instead of {count}");
    }
    let found = explained(&parts, &TOKENS, &sum(&parts, &[1.0, 0.0, 1.0, 1.0]), None).unwrap();
    assert_eq!(found.cause, Cause::GradientMissing, "{}", found.text);
}
