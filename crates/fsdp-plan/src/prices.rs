//! Durations of operations on a cluster: rooflines with efficiencies, and ring collectives.

mod collectives;
mod compute;
mod points;

use fsdp_core::plan::Plan;
use fsdp_core::schedule::{Op, OpKind, Schedule};
use fsdp_core::{DType, Group};
use fsdp_sim::virtual_time::Work;

use crate::cluster::{Cluster, ClusterError, Kind, LinkKind};
use crate::constants::{Constants, stand_in};
use crate::software::{Recomputed, Software};
use crate::work::{CallKind, CallWork, OpWork, StepWork};
pub use collectives::Collective;
use collectives::Ring;
pub use points::{Far, Instead};

/// Fraction of memory bandwidth that elementwise passes reach (BabelStream on A100 and H100: 0.85 to 0.92).
const MEMORY_REACHED: f64 = 0.85;

/// Bandwidth of host memory per device when the host updates parameters, in bytes per second. Assumed: two thirds of
/// some 300 GB/s of a server with 8 devices.
const HOST_BANDWIDTH: f64 = 25e9;

/// The number that identifies the links within a node in [virtual time](fsdp_sim::virtual_time).
pub const NODE_LINK: usize = 0;
/// The number that identifies the links between nodes.
pub const NETWORK: usize = 1;

/// The properties of a run that prices depend on.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Number of ranks.
    pub world: usize,
    /// The compute dtype.
    pub dtype: DType,
    /// Transport of collectives, as named in [`Measured::collectives`](crate::measured::Measured::collectives).
    pub transport: &'static str,
}

/// Computes the durations of operations.
#[derive(Clone, Debug)]
pub struct Prices<'a> {
    cluster: &'a Cluster,
    constants: &'a Constants,
    software: Software,
    setting: Setting,
    /// Number of ranks that share a device.
    sharing: usize,
    /// Peak rate of products in the compute dtype, in floating-point operations per second and rank.
    peak: f64,
    /// The same in the master dtype (the compute dtype's if unknown), and the bytes of its elements.
    master: (f64, usize),
    /// Bandwidth that memory passes reach, in bytes per second and rank.
    bandwidth: f64,
    /// Fraction of the peak that large products reach.
    products: f64,
    /// Fraction of the peak that attention reaches.
    attention: f64,
    /// Factor from the listed bytes of operations other than products to the bytes they move.
    elementwise: f64,
}

