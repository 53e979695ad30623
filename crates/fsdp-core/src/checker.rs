//! Proves a schedule safe before any byte moves.
//!
//! The checker walks a schedule in program order with its own [`Tenancy`], and knows for every operation what
//! has certainly happened before it: all earlier operations of its queue, and what its declared waits imply
//! (vector clocks). It accepts a schedule when nothing computes on a resharded unit, every pair of
//! conflicting accesses is ordered, every collective hands its buffers over before they are used, every
//! gradient is reduced, everything is given up at the end, and all ranks issue the same collectives in the
//! same order.

mod order;
mod ranks;

pub use ranks::check_ranks;

use std::collections::BTreeMap;

use crate::layout::{Layout, Segment, UnitLayout};
use crate::model::ModelSpec;
use crate::rank::{Queue, Rank};
use crate::schedule::{OpKind, Resource, Schedule, Slot, Tenancy};

/// Why a schedule is unsafe.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A unit is used as unsharded while it is not.
    #[error("unit `{unit}` is not unsharded here")]
    NotUnsharded {
        /// The unit.
        unit: String,
    },
    /// A block computes on a resharded unit.
    #[error("block `{block}` computes on unit `{unit}`, which is not unsharded here")]
    ComputesOnSharded {
        /// The block.
        block: String,
        /// The unit.
        unit: String,
    },
    /// A gradient is used that was not opened.
    #[error("the gradient of unit `{unit}` is not open here")]
    GradientNotOpen {
        /// The unit.
        unit: String,
    },
    /// A gradient is reduced, folded or added to before it is complete.
    #[error("the gradient of unit `{unit}` is not complete here")]
    GradientNotClosed {
        /// The unit.
        unit: String,
    },
    /// A gradient is folded that no reduce-scatter brought.
    #[error("there is no reduced gradient of unit `{unit}` to fold here")]
    NothingToFold {
        /// The unit.
        unit: String,
    },
    /// A gradient is reduced while the one before it is not folded yet.
    #[error("the gradient of unit `{unit}` is reduced again before it is folded")]
    NotFolded {
        /// The unit.
        unit: String,
    },
    /// A slot does not exist, or does not fit its tenant.
    #[error("slot {slot} does not fit unit `{unit}`")]
    SlotMismatch {
        /// The slot.
        slot: usize,
        /// The unit.
        unit: String,
    },
    /// A slot is given to a second tenant.
    #[error("slot {slot} is given to unit `{unit}` while unit `{tenant}` holds it")]
    SlotTaken {
        /// The slot.
        slot: usize,
        /// The new tenant.
        unit: String,
        /// The present one.
        tenant: String,
    },
    /// A unit is gathered from a staging slot into which it was not uploaded.
    #[error("unit `{unit}` is gathered from staging slot {staging}, which does not hold it")]
    NotStaged {
        /// The unit.
        unit: String,
        /// The slot.
        staging: usize,
    },
    /// A gradient is summed over replicas or downloaded before its last fold, or after it left the device.
    #[error("the total gradient of unit `{unit}` is not on the device here")]
    NoTotal {
        /// The unit.
        unit: String,
    },
    /// A sub-shard is gathered that was not kept.
    #[error("unit `{unit}` is gathered from a sub-shard that was not kept")]
    NoSubShard {
        /// The unit.
        unit: String,
    },
    /// Two conflicting operations are not ordered.
    #[error(
        "operation {later} may overtake operation {earlier}: both touch {resource:?}, and no wait orders them"
    )]
    Race {
        /// The operation that comes first in program order.
        earlier: String,
        /// The one that comes later.
        later: String,
        /// What both touch.
        resource: Resource,
    },
    /// A wait names a later operation, or one of the same queue.
    #[error("operation {op} waits for operation {target}, which does not come before it on another queue")]
    BadWait {
        /// The operation.
        op: String,
        /// What it waits for.
        target: usize,
    },
    /// A join names something other than an earlier collective that certainly comes before.
    #[error("operation {op} joins operation {target}, which is no collective that comes before it")]
    BadJoin {
        /// The operation.
        op: String,
        /// What it joins.
        target: usize,
    },
    /// The result of a collective is used, but nothing before hands its buffers over.
    #[error("operation {later} uses the result of operation {collective}, which nothing waits for or joins")]
    NotHandedOver {
        /// The collective.
        collective: String,
        /// The operation that uses its result.
        later: String,
    },
    /// Something is still in use when the step ends.
    #[error("unit `{unit}` is still {what} at the end of the step")]
    LeftOver {
        /// The unit.
        unit: String,
        /// In which state.
        what: &'static str,
    },
    /// A unit's gradient is not reduced or not applied as often as it must be.
    #[error("unit `{unit}` has {got} {what} operations in a step, expected {expected}")]
    Count {
        /// The unit.
        unit: String,
        /// The kind of operation.
        what: &'static str,
        /// How many there must be.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// Two ranks would issue different collectives.
    #[error("{rank} issues {got} as collective {index} of queue {queue}, but rank 0 issues {expected}")]
    Diverges {
        /// The rank that differs from rank 0.
        rank: Rank,
        /// The queue.
        queue: Queue,
        /// Position among the queue's collectives.
        index: usize,
        /// Rank 0's collective.
        expected: String,
        /// The rank's.
        got: String,
    },
}

