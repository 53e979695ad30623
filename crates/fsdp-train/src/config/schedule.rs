//! `train.lr_schedule`: how the learning rate goes over the steps. [`LrSchedule`](crate::lr::LrSchedule)
//! has the formulas.

use serde::Serialize;

use super::error::ConfigError;
use super::kind::{COUNT, FACTOR, Kind, NON_NEGATIVE};
use super::reader::{Origin, Reader};

const PATH: &str = "train.lr_schedule";
const NAMES: Kind<&str> = Kind {
    allowed: "\"constant\", \"linear\" or \"warmup-cosine\"",
    read: |value| {
        ["constant", "linear", "warmup-cosine"].into_iter().find(|&name| value.as_str() == Some(name))
    },
};

/// A learning rate schedule.
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    pub(super) fn read(origin: &Origin, train: &Reader<'_>) -> Result<LrScheduleConfig, ConfigError> {
        let (name, table) = train.named_table("lr_schedule", NAMES, "constant")?;
        let keys: &[&str] = match name {
            "constant" => &["warmup_steps", "start_factor"],
            _ => &["warmup_steps", "start_factor", "min_lr"],
        };
        let reader = Reader::open(origin, PATH, table, keys)?;
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
