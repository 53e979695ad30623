//! The load balancing loss of routers (Switch Transformers: Fedus et al. 2021, equations 4 to 6), computed like
//! transformers' `load_balancing_loss_func`: over the rows of a micro-batch and all mixtures of the model together.
//!
//! With N counted rows, L mixtures of E experts, C(e) the number of routes to expert e and S(e) the sum of its
//! probabilities over all rows and mixtures, the loss is `E * sum over e of C(e) / (L N) * S(e) / (L N)`. Its
//! gradient treats C as constant.

use crate::backend::BatchFacts;

/// The mixtures of a model, whose routers record loads in training, and the factors of their balancing loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// Number of blocks that are mixtures.
    pub layers: usize,
    /// Experts per mixture.
    pub experts: usize,
    /// Coefficient of the loss; 0 disables it.
    pub coefficient: f64,
    /// Factor of the loss's gradient, as [`LossTerms::loss_scale`](super::LossTerms::loss_scale).
    pub loss_scale: f64,
}

impl Balance {
    /// Returns `self` if there is a loss.
    pub fn loss(self) -> Option<Self> {
        (self.coefficient != 0.0).then_some(self)
    }

    /// Length of the load of a mixture: the number of routes to each expert, then the sum of each expert's
    /// probabilities.
    pub fn load_len(&self) -> usize {
        2 * self.experts
    }

    /// Total length of the loads of all mixtures.
    pub fn loads_len(&self) -> usize {
        self.layers * self.load_len()
    }

    /// Factor of `sum over e of C(e) S(e)` in the summed loss of a micro-batch. The balancing loss counts once per
    /// target, so that dividing the sum by the number of targets gives the mean.
    pub fn scale(&self, facts: BatchFacts<'_>) -> f64 {
        let rows = (self.layers * facts.counted_rows) as f64;
        if rows == 0.0 {
            return 0.0;
        }
        facts.targets as f64 * self.coefficient * self.experts as f64 / (rows * rows)
    }

    /// Factor of C in the backward gradient.
    pub fn slope(&self, facts: BatchFacts<'_>) -> f64 {
        self.scale(facts) * self.loss_scale
    }

    /// Sums the loads of all mixtures into C and S.
    pub fn sums(&self, loads: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.load_len()];
        for load in loads.chunks_exact(self.load_len()) {
            sums.iter_mut().zip(load).for_each(|(sum, value)| *sum += value);
        }
        sums
    }
}