impl<'a> Prices<'a> {
    /// Creates the prices of a run on a cluster.
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
        let (peak, master) = (cluster.peak(setting.dtype)?, setting.dtype.master());
        let peak_of_master = cluster.peak(master).unwrap_or(peak);
        Ok(Self {
            peak: peak / sharing as f64,
            master: (peak_of_master / sharing as f64, master.size_bytes()),
            bandwidth: cluster.device.memory_bandwidth.value * MEMORY_REACHED / sharing as f64,
            products: constants.get(&format!("products.{generation}")),
            attention: constants.get(&attention)
                * compute::kernel(constants, software.attention, (&cluster.generation, setting.dtype)),
            elementwise: compute::elementwise(constants, software.elementwise),
            cluster,
            constants,
            software,
            setting,
            sharing,
        })
    }

    /// The cost of each operation of a plan's step, in program order.
    pub fn of_step(&self, plan: &Plan, work: &StepWork) -> Vec<Work> {
        let kinds = &work.calls.kinds;
        let ring = |group| Ring::of(plan.mesh, group);
        let redistributed = |call: &CallWork| -> f64 {
            let seconds = |&(group, bytes): &(Group, f64)| {
                self.collective(Collective::AllGather, bytes, ring(group)).seconds
            };
            call.redistributed.iter().map(seconds).sum()
        };
        let calls: Vec<f64> = kinds.iter().map(|call| self.call(call) + redistributed(call)).collect();
        let price = |(op, bytes): (&Op, &OpWork)| {
            let Some(call) = op.kind.call() else { return self.op(plan, op, bytes) };
            let index = |kind| work.calls.kind(call.block(), kind);
            let seconds = match (CallKind::of(call), self.software.recomputed) {
                (CallKind::Recompute, Some(part)) => self.recompute_seconds(
                    &kinds[index(CallKind::Forward)],
                    &kinds[index(CallKind::Recompute)],
                    part,
                ),
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

    /// The cost of an operation that calls no block.
    fn op(&self, plan: &Plan, op: &Op, work: &OpWork) -> Work {
        if let Some(estimate) = self.estimate_operation(op, work) {
            return Work { seconds: estimate.seconds, ..Work::default() };
        }
        let pass = |bytes: f64| Work { seconds: bytes / self.bandwidth, ..Work::default() };
        let ring = |group| Ring::of(plan.mesh, group);
        let host =
            |bytes: f64| Work { seconds: bytes / self.cluster.node.host_link.value, ..Work::default() };
        match op.kind {
            OpKind::AllGather { group, .. } => {
                let bytes = match self.software.gathered_bytes {
                    Some(each) => work.elements_written * each,
                    None => work.bytes_written,
                };
                self.collective(Collective::AllGather, bytes, ring(group))
            }
            OpKind::ReduceScatter { group, .. } => {
                self.collective(Collective::ReduceScatter, work.bytes_read, ring(group))
            }
            OpKind::GatherDirections { group, .. } => {
                self.collective(Collective::AllGather, work.bytes_written, ring(group))
            }
            OpKind::AllReduce { .. } => self.replicated(work.bytes_written, plan.mesh),
            OpKind::ReduceScalars | OpKind::ReduceStatistics(_) => {
                self.collective(Collective::AllReduce, 0.0, ring(Group::WORLD))
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
                // Written operands are also read.
                let bytes = work.bytes_read + 2.0 * work.bytes_written - work.host_bytes;
                let host = work.host_bytes / HOST_BANDWIDTH;
                Work { seconds: bytes.max(0.0) / self.bandwidth + host, ..Work::default() }
            }
            OpKind::KeepSubShard { .. } => pass(2.0 * work.bytes_written),
            OpKind::Upload(_) => host(work.bytes_written),
            OpKind::Download(_) => host(work.bytes_read),
            // Each unit is resharded twice per micro-batch, and copied out of the gathered buffer once.
            OpKind::Reshard(_) => pass(work.elements_written * self.software.copies_forward / 2.0),
            OpKind::CloseGradient(_) if self.software.copies_backward => {
                let reduced = work.bytes_written / work.elements_written.max(1.0);
                let each = self.constants.get("copies") + 2.0 * (reduced - 2.0);
                pass(work.elements_written * each)
            }
            _ => Work::default(),
        }
    }

    /// Seconds of a block call.
    pub fn call(&self, call: &CallWork) -> f64 {
        match self.measured() {
            Some(measured) => {
                call.listed.iter().map(|listed| self.estimate_listed(measured, listed).seconds).sum()
            }
            None => self.roofline(call),
        }
    }

    /// Seconds of a block call according to the roofline.
    fn roofline(&self, call: &CallWork) -> f64 {
        let products: f64 = call.products.iter().map(|product| self.product(product)).sum();
        products + self.attention_of(call) + self.passes(call)
    }

    /// Seconds of recomputing parts of a forward: other software repeats the forward's operations, ours runs only those
    /// that backward needs.
    fn recompute_seconds(&self, forward: &CallWork, ours: &CallWork, part: Recomputed) -> f64 {
        let products = if part.spares_last { &ours.products } else { &forward.products };
        let products: f64 = products.iter().map(|product| self.product(product)).sum();
        products * part.products
            + self.attention_of(forward) * part.attention
            + self.passes(forward) * part.elementwise
    }
}

/// Moves the all-reduces over replicas after all of backward, to the reduction of the step's scalars.
fn expose_replication(schedule: &Schedule, priced: &mut [Work]) {
    let mut exposed = 0.0;
    for (op, work) in schedule.ops.iter().zip(priced) {
        match op.kind {
            OpKind::AllReduce { .. } => exposed += std::mem::take(&mut work.seconds),
            OpKind::ReduceScalars => work.seconds += std::mem::take(&mut exposed),
            _ => {}
        }
    }
}

/// Fraction of link bandwidth that ring collectives reach in a full node: 235 of 300 GB/s (A100), 361 of 450 (H100) and
/// 313 of 448 (MI300X) in the vendors' own tests, as collected in Stas Bekman's Machine Learning Engineering; PCIe is
/// assumed.
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
