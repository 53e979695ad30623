//! What routers add to the loss in training. All terms are means over the mixtures of the model, and over the counted
//! rows or the sequences of a micro-batch. A term counts once per target of its micro-batch, so that dividing the sum by
//! the number of targets gives a mean.
//!
//! - The load balancing loss (Switch Transformers: Fedus et al. 2021, equations 4 to 6), computed like transformers'
//!   `load_balancing_loss_func`: over the rows of a micro-batch and all mixtures of the model together. With N counted
//!   rows, L mixtures of E experts, C(e) the number of routes to expert e and S(e) the sum of its probabilities over all
//!   rows and mixtures, the loss is `E * sum over e of C(e) / (L N) * S(e) / (L N)`. Its gradient treats C as constant.
//! - The z-loss (ST-MoE: Zoph et al. 2022, equation 5), the mean of the squared log-sum-exp of a row's logits.
//! - The sequence-wise balance loss (DeepSeek V3, 2024, equations 17 to 20), the mean over sequences. With T counted rows in a
//!   sequence, K routes per row, C(e) the routes of the sequence to expert e and S(e) the sum of the expert's scores, divided by
//!   those of all experts, it is `sum over e of E / (K T) * C(e) * S(e) / T`. Its gradient treats C as constant.

use std::ops::Range;

use super::routing::Routing;
use crate::backend::BatchFacts;

/// Number of sums of a model with mixtures: the balancing loss of the routers, their z-loss, and their
/// sequence-wise loss.
pub(crate) const ROUTER_SUMS: usize = 3;

/// The mixtures of a model, whose routers record loads in training, and the coefficients of what they add to the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterTerms {
    /// Number of blocks that are mixtures.
    pub layers: usize,
    /// Experts per mixture.
    pub experts: usize,
    /// Coefficient of the balancing loss; 0 disables it.
    pub balance: f64,
    /// Coefficient of the z-loss; 0 disables it.
    pub z_loss: f64,
    /// Coefficient of the sequence-wise balance loss; 0 disables it. Samples are whole, if there is one.
    pub sequence: f64,
    /// Factor of the gradients of all terms, as [`LossTerms::loss_scale`](super::LossTerms::loss_scale).
    pub loss_scale: f64,
}

impl RouterTerms {
    /// Returns `self` if there is a balancing loss.
    pub fn balancing(self) -> Option<Self> {
        (self.balance != 0.0).then_some(self)
    }

    /// Returns `self` if there is any term.
    pub fn any(self) -> Option<Self> {
        (self.balance != 0.0 || self.z_loss != 0.0 || self.sequence != 0.0).then_some(self)
    }

    /// Length of the load of a mixture: the number of routes to each expert, the sum of each expert's probabilities, and
    /// the mixture's z-loss and sequence-wise loss, if there are any.
    pub fn load_len(&self) -> usize {
        2 * self.experts + usize::from(self.z_loss != 0.0) + usize::from(self.sequence != 0.0)
    }

    /// Where the z-loss is in the load of a mixture.
    pub fn z_loss_at(&self) -> Option<usize> {
        (self.z_loss != 0.0).then_some(2 * self.experts)
    }

    /// Where the sequence-wise loss is in the load of a mixture.
    pub fn sequence_at(&self) -> Option<usize> {
        (self.sequence != 0.0).then(|| self.load_len() - 1)
    }

    /// Total length of the loads of all mixtures.
    pub fn loads_len(&self) -> usize {
        self.layers * self.load_len()
    }

    /// Factor of `sum over e of C(e) S(e)` in the summed loss of a micro-batch.
    pub fn balance_scale(&self, facts: BatchFacts<'_>) -> f64 {
        let rows = (self.layers * facts.counted_rows) as f64;
        if rows == 0.0 {
            return 0.0;
        }
        facts.targets as f64 * self.balance * self.experts as f64 / (rows * rows)
    }

    /// Factor of C in the backward gradient.
    pub fn balance_slope(&self, facts: BatchFacts<'_>) -> f64 {
        self.balance_scale(facts) * self.loss_scale
    }

    /// Factor of a row's squared log-sum-exp in the summed loss of a micro-batch.
    pub fn z_scale(&self, facts: BatchFacts<'_>) -> f64 {
        let rows = (self.layers * facts.counted_rows) as f64;
        if rows == 0.0 {
            return 0.0;
        }
        facts.targets as f64 * self.z_loss / rows
    }

    /// Factor of the log-sum-exp of a row times the softmax of its logits in their gradients.
    pub fn z_slope(&self, facts: BatchFacts<'_>) -> f64 {
        2.0 * self.z_scale(facts) * self.loss_scale
    }

    /// The counted rows of each sequence, with the factor of its `sum over e of C(e) S(e)` in the summed loss of a micro-batch.
    pub fn sequences(&self, facts: BatchFacts<'_>, routing: Routing) -> Vec<(Range<usize>, f64)> {
        let sequences = facts.sequences(routing.rows);
        let each = facts.targets as f64 * self.sequence / (self.layers * sequences.len()) as f64;
        let scale = |rows: usize| each * self.experts as f64 / (routing.top * rows * rows) as f64;
        sequences.into_iter().map(|rows| (rows.clone(), scale(rows.len()))).collect()
    }

    /// Sums the loads of all mixtures into C and S.
    pub fn sums(&self, loads: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; 2 * self.experts];
        for load in loads.chunks_exact(self.load_len()) {
            sums.iter_mut().zip(load).for_each(|(sum, value)| *sum += value);
        }
        sums
    }
}
