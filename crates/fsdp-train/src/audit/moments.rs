//! What the state of an optimizer says about the gradient of its last step.

use fsdp_config::OptimizerConfig;

/// How a first moment takes up the gradient: after = decay * before + gain * gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moments {
    /// Name of the state; `None` if there is none, and the weights, divided by the negative learning rate, take up the
    /// gradient.
    pub(super) first: Option<&'static str>,
    pub(super) decay: f64,
    pub(super) gain: f64,
    /// Whether weight decay is added to the gradient first.
    pub(super) is_coupled: bool,
}

impl Moments {
    /// Those of an optimizer in a step, counted from 0; `None` if its state does not contain the gradient.
    pub(super) fn of(optimizer: &OptimizerConfig, step: u64) -> Option<Moments> {
        let of = |decay: f64| Moments { first: Some("exp_avg"), decay, gain: 1.0 - decay, is_coupled: false };
        match optimizer {
            OptimizerConfig::Adamw(c) => Some(of(c.betas[0])),
            OptimizerConfig::Lion(c) => Some(of(c.betas[1])),
            OptimizerConfig::Sgd(c) if c.momentum > 0.0 => {
                // The first gradient becomes the momentum as it is.
                let gain = if step == 0 { 1.0 } else { 1.0 - c.dampening };
                Some(Moments { first: Some("momentum_buffer"), decay: c.momentum, gain, is_coupled: true })
            }
            OptimizerConfig::Sgd(_) => Some(Moments { first: None, decay: 1.0, gain: 1.0, is_coupled: true }),
            _ => None,
        }
    }

    /// The gradient between two values of the moment.
    pub(super) fn gradient(&self, before: f64, after: f64) -> f64 {
        (after - self.decay * before) / self.gain
    }
}

/// The decay that somebody would write for one that was fitted: one minus a number of two digits, if that is near.
pub(super) fn written(decay: f64) -> f64 {
    let gain: f64 = format!("{:.1e}", 1.0 - decay).parse().unwrap_or(1.0 - decay);
    // As the shortest decimal.
    let near: f64 = format!("{:.9}", 1.0 - gain).parse().unwrap_or(decay);
    if (near - decay).abs() <= WRITTEN_ERROR * (1.0 - decay).abs() { near } else { decay }
}

/// Relative error of the gain up to which a fitted decay counts as a written one.
const WRITTEN_ERROR: f64 = 1e-3;
