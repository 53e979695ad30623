//! `train.lr_schedule`: the learning rate over the steps. `LrSchedule` of `fsdp-train` has the formulas.

use serde::Serialize;

use super::describe::{self, TableSchema};
use super::error::ConfigError;
use super::kind::{COUNT, FACTOR, NON_NEGATIVE, POSITIVE_COUNT, SHARE};
use super::named::{Named, named};
use super::reader::Reader;

/// A learning rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LrScheduleConfig {
    /// The schedule after the warm-up.
    #[serde(flatten)]
    pub shape: LrShape,
    /// The warm-up.
    #[serde(flatten)]
    pub warmup: Warmup,
}

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "kebab-case")]
pub enum LrShape {
    /// Stays at the optimizer's learning rate.
    Constant,
    /// Decays linearly to the minimum at the last step.
    Linear {
        /// Learning rate at the end.
        #[serde(flatten)]
        min: MinLr,
    },
    /// Decays along half a cosine to the minimum at the last step.
    WarmupCosine {
        /// Learning rate at the end.
        #[serde(flatten)]
        min: MinLr,
    },
    /// Decays along half a cosine towards the minimum, several times, each time from the optimizer's learning rate.
    CosineWithRestarts {
        /// Number of decays.
        cycles: u64,
        /// Learning rate at the end.
        #[serde(flatten)]
        min: MinLr,
    },
    /// Decays with the inverse square root of the step, without end.
    InverseSqrt {
        /// Time scale in steps: `3 * timescale` steps after the warm-up, the learning rate is half of the full one.
        timescale: u64,
        /// Lower bound of the learning rate.
        #[serde(flatten)]
        min: MinLr,
    },
    /// Stays at the optimizer's learning rate, then decays to the minimum at the last step.
    WarmupStableDecay {
        /// Fraction of all steps in which it decays.
        decay_share: f64,
        /// Curve of the decay.
        decay: DecayCurve,
        /// Learning rate at the end.
        #[serde(flatten)]
        min: MinLr,
    },
}

/// The lowest learning rate of a schedule that decays.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum MinLr {
    /// An absolute learning rate.
    #[serde(rename = "min_lr")]
    Absolute(f64),
    /// A fraction of the optimizer's learning rate.
    #[serde(rename = "min_lr_ratio")]
    Ratio(f64),
}

/// Curve of the decay at the end of `warmup-stable-decay`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayCurve {
    /// A straight line.
    Linear,
    /// Half a cosine.
    Cosine,
    /// One minus a square root: steep at first.
    OneMinusSqrt,
}

named! {
    DecayCurve { "1-sqrt": OneMinusSqrt, "linear": Linear, "cosine": Cosine }
}

impl Serialize for DecayCurve {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The first steps, in which the learning rate rises linearly from a fraction to its full value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Warmup {
    /// Number of steps; 0 for none.
    #[serde(rename = "warmup_steps")]
    pub steps: u64,
    /// Fraction of the learning rate at the first step.
    pub start_factor: f64,
}

/// The `timescale` of `inverse-sqrt` without a warm-up, as in transformers.
const TIMESCALE_WITHOUT_WARMUP: u64 = 10_000;

/// Names of all schedules, the default first, with their keys other than those of the warm-up.
const NAMES: [(&str, &[&str]); 6] = [
    ("constant", &[]),
    ("linear", &["min_lr", "min_lr_ratio"]),
    ("warmup-cosine", &["min_lr", "min_lr_ratio"]),
    ("cosine-with-restarts", &["min_lr", "min_lr_ratio", "cycles"]),
    ("inverse-sqrt", &["min_lr", "min_lr_ratio", "timescale"]),
    ("warmup-stable-decay", &["min_lr", "min_lr_ratio", "decay_share", "decay"]),
];

/// The keys of the warm-up.
const WARMUP: [&str; 2] = ["warmup_steps", "start_factor"];

impl TableSchema for LrScheduleConfig {
    fn schema() -> serde_json::Value {
        let variant_schema = |(name, keys): (_, &[&str])| {
            (name, describe::of_table("", Vec::new(), &[&WARMUP, keys].concat()))
        };
        describe::by_name(NAMES.map(variant_schema))
    }
}

impl LrScheduleConfig {
    pub(super) fn read(reader: &Reader<'_>) -> Result<LrScheduleConfig, ConfigError> {
        let (name, reader) = reader.split_name(&NAMES.map(|(name, _)| name))?;
        let keys = NAMES.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, keys)| keys);
        reader.expect_known(&[&WARMUP, keys].concat())?;
        let warmup = Warmup {
            steps: reader.or("warmup_steps", COUNT, 0)?,
            start_factor: reader.or("start_factor", SHARE, 0.1)?,
        };
        let min = MinLr::read(&reader)?;
        let shape = match name {
            "constant" => LrShape::Constant,
            "linear" => LrShape::Linear { min },
            "warmup-cosine" => LrShape::WarmupCosine { min },
            "cosine-with-restarts" => {
                LrShape::CosineWithRestarts { cycles: reader.or("cycles", POSITIVE_COUNT, 1)?, min }
            }
            "inverse-sqrt" => {
                let default = if warmup.steps == 0 { TIMESCALE_WITHOUT_WARMUP } else { warmup.steps };
                LrShape::InverseSqrt { timescale: reader.or("timescale", POSITIVE_COUNT, default)?, min }
            }
            _ => LrShape::WarmupStableDecay {
                decay_share: reader.or("decay_share", FACTOR, 0.1)?,
                decay: reader.named("decay", DecayCurve::OneMinusSqrt)?,
                min,
            },
        };
        Ok(LrScheduleConfig { shape, warmup })
    }
}

impl LrShape {
    /// The lowest learning rate; `None` if it does not decay.
    pub fn min(&self) -> Option<MinLr> {
        match *self {
            LrShape::Constant => None,
            LrShape::Linear { min }
            | LrShape::WarmupCosine { min }
            | LrShape::CosineWithRestarts { min, .. }
            | LrShape::InverseSqrt { min, .. }
            | LrShape::WarmupStableDecay { min, .. } => Some(min),
        }
    }
}

impl MinLr {
    fn read(reader: &Reader<'_>) -> Result<MinLr, ConfigError> {
        let absolute = reader.optional("min_lr", NON_NEGATIVE)?;
        match (absolute, reader.optional("min_lr_ratio", SHARE)?) {
            (Some(_), Some(_)) => Err(reader.conflict("min_lr", "min_lr_ratio", "remove one of them")),
            (None, Some(ratio)) => Ok(MinLr::Ratio(ratio)),
            (min_lr, None) => Ok(MinLr::Absolute(min_lr.unwrap_or(0.0))),
        }
    }

    /// Returns the absolute learning rate, where `base` is the optimizer's.
    pub fn of(self, base: f64) -> f64 {
        match self {
            MinLr::Absolute(min) => min,
            MinLr::Ratio(ratio) => ratio * base,
        }
    }
}
