//! The `[fsdp]` table: units, policies, dtypes and the mesh. Policies are those of `fsdp-core`.
//!
//! `config` names a Hugging Face `fsdp_config.json`: see [`fsdp_json`](super::fsdp_json).

use fsdp_core::DType;
use fsdp_core::comm::ReduceOp;
use fsdp_core::schedule::{Accumulation, AccumulationOrder, Checkpointing, Offload, Policy, Reshard};
use fsdp_core::wrap::WrapPolicy;

use super::error::ConfigError;
use super::kind::{LENGTH, SIZE};
use super::reader::Reader;
use super::table::table;
use super::written;

table! {
    /// The `[fsdp]` table.
    pub struct FsdpConfig also ["min_num_params", "config"] {
        /// Which modules become units; written as `wrap` or `min_num_params`.
        wrap: WrapPolicy = wrap(),
        /// What happens to gathered parameters between forward and backward.
        reshard_after_forward: Reshard = reshard(),
        /// Units gathered ahead in forward.
        forward_prefetch: usize = or(LENGTH, 1),
        /// Units gathered ahead in backward.
        backward_prefetch: usize = or(LENGTH, 1),
        /// Where the gradients of a step's micro-batches are added.
        accumulation: Accumulation = named(Accumulation::Reduce),
        /// In which order they are added.
        accumulation_order: AccumulationOrder = named(AccumulationOrder::Tree),
        /// What parameters are gathered and computed in.
        param_dtype: DType = named(DType::F32),
        /// What gradients are reduced in.
        reduce_dtype: DType = named(DType::F32),
        /// How the gradients of ranks are combined.
        reduce_op: ReduceOp = named(ReduceOp::Sum),
        /// What backward recomputes.
        activation_checkpointing: Checkpointing = named(Checkpointing::None),
        /// Where shards, reduced gradients and optimizer state live.
        offload: Offload = named(Offload::None),
        /// The axes of the world.
        mesh: MeshConfig = table(MeshConfig::read),
        /// Regular expressions, found anywhere in a name, of parameters that are not trained.
        frozen: Vec<String> = patterns(),
    }
}

table! {
    /// The axes of the world.
    pub struct MeshConfig {
        /// Replicas; the shard axis has `ranks / replicate` ranks.
        replicate: usize = or(SIZE, 1),
    }
}

impl FsdpConfig {
    /// The policies, not yet held to a mesh.
    pub fn policy(&self) -> Policy {
        Policy {
            reshard_after_forward: self.reshard_after_forward,
            forward_prefetch: self.forward_prefetch,
            backward_prefetch: self.backward_prefetch,
            accumulation: self.accumulation,
            accumulation_order: self.accumulation_order,
            param_dtype: self.param_dtype,
            frozen_master: true,
            reduce_dtype: self.reduce_dtype,
            reduce_op: self.reduce_op,
            checkpointing: self.activation_checkpointing,
            offload: self.offload,
        }
    }
}
