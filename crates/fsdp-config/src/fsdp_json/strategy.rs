//! Sharding strategies of FSDP1. accelerate takes them as `sharding_strategy` and, in newer versions, as
//! `reshard_after_forward`; by name in any case, or by their number in PyTorch's enumeration.

use serde_json::Value;

use super::boolean;
use crate::{Warning, World};

/// The accepted values.
pub(super) const ALLOWED: &str =
    "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2 (or 1 to 5)";

/// A strategy, in PyTorch's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    FullShard,
    ShardGradOp,
    NoShard,
    HybridShard,
    HybridShardZero2,
}

/// What a mesh replicates over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replicas {
    /// Every rank holds a whole replica.
    Ranks,
    /// Every node holds one.
    Nodes,
}

impl Replicas {
    /// Their number in a world, and what to say about it.
    pub(crate) fn count(self, world: World) -> (usize, Warning) {
        let counted = |replicate, over| (replicate, Warning::Replicas { replicate, over });
        match (self, world.nodes) {
            (Replicas::Ranks, _) => counted(world.ranks, "ranks"),
            (Replicas::Nodes, Some(nodes)) => counted(nodes, "nodes"),
            (Replicas::Nodes, None) => (1, Warning::OneNode),
        }
    }
}

const STRATEGIES: [(Strategy, &str); 5] = [
    (Strategy::FullShard, "FULL_SHARD"),
    (Strategy::ShardGradOp, "SHARD_GRAD_OP"),
    (Strategy::NoShard, "NO_SHARD"),
    (Strategy::HybridShard, "HYBRID_SHARD"),
    (Strategy::HybridShardZero2, "HYBRID_SHARD_ZERO2"),
];

impl Strategy {
    /// Reads a name or a number; PyTorch's own name of the last one begins with an underscore.
    pub(super) fn read(value: &Value) -> Option<Strategy> {
        let text = value.as_str().map(|text| text.trim().to_ascii_uppercase());
        let number = match &text {
            Some(text) => text.parse().ok(),
            None => value.as_u64(),
        };
        let by_number =
            number.and_then(|number| STRATEGIES.get(usize::try_from(number).ok()?.checked_sub(1)?));
        let is_named =
            |name: &str| text.as_ref().is_some_and(|text| text.strip_prefix('_').unwrap_or(text) == name);
        by_number
            .or_else(|| STRATEGIES.iter().find(|(_, name)| is_named(name)))
            .map(|&(strategy, _)| strategy)
    }

    /// Its name.
    pub(super) fn name(self) -> &'static str {
        STRATEGIES.into_iter().find(|&(strategy, _)| strategy == self).expect("the table is complete").1
    }

    /// The settings that it stands for, for people.
    pub(super) fn settings(self) -> &'static str {
        match self {
            Strategy::FullShard => "`fsdp.reshard_after_forward` = \"auto\" (ZeRO-3)",
            Strategy::ShardGradOp => "`fsdp.reshard_after_forward` = false (ZeRO-2)",
            Strategy::NoShard => "a whole replica on every rank (DDP)",
            Strategy::HybridShard => {
                "`fsdp.reshard_after_forward` = \"auto\" and a replica on every node (HSDP)"
            }
            Strategy::HybridShardZero2 => {
                "`fsdp.reshard_after_forward` = false and a replica on every node (HSDP)"
            }
        }
    }

    /// Whether parameters are freed between forward and backward (the root, which backward needs first, never is).
    pub(super) fn reshards(self) -> bool {
        matches!(self, Strategy::FullShard | Strategy::HybridShard)
    }

    /// What it replicates over; `None` if one replica is sharded over all ranks.
    pub(super) fn replicas(self) -> Option<Replicas> {
        match self {
            Strategy::FullShard | Strategy::ShardGradOp => None,
            Strategy::NoShard => Some(Replicas::Ranks),
            Strategy::HybridShard | Strategy::HybridShardZero2 => Some(Replicas::Nodes),
        }
    }
}

/// A value of `reshard_after_forward`: a boolean in FSDP2, a strategy in FSDP1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReshardAfterForward {
    Is(bool),
    Of(Strategy),
}

impl ReshardAfterForward {
    /// Reads either form. `1` is true and FULL_SHARD, which are the same.
    pub(super) fn read(value: &Value) -> Option<Self> {
        boolean(value).map(Self::Is).or_else(|| Strategy::read(value).map(Self::Of))
    }
}
