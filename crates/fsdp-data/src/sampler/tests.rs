use proptest::prelude::*;

use super::*;

fn sampler(samples: usize, global: usize, micro: usize, shuffle: Option<u64>) -> Sampler {
    Sampler::new(samples, 8, global, micro, shuffle).unwrap()
}

fn step(sampler: &Sampler, step: u64) -> Vec<usize> {
    (0..sampler.micro_batches()).flat_map(|micro_batch| sampler.batch(step, micro_batch)).collect()
}

#[test]
fn unshuffled_steps_visit_samples_in_order() {
    let sampler = sampler(13, 6, 2, None);
    assert_eq!((sampler.steps_per_epoch(), sampler.micro_batches()), (2, 3));
    assert_eq!(sampler.batch(0, 0), [0, 1]);
    assert_eq!(sampler.batch(0, 2), [4, 5]);
    assert_eq!(sampler.batch(1, 1), [8, 9]);
}

#[test]
fn incomplete_batch_is_dropped_at_end_of_epoch() {
    let sampler = sampler(13, 6, 2, None);
    assert_eq!((sampler.epoch(1), sampler.epoch(2)), (0, 1));
    assert_eq!(step(&sampler, 2), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn shuffled_epochs_differ() {
    let sampler = sampler(64, 64, 8, Some(3));
    assert_ne!(step(&sampler, 0), step(&sampler, 1));
    assert_eq!(step(&sampler, 0), step(&sampler.clone(), 0));
}

#[test]
fn fewer_samples_than_one_global_batch_is_error() {
    assert_eq!(step(&sampler(4, 4, 4, None), 9), [0, 1, 2, 3]);
    let message = Sampler::new(3, 8, 4, 2, None).unwrap_err().to_string();
    assert!(message.starts_with("the data holds 3 samples of 8 tokens, fewer than one global batch of 4;"));
}

proptest! {
    #[test]
    fn epoch_uses_each_sample_at_most_once(
        micro in 1usize..5, per_step in 1usize..6, steps in 1usize..6, rest in 0usize..5,
        epoch in 0u64..4, seed in proptest::option::of(any::<u64>()),
    ) {
        let global = micro * per_step;
        let samples = global * steps + rest % global;
        let sampler = sampler(samples, global, micro, seed);
        let first = epoch * sampler.steps_per_epoch();
        let mut taken: Vec<usize> =
            (first..first + sampler.steps_per_epoch()).flat_map(|s| step(&sampler, s)).collect();
        prop_assert_eq!(taken.len(), global * steps);
        taken.sort_unstable();
        taken.dedup();
        prop_assert_eq!(taken.len(), global * steps);
        prop_assert!(taken.iter().all(|&sample| sample < samples));
    }

    #[test]
    fn micro_batch_size_does_not_change_global_batch(
        halvings in 0u32..4, s in 0u64..50, seed in proptest::option::of(any::<u64>()),
    ) {
        let whole = step(&sampler(100, 16, 16, seed), s);
        prop_assert_eq!(step(&sampler(100, 16, 16 >> halvings, seed), s), whole);
    }
}
