//! AdamW, computed like `torch.optim.AdamW`, operation by operation.

use super::elementwise::{Elementwise, Number, STATES_MAX, lerp};
use super::groups::{GroupSettings, Groups};

/// Adam with decoupled weight decay. State: `exp_avg` and `exp_avg_sq`.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// Decay rates of the running averages of the gradient and of its square.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Learning rate scales and weight decay by parameter.
    pub groups: Groups,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, groups: Groups::uniform(0.01) }
    }
}

impl Elementwise for AdamW {
    fn state(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn groups(&self) -> Option<&Groups> {
        Some(&self.groups)
    }

    fn factors(&self, settings: GroupSettings, step: u64, lr: f64) -> Vec<f64> {
        let (beta1, beta2) = self.betas;
        let [correction1, correction2] = [beta1, beta2].map(|beta| 1.0 - beta.powf(step as f64));
        vec![1.0 - lr * settings.weight_decay, correction2.sqrt(), -(lr / correction1)]
    }

    #[inline(always)]
    fn step<N: Number>(&self, factors: &[N], gradient: N, param: N, state: &mut [N; STATES_MAX]) -> N {
        let &[keep, root_correction, step_size] = factors else { unreachable!("the factors of AdamW") };
        let ([mean, square, _], g, (beta1, beta2)) = (*state, gradient, self.betas);
        let average = lerp(mean, g, 1.0 - beta1);
        let variance = square * g.constant(beta2) + g.constant(1.0 - beta2) * g * g;
        let denominator = variance.square_root() / root_correction + g.constant(self.eps);
        (state[0], state[1]) = (average, variance);
        param * keep + step_size * average / denominator
    }
}
