use proptest::prelude::*;

use super::*;

#[test]
fn last_batch_is_padded_with_masked_samples() {
    let sampler = EvalSampler::new(7, 4, 2, 0);
    assert_eq!((sampler.batches(), sampler.micro_batches()), (2, 2));
    assert_eq!(sampler.batch(0, 1), [Some(2), Some(3)]);
    assert_eq!(sampler.batch(1, 1), [Some(6), None]);
}

#[test]
fn fewer_samples_than_one_batch_are_accepted() {
    let sampler = EvalSampler::new(1, 4, 2, 0);
    assert_eq!((sampler.batch(0, 0), sampler.batch(0, 1)), (vec![Some(0), None], vec![None, None]));
}

#[test]
fn batch_limit_stops_early_but_adds_no_batches() {
    assert_eq!(EvalSampler::new(100, 4, 2, 3).batches(), 3);
    assert_eq!(EvalSampler::new(10, 4, 2, u64::MAX).batches(), 3);
}

proptest! {
    #[test]
    fn every_sample_is_evaluated_once_in_order(
        samples in 1usize..60, micro in 1usize..5, per_batch in 1usize..5,
    ) {
        let sampler = EvalSampler::new(samples, micro * per_batch, micro, 0);
        let sampler = &sampler;
        let all: Vec<usize> = (0..sampler.batches())
            .flat_map(|batch| (0..sampler.micro_batches()).flat_map(move |j| sampler.batch(batch, j)))
            .flatten()
            .collect();
        prop_assert_eq!(all, (0..samples).collect::<Vec<_>>());
    }
}
