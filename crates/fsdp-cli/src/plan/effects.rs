//! The effects of other settings, one at a time.

use rayon::prelude::*;

use super::ahead::Forecaster;
use super::settings::Settings;

/// A step with another setting.
#[derive(Clone, Debug)]
pub(super) struct Effect {
    /// The changed setting, as written in a run file.
    pub(super) change: String,
    pub(super) seconds: f64,
    pub(super) device_bytes: u64,
    pub(super) fits: bool,
}

/// Tries every setting with each of its other values; those that fit come first, the fastest first. Unsupported
/// settings are left out.
pub(super) fn of(forecaster: &Forecaster<'_>) -> Vec<Effect> {
    let current = Settings::of(forecaster.config);
    let effect = |settings: &Settings| {
        let run = forecaster.forecast(&settings.applied(forecaster.config)).ok()?;
        Some(Effect {
            change: settings.differences(&current).join(", "),
            seconds: run.forecast.seconds,
            device_bytes: run.device_bytes(),
            fits: run.fits(),
        })
    };
    let mut effects: Vec<Effect> = current
        .neighbors(forecaster.config, forecaster.cluster, &forecaster.wraps)
        .par_iter()
        .filter_map(effect)
        .collect();
    effects.sort_by(|one, other| other.fits.cmp(&one.fits).then(one.seconds.total_cmp(&other.seconds)));
    effects
}
