//! The ledger: predicts how much memory a rank needs for a schedule, by category, to the byte.
//!
//! The buffers that a schedule declares are allocated once, so their categories are sums over its declarations.
//! Activations and workspace come and go with the block calls of a micro-batch (all micro-batches are alike); their
//! footprints come from walking the lists of operations that run them. The engine's memory counts independently, and
//! must agree with the prediction.

use std::collections::{BTreeMap, BTreeSet};

use crate::memory::{Category, Usage};
use crate::program::CallFootprint;
use crate::schedule::{BufferId, OpId, OpKind, Place, Role, Schedule};
use crate::update::RankTables;

/// Inputs of the ledger besides the schedule.
#[derive(Clone, Debug)]
pub struct LedgerInput<'a> {
    /// The contents of the rank's shards.
    pub tables: &'a RankTables,
    /// Footprints of the calls of one micro-batch, in the order of [`calls`](crate::program::calls).
    pub calls: &'a [CallFootprint],
    /// Activation bytes that the program holds throughout: the data of the step.
    pub data_bytes: usize,
}

/// Predicts the memory that a rank needs to run a schedule: peaks per category and of all categories together.
pub fn predict(schedule: &Schedule, input: &LedgerInput<'_>) -> Usage {
    let mut usage = Usage::default();
    for decl in &schedule.buffers {
        let bytes = decl.len_on(input.tables) * decl.dtype.size_bytes();
        match decl.place {
            Place::Device => usage.device.live_bytes[decl.category as usize] += bytes,
            Place::Host => usage.host.live_bytes[decl.category as usize] += bytes,
        }
    }
    usage.device.reset_peaks();
    usage.host.reset_peaks();
    let mut live = input.data_bytes;
    let (mut activation_peak, mut workspace_peak, mut total_peak) = (live, 0, live);
    for call in input.calls {
        activation_peak = activation_peak.max(live + call.activation_peak);
        workspace_peak = workspace_peak.max(call.workspace_peak);
        total_peak = total_peak.max(live + call.total_peak);
        live = call.after(live);
    }
    usage.device.live_bytes[Category::Activation as usize] = live;
    usage.device.peak_bytes[Category::Activation as usize] = activation_peak;
    usage.device.peak_bytes[Category::Workspace as usize] += workspace_peak;
    usage.device.total_peak_bytes += total_peak;
    usage
}

/// Peak of the storage that is allocated and freed within a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moving {
    /// Bytes held by a rank that is computing.
    pub rank_bytes: usize,
    /// Bytes held by all ranks together.
    pub world_bytes: usize,
}

/// A lower bound of the storage that `ranks` ranks of one process hold at one time for gathered parameters,
/// activations, workspace and gradients. At most `computing` of them compute at a time, gathered parameters are stored
/// once for all of them, and storage is freed when its contents are given up.
///
/// When an all-gather ends, all ranks that were not computing have been waiting for it, holding their buffers. The
/// extra memory of a call is counted for one rank only, because the others may not have reached it.
pub fn moving(schedule: &Schedule, input: &LedgerInput<'_>, ranks: usize, computing: usize) -> Moving {
    let bytes = |ids: &[BufferId]| -> usize {
        let decls = ids.iter().map(|&id| schedule.buffer(id));
        decls.map(|decl| decl.len_on(input.tables) * decl.dtype.size_bytes()).sum()
    };
    let is_gather = |id: &&OpId| matches!(schedule.op(**id).kind, OpKind::AllGather { .. });
    let waiting = ranks.saturating_sub(computing);
    // The gathered buffers, and the operations that gather them.
    let mut gathered: BTreeMap<BufferId, OpId> = BTreeMap::new();
    let mut reduced: BTreeSet<BufferId> = BTreeSet::new();
    let (mut open_bytes, mut reduced_bytes, mut activations) = (0, 0, input.data_bytes);
    let mut peak = Moving::default();
    let mut calls = input.calls.iter();
    for (index, op) in schedule.ops.iter().enumerate() {
        // A reduced gradient counts as held once some operation has waited for it.
        let earlier = op.waits.iter().chain(&op.joins).map(|&earlier| schedule.op(earlier));
        let reductions = earlier.filter(|op| matches!(op.kind, OpKind::ReduceScatter { .. }));
        for id in reductions.flat_map(|op| &op.writes) {
            let decl = schedule.buffer(*id);
            if (decl.role, decl.place) == (Role::ShardedGradient, Place::Device) && reduced.insert(*id) {
                reduced_bytes += bytes(&[*id]);
            }
        }
        let per_rank_bytes = activations + open_bytes + reduced_bytes;
        let gathered_bytes = |last: OpId| -> usize {
            gathered.iter().filter(|(_, by)| **by <= last).map(|(&id, _)| bytes(&[id])).sum()
        };
        let mut update_peak = |rank: usize, world: usize| {
            peak.rank_bytes = peak.rank_bytes.max(rank);
            peak.world_bytes = peak.world_bytes.max(world);
        };
        if let Some(&last) = op.waits.iter().filter(is_gather).max() {
            // Gathers that were issued later end later.
            update_peak(
                gathered_bytes(last) + per_rank_bytes,
                gathered_bytes(last) + waiting * per_rank_bytes + (ranks - waiting) * reduced_bytes,
            );
        }
        match op.kind {
            OpKind::AllGather { .. } => gathered.extend(op.writes.iter().map(|&id| (id, OpId(index)))),
            OpKind::Reshard(_) => gathered.retain(|id, _| !op.writes.contains(id)),
            OpKind::OpenGradient(_) => open_bytes += bytes(&op.writes),
            OpKind::CloseGradient(_) => open_bytes -= bytes(&op.writes),
            OpKind::ReduceScalars => update_peak(per_rank_bytes, ranks * reduced_bytes),
            OpKind::Call(_) => {
                // The calls of the first micro-batch represent those of all others.
                let Some(call) = calls.next() else { break };
                let rank = gathered_bytes(OpId(index)) + per_rank_bytes + call.total_peak;
                update_peak(rank, rank + (ranks - 1) * reduced_bytes);
                activations = call.after(activations);
            }
            _ => {}
        }
    }
    peak
}

#[cfg(test)]
mod tests;
