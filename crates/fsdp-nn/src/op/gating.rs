//! How routers score the experts of a mixture, and choose among them.

/// The scores of all experts, which of them a row is sent to, and with which weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gating {
    /// The function from logits to scores.
    pub scoring: Scoring,
    /// Whether a bias of each expert is added to its score for the choice, but not for the weights (loss-free balancing:
    /// Wang et al., 2024; DeepSeek V3). It has no gradient.
    pub biased: bool,
    /// Experts are chosen from some groups only; [`Groups::ONE`] for no restriction.
    pub groups: Groups,
    /// Whether the weights of a row's experts are divided by their sum.
    pub normalized: bool,
}

/// The function from a row's logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Probabilities of all experts, which sum to one.
    Softmax,
    /// The logistic function of each logit (DeepSeek V3). The balancing loss uses scores divided by their sum.
    Sigmoid,
}

/// Equal groups of consecutive experts. A group counts as much as the sum of its two best experts, and only experts of the
/// best groups are chosen (DeepSeek V3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups; divides the number of experts.
    pub count: usize,
    /// Number of groups that experts are chosen from.
    pub top: usize,
}

impl Groups {
    /// All experts.
    pub const ONE: Groups = Groups { count: 1, top: 1 };

    /// Whether some groups are left out.
    pub fn restrict(&self) -> bool {
        self.top < self.count
    }
}

impl Gating {
    /// The most probable experts of all, by a softmax.
    pub const fn softmax(normalized: bool) -> Self {
        Self { scoring: Scoring::Softmax, biased: false, groups: Groups::ONE, normalized }
    }
}

/// Added to the sum of logistic scores before they are divided by it, as in transformers, where all may be zero.
pub const SCORES_EPS: f64 = 1e-20;
