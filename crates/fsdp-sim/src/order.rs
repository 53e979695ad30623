//! Adversarial issue orders: which of the queues that may run goes next, from a seed.
//!
//! Host queues normally run in program order, for speed. A seeded order instead picks any queue whose declared waits
//! are met, so that a wait missing from the schedule shows as wrong bits. The seed reproduces the run.

use fsdp_core::engine::IssueOrder;
use fsdp_core::schedule::OpId;

/// A pseudo-random order, the same for the same seed on every machine.
#[derive(Clone, Debug)]
pub struct SeededOrder {
    state: u64,
}

impl SeededOrder {
    /// Creates the order of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Creates the order of `seed` for one rank: ranks differ, and each is reproducible by itself.
    pub fn for_rank(seed: u64, rank: usize) -> Self {
        Self::new(mix(seed ^ mix(rank as u64)))
    }

    /// Returns which of `ready` candidates goes next; all are equally likely.
    ///
    /// # Panics
    /// When there are no candidates.
    pub fn choose(&mut self, ready: usize) -> usize {
        assert!(ready > 0, "one of no candidates cannot be chosen");
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The high bits of the product are spread evenly over the candidates, without the bias of a remainder.
        ((u128::from(mix(self.state)) * ready as u128) >> 64) as usize
    }
}

impl IssueOrder for SeededOrder {
    fn choose(&mut self, ready: &[OpId]) -> usize {
        self.choose(ready.len())
    }
}

/// The output function of SplitMix64.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(mut order: SeededOrder, count: usize) -> Vec<usize> {
        (0..count).map(|_| order.choose(3)).collect()
    }

    #[test]
    fn same_seed_gives_same_order() {
        assert_eq!(choices(SeededOrder::new(7), 100), choices(SeededOrder::new(7), 100));
    }

    #[test]
    fn different_seeds_and_ranks_give_different_orders() {
        assert_ne!(choices(SeededOrder::new(7), 100), choices(SeededOrder::new(8), 100));
        assert_ne!(choices(SeededOrder::for_rank(7, 0), 100), choices(SeededOrder::for_rank(7, 1), 100));
    }

    #[test]
    fn candidates_are_chosen_uniformly() {
        let mut counts = [0; 3];
        choices(SeededOrder::new(1), 30_000).into_iter().for_each(|choice| counts[choice] += 1);
        assert!(counts.iter().all(|&count| (9_500..10_500).contains(&count)), "{counts:?}");
    }
}
