use proptest::prelude::*;

use super::*;

#[test]
fn the_last_batch_is_filled_with_masked_samples() {
    let sampler = EvalSampler::new(7, 8, 4, 2, 0).unwrap();
    assert_eq!((sampler.batches(), sampler.micro_batches()), (2, 2));
    assert_eq!(sampler.batch(0, 1), [Some(2), Some(3)]);
    assert_eq!(sampler.batch(1, 1), [Some(6), None]);
}

#[test]
fn less_than_one_batch_is_enough_but_nothing_is_an_error() {
    let sampler = EvalSampler::new(1, 8, 4, 2, 0).unwrap();
    assert_eq!((sampler.batch(0, 0), sampler.batch(0, 1)), (vec![Some(0), None], vec![None, None]));
    let message = EvalSampler::new(0, 8, 4, 2, 0).unwrap_err().to_string();
    assert!(message.starts_with("data.eval holds no sample of 8 tokens"), "{message}");
}

#[test]
fn a_limit_stops_early_but_adds_nothing() {
    assert_eq!(EvalSampler::new(100, 8, 4, 2, 3).unwrap().batches(), 3);
    assert_eq!(EvalSampler::new(10, 8, 4, 2, u64::MAX).unwrap().batches(), 3);
}

proptest! {
    #[test]
    fn every_sample_is_evaluated_once_in_order(
        samples in 1usize..60, micro in 1usize..5, per_batch in 1usize..5,
    ) {
        let sampler = EvalSampler::new(samples, 8, micro * per_batch, micro, 0).unwrap();
        let sampler = &sampler;
        let all: Vec<usize> = (0..sampler.batches())
            .flat_map(|batch| (0..sampler.micro_batches()).flat_map(move |j| sampler.batch(batch, j)))
            .flatten()
            .collect();
        prop_assert_eq!(all, (0..samples).collect::<Vec<_>>());
    }
}
