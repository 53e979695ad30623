//! The ledger: walks a schedule and says how much memory a rank needs, by category, to the byte.
//!
//! Buffers that the engine owns are allocated once and never again, so their categories are sums over the
//! layout and the schedule's slots. Activations and workspace come and go with the calls of a micro-batch
//! (the same for all of them); their footprints come from walking the lists of calls that run them. The engine's memory counts
//! independently of this, and must agree.

use std::collections::{BTreeMap, BTreeSet};

use crate::dtype::DType;
use crate::layout::{Layout, Segment};
use crate::memory::{Category, Usage};
use crate::program::CallFootprint;
use crate::scalars::{GradientFactors, SCALAR_WORDS};
use crate::schedule::{
    Accumulation, AccumulationOrder, Offload, OpId, OpKind, Policy, Reshard, Schedule, Slot,
};
use crate::tree;

/// What the ledger needs besides the schedule.
#[derive(Clone, Debug)]
pub struct LedgerInput<'a> {
    /// The layout.
    pub layout: &'a Layout,
    /// The (resolved) policy.
    pub policy: &'a Policy,
    /// Bytes of optimizer state of each unit on this rank.
    pub optimizer_bytes: &'a [usize],
    /// Elements of each phase of the update rule's statistics.
    pub statistics: &'a [usize],
    /// Footprints of the calls of one micro-batch, in the order of [`Schedule::calls`].
    pub calls: &'a [CallFootprint],
    /// Activation bytes that the program holds all the time: the data of the step.
    pub data_bytes: usize,
}

/// The memory that a rank needs to run a schedule: peaks per category and of all together.
pub fn predict(schedule: &Schedule, input: &LedgerInput<'_>) -> Usage {
    let mut usage = Usage::default();
    for category in Category::ALL {
        let bytes = static_bytes(category, schedule, input);
        usage.device.live_bytes[category as usize] = bytes;
        usage.device.peak_bytes[category as usize] = bytes;
    }
    let fixed: usize = usage.device.live_bytes.iter().sum();
    for category in Category::ALL {
        usage.host.live_bytes[category as usize] = host_bytes(category, input);
    }
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
    usage.device.peak_bytes[Category::Workspace as usize] = workspace_peak;
    usage.device.total_peak_bytes = fixed + total_peak;
    usage
}

/// Storage that comes and goes in a step, at the moment where there is most of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moving {
    /// What a rank holds that computes.
    pub rank_bytes: usize,
    /// What all ranks hold together.
    pub world_bytes: usize,
}

/// The storage of gathered parameters, activations, workspace and gradients that `ranks` ranks surely hold at one time, of
/// which at most `computing` compute at a time, when they hold gathered parameters once for all and give storage back with
/// its contents.
///
/// When an all-gather ends, all ranks that did not compute just then have waited for it, with what they held. What a call
/// needs beside is counted for one rank: others may be behind it.
pub fn moving(schedule: &Schedule, input: &LedgerInput<'_>, ranks: usize, computing: usize) -> Moving {
    let (param, reduce) = (input.policy.param_dtype.size_bytes(), input.policy.reduce_dtype.size_bytes());
    let unit = |unit: usize| &input.layout.units[unit];
    let gathered_bytes =
        |index: usize| unit(index).segments.iter().map(Segment::unsharded_len).sum::<usize>() * param;
    let trained =
        |index: usize, len: fn(&Segment) -> usize| unit(index).trainable_segments().map(len).sum::<usize>();
    let is_gather = |id: &&OpId| matches!(schedule.op(**id).kind, OpKind::AllGather { .. });
    let waiting = ranks.saturating_sub(computing);
    // Bytes of gathered units, and by which operation.
    let mut gathered: BTreeMap<usize, (OpId, usize)> = BTreeMap::new();
    let mut folded = BTreeSet::new();
    let (mut open, mut reduced, mut activations) = (0, 0, input.data_bytes);
    let mut most = Moving::default();
    let mut calls = input.calls.iter();
    for (index, op) in schedule.ops.iter().enumerate() {
        let held = activations + open + reduced;
        let there = |last: OpId| -> usize {
            gathered.values().filter(|(by, _)| *by <= last).map(|(_, bytes)| bytes).sum()
        };
        let mut note = |rank: usize, world: usize| {
            most.rank_bytes = most.rank_bytes.max(rank);
            most.world_bytes = most.world_bytes.max(world);
        };
        if let Some(&last) = op.waits.iter().filter(is_gather).max() {
            // What was issued later ends later.
            note(there(last) + held, there(last) + waiting * held + (ranks - waiting) * reduced);
        }
        match op.kind {
            OpKind::AllGather { unit, .. } => {
                gathered.insert(unit, (OpId(index), gathered_bytes(unit)));
            }
            OpKind::Reshard { unit } => drop(gathered.remove(&unit)),
            OpKind::OpenGradient { unit, .. } => open += trained(unit, Segment::unsharded_len) * reduce,
            OpKind::CloseGradient { unit } => open -= trained(unit, Segment::unsharded_len) * reduce,
            OpKind::Fold { unit, .. } if input.policy.offload == Offload::None && folded.insert(unit) => {
                reduced += trained(unit, Segment::shard_len) * reduce;
            }
            OpKind::ReduceScalars => note(held, ranks * reduced),
            OpKind::Forward { .. } | OpKind::Finish { .. } | OpKind::Backward { .. } => {
                // The calls of the first micro-batch say what those of all others do.
                let Some(call) = calls.next() else { break };
                let rank = there(OpId(index)) + held + call.total_peak;
                note(rank, rank + (ranks - 1) * reduced);
                activations = call.after(activations);
            }
            _ => {}
        }
    }
    most
}