/// Checks one rank's schedule.
///
/// # Errors
/// The first [`Violation`] in program order.
pub fn check(schedule: &Schedule, spec: &ModelSpec, layout: &Layout) -> Result<(), Violation> {
    let mut walk = order::Walk::new(schedule);
    let mut tenancy = Tenancy::new(spec, layout);
    let phases = schedule.ops.iter().filter(|op| matches!(op.kind, OpKind::ReduceStatistics { .. })).count();
    for (index, op) in schedule.ops.iter().enumerate() {
        let mut accesses = tenancy.apply(&op.kind)?;
        if matches!(op.kind, OpKind::Update { .. }) {
            accesses = Tenancy::with_statistics(accesses, phases);
        }
        check_slot(schedule, layout, &op.kind)?;
        walk.op(index, op, &accesses)?;
    }
    let name = |unit: usize| layout.units[unit].name.clone();
    if let Some(unit) = tenancy.resident().next() {
        return Err(Violation::LeftOver { unit: name(unit), what: "unsharded" });
    }
    if let Some(unit) = tenancy.staged().next() {
        return Err(Violation::LeftOver { unit: name(unit), what: "in a staging slot" });
    }
    if let Some(unit) = tenancy.reduced().next() {
        return Err(Violation::LeftOver { unit: name(unit), what: "holding a reduced slot" });
    }
    if let Some(unit) = tenancy.open_gradients().next() {
        return Err(Violation::LeftOver { unit: name(unit), what: "holding a gradient slot" });
    }
    if let Some(unit) = tenancy.unfolded().next() {
        return Err(Violation::LeftOver { unit: name(unit), what: "holding a reduced gradient" });
    }
    check_counts(schedule, layout)
}

/// The slot that an operation takes has a buffer for every segment.
fn check_slot(schedule: &Schedule, layout: &Layout, kind: &OpKind) -> Result<(), Violation> {
    let lens = |segments: &mut dyn Iterator<Item = &Segment>| segments.map(Segment::unsharded_len).collect();
    let shard_lens =
        |segments: &mut dyn Iterator<Item = &Segment>| segments.map(Segment::shard_len).collect();
    let (slots, slot, unit, lens): (&[Slot], usize, &UnitLayout, Vec<usize>) = match *kind {
        OpKind::Upload { unit, staging } => {
            let unit = &layout.units[unit];
            (&schedule.staging_slots, staging, unit, shard_lens(&mut unit.segments.iter()))
        }
        OpKind::ReduceScatter { unit, slot: Some(slot) } => {
            let unit = &layout.units[unit];
            (&schedule.reduced_slots, slot, unit, shard_lens(&mut unit.trainable_segments()))
        }
        OpKind::AllGather { unit, slot, .. } => {
            let unit = &layout.units[unit];
            (&schedule.slots, slot, unit, lens(&mut unit.segments.iter()))
        }
        OpKind::OpenGradient { unit, slot, .. } => {
            let unit = &layout.units[unit];
            (&schedule.gradient_slots, slot, unit, lens(&mut unit.trainable_segments()))
        }
        _ => return Ok(()),
    };
    match slots.get(slot) {
        Some(found) if found.lens == lens => Ok(()),
        _ => Err(Violation::SlotMismatch { slot, unit: unit.name.clone() }),
    }
}

/// The unit of an operation of which there is a fixed number per step, and what that is called.
fn counted(kind: &OpKind) -> Option<(&'static str, usize)> {
    match *kind {
        OpKind::CloseGradient { unit } => Some(("close gradient", unit)),
        OpKind::Fold { unit, last: true } => Some(("final fold", unit)),
        OpKind::AllReduceReplicas { unit } => Some(("all-reduce", unit)),
        OpKind::Download { unit, .. } => Some(("download", unit)),
        OpKind::SquareNorm { unit } => Some(("square norm", unit)),
        OpKind::Update { unit } => Some(("update", unit)),
        _ => None,
    }
}

/// Every trainable unit is written in every micro-batch, and reduced, measured and updated once.
fn check_counts(schedule: &Schedule, layout: &Layout) -> Result<(), Violation> {
    let any = |is: fn(&OpKind) -> bool| usize::from(schedule.ops.iter().any(|op| is(&op.kind)));
    let trains = any(|kind| matches!(kind, OpKind::Finish { backward: true, .. }));
    let replicated = any(|kind| matches!(kind, OpKind::AllReduceReplicas { .. }));
    let offloaded = any(|kind| matches!(kind, OpKind::Download { .. }));
    let mut counts: BTreeMap<(&str, usize), usize> = BTreeMap::new();
    for found in schedule.ops.iter().filter_map(|op| counted(&op.kind)) {
        *counts.entry(found).or_default() += 1;
    }
    for (unit, unit_layout) in layout.units.iter().enumerate() {
        let once = trains * usize::from(unit_layout.is_trainable());
        for (what, expected) in [
            ("close gradient", schedule.rounds * once),
            ("final fold", once),
            ("all-reduce", replicated * once),
            ("download", offloaded * once),
            ("square norm", once),
            ("update", once),
        ] {
            let got = counts.get(&(what, unit)).copied().unwrap_or(0);
            if got != expected {
                return Err(Violation::Count { unit: unit_layout.name.clone(), what, expected, got });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
