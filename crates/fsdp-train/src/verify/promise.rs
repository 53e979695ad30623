//! The promise of the numerics contract for a configuration.

use fsdp_config::{Device, OptimizerConfig, Resolved};
use fsdp_core::DType;
use fsdp_core::comm::ReduceOp;
use fsdp_core::schedule::{Accumulation, AccumulationOrder};

/// The promise for a sharded run, compared with the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Contract D2: every loss, norm, parameter and optimizer element has the same bits.
    Bits,
    /// The loss of the first step has the same bits. Its gradients, and so their norm, are within a derived bound of
    /// the oracle's: `2 (n - 1) u sum |leaf|` if they are summed.
    Bounds,
    /// The kernels are not the oracle's, so a tolerance applies: losses and gradients of the first step are near the
    /// oracle's, within a few times its own rounding errors.
    Near,
}

impl Promise {
    /// Returns the promise for a configuration.
    pub fn of(config: &Resolved) -> Self {
        let fsdp = &config.fsdp;
        let (replicas, context) = (fsdp.mesh.replicate, fsdp.mesh.context);
        let axes = [replicas, fsdp.mesh.dp_degree(config.run.ranks) / replicas, context];
        let micro_batches = config.train.micro_batches_per_step();
        let powers = axes.into_iter().chain([micro_batches]).all(usize::is_power_of_two);
        // On one rank, the running order is the oracle's.
        let ordered = match fsdp.accumulation_order {
            // Unsharded gradients of a chunk are added over micro-batches first, and then over chunks; those of experts on
            // their axis, over its ranks first.
            AccumulationOrder::Tree => {
                let reduces = fsdp.accumulation == Accumulation::Reduce;
                powers && (reduces || (context == 1 && fsdp.mesh.expert == 1))
            }
            AccumulationOrder::Running => axes == [1, 1, 1],
        };
        // Averaging over one rank multiplies by one; over more, a product may be subnormal.
        let summed = fsdp.reduce_op == ReduceOp::Sum || axes == [1, 1, 1];
        let exact_dtype = fsdp.reduce_dtype != DType::Bf16;
        // All other rules work on elements, on blocks within rows, which are never split, or on whole matrices.
        let ignores_cuts = !matches!(config.train.optimizer, OptimizerConfig::Adafactor(_));
        if config.run.device == Device::Xla {
            return Promise::Near;
        }
        // libtorch does not guarantee that its kernels give the same bits for any alignment of their operands.
        let own_kernels = config.run.device == Device::Cpu;
        if ordered && summed && exact_dtype && ignores_cuts && own_kernels {
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
            Promise::Near => "near the oracle (a tolerance)",
        }
    }
}
