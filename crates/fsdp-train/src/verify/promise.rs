//! What the numerics contract promises of a configuration.

use fsdp_core::DType;
use fsdp_core::comm::ReduceOp;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::AccumulationOrder;

use crate::config::{self, Device, OptimizerConfig, Resolved};

/// What is promised of a sharded run, compared with the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Contract D2: every loss, norm, parameter and optimizer element has the same bits.
    Bits,
    /// The loss of the first step has the same bits; its gradients, and so their norm, lie within a derived bound of the
    /// oracle's: `2 (n - 1) u sum |leaf|` where they are summed.
    Bounds,
}

impl Promise {
    /// The promise for a plan and an optimizer on a device.
    pub fn of(plan: &Plan, optimizer: &OptimizerConfig, device: Device) -> Self {
        let axes = [plan.mesh.replicas(), plan.mesh.shards()];
        let micro_batches = plan.step.rounds * plan.mesh.world();
        let running = plan.policy.accumulation_order == AccumulationOrder::Running;
        let reduction = (plan.policy.reduce_op, plan.policy.reduce_dtype);
        Self::decide(axes, micro_batches, running, reduction, optimizer, device)
    }

    /// The promise for a configuration, without planning it.
    pub fn of_config(config: &Resolved) -> Self {
        let replicas = config.fsdp.mesh.replicate;
        let axes = [replicas, config.run.ranks / replicas];
        let running = config.fsdp.accumulation_order == config::AccumulationOrder::Running;
        let micro_batches = config.train.micro_batches_per_step();
        let reduction = (config.fsdp.reduce_op.into(), config.fsdp.reduce_dtype.into());
        let optimizer = &config.train.optimizer;
        Self::decide(axes, micro_batches, running, reduction, optimizer, config.run.device)
    }

    fn decide(
        axes: [usize; 2],
        micro_batches: usize,
        running: bool,
        (reduce_op, reduce_dtype): (ReduceOp, DType),
        optimizer: &OptimizerConfig,
        device: Device,
    ) -> Self {
        let powers = axes.into_iter().chain([micro_batches]).all(usize::is_power_of_two);
        // With one rank the running order is the oracle's.
        let ordered = if running { axes == [1, 1] } else { powers };
        // An average over one rank is a product with one; over more, a product may be no normal number.
        let summed = reduce_op == ReduceOp::Sum || axes == [1, 1];
        let exact_dtype = reduce_dtype != DType::Bf16;
        let element_wise = !matches!(optimizer, OptimizerConfig::Adafactor(_));
        // libtorch does not say that its kernels give the same bits wherever their operands lie.
        let own_kernels = device == Device::Cpu;
        if ordered && summed && exact_dtype && element_wise && own_kernels {
            Promise::Bits
        } else {
            Promise::Bounds
        }
    }

    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Promise::Bits => "equal bits (D2)",
            Promise::Bounds => "derived bounds",
        }
    }
}
