//! What other settings would change, one at a time.

use rayon::prelude::*;

use super::ahead::Foresight;
use super::settings::Settings;

/// What a step would be with other settings.
#[derive(Clone, Debug)]
pub(super) struct Effect {
    /// What is set otherwise, as a run file writes it.
    pub(super) change: String,
    pub(super) seconds: f64,
    pub(super) device_bytes: u64,
    pub(super) fits: bool,
}

/// Every setting with each of its other values, the fastest that fit first. What a run can not have is left out.
pub(super) fn of(foresight: &Foresight<'_>) -> Vec<Effect> {
    let here = Settings::of(foresight.config);
    let effect = |settings: &Settings| {
        let ahead = foresight.ahead(&settings.applied(foresight.config)).ok()?;
        Some(Effect {
            change: settings.differences(&here).join(", "),
            seconds: ahead.forecast.seconds,
            device_bytes: ahead.device_bytes(),
            fits: ahead.fits(),
        })
    };
    let mut effects: Vec<Effect> = here
        .neighbours(foresight.config, foresight.cluster, &foresight.wraps)
        .par_iter()
        .filter_map(effect)
        .collect();
    effects.sort_by(|one, other| other.fits.cmp(&one.fits).then(one.seconds.total_cmp(&other.seconds)));
    effects
}
