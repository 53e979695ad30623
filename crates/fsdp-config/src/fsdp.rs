//! The `[fsdp]` table: units, policies, dtypes and the mesh. The policy types come from `fsdp-core`.
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
use super::writer;

table! {
    /// The `[fsdp]` table.
    pub struct FsdpConfig also ["min_num_params", "config"] {
        /// Modules that become units; written as `wrap` or `min_num_params`.
        wrap: WrapPolicy = wrap(),
        /// Whether gathered parameters are freed, or kept in sub-shards, between forward and backward.
        reshard_after_forward: Reshard = reshard(),
        /// Number of units to gather ahead in forward.
        forward_prefetch: usize = or(LENGTH, 1),
        /// Number of units to gather ahead in backward.
        backward_prefetch: usize = or(LENGTH, 1),
        /// Where gradients of micro-batches accumulate: before or after the reduction.
        accumulation: Accumulation = named(Accumulation::Reduce),
        /// Order in which they are added.
        accumulation_order: AccumulationOrder = named(AccumulationOrder::Tree),
        /// Dtype of gathered parameters and of compute, but for those that `keep_f32` names.
        param_dtype: DType = named(DType::F32),
        /// Dtype of gradient reduction.
        reduce_dtype: DType = named(DType::F32),
        /// How gradients are combined over ranks.
        reduce_op: ReduceOp = named(ReduceOp::Sum),
        /// What backward recomputes (activation checkpointing).
        activation_checkpointing: Checkpointing = named(Checkpointing::None),
        /// Where shards, reduced gradients and optimizer state are stored.
        offload: Offload = named(Offload::None),
        /// The device mesh.
        mesh: MeshConfig = table(MeshConfig::read),
        /// How samples and experts are cut.
        chunks: ChunksConfig = table(ChunksConfig::read),
        /// Regular expressions, found anywhere in a name, of parameters that are frozen.
        frozen: Vec<String> = patterns(),
        /// Regular expressions, found anywhere in a name, of parameters that are gathered and computed with in f32 where
        /// `param_dtype` is narrower. Left out, or "family": in some families of models the routers with their corrections, or the
        /// norms (docs/models.md lists them).
        keep_f32: Option<Vec<String>> = patterns_or_family(),
    }
}

table! {
    /// The device mesh.
    pub struct MeshConfig {
        /// Number of replicas (HSDP).
        replicate: usize = or(SIZE, 1),
        /// Number of ranks that parameters are sharded over and that train on different data. Left out, it is
        /// `ranks / (replicate x context)`; given, the three must multiply to `ranks`.
        shard: Option<usize> = or_none(SIZE),
        /// Number of ranks that share each sample: every one has some of its chunks (context parallelism), and
        /// parameters are sharded over them, too. A power of two.
        context: usize = or(SIZE, 1),
        /// Number of ranks that have the experts of every mixture together, each some of them (expert parallelism). They are
        /// neighbors among those of shard x context, which it divides. A power of two.
        expert: usize = or(SIZE, 1),
    }
}

table! {
    /// How samples and experts are cut.
    pub struct ChunksConfig {
        /// Number of chunks that the positions of a sample are cut into, for the ranks of the context axis to share. It
        /// is the order of sums: runs with equally many chunks have the same bits on all meshes. A power of two, a multiple of
        /// `mesh.context`, that divides `seq_len` and the query heads, and divides the key heads or is a multiple of them; left
        /// out, as many as `mesh.context`.
        context: Option<usize> = or_none(SIZE),
        /// Number of chunks that the experts of every mixture are cut into, for the ranks of the expert axis to share; the
        /// order of sums over the experts of a token. A power of two, a multiple of `mesh.expert`, that divides the experts;
        /// left out, as many as `mesh.expert`.
        expert: Option<usize> = or_none(SIZE),
    }
}

impl MeshConfig {
    /// The degree of data parallelism of `ranks` ranks.
    pub fn dp_degree(&self, ranks: usize) -> usize {
        ranks / self.context
    }
}

impl FsdpConfig {
    /// Number of chunks of a sample.
    pub fn chunks(&self) -> usize {
        self.chunks.context.unwrap_or(self.mesh.context)
    }

    /// The key that says into how many chunks samples are cut.
    pub fn chunks_key(&self) -> &'static str {
        if self.chunks() == self.mesh.context { "fsdp.mesh.context" } else { "fsdp.chunks.context" }
    }

    /// Number of chunks of the experts of a mixture.
    pub fn expert_chunks(&self) -> usize {
        self.chunks.expert.unwrap_or(self.mesh.expert)
    }

    /// The key that says into how many chunks experts are cut.
    pub fn expert_chunks_key(&self) -> &'static str {
        if self.expert_chunks() == self.mesh.expert { "fsdp.mesh.expert" } else { "fsdp.chunks.expert" }
    }

    /// Returns the policy, not yet checked against a mesh.
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
            chunks: self.chunks(),
            expert_chunks: self.expert_chunks(),
        }
    }
}
