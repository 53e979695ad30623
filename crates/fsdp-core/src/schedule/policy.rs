//! The knobs of fully sharded training, as the compiler reads them.

use crate::comm::ReduceOp;
use crate::dtype::DType;
use crate::error::Error;
use crate::program::ForwardMode;
use crate::rank::Mesh;

/// What happens to an unsharded unit between its last use in forward and its first in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reshard {
    /// The root unit is kept, others are resharded (FSDP2's default).
    Auto,
    /// Every unit is resharded (ZeRO-3).
    Always,
    /// Every unit is kept (ZeRO-2).
    Never,
    /// A part of `1 / n` is kept, and backward gathers within groups of `n` ranks.
    ToGroup(usize),
}

/// When gradients of several micro-batches are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Every micro-batch is reduce-scattered; sums are sharded.
    Reduce,
    /// Sums are unsharded; one reduce-scatter per step.
    Unsharded,
}

/// In which order the gradients of several micro-batches are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccumulationOrder {
    /// The tree of [`crate::tree`]: bits do not depend on the number of ranks.
    Tree,
    /// One accumulator, in order.
    Running,
}

/// What forward keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Checkpointing {
    /// Everything.
    None,
    /// Only the input of every layer; layers are recomputed in backward.
    Full,
    /// The input of every layer and the outputs of matrix products and of attention; all else is recomputed.
    Selective,
}

impl Checkpointing {
    /// In which mode the layers run forward that are recomputed in backward; `None` when none are.
    pub const fn forward_mode(self) -> Option<ForwardMode> {
        match self {
            Checkpointing::None => None,
            Checkpointing::Full => Some(ForwardMode::Checkpoint),
            Checkpointing::Selective => Some(ForwardMode::CheckpointProducts),
        }
    }
}

/// Where parameter shards, reduced gradients and optimizer state live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Offload {
    /// In the device's memory.
    None,
    /// In host memory, where the update happens. Shards are uploaded before they are gathered.
    Cpu,
}

/// All policies of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// What happens after forward.
    pub reshard_after_forward: Reshard,
    /// How many units ahead forward gathers.
    pub forward_prefetch: usize,
    /// How many units ahead backward gathers.
    pub backward_prefetch: usize,
    /// When gradients are reduced.
    pub accumulation: Accumulation,
    /// In which order they are added.
    pub accumulation_order: AccumulationOrder,
    /// Dtype of gathered parameters and of compute.
    pub param_dtype: DType,
    /// Whether frozen parameters are kept in the master dtype of [`Policy::param_dtype`], as trained ones are, beside the
    /// copy that computes. Otherwise that copy is all there is of them.
    pub frozen_master: bool,
    /// Dtype of gradients from the moment they are written until they are reduced.
    pub reduce_dtype: DType,
    /// How the gradients of ranks are combined, over shards and over replicas.
    pub reduce_op: ReduceOp,
    /// What forward keeps.
    pub checkpointing: Checkpointing,
    /// Where what is sharded lives.
    pub offload: Offload,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            reshard_after_forward: Reshard::Auto,
            forward_prefetch: 1,
            backward_prefetch: 1,
            accumulation: Accumulation::Reduce,
            accumulation_order: AccumulationOrder::Tree,
            param_dtype: DType::F32,
            frozen_master: true,
            reduce_dtype: DType::F32,
            reduce_op: ReduceOp::Sum,
            checkpointing: Checkpointing::None,
            offload: Offload::None,
        }
    }
}

impl Policy {
    /// The type in which parameters are kept that are trained, or frozen.
    pub const fn kept_dtype(&self, trainable: bool) -> DType {
        if trainable || self.frozen_master { self.param_dtype.master() } else { self.param_dtype }
    }

    /// Checks the policy against a mesh, and gives it the form that the compiler expects: a sub-group of
    /// the whole shard axis is `Always`, one of a single rank is `Never` (as FSDP2).
    ///
    /// # Errors
    /// [`Error::Policy`] that names the key.
    pub fn resolve(mut self, mesh: Mesh) -> Result<Self, Error> {
        if let Reshard::ToGroup(n) = self.reshard_after_forward {
            if n == 0 || !mesh.shards().is_multiple_of(n) {
                return Err(Error::Policy {
                    key: "reshard_after_forward",
                    value: n.to_string(),
                    expected: format!("a group size must divide the shard axis of {} ranks", mesh.shards()),
                });
            }
            if n == mesh.shards() {
                self.reshard_after_forward = Reshard::Always;
            } else if n == 1 {
                self.reshard_after_forward = Reshard::Never;
            }
        }
        for (key, dtype) in [("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)] {
            if !dtype.is_float() {
                let expected = "must be f32, f64, bf16 or f16".into();
                return Err(Error::Policy { key, value: dtype.to_string(), expected });
            }
        }
        if self.reduce_dtype == DType::F16 {
            return Err(Error::Policy {
                key: "reduce_dtype",
                value: self.reduce_dtype.to_string(),
                expected: "gradients are sums over all targets, for which f16 has no range; set f32 or bf16"
                    .into(),
            });
        }
        if self.param_dtype == DType::F64 && self.reduce_dtype != DType::F64 {
            return Err(Error::Policy {
                key: "reduce_dtype",
                value: self.reduce_dtype.to_string(),
                expected: "gradients of param_dtype = f64 are reduced in f64; set both to f64, or \
                           param_dtype to f32, bf16 or f16"
                    .into(),
            });
        }
        Ok(self)
    }
}
