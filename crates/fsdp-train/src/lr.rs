//! Learning rate schedules of PyTorch and transformers, in closed form.
//!
//! PyTorch multiplies the previous learning rate (`LinearLR`, `CosineAnnealingLR` in `SequentialLR`), which makes a
//! value depend on the rounding of all values before it. Here the value depends only on the step, so that a resumed run
//! needs no state. Both agree to 1e-12 of the value (or of 1e-3 of the base, if that is larger: the recursion cancels
//! near 0). Steps count from 0: step 0 uses the learning rate that a PyTorch optimizer has after its schedulers are
//! built, before the first `scheduler.step()`.
//!
//! | schedule | source |
//! |---|---|
//! | linear, cosine | `torch.optim.lr_scheduler` |
//! | cosine with restarts | SGDR (Loshchilov and Hutter 2017) with cycles of one length: transformers' `cosine_with_restarts` |
//! | inverse square root | transformers' `inverse_sqrt`; Zhai et al. 2022, Scaling Vision Transformers |
//! | warm-up, stable, decay | MiniCPM (Hu et al. 2024); one minus a root: Hägele et al. 2024; transformers' `warmup_stable_decay` |

#![expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]

use std::f64::consts::PI;

use fsdp_config::{DecayCurve, LrScheduleConfig, LrShape, Warmup};

/// The learning rate as a function of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    config: LrScheduleConfig,
    base: f64,
    /// The learning rate at the end, or the lower bound, of schedules that decay.
    min: f64,
    /// Number of steps of the run.
    total: u64,
}

impl LrSchedule {
    /// Creates the schedule of a run of `steps` steps whose optimizer has the learning rate `base`.
    ///
    /// A run that is shorter than its warm-up ends within it.
    pub fn new(config: &LrScheduleConfig, base: f64, steps: u64) -> LrSchedule {
        let min = config.shape.min().map_or(base, |min| min.of(base));
        LrSchedule { config: *config, base, min, total: steps }
    }

    /// Returns the learning rate of a step, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        let Warmup { steps, start_factor } = self.config.warmup;
        match step.checked_sub(steps) {
            Some(step) => self.after_warmup(step),
            None => self.base * (start_factor + (1.0 - start_factor) * ratio(step, steps)),
        }
    }

    /// Steps past the end keep the last value; PyTorch's cosine would rise again there, but only for a caller beyond
    /// `train.steps`. The inverse square root has no end.
    fn after_warmup(&self, step: u64) -> f64 {
        let Self { base, min, .. } = *self;
        let steps = self.total.saturating_sub(self.config.warmup.steps);
        match self.config.shape {
            LrShape::Constant => base,
            LrShape::InverseSqrt { timescale, .. } => {
                (base / ratio(step + timescale, timescale).sqrt()).max(min)
            }
            _ if step >= steps => min,
            LrShape::Linear { .. } => base + (min - base) * ratio(step, steps),
            LrShape::WarmupCosine { .. } => min + (base - min) * half_cosine(ratio(step, steps)),
            // Integer arithmetic, so that a rounded quotient cannot delay the start of a cycle by a step.
            LrShape::CosineWithRestarts { cycles, .. } => {
                let done = u128::from(cycles) * u128::from(step) % u128::from(steps);
                min + (base - min) * half_cosine(done as f64 / steps as f64)
            }
            LrShape::WarmupStableDecay { decay_share, decay, .. } => {
                let decaying = ((decay_share * self.total as f64).round() as u64).min(steps);
                match step.checked_sub(steps - decaying) {
                    Some(step) => min + (base - min) * remaining(decay, ratio(step, decaying)),
                    None => base,
                }
            }
        }
    }
}

/// Returns the remaining fraction after part of the decay, from 1 at 0 to 0 at 1.
fn remaining(decay: DecayCurve, progress: f64) -> f64 {
    match decay {
        DecayCurve::Linear => 1.0 - progress,
        DecayCurve::Cosine => half_cosine(progress),
        DecayCurve::OneMinusSqrt => 1.0 - progress.sqrt(),
    }
}

/// Falls from 1 at 0 to 0 at 1.
fn half_cosine(progress: f64) -> f64 {
    (1.0 + (PI * progress).cos()) / 2.0
}

fn ratio(step: u64, steps: u64) -> f64 {
    step as f64 / steps as f64
}

#[cfg(test)]
mod tests;
