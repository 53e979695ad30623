//! Predicts a step on a cluster.

use std::collections::BTreeMap;

use fsdp_core::plan::Plan;
use fsdp_core::{Axis, Queue};
use fsdp_sim::virtual_time::{Pace, Timeline, Work, simulate, straggling};

use crate::cluster::{Cluster, ClusterError, Kind};
use crate::constants::Constants;
use crate::prices::{Far, Instead, Prices, Setting};
use crate::software::Software;
use crate::work::StepWork;

/// The inputs of a forecast.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    /// The plan with the step's schedule.
    pub plan: &'a Plan,
    /// The work of the step.
    pub work: &'a StepWork,
    /// The cluster to run on.
    pub cluster: &'a Cluster,
    /// The software that runs it.
    pub software: Software,
    /// The constants of prices.
    pub constants: &'a Constants,
    /// The transport of collectives.
    pub transport: &'static str,
}

/// The predicted timing of a step.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Seconds of a step on the slowest rank.
    pub seconds: f64,
    /// The cost of each operation by itself.
    pub work: Vec<Work>,
    /// The time at which each operation runs.
    pub timeline: Timeline,
    /// Seconds during which computation runs.
    pub computing: f64,
    /// Seconds during which computation waits for communication.
    pub exposed: f64,
    /// Factor by which differences between ranks lengthen a step.
    pub straggling: f64,
    /// On a measured cluster: the operations without a point near, by name.
    pub far: BTreeMap<&'static str, Far>,
    /// On a measured cluster: the operations that were not measured, and the basis of their prices.
    pub unmeasured: BTreeMap<String, Instead>,
}

/// Number of TPUs per slice, for the purpose of jitter.
const SLICE: f64 = 256.0;

/// Predicts how long a step takes.
///
/// # Errors
/// [`ClusterError::NoPeak`].
pub fn forecast(planned: &Planned<'_>) -> Result<Forecast, ClusterError> {
    let Planned { plan, work, cluster, software, constants, transport } = *planned;
    let setting = Setting { world: plan.mesh.world(), dtype: plan.policy.param_dtype, transport };
    let prices = Prices::new(cluster, constants, software, setting)?;
    let far = prices.far_from_points(plan, work);
    let unmeasured = prices.unmeasured(plan, work);
    let work = prices.of_step(plan, work);
    let measured = cluster.measured.as_ref();
    let pace = Pace {
        issue_seconds: measured.map_or(0.0, |measured| measured.issue),
        // On CPUs, operations run on the thread that issues them.
        is_serial: cluster.kind == Kind::Cpu,
    };
    let timeline = simulate(&plan.step, &work, pace);
    let computing = timeline.busy(&plan.step, Queue::Compute);
    let exposed = timeline.end - computing;
    let world = plan.mesh.world();
    let straggling = match cluster.kind {
        Kind::Tpu => {
            let slices = straggling(plan.mesh.size(Axis::Replicate), constants.get("slice_jitter"));
            slices * straggling((world as f64 / SLICE).ceil() as usize, constants.get("jitter"))
        }
        _ => straggling(world.div_ceil(cluster.devices_per_node()), constants.get("jitter")),
    };
    // Measurements are of this engine, and include the time outside of operations.
    let total = match measured.filter(|_| software == Software::OURS) {
        Some(measured) => measured.whole(transport, world, timeline.end),
        None => timeline.end + constants.get("outside"),
    };
    let seconds = total * straggling;
    Ok(Forecast { seconds, work, timeline, computing, exposed, straggling, far, unmeasured })
}
