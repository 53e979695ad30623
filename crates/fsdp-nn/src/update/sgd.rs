//! Stochastic gradient descent, computed like `torch.optim.SGD`.

use super::elementwise::{Elementwise, Number, STATES_MAX};
use super::groups::{GroupSettings, Groups};

/// SGD with momentum and coupled weight decay. State: `momentum_buffer`, if there is momentum.
#[derive(Clone, Debug)]
pub struct Sgd {
    /// Momentum; 0 for none.
    pub momentum: f64,
    /// Dampening of the gradient in the momentum; not applied in step 1.
    pub dampening: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Learning rate scales and weight decay (added to the gradient) by parameter.
    pub groups: Groups,
}

impl Default for Sgd {
    fn default() -> Self {
        Self { momentum: 0.0, dampening: 0.0, nesterov: false, groups: Groups::uniform(0.0) }
    }
}

impl Elementwise for Sgd {
    fn state(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn groups(&self) -> Option<&Groups> {
        Some(&self.groups)
    }

    /// The factor of the direction, the weight decay, and whether this is the first step.
    fn factors(&self, settings: GroupSettings, step: u64, lr: f64) -> Vec<f64> {
        vec![-lr, settings.weight_decay, f64::from(u8::from(step == 1))]
    }

    #[inline(always)]
    fn step<N: Number>(&self, factors: &[N], gradient: N, param: N, state: &mut [N; STATES_MAX]) -> N {
        let &[step_size, decay, is_first] = factors else { unreachable!("the factors of SGD") };
        let g = gradient + decay * param;
        if self.momentum == 0.0 {
            return param + step_size * g;
        }
        let momentum = g.constant(self.momentum);
        let later = state[0] * momentum + g.constant(1.0 - self.dampening) * g;
        // The first average is the gradient, without dampening.
        let average = g.constant(0.0).if_less(is_first, g, later);
        state[0] = average;
        param + step_size * if self.nesterov { g + momentum * average } else { average }
    }
}
