use proptest::prelude::*;

use super::*;

fn order(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let permutation = Permutation::new(len, seed, epoch);
    (0..len).map(|position| permutation.at(position)).collect()
}

fn assert_is_permutation(len: usize, seed: u64, epoch: u64) {
    let mut sorted = order(len, seed, epoch);
    sorted.sort_unstable();
    assert_eq!(sorted, (0..len).collect::<Vec<_>>(), "len {len}, seed {seed}, epoch {epoch}");
}

#[test]
fn every_small_length_is_permuted() {
    for len in 0..300 {
        assert_is_permutation(len, 7, 3);
    }
}

#[test]
fn lengths_around_powers_of_two_are_permuted() {
    for len in [1023, 1024, 1025, 4095, 4096, 4097, 65_535, 65_536, 65_537] {
        assert_is_permutation(len, 0, 0);
    }
}

/// The expected orders come from a separate implementation (in Python) of the module's description.
#[test]
fn order_matches_reference_implementation() {
    assert_eq!(order(8, 0, 0), [4, 2, 7, 0, 6, 1, 3, 5]);
    assert_eq!(order(8, 0, 1), [5, 4, 0, 3, 7, 6, 2, 1]);
}

#[test]
fn huge_length_needs_no_memory() {
    let permutation = Permutation::new(1 << 40, 1, 2);
    assert!((0..1000).all(|position| permutation.at(position) < 1 << 40));
}

/// Over many epochs, every element is equally likely at every position, and so is every ordered pair at the front:
/// chi-square stays within six standard deviations of its mean.
#[test]
fn positions_and_neighbors_are_uniform_over_epochs() {
    const LEN: usize = 10;
    const EPOCHS: usize = 20_000;
    let (mut at, mut pairs) = ([[0usize; LEN]; LEN], [[0usize; LEN]; LEN]);
    for epoch in 0..EPOCHS as u64 {
        let order = order(LEN, 42, epoch);
        for (position, &element) in order.iter().enumerate() {
            at[position][element] += 1;
        }
        pairs[order[0]][order[1]] += 1;
    }
    let chi_square = |counts: &mut dyn Iterator<Item = usize>, expected: f64| {
        counts.map(|count| (count as f64 - expected).powi(2) / expected).sum::<f64>()
    };
    let positions = chi_square(&mut at.iter().flatten().copied(), EPOCHS as f64 / LEN as f64);
    let distinct = LEN * (LEN - 1);
    let off_diagonal = &mut pairs.iter().flatten().copied().filter(|&count| count > 0);
    let neighbors = chi_square(off_diagonal, EPOCHS as f64 / distinct as f64);
    for (chi_square, freedom) in [(positions, 81.0), (neighbors, 89.0)] {
        let deviations = (chi_square - freedom) / f64::sqrt(2.0 * freedom);
        assert!(deviations.abs() < 6.0, "chi-square {chi_square} for {freedom} degrees of freedom");
    }
}

proptest! {
    #[test]
    fn every_seed_and_epoch_yields_permutation(len in 0usize..3000, seed: u64, epoch: u64) {
        assert_is_permutation(len, seed, epoch);
    }

    #[test]
    fn different_seeds_and_epochs_give_different_orders(seed: u64, epoch in 0u64..1 << 40) {
        let first = order(100, seed, epoch);
        prop_assert_ne!(&first, &order(100, seed, epoch + 1));
        prop_assert_ne!(&first, &order(100, seed.wrapping_add(1), epoch));
        prop_assert_ne!(&first, &(0..100).collect::<Vec<_>>());
    }
}
