use proptest::prelude::*;

use super::*;

fn plain(temperature: f64) -> Sampling {
    Sampling { temperature, top_k: None, top_p: None, seed: 5 }
}

/// The definitions, with explicit candidate sets: the smallest set of the most likely tokens that suffices.
fn expected(sampling: &Sampling, logits: &[f64]) -> Vec<f64> {
    let weight = |logit: f64| (logit / sampling.temperature).exp();
    let is_among =
        |token: usize, count: usize| logits.iter().filter(|&&other| other > logits[token]).count() < count;
    let mut left: Vec<usize> =
        (0..logits.len()).filter(|&token| is_among(token, sampling.top_k.unwrap_or(usize::MAX))).collect();
    left.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let mass = |tokens: &[usize]| tokens.iter().map(|&token| weight(logits[token])).sum::<f64>();
    let (all, top_p) = (mass(&left), sampling.top_p.unwrap_or(1.0));
    let count = (1..left.len()).find(|&count| mass(&left[..count]) >= top_p * all - 1e-13 * all);
    if sampling.top_p.is_some() {
        left.truncate(count.unwrap_or(left.len()));
    }
    let sum = mass(&left);
    let of = |token: usize| if left.contains(&token) { weight(logits[token]) / sum } else { 0.0 };
    (0..logits.len()).map(of).collect()
}

proptest! {
    #[test]
    fn probabilities_match_definition_and_draws_are_repeatable(
        logits in prop::collection::vec(-8.0..8.0f64, 1..20),
        temperature in 0.2..3.0f64,
        top_k in prop::option::of(1..25usize),
        top_p in prop::option::of(0.01..0.999f64),
    ) {
        let sampling = Sampling { temperature, top_k, top_p, seed: 0 };
        let (found, expected) = (sampling.probabilities(&logits), expected(&sampling, &logits));
        for (found, expected) in found.iter().zip(&expected) {
            prop_assert!((found - expected).abs() <= 1e-12, "{found}, {expected}");
        }
        let support = |probabilities: &[f64]| probabilities.iter().map(|&p| p > 0.0).collect::<Vec<_>>();
        prop_assert_eq!(support(&found), support(&expected));
        let drawn = sampling.draw(&logits, 3);
        prop_assert!(found[drawn as usize] > 0.0);
        prop_assert_eq!(drawn, sampling.draw(&logits, 3), "a function of seed and place");
    }
}

#[test]
fn token_frequencies_match_probabilities() {
    let logits = [1.0, 0.0, -1.0, 2.0, 0.5, -30.0];
    for sampling in [
        plain(1.0),
        plain(0.5),
        Sampling { top_k: Some(3), ..plain(2.0) },
        Sampling { top_p: Some(0.8), ..plain(1.0) },
    ] {
        let probabilities = sampling.probabilities(&logits);
        let draws = 20_000;
        let mut counts = [0.0; 6];
        (0..draws).for_each(|place| counts[sampling.draw(&logits, place) as usize] += 1.0);
        let mut distance = 0.0;
        for (count, probability) in counts.iter().zip(&probabilities) {
            let mean = probability * draws as f64;
            if mean < 1e-3 {
                assert_eq!(*count, 0.0, "{sampling:?}: a token that cannot come");
            } else {
                distance += (count - mean) * (count - mean) / mean;
            }
        }
        // With 5 degrees of freedom, the probability beyond 35.9 is one in a million.
        assert!(distance < 35.9, "{sampling:?}: {distance}, {counts:?}");
    }
}

#[test]
fn low_temperature_and_top_k_one_are_greedy() {
    let logits = [0.3, 2.0, 2.0, -1.0];
    assert_eq!(likeliest(&logits), 1, "the first of equal ones");
    let cold = plain(1e-3).probabilities(&logits);
    assert_eq!((cold[0], cold[1], cold[2]), (0.0, 0.5, 0.5));
    let one = Sampling { top_k: Some(1), ..plain(1.0) }.probabilities(&logits);
    assert_eq!(one, [0.0, 0.5, 0.5, 0.0], "equal ones stay together, as in transformers");
    assert_eq!(Sampling { top_p: Some(1e-9), ..plain(1.0) }.probabilities(&[0.0, 1.0]), [0.0, 1.0]);
}
