//! The loss scale of a run that computes in f16: gradients are multiplied with it, so that small ones do not underflow.
//!
//! A step whose gradients overflow is skipped and halves the scale; `growth_interval` consecutive steps without
//! overflow double it. These are the rules of `torch.amp.GradScaler`. All ranks see the same step reports and so have
//! the same scale. It is a power of two, so that multiplying an f32 gradient and dividing it again restores its bits.
//!
//! The consequences of a report must be known before the next step begins. Like `GradScaler.step`, the host therefore
//! waits for the report of each step.

use fsdp_config::{LossScaleConfig, Resolved};
use fsdp_core::DType;
use serde::{Deserialize, Serialize};

/// The loss scale after some steps, as saved in checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// The factor for the gradients of the next step.
    pub scale: f64,
    /// Number of steps, all of them applied, since the scale last changed.
    pub good_steps: u64,
    /// Number of steps skipped during the whole run.
    pub skipped: u64,
}

/// Updates the loss scale after every step.
#[derive(Clone, Debug)]
pub(crate) struct LossScaler {
    config: LossScaleConfig,
    current: LossScale,
}

impl LossScaler {
    /// Creates the scaler of a new run; `None` if it does not compute in f16.
    pub(crate) fn of(config: &Resolved) -> Option<Self> {
        (config.fsdp.param_dtype == DType::F16)
            .then(|| Self::new(config.train.loss_scale.clone().unwrap_or_default()))
    }

    fn new(config: LossScaleConfig) -> Self {
        let current = LossScale { scale: config.init, good_steps: 0, skipped: 0 };
        Self { config, current }
    }

    /// Continues from the state in a checkpoint. A fixed scale is taken from the run file.
    pub(crate) fn resume(&mut self, saved: LossScale) {
        let scale = if self.config.dynamic { saved.scale } else { self.config.init };
        self.current = LossScale { scale, ..saved };
    }

    /// The current state.
    pub(crate) fn current(&self) -> LossScale {
        self.current
    }

    /// The number (from 1) of the update that step `step` (from 0) makes: the update rule does not count skipped steps.
    pub(crate) fn update_number(&self, step: u64) -> u64 {
        step + 1 - self.current.skipped
    }

    /// Records whether a step was finite, and returns whether the run may continue. After a step that was not
    /// finite, it may not if the scale is fixed or falls below 1: a scale of 1 does not enlarge gradients, so something
    /// else made them overflow.
    pub(crate) fn note(&mut self, finite: bool) -> bool {
        let LossScale { scale, good_steps, skipped } = &mut self.current;
        if !finite {
            *skipped += 1;
            *good_steps = 0;
            if self.config.dynamic {
                *scale /= 2.0;
            }
            return self.config.dynamic && *scale >= 1.0;
        }
        *good_steps += 1;
        if self.config.dynamic && *good_steps == self.config.growth_interval {
            *good_steps = 0;
            // As in PyTorch, a scale stays within single precision.
            if *scale * 2.0 <= f64::from(f32::MAX) {
                *scale *= 2.0;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The scale and its count of good steps after each step of a sequence, from `tests/golden/loss_scale.json`.
    #[derive(Deserialize)]
    struct Golden {
        init: f64,
        growth_interval: u64,
        finite: Vec<bool>,
        scales: Vec<f64>,
        good_steps: Vec<u64>,
    }

    #[test]
    fn scale_updates_match_pytorch() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/loss_scale.json");
        let golden: Vec<Golden> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        assert_eq!(golden.len(), 4);
        for Golden { init, growth_interval, finite, scales, good_steps } in golden {
            let mut scaler = LossScaler::new(LossScaleConfig { init, growth_interval, dynamic: true });
            let mut skipped = 0;
            for ((finite, scale), good_steps) in finite.into_iter().zip(scales).zip(good_steps) {
                scaler.note(finite);
                skipped += u64::from(!finite);
                assert_eq!(scaler.current(), LossScale { scale, good_steps, skipped });
            }
        }
    }

    #[test]
    fn update_number_excludes_skipped_steps() {
        let mut scaler = LossScaler::new(LossScaleConfig::default());
        let updates: Vec<u64> = [true, false, false, true, true]
            .into_iter()
            .zip(0..)
            .map(|(finite, step)| {
                let update = scaler.update_number(step);
                scaler.note(finite);
                update
            })
            .collect();
        assert_eq!(updates, [1, 2, 2, 2, 3]);
    }

    #[test]
    fn overflow_at_scale_one_ends_run() {
        let mut scaler = LossScaler::new(LossScaleConfig { init: 2.0, ..LossScaleConfig::default() });
        assert_eq!([false; 2].map(|finite| scaler.note(finite)), [true, false]);
    }

    #[test]
    fn fixed_scale_never_changes_and_overflow_ends_run() {
        let config = LossScaleConfig { init: 8.0, growth_interval: 1, dynamic: false };
        let mut scaler = LossScaler::new(config);
        scaler.resume(LossScale { scale: 4.0, good_steps: 7, skipped: 2 });
        assert_eq!(scaler.current(), LossScale { scale: 8.0, good_steps: 7, skipped: 2 });
        assert!(scaler.note(true) && !scaler.note(false));
        assert_eq!(scaler.current().scale, 8.0);
    }
}
