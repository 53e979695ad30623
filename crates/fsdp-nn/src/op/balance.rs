//! The load balancing loss of routers (Switch Transformers: Fedus et al. 2021, equations 4 to 6), as transformers'
//! `load_balancing_loss_func` computes it: over the rows of a micro-batch and all mixtures of the model together.
//!
//! With N rows that count and L mixtures of E experts, C(e) routes to an expert and S(e) the sum of its probabilities over
//! all rows and mixtures, it is `E * sum over e of C(e) / (L N) * S(e) / (L N)`. C is constant in its gradient.

use crate::backend::BatchFacts;

/// The mixtures of a model, whose routers leave loads in training, and what their balancing loss is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// Blocks that are mixtures.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Coefficient of the loss; where it is 0, there is none.
    pub coefficient: f64,
    /// What its gradient is multiplied with, as [`LossTerms::loss_scale`](super::LossTerms::loss_scale).
    pub loss_scale: f64,
}

impl Balance {
    /// The same, if there is a loss.
    pub(crate) fn loss(self) -> Option<Self> {
        (self.coefficient > 0.0).then_some(self)
    }

    /// Numbers in the load of a mixture: routes to each expert, then the sum of its probabilities.
    pub fn load_len(&self) -> usize {
        2 * self.experts
    }

    /// Numbers in the loads of all mixtures.
    pub fn loads_len(&self) -> usize {
        self.layers * self.load_len()
    }

    /// Bytes that a micro-batch has for the loads, and for the loss.
    pub(crate) fn bytes(&self) -> usize {
        8 * (self.loads_len() + 1)
    }

    /// What `sum over e of C(e) S(e)` is multiplied with in the sum of the losses of a micro-batch: the loss counts once for each
    /// of its targets, so that it is the mean over them behind the division by their number.
    pub fn scale(&self, facts: BatchFacts<'_>) -> f64 {
        let rows = (self.layers * facts.lengths.iter().sum::<usize>()) as f64;
        if rows == 0.0 {
            return 0.0;
        }
        facts.targets as f64 * self.coefficient * self.experts as f64 / (rows * rows)
    }

    /// What C is multiplied with in the gradient that travels.
    pub fn slope(&self, facts: BatchFacts<'_>) -> f64 {
        self.scale(facts) * self.loss_scale
    }

    /// C and S, from the loads of all mixtures.
    pub fn sums(&self, loads: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.load_len()];
        for load in loads.chunks_exact(self.load_len()) {
            sums.iter_mut().zip(load).for_each(|(sum, value)| *sum += value);
        }
        sums
    }
}
