use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// A slow reference: deals numbers one by one to the sources that the mix gives.
fn dealt(mix: &Mix, count: u64) -> BTreeMap<usize, u64> {
    let mut dealt = BTreeMap::new();
    for number in 0..count {
        let (source, before) = mix.at(number);
        let so_far = dealt.entry(source).or_insert(0);
        assert_eq!(before, *so_far, "sample {number} is the next one of source {source}");
        *so_far += 1;
    }
    dealt
}

#[test]
fn source_shares_match_weights_in_short_and_long_prefixes() {
    let mix = Mix::new(&[7.0, 2.0, 1.0]).unwrap();
    for (source, share) in [0.7, 0.2, 0.1].into_iter().enumerate() {
        assert!((mix.share(source) - share).abs() < 1.0 / SLOTS as f64);
        for count in [10, 100, 1000, 100_000] {
            let got = mix.taken(source, count) as f64;
            assert!((got - share * count as f64).abs() <= 2.5, "{got} of {count} for {share}");
        }
    }
    let weights = [1e300, 1e300];
    assert_eq!(Mix::new(&weights).unwrap().shares, [SLOTS / 2; 2]);
}

#[test]
fn source_without_slot_is_rejected() {
    let message = Mix::new(&[1.0, 1e-9]).unwrap_err().to_string();
    assert!(message.contains("source[1]") && message.contains("65536"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn each_source_yields_its_samples_in_order(weights in prop::collection::vec(0.01f64..10.0, 1..5)) {
        let mix = Mix::new(&weights).unwrap();
        let count = SLOTS as u64 + 1234;
        let dealt = dealt(&mix, count);
        for source in 0..weights.len() {
            prop_assert_eq!(mix.taken(source, count), dealt.get(&source).copied().unwrap_or(0));
        }
        prop_assert_eq!(mix.shares.iter().sum::<usize>(), SLOTS);
    }

    #[test]
    fn source_epochs_are_permutations_for_any_micro_batch_size(
        samples in prop::collection::vec(1usize..9, 1..4),
        seed in prop::option::of(any::<u64>()), micro in 1usize..4, rounds in 1usize..4,
    ) {
        let weights: Vec<f64> = (0..samples.len()).map(|source| 1.0 + source as f64).collect();
        let global = 12;
        let sampler = |micro| {
            MixSampler::new(Mix::new(&weights).unwrap(), samples.clone(), global, micro, seed)
        };
        let run = |micro: usize| -> Vec<(usize, usize)> {
            let sampler = sampler(micro);
            let steps = 0..40 * rounds as u64;
            let places = steps.flat_map(|step| (0..global / micro).map(move |index| (step, index)));
            places.flat_map(|(step, index)| sampler.batch(step, index)).collect()
        };
        let whole = run(12);
        let cut = [1, 2, 3][micro - 1];
        prop_assert_eq!(&run(cut), &whole);
        for (source, &count) in samples.iter().enumerate() {
            let taken: Vec<usize> = whole.iter().filter(|(of, _)| *of == source).map(|(_, index)| *index).collect();
            for epoch in taken.chunks_exact(count) {
                let mut sorted = epoch.to_vec();
                sorted.sort_unstable();
                prop_assert!(sorted.into_iter().eq(0..count));
            }
            let steps = 40 * rounds as u64;
            let (epochs, rest) = sampler(1).position(source, steps);
            prop_assert_eq!(epochs as usize * count + rest as usize, taken.len());
        }
    }
}
