//! What the numerics contract promises of a configuration.

use fsdp_core::DType;
use fsdp_core::engine::Plan;
use fsdp_core::schedule::AccumulationOrder;

use crate::config::{self, Device, OptimizerConfig, Resolved};

/// What is promised of a sharded run, compared with the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Contract D2: every loss, norm, parameter and optimizer element has the same bits.
    Bits,
    /// The loss of the first step has the same bits, and its gradients lie within `2 (n - 1) u sum |leaf|` of
    /// the oracle's.
    Bounds,
}

impl Promise {
    /// The promise for a plan and an optimizer on a device.
    pub fn of(plan: &Plan, optimizer: &OptimizerConfig, device: Device) -> Self {
        let axes = [plan.mesh.replicas(), plan.mesh.shards()];
        let micro_batches = plan.step.rounds * plan.mesh.world();
        let running = plan.policy.accumulation_order == AccumulationOrder::Running;
        Self::decide(axes, micro_batches, running, plan.policy.reduce_dtype, optimizer, device)
    }

    /// The promise for a configuration, without planning it.
    pub fn of_config(config: &Resolved) -> Self {
        let replicas = config.fsdp.mesh.replicate;
        let axes = [replicas, config.run.ranks / replicas];
        let running = config.fsdp.accumulation_order == config::AccumulationOrder::Running;
        let micro_batches = config.train.micro_batches_per_step();
        let (reduce_dtype, optimizer) = (config.fsdp.reduce_dtype.into(), &config.train.optimizer);
        Self::decide(axes, micro_batches, running, reduce_dtype, optimizer, config.run.device)
    }

    fn decide(
        axes: [usize; 2],
        micro_batches: usize,
        running: bool,
        reduce_dtype: DType,
        optimizer: &OptimizerConfig,
        device: Device,
    ) -> Self {
        let powers = axes.into_iter().chain([micro_batches]).all(usize::is_power_of_two);
        // With one rank the running order is the oracle's.
        let ordered = if running { axes == [1, 1] } else { powers };
        let exact_dtype = reduce_dtype != DType::Bf16;
        let element_wise = !matches!(optimizer, OptimizerConfig::Adafactor(_));
        // libtorch does not say that its kernels give the same bits wherever their operands lie.
        let own_kernels = device == Device::Cpu;
        if ordered && exact_dtype && element_wise && own_kernels { Promise::Bits } else { Promise::Bounds }
    }

    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Promise::Bits => "equal bits (D2)",
            Promise::Bounds => "derived bounds",
        }
    }
}
