//! Error bands of predicted steps.

use crate::cluster::{Cluster, LinkKind};
use crate::constants::stand_in;
use crate::forecast::Forecast;
use crate::prices::Instead;

/// Relative error that nine of ten predictions of published runs stay within, each left out of the fit with all runs of
/// its kind.
pub const OF_FITTED: f64 = 0.10;

/// Relative error far from all measured points. Assumed.
pub const OF_FAR: f64 = 0.25;

/// Smallest and largest relative error where another generation stands in for the devices. Of two published runs that
/// are not in the fit (Llama 3 8B on 8 devices), the one on MI300X took 1.7 times, and the one on B200 1.9 times, what
/// H100's constants predict.
pub const OF_STAND_INS: [f64; 2] = [OF_FAR, 1.0];

/// Relative error on a calibrated machine: of 80 runs of bench/plan.py, nine of ten were within 11.6 %.
pub const OF_MEASURED: f64 = 0.12;

/// A step is far from measured points if more than this fraction of the work of its calls is.
const FAR_MAX: f64 = 0.2;

/// The points of a step count as no better than none if more than this fraction of its work is of operations that were
/// never measured.
const UNKNOWN_MAX: f64 = 0.02;

/// The relative amounts by which a step may be shorter and longer than predicted. On a measured machine, the less of a
/// step its points cover, the wider the band; where prices rest on constants, at least as wide as without measurements.
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
    let any_basis = |is_kind: fn(&Instead) -> bool| forecast.unmeasured.values().any(is_kind);
    let is_unknown = part(true) > UNKNOWN_MAX || any_basis(|basis| matches!(basis, Instead::Price(_)));
    let is_far = is_unknown || part(false) > FAR_MAX || any_basis(|basis| matches!(basis, Instead::Ranks(_)));
    let rests_on_constants = is_unknown || any_basis(|basis| *basis == Instead::Network);
    let min_error = if is_far { OF_FAR } else { OF_MEASURED };
    constants.map(|error| if rests_on_constants { min_error.max(error) } else { min_error })
}

/// Number of ranks beyond which collectives of all ranks have been slower than predicted, by up to [`SLOWER`].
pub const LARGE_WORLD: usize = 512;

/// The largest factor by which they have been slower.
pub const SLOWER: f64 = 1.66;

/// Returns the cluster with the links between all ranks slowed down by [`SLOWER`], the worst case in a large world.
pub fn slower(cluster: &Cluster) -> Cluster {
    let mut slower = cluster.clone();
    // Slows the links that reach all ranks: the network, or the links of the node without one. A torus is slowed as
    // well as the network between its slices.
    if let Some(network) = &mut slower.network {
        network.bandwidth.value /= SLOWER;
    }
    if slower.network.is_none() || slower.node.link.kind == LinkKind::Torus {
        slower.node.link.bandwidth.value /= SLOWER;
    }
    slower
}
