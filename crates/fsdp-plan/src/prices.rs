//! What operations take on a cluster: rooflines with efficiencies, and rings of collectives.

mod collectives;
mod compute;
mod points;

use fsdp_core::DType;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::{Op, OpKind, Schedule, Source};
use fsdp_nn::model::unsharded::BlockCall;
use fsdp_sim::virtual_time::Work;

use crate::cluster::{Cluster, ClusterError, Kind, LinkKind};
use crate::constants::Constants;
use crate::software::{Recomputed, Software};
use crate::work::{CallKind, CallWork, OpWork, StepWork};
pub use collectives::Collective;
pub use points::{Far, Instead};

/// The part of the bandwidth of memory that passes over it reach (BabelStream on A100 and H100: 0.85 to 0.92).
const MEMORY_REACHED: f64 = 0.85;

/// Bytes a second of host memory for each device, where the host updates parameters: assumed, of some 300 GB/s of a server
/// with 8 devices, two thirds.
const HOST_BANDWIDTH: f64 = 25e9;

/// The links of a node, by the number that [virtual time](fsdp_sim::virtual_time) knows them by.
pub const NODE_LINK: usize = 0;
/// The links between nodes.
pub const NETWORK: usize = 1;

/// What a run is, as far as prices depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Ranks.
    pub world: usize,
    /// The element type that computes.
    pub dtype: DType,
    /// What carries collectives, in the words of [`Measured::collectives`](crate::measured::Measured::collectives).
    pub transport: &'static str,
}

/// What operations take.
#[derive(Clone, Debug)]
pub struct Prices<'a> {
    cluster: &'a Cluster,
    constants: &'a Constants,
    software: Software,
    setting: Setting,
    /// Ranks that share a device.
    sharing: usize,
    /// Products a second of the type that computes, of a rank.
    peak: f64,
    /// Of the type of master parameters, where it is known, and bytes of its elements.
    master: (f64, usize),
    /// Bytes a second that passes over memory reach.
    bandwidth: f64,
    /// The part of the peak that large products reach.
    products: f64,
    /// The part of the peak that attention reaches.
    attention: f64,
    /// Bytes that operations which are no products move, beside what they say.
    elementwise: f64,
}

/// Whose constants stand for a generation of devices of which no run was fitted.
pub fn stand_in(generation: &str) -> Option<&'static str> {
    match generation {
        "blackwell" | "cdna3" => Some("hopper"),
        "tpu-v5p" => Some("tpu-v5e"),
        "x86" => Some("ampere"),
        _ => None,
    }
}

impl<'a> Prices<'a> {
    /// Those of a cluster for a run.
    ///
    /// # Errors
    /// [`ClusterError::NoPeak`].
    pub fn new(
        cluster: &'a Cluster,
        constants: &'a Constants,
        software: Software,
        setting: Setting,
    ) -> Result<Self, ClusterError> {
        let sharing = cluster.sharing(setting.world);
        let generation = stand_in(&cluster.generation).unwrap_or(&cluster.generation);
        let attention = match cluster.kind {
            Kind::Tpu => "attention.tpu".to_owned(),
            _ => format!("attention.{generation}"),
        };
        let (own, master) = (cluster.peak(setting.dtype)?, setting.dtype.master());
        let peak_of_master = cluster.peak(master).unwrap_or(own);
        Ok(Self {
            peak: own / sharing as f64,
            master: (peak_of_master / sharing as f64, master.size_bytes()),
            bandwidth: cluster.device.memory_bandwidth.value * MEMORY_REACHED / sharing as f64,
            products: constants.get(&format!("products.{generation}")),
            attention: constants.get(&attention) * compute::kernel(constants, software.attention),
            elementwise: compute::elementwise(constants, software.elementwise),
            cluster,
            constants,
            software,
            setting,
            sharing,
        })
    }

    /// What each operation of a plan's step takes, in program order.
    pub fn of_step(&self, plan: &Plan, work: &StepWork) -> Vec<Work> {
        let kinds = &work.calls.kinds;
        let calls: Vec<f64> = kinds.iter().map(|call| self.call(call)).collect();
        let price = |(op, bytes): (&Op, &OpWork)| {
            let Some(call) = BlockCall::of(op.kind) else { return self.op(plan, op, bytes) };
            let index = |kind| work.calls.kind(call.block(), kind);
            let seconds = match (CallKind::of(call), self.software.recomputed) {
                (CallKind::Recompute, Some(part)) => {
                    self.again(&kinds[index(CallKind::Forward)], &kinds[index(CallKind::Recompute)], part)
                }
                (kind, _) => calls[index(kind)],
            };
            Work { seconds, ..Work::default() }
        };
        let mut priced: Vec<Work> = plan.step.ops.iter().zip(&work.ops).map(price).collect();
        if self.software.is_replication_exposed {
            expose_replication(&plan.step, &mut priced);
        }
        priced
    }

