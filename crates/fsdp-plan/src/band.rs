//! How far a step may be from what is predicted of it.

use crate::cluster::{Cluster, LinkKind};
use crate::forecast::Forecast;
use crate::prices::{Instead, stand_in};

/// What of ten predictions of published runs nine are within, each left out of the fit with all runs of its kind.
pub const OF_FITTED: f64 = 0.10;

/// The same far from all points that were measured. Assumed.
pub const OF_FAR: f64 = 0.25;

/// The same where another generation stands for the devices, at least and at most. Of two published runs that are not in the fit
/// (Llama 3 8B on 8 devices) the one on MI300X took 1.7 and the one on B200 1.9 times what H100's constants say.
pub const OF_STAND_INS: [f64; 2] = [OF_FAR, 1.0];

/// The same on a machine that was calibrated: of 80 runs of bench/plan.py nine of ten were within 11.6 %.
pub const OF_MEASURED: f64 = 0.12;

/// Where more of what calls ask for is far from all points, a step is.
const FAR_MAX: f64 = 0.2;

/// Where more of it is of operations that were never measured, points are no better than none.
const UNKNOWN_MAX: f64 = 0.02;

/// By which parts of itself a step may be shorter and longer than predicted. Where a machine was measured, the less of
/// a step that its points say the more, and never less than if it was not.
pub fn around(cluster: &Cluster, forecast: &Forecast) -> [f64; 2] {
    let constants = match stand_in(&cluster.generation) {
        Some(_) => OF_STAND_INS,
        None => [OF_FITTED; 2],
    };
    if cluster.measured.is_none() {
        return constants;
    }
    let part = |is_unknown: bool| -> f64 {
        forecast.far.values().filter(|far| far.is_unknown || !is_unknown).map(|far| far.part).sum()
    };
    let instead = |is: fn(&Instead) -> bool| forecast.unmeasured.values().any(is);
    let is_unknown = part(true) > UNKNOWN_MAX || instead(|instead| matches!(instead, Instead::Price(_)));
    let is_far =
        is_unknown || part(false) > FAR_MAX || instead(|instead| matches!(instead, Instead::Ranks(_)));
    let rests_on_constants = is_unknown || instead(|instead| *instead == Instead::Network);
    let least = if is_far { OF_FAR } else { OF_MEASURED };
    constants.map(|part| if rests_on_constants { least.max(part) } else { least })
}

/// Beyond so many ranks collectives of all ranks have been slower than predicted, by up to [`SLOWER`].
pub const LARGE_WORLD: usize = 512;

/// By how much they have been.
pub const SLOWER: f64 = 1.66;

/// The same cluster, as slow as it may be in a large world.
pub fn slower(cluster: &Cluster) -> Cluster {
    let mut slower = cluster.clone();
    // What reaches all ranks: a torus does beside the network between its slices.
    if let Some(network) = &mut slower.network {
        network.bandwidth.value /= SLOWER;
    }
    if slower.network.is_none() || slower.node.link.kind == LinkKind::Torus {
        slower.node.link.bandwidth.value /= SLOWER;
    }
    slower
}
