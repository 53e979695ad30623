//! `train.lr_schedule`: how the learning rate goes over the steps. [`LrSchedule`](crate::lr::LrSchedule)
//! has the formulas.

use serde::Serialize;

use super::error::ConfigError;
use super::kind::{COUNT, FACTOR, NON_NEGATIVE};
use super::reader::Reader;

/// A learning rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "kebab-case")]
pub enum LrScheduleConfig {
    /// The learning rate of the optimizer, after the warm-up.
    Constant {
        /// The steps before.
        #[serde(flatten)]
        warmup: Warmup,
    },
    /// In a straight line to `min_lr` at the last step.
    Linear {
        /// The steps before.
        #[serde(flatten)]
        warmup: Warmup,
        /// The learning rate at the end.
        min_lr: f64,
    },
    /// Along half a cosine to `min_lr` at the last step.
    WarmupCosine {
        /// The steps before.
        #[serde(flatten)]
        warmup: Warmup,
        /// The learning rate at the end.
        min_lr: f64,
    },
}

/// The first steps: in a straight line from a fraction of the learning rate to all of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Warmup {
    /// How many steps; 0 for none.
    #[serde(rename = "warmup_steps")]
    pub steps: u64,
    /// The fraction at the first step.
    pub start_factor: f64,
}

impl LrScheduleConfig {
    pub(super) fn read(reader: &Reader<'_>) -> Result<LrScheduleConfig, ConfigError> {
        let (name, reader) = reader.split_name(&["constant", "linear", "warmup-cosine"])?;
        let keys = ["warmup_steps", "start_factor", "min_lr"];
        reader.expect_known(if name == "constant" { &keys[..2] } else { &keys })?;
        let warmup = Warmup {
            steps: reader.or("warmup_steps", COUNT, 0)?,
            start_factor: reader.or("start_factor", FACTOR, 0.1)?,
        };
        if name == "constant" {
            return Ok(LrScheduleConfig::Constant { warmup });
        }
        let min_lr = reader.or("min_lr", NON_NEGATIVE, 0.0)?;
        Ok(match name {
            "linear" => LrScheduleConfig::Linear { warmup, min_lr },
            _ => LrScheduleConfig::WarmupCosine { warmup, min_lr },
        })
    }

    /// The first steps.
    pub fn warmup(&self) -> Warmup {
        match self {
            LrScheduleConfig::Constant { warmup }
            | LrScheduleConfig::Linear { warmup, .. }
            | LrScheduleConfig::WarmupCosine { warmup, .. } => *warmup,
        }
    }
}
