//! What the numerics contract promises of a configuration.

use fsdp_core::DType;
use fsdp_core::engine::Plan;
use fsdp_core::schedule::{Accumulation, AccumulationOrder};

use crate::config::OptimizerConfig;

/// What is promised of a sharded run, compared with the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Contract D2: every loss, norm, parameter and optimizer element has the same bits.
    Bits,
    /// The loss of the first step has the same bits, and its gradients lie within `2 (n - 1) u sum |leaf|` of
    /// the oracle's.
    Bounds,
    /// The loss of the first step has the same bits. Kernels add the terms of a micro-batch to the sum of
    /// earlier ones in place, one by one, so that the leaves bound nothing where those terms cancel.
    FirstLoss,
}

impl Promise {
    /// The promise for a plan and an optimizer.
    pub fn of(plan: &Plan, optimizer: &OptimizerConfig) -> Self {
        let (replicas, shards) = (plan.mesh.replicas(), plan.mesh.shards());
        let micro_batches = plan.step.rounds * plan.mesh.world();
        let powers = [replicas, shards, micro_batches].into_iter().all(usize::is_power_of_two);
        let running = plan.policy.accumulation_order == AccumulationOrder::Running;
        if running && plan.policy.accumulation == Accumulation::Unsharded && plan.step.rounds > 1 {
            return Promise::FirstLoss;
        }
        // With one rank the running order is the oracle's.
        let ordered = if running { plan.mesh.world() == 1 } else { powers };
        let exact_dtype = plan.policy.reduce_dtype != DType::Bf16;
        let element_wise = !matches!(optimizer, OptimizerConfig::Adafactor(_));
        if ordered && exact_dtype && element_wise { Promise::Bits } else { Promise::Bounds }
    }

    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Promise::Bits => "equal bits (D2)",
            Promise::Bounds => "derived bounds",
            Promise::FirstLoss => "equal first loss",
        }
    }
}
