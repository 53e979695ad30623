//! A step on a cluster.

use std::collections::BTreeMap;

use fsdp_core::Queue;
use fsdp_core::plan::Plan;
use fsdp_sim::virtual_time::{Pace, Timeline, Work, simulate, straggling};

use crate::cluster::{Cluster, ClusterError, Kind};
use crate::constants::Constants;
use crate::prices::{Far, Instead, Prices, Setting};
use crate::software::Software;
use crate::work::StepWork;

/// What a step is run on, and by what.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    /// The step.
    pub plan: &'a Plan,
    /// What it asks for.
    pub work: &'a StepWork,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The software.
    pub software: Software,
    /// The constants.
    pub constants: &'a Constants,
    /// What carries collectives.
    pub transport: &'static str,
}

/// A step in the future.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Seconds of a step, the slowest rank's.
    pub seconds: f64,
    /// What each operation takes by itself.
    pub work: Vec<Work>,
    /// When each runs.
    pub timeline: Timeline,
    /// Seconds in which computation was at work.
    pub computing: f64,
    /// Seconds in which computation waited for communication.
    pub exposed: f64,
    /// By what ranks that differ lengthen a step.
    pub straggling: f64,
    /// Where operations were measured: those of which there is no point near, by name.
    pub far: BTreeMap<&'static str, Far>,
    /// Where operations were measured: what was not, and what its price is instead.
    pub unmeasured: BTreeMap<String, Instead>,
}

/// Devices of a slice of TPUs, as far as their jitter goes.
const SLICE: f64 = 256.0;

/// How long a step takes.
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
        // On the host, operations run on the thread that issues them.
        is_serial: cluster.kind == Kind::Cpu,
    };
    let timeline = simulate(&plan.step, &work, pace);
    let computing = timeline.busy(&plan.step, Queue::Compute);
    let exposed = timeline.end - computing;
    let world = plan.mesh.world();
    let straggling = match cluster.kind {
        Kind::Tpu => {
            let slices = straggling(plan.mesh.replicas(), constants.get("slice_jitter"));
            slices * straggling((world as f64 / SLICE).ceil() as usize, constants.get("jitter"))
        }
        _ => straggling(world.div_ceil(cluster.devices_per_node()), constants.get("jitter")),
    };
    // What was measured is of this engine, and has all in it that is outside of operations.
    let whole = match measured.filter(|_| software == Software::OURS) {
        Some(measured) => measured.whole(transport, world, timeline.end),
        None => timeline.end + constants.get("outside"),
    };
    let seconds = whole * straggling;
    Ok(Forecast { seconds, work, timeline, computing, exposed, straggling, far, unmeasured })
}