    /// What an operation takes that calls no block.
    fn op(&self, plan: &Plan, op: &Op, work: &OpWork) -> Work {
        if let Some(said) = self.operation(op, work) {
            return Work { seconds: said.seconds, ..Work::default() };
        }
        let pass = |bytes: f64| Work { seconds: bytes / self.bandwidth, ..Work::default() };
        let (shards, world) = (plan.mesh.shards(), plan.mesh.world());
        let host =
            |bytes: f64| Work { seconds: bytes / self.cluster.node.host_link.value, ..Work::default() };
        match op.kind {
            OpKind::AllGather { source, .. } => {
                let group = match source {
                    Source::SubShard => plan.step.sub_group.unwrap_or(shards),
                    Source::Shard | Source::Staged => shards,
                };
                let bytes = match self.software.gathered_bytes {
                    Some(each) => work.elements_written * each,
                    None => work.bytes_written,
                };
                self.collective(Collective::AllGather, bytes, group)
            }
            OpKind::ReduceScatter { .. } => {
                self.collective(Collective::ReduceScatter, work.bytes_read, shards)
            }
            OpKind::GatherDirections(_) => self.collective(Collective::AllGather, work.bytes_written, shards),
            OpKind::AllReduceReplicas { .. } => self.replicated(work.bytes_written, plan.mesh),
            OpKind::ReduceScalars | OpKind::ReduceStatistics(_) => {
                self.collective(Collective::AllReduce, 0.0, world)
            }
            OpKind::Update(_) if !self.software.is_update_fused => {
                pass(work.elements_read * self.constants.get("update"))
            }
            OpKind::Update(_) if !work.products.is_empty() => {
                let bytes = work.bytes_read + 2.0 * work.bytes_written;
                let products: f64 = work.products.iter().map(|product| self.master_product(product)).sum();
                Work { seconds: bytes / self.bandwidth + products, ..Work::default() }
            }
            OpKind::Update(_)
            | OpKind::Direct(_)
            | OpKind::Statistics { .. }
            | OpKind::SquareNorm(_)
            | OpKind::Add { .. } => {
                // What is written is read before.
                let bytes = work.bytes_read + 2.0 * work.bytes_written - work.host_bytes;
                let host = work.host_bytes / HOST_BANDWIDTH;
                Work { seconds: bytes.max(0.0) / self.bandwidth + host, ..Work::default() }
            }
            OpKind::KeepSubShard(_) => pass(2.0 * work.bytes_written),
            OpKind::Upload(_) => host(work.bytes_written),
            OpKind::Download(_) => host(work.bytes_read),
            // Each unit is resharded twice, and copied out of what was gathered once.
            OpKind::Reshard(_) => pass(work.elements_written * self.software.copies_forward / 2.0),
            OpKind::CloseGradient(_) if self.software.copies_backward => {
                let reduced = work.bytes_written / work.elements_written.max(1.0);
                let each = self.constants.get("copies") + 2.0 * (reduced - 2.0);
                pass(work.elements_written * each)
            }
            _ => Work::default(),
        }
    }

    /// What a call of a block takes.
    pub fn call(&self, call: &CallWork) -> f64 {
        match self.measured() {
            Some(measured) => call.listed.iter().map(|listed| self.listed(measured, listed).seconds).sum(),
            None => self.estimated(call),
        }
    }

    /// What a call takes by the roofline.
    fn estimated(&self, call: &CallWork) -> f64 {
        let products: f64 = call.products.iter().map(|product| self.product(product)).sum();
        products + self.attention_of(call) + self.passes(call)
    }

    /// What running a part of a forward again takes: others run what they ran before, ours only what backward asks for.
    fn again(&self, forward: &CallWork, ours: &CallWork, part: Recomputed) -> f64 {
        let products = if part.spares_last { &ours.products } else { &forward.products };
        let products: f64 = products.iter().map(|product| self.product(product)).sum();
        products * part.products
            + self.attention_of(forward) * part.attention
            + self.passes(forward) * part.elementwise
    }
}

/// Sums of replicas come after all of backward: with the scalars of the step.
fn expose_replication(schedule: &Schedule, priced: &mut [Work]) {
    let mut exposed = 0.0;
    for (op, work) in schedule.ops.iter().zip(priced) {
        match op.kind {
            OpKind::AllReduceReplicas { .. } => exposed += std::mem::take(&mut work.seconds),
            OpKind::ReduceScalars => work.seconds += std::mem::take(&mut exposed),
            _ => {}
        }
    }
}

/// The part of a link that rings of collectives reach in a full node: 235 of 300 GB/s (A100), 361 of 450 (H100) and 313 of 448
/// (MI300X) by the vendors' own tests, as collected in Stas Bekman's Machine Learning Engineering; PCIe assumed.
fn link_reached(kind: LinkKind) -> f64 {
    match kind {
        LinkKind::Nvlink => 0.79,
        LinkKind::Xgmi => 0.70,
        LinkKind::Pcie => 0.75,
        LinkKind::Torus | LinkKind::Memory => 1.0,
    }
}

#[cfg(test)]
mod tests;
