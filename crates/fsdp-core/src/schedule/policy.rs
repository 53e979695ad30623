//! The policies of fully sharded training, as inputs of the compiler.

use crate::collective::ReduceOp;
use crate::dtype::DType;
use crate::error::Error;
use crate::layout::{Segment, UnitLayout};
use crate::mesh::{Axis, Group, Mesh};
use crate::program::Checkpointing;

/// The treatment of an unsharded unit between its last use in forward and its first use in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reshard {
    /// Keeps the root unit and reshards all others (FSDP2's default).
    Auto,
    /// Reshards every unit (ZeRO-3).
    Always,
    /// Keeps every unit (ZeRO-2).
    Never,
    /// Keeps a part of `1 / n`; backward gathers within groups of `n` ranks.
    ToGroup(usize),
}

impl Reshard {
    /// The groups that keep a part of a unit between forward and backward, if they are smaller than all that hold it.
    pub(super) fn sub_group(self, unit: &UnitLayout) -> Option<Group> {
        match self {
            Reshard::ToGroup(n) if n < unit.shards && unit.shards.is_multiple_of(n) => {
                Some(unit.group().neighbors(n))
            }
            _ => None,
        }
    }
}

/// When the gradients of several micro-batches are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// After every micro-batch: one reduce-scatter each, and sums are sharded.
    Reduce,
    /// Once per step: sums are unsharded, and one reduce-scatter follows.
    Unsharded,
}

/// The order in which the gradients of several micro-batches are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccumulationOrder {
    /// The order of the tree in [`crate::tree`]: results have the same bits for any number of ranks.
    Tree,
    /// Data order, into one accumulator.
    Running,
}

/// The memory that holds parameter shards, reduced gradients and optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Offload {
    /// Device memory.
    None,
    /// Host memory, where the update also runs. Shards are uploaded before they are gathered.
    Cpu,
}

/// All policies of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The treatment of unsharded units after forward.
    pub reshard_after_forward: Reshard,
    /// Number of units that forward gathers ahead.
    pub forward_prefetch: usize,
    /// Number of units that backward gathers ahead.
    pub backward_prefetch: usize,
    /// When gradients are reduced.
    pub accumulation: Accumulation,
    /// The order in which gradients of micro-batches are added.
    pub accumulation_order: AccumulationOrder,
    /// Dtype of gathered parameters and of compute.
    pub param_dtype: DType,
    /// Whether frozen parameters are kept in the master dtype of [`Policy::param_dtype`] as well as in the compute
    /// dtype, like trained ones. Otherwise only the compute copy exists.
    pub frozen_master: bool,
    /// Dtype of gradients, from when they are written until they are reduced.
    pub reduce_dtype: DType,
    /// How gradients are combined across ranks, over shards and over replicas.
    pub reduce_op: ReduceOp,
    /// What forward saves for backward.
    pub checkpointing: Checkpointing,
    /// The memory that holds the sharded data.
    pub offload: Offload,
    /// Number of chunks that the ranks of the context axis share of every sample. The gradient of a micro-batch is the
    /// sum over its chunks, in the order of the tree in [`crate::tree`]: it is the number of chunks that determines bits,
    /// not that of the ranks which they are on.
    pub chunks: usize,
    /// Number of chunks that the ranks of the expert axis share of the experts of every mixture: sums over the experts of a
    /// token are trees over them.
    pub expert_chunks: usize,
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
            chunks: 1,
            expert_chunks: 1,
        }
    }
}

impl Policy {
    /// The dtype in which trainable or frozen parameters are kept, if they are not quantized.
    pub const fn kept_dtype(&self, trainable: bool) -> DType {
        if trainable || self.frozen_master { self.param_dtype.master() } else { self.param_dtype }
    }

    /// The dtype in which a segment is kept.
    pub fn kept_segment_dtype(&self, segment: &Segment) -> DType {
        if segment.dtype == self.param_dtype { self.kept_dtype(segment.trainable) } else { segment.dtype }
    }

    /// Checks the policy against a mesh, and brings it into the form that the compiler expects: a sub-group of the
    /// whole shard axis becomes `Always`, and one of a single rank becomes `Never` (as in FSDP2).
    ///
    /// # Errors
    /// [`Error::Policy`] with the key of the rejected value.
    pub fn resolve(mut self, mesh: Mesh) -> Result<Self, Error> {
        let context = (self.chunks, mesh.size(Axis::Context), ["chunks.context", "context"]);
        let expert = (self.expert_chunks, mesh.expert(), ["chunks.expert", "expert"]);
        for (chunks, ranks, [key, axis]) in [context, expert] {
            if !chunks.is_power_of_two() || !chunks.is_multiple_of(ranks) {
                let expected =
                    format!("must be a power of two, and a multiple of the {ranks} ranks of the {axis} axis");
                return Err(Error::Policy { key, value: chunks.to_string(), expected });
            }
        }
        if mesh.expert() > 1 && self.reduce_op == ReduceOp::Average {
            return Err(Error::Policy {
                key: "reduce_op",
                value: "average".into(),
                expected: "must be \"sum\" with an expert axis: gradients of experts are of fewer ranks"
                    .into(),
            });
        }
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
                expected: "gradients are sums over all targets, which can overflow f16; set f32 or bf16"
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
