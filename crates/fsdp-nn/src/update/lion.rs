//! Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, program 1): the sign of a running average
//! of the gradient, with decoupled weight decay, operation by operation as in the authors' `lion_pytorch.py`.

use super::elementwise::{Elementwise, Number, STATES_MAX};
use super::groups::{GroupSettings, Groups};

/// Lion. State: `exp_avg`.
#[derive(Clone, Debug)]
pub struct Lion {
    /// Weight of the running average: in the direction of a step, and in the new average.
    pub betas: (f64, f64),
    /// Learning rate scales and weight decay by parameter.
    pub groups: Groups,
}

impl Default for Lion {
    fn default() -> Self {
        Self { betas: (0.9, 0.99), groups: Groups::uniform(0.0) }
    }
}

impl Elementwise for Lion {
    fn state(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn groups(&self) -> Option<&Groups> {
        Some(&self.groups)
    }

    fn factors(&self, settings: GroupSettings, _step: u64, lr: f64) -> Vec<f64> {
        vec![1.0 - lr * settings.weight_decay, -lr]
    }

    #[inline(always)]
    fn step<N: Number>(&self, factors: &[N], gradient: N, param: N, state: &mut [N; STATES_MAX]) -> N {
        let &[keep, step_size] = factors else { unreachable!("the factors of Lion") };
        let (average, zero) = (state[0], gradient.constant(0.0));
        let weighted =
            |beta: f64| average * gradient.constant(beta) + gradient.constant(1.0 - beta) * gradient;
        let direction = weighted(self.betas.0);
        let up = zero.if_less(direction, step_size, zero);
        let down = direction.if_less(zero, step_size, zero);
        state[0] = weighted(self.betas.1);
        param * keep + (up - down)
    }
}
