//! Learning rate schedules: those of PyTorch, in closed form.
//!
//! PyTorch multiplies the previous learning rate (`LinearLR`, `CosineAnnealingLR` behind `SequentialLR`),
//! which makes a value depend on the rounding of all before it. Here the value of a step is a function of
//! the step alone, so that a resumed run needs no state; both agree to 1e-12 of the value (of 1e-3 of the
//! base where that is larger: the recursion cancels near 0). Steps count from 0: step 0 uses what a PyTorch
//! optimizer holds after its schedulers are built, before the first `scheduler.step()`.

use std::f64::consts::PI;

use crate::config::{LrScheduleConfig, Warmup};

/// The learning rate as a function of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    config: LrScheduleConfig,
    base: f64,
    /// The steps after the warm-up.
    steps: u64,
}

impl LrSchedule {
    /// The schedule of a run of `steps` steps whose optimizer has the learning rate `base`.
    ///
    /// A run that is shorter than its warm-up ends within it.
    pub fn new(config: &LrScheduleConfig, base: f64, steps: u64) -> LrSchedule {
        LrSchedule { config: *config, base, steps: steps.saturating_sub(config.warmup().steps) }
    }

    /// The learning rate of a step, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        let Warmup { steps, start_factor } = self.config.warmup();
        match step.checked_sub(steps) {
            Some(step) => self.after_warmup(step),
            None => self.base * (start_factor + (1.0 - start_factor) * ratio(step, steps)),
        }
    }

    /// Steps past the end keep the last value: only a caller beyond `train.steps` would see PyTorch's
    /// cosine rise again.
    fn after_warmup(&self, step: u64) -> f64 {
        let Self { config, base, steps } = *self;
        match config {
            LrScheduleConfig::Constant { .. } => base,
            LrScheduleConfig::Linear { min_lr, .. } if step < steps => {
                base + (min_lr - base) * ratio(step, steps)
            }
            LrScheduleConfig::WarmupCosine { min_lr, .. } if step < steps => {
                min_lr + (base - min_lr) * (1.0 + (PI * ratio(step, steps)).cos()) / 2.0
            }
            LrScheduleConfig::Linear { min_lr, .. } | LrScheduleConfig::WarmupCosine { min_lr, .. } => min_lr,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "steps are far below 2^53")]
fn ratio(step: u64, steps: u64) -> f64 {
    step as f64 / steps as f64
}

#[cfg(test)]
mod tests;
