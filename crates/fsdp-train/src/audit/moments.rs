//! What the state of an optimizer says about the gradient of its last step.

use crate::config::OptimizerConfig;

/// How a first moment takes up the gradient: after = decay * before + gain * gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moments {
    /// Name of the state.
    pub(super) first: &'static str,
    pub(super) decay: f64,
    pub(super) gain: f64,
}

impl Moments {
    /// Those of an optimizer; `None` if its state does not contain the gradient.
    pub(super) fn of(optimizer: &OptimizerConfig) -> Option<Moments> {
        match optimizer {
            OptimizerConfig::Adamw(c) => {
                Some(Moments { first: "exp_avg", decay: c.betas[0], gain: 1.0 - c.betas[0] })
            }
            OptimizerConfig::Lion(c) => {
                Some(Moments { first: "exp_avg", decay: c.betas[1], gain: 1.0 - c.betas[1] })
            }
            OptimizerConfig::Sgd(c) if c.momentum > 0.0 => {
                Some(Moments { first: "momentum_buffer", decay: c.momentum, gain: 1.0 - c.dampening })
            }
            _ => None,
        }
    }

    /// The gradient between two values of the moment.
    pub(super) fn gradient(&self, before: f64, after: f64) -> f64 {
        (after - self.decay * before) / self.gain
    }
}
