//! Data order: which micro-batch of the step each rank runs, and when.
//!
//! Gradients are added by the tree over micro-batches in data order. A micro-batch index is a mixed-radix number whose
//! digits are (replica, shard, round). The digit that is summed over first is the least significant, so every partial
//! sum that a rank or a collective computes is a subtree.

use super::Accumulation;
use crate::mesh::{Axis, Mesh};
use crate::rank::Rank;

/// Returns which of the `world * rounds` micro-batches of a step `rank` runs in its round `round`.
///
/// With [`Accumulation::Reduce`], gradients are summed over shards, then over rounds, then over replicas; with
/// [`Accumulation::Unsharded`], over rounds, then over shards, then over replicas.
///
/// # Panics
/// When `rank` or `round` is out of range.
pub fn micro_batch_index(
    mesh: Mesh,
    accumulation: Accumulation,
    rounds: usize,
    rank: Rank,
    round: usize,
) -> usize {
    assert!(rank.0 < mesh.world(), "{rank} is not in a mesh of {mesh}");
    assert!(round < rounds, "round {round} of {rounds}");
    let (replica, shard) = (mesh.coordinate(rank, Axis::Replicate), mesh.coordinate(rank, Axis::Shard));
    match accumulation {
        Accumulation::Reduce => (replica * rounds + round) * mesh.size(Axis::Shard) + shard,
        Accumulation::Unsharded => (replica * mesh.size(Axis::Shard) + shard) * rounds + round,
    }
}
