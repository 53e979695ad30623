//! Schedule-free AdamW (Defazio et al. 2024, The Road Less Scheduled), with the steps of the authors'
//! `AdamWScheduleFree`: instead of a learning rate that decays, an average of the iterates.
//!
//! Gradients are taken at the parameters y, between the iterate z and its average x, which is the model to evaluate.
//! (The authors' code keeps y and z, and computes x from them.)

use super::elementwise::{Elementwise, Number, STATES_MAX};
use super::ema::Ema;
use super::groups::{GroupSettings, Groups};

/// Schedule-free AdamW. State: `z`, `exp_avg_sq`, and the average x as [`Ema::STATE`].
#[derive(Clone, Debug)]
pub struct ScheduleFree {
    /// The share of x in y, and the decay rate of the running average of squares.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Steps in which the learning rate rises to its value.
    pub warmup_steps: u64,
    /// Learning rate scales and weight decay by parameter.
    pub groups: Groups,
}

impl ScheduleFree {
    /// The share of the learning rate in a step.
    fn warmup(&self, step: u64) -> f64 {
        if step < self.warmup_steps { step as f64 / self.warmup_steps as f64 } else { 1.0 }
    }

    /// The weight of a step's iterate in the average: the square of its learning rate, as a share of those of all steps.
    fn weight(&self, step: u64) -> f64 {
        let (step_number, warming) = (step as f64, self.warmup_steps.min(step) as f64);
        // The sum of the squares of 1 to n.
        let squares = |n: f64| n * (n + 1.0) * (2.0 * n + 1.0) / 6.0;
        let warmup = self.warmup_steps.max(1) as f64;
        self.warmup(step).powi(2) / (squares(warming) / (warmup * warmup) + (step_number - warming))
    }
}

impl Elementwise for ScheduleFree {
    fn state(&self) -> &'static [&'static str] {
        &["z", "exp_avg_sq", Ema::STATE]
    }

    fn groups(&self) -> Option<&Groups> {
        Some(&self.groups)
    }

    fn factors(&self, settings: GroupSettings, step: u64, lr: f64) -> Vec<f64> {
        let correction = 1.0 - self.betas.1.powf(step as f64);
        let is_first = f64::from(u8::from(step == 1));
        vec![lr * self.warmup(step), settings.weight_decay, correction, self.weight(step), is_first]
    }

    #[inline(always)]
    fn step<N: Number>(&self, factors: &[N], gradient: N, param: N, state: &mut [N; STATES_MAX]) -> N {
        let &[lr, decay, correction, weight, is_first] = factors else {
            unreachable!("the factors of schedule-free AdamW")
        };
        let (g, beta2) = (gradient, gradient.constant(self.betas.1));
        let at_start = |value: N| g.constant(0.0).if_less(is_first, param, value);
        let (iterate, average) = (at_start(state[0]), at_start(state[2]));
        let square = state[1] * beta2 + g.constant(1.0 - self.betas.1) * g * g;
        let denominator = (square / correction).square_root() + g.constant(self.eps);
        let iterate = iterate - lr * (g / denominator + decay * param);
        let average = average + weight * (iterate - average);
        *state = [iterate, square, average];
        iterate + g.constant(self.betas.0) * (average - iterate)
    }
}