/// What lives in host memory.
fn host_bytes(category: Category, input: &LedgerInput<'_>) -> usize {
    let is_home =
        matches!(category, Category::ParameterShard | Category::ShardedGradient | Category::OptimizerState);
    match input.policy.offload {
        Offload::Cpu if is_home => sharded_bytes(category, input),
        _ => 0,
    }
}

/// What a rank owns of parameters, reduced gradients and optimizer state, wherever that lives.
fn sharded_bytes(category: Category, input: &LedgerInput<'_>) -> usize {
    let policy = input.policy;
    match category {
        Category::ParameterShard => {
            let master = policy.param_dtype.master();
            let copy = if master == policy.param_dtype { 0 } else { policy.param_dtype.size_bytes() };
            shard_elements(input.layout) * (master.size_bytes() + copy)
        }
        Category::ShardedGradient => {
            trainable_shard_elements(input.layout) * policy.reduce_dtype.size_bytes()
        }
        _ => input.optimizer_bytes.iter().sum(),
    }
}

fn static_bytes(category: Category, schedule: &Schedule, input: &LedgerInput<'_>) -> usize {
    let policy = input.policy;
    let param_bytes = policy.param_dtype.size_bytes();
    let reduce_bytes = policy.reduce_dtype.size_bytes();
    match category {
        Category::ParameterShard | Category::ShardedGradient | Category::OptimizerState => {
            match policy.offload {
                Offload::None => sharded_bytes(category, input),
                Offload::Cpu => 0,
            }
        }
        Category::Unsharded => {
            slot_elements(&schedule.slots) * param_bytes + sub_shard_elements(schedule, input) * param_bytes
        }
        Category::GradientSlot => slot_elements(&schedule.gradient_slots) * reduce_bytes,
        Category::Accumulator => accumulator_elements(schedule, input) * reduce_bytes,
        Category::CommStaging => {
            let statistics: usize = input.statistics.iter().sum();
            let factors = GradientFactors::LEN + statistics;
            // One step's scalars may be read while the next step adds to its own. One word is noted by updates.
            let words = 2 * SCALAR_WORDS + 1;
            words * DType::I64.size_bytes() + factors * DType::F64.size_bytes()
        }
        Category::HostStaging => {
            slot_elements(&schedule.staging_slots) * param_bytes
                + slot_elements(&schedule.reduced_slots) * reduce_bytes
        }
        Category::Activation | Category::Workspace => 0,
    }
}

fn slot_elements(slots: &[Slot]) -> usize {
    slots.iter().flat_map(|slot| &slot.lens).sum()
}

fn shard_elements(layout: &Layout) -> usize {
    layout.units.iter().flat_map(|unit| &unit.segments).map(|segment| segment.shard_len()).sum()
}

fn trainable_shard_elements(layout: &Layout) -> usize {
    layout.units.iter().flat_map(|unit| unit.trainable_segments()).map(|segment| segment.shard_len()).sum()
}

fn sub_shard_elements(schedule: &Schedule, input: &LedgerInput<'_>) -> usize {
    let Reshard::ToGroup(n) = input.policy.reshard_after_forward else { return 0 };
    let kept = input.layout.units.iter().zip(&schedule.keeps_sub_shard).filter(|(_, keeps)| **keeps);
    kept.flat_map(|(unit, _)| &unit.segments).map(|segment| segment.unsharded_len() / n).sum()
}

/// Buffers for partial sums beyond the slot or sharded gradient that receives a micro-batch's gradient.
pub fn extra_accumulators(policy: &Policy, rounds: usize) -> usize {
    match policy.accumulation_order {
        AccumulationOrder::Tree => tree::accumulators(rounds) - 1,
        AccumulationOrder::Running => usize::from(rounds > 1),
    }
}

/// Sets of sharded gradients that each unit owns on the device: one that holds the total until the next step, and
/// accumulators. Under offload the total is on the host, and what is not added up passes through slots.
pub fn sharded_sets(policy: &Policy, rounds: usize) -> (usize, usize) {
    let extra = match policy.accumulation {
        Accumulation::Reduce => extra_accumulators(policy, rounds),
        Accumulation::Unsharded => 0,
    };
    match policy.offload {
        Offload::None => (1, extra),
        Offload::Cpu if extra > 0 => (0, extra + 1),
        Offload::Cpu => (0, 0),
    }
}

fn accumulator_elements(schedule: &Schedule, input: &LedgerInput<'_>) -> usize {
    let (_, sharded) = sharded_sets(input.policy, schedule.rounds);
    let trainable = input.layout.units.iter().flat_map(|unit| unit.trainable_segments());
    let unsharded: usize = match input.policy.accumulation {
        Accumulation::Reduce => 0,
        Accumulation::Unsharded => trainable.map(|segment| segment.unsharded_len()).sum(),
    };
    sharded * trainable_shard_elements(input.layout)
        + extra_accumulators(input.policy, schedule.rounds) * unsharded
}

#[cfg(test)]
mod tests;
