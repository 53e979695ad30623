//! Proves a schedule safe before any byte moves.
//!
//! The checker walks a schedule in program order with its own [`Tenancy`], and knows for every operation what
//! has certainly happened before it: all earlier operations of its queue, and what its declared waits imply
//! (vector clocks). It accepts a schedule when nothing computes on a resharded unit, every pair of
//! conflicting accesses is ordered, every gradient is reduced, everything is given up at the end, and all
//! ranks issue the same collectives in the same order.

use std::collections::BTreeMap;

use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::rank::{Queue, Rank};
use crate::schedule::{Access, Op, OpId, OpKind, Resource, Schedule, Tenancy};

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
    let mut walk = Walk::new(schedule);
    let mut tenancy = Tenancy::new(spec, layout);
    let phases = schedule.ops.iter().filter(|op| matches!(op.kind, OpKind::ReduceStatistics { .. })).count();
    for (index, op) in schedule.ops.iter().enumerate() {
        let mut accesses = tenancy.apply(&op.kind)?;
        if matches!(op.kind, OpKind::Update { .. }) {
            accesses = Tenancy::with_statistics(accesses, phases);
        }
        walk.op(index, op, &accesses)?;
    }
    let name = |unit: usize| layout.units[unit].name.clone();
    if let Some(unit) = tenancy.resident().next() {
        return Err(Violation::LeftOver { unit: name(unit), what: "unsharded" });
    }
    if let Some(unit) = tenancy.open_gradients().next() {
        return Err(Violation::LeftOver { unit: name(unit), what: "holding a gradient slot" });
    }
    check_counts(schedule, layout)
}

/// Checks that all ranks (given in rank order) issue the same collectives in the same order per queue.
///
/// # Errors
/// [`Violation::Diverges`] that names the first rank, queue and position that differ from rank 0.
pub fn check_ranks(schedules: &[&Schedule]) -> Result<(), Violation> {
    let Some(first) = schedules.first() else { return Ok(()) };
    for queue in Queue::ALL {
        let expected = collectives(first, queue);
        for (rank, schedule) in schedules.iter().enumerate().skip(1) {
            let got = collectives(schedule, queue);
            let longest = expected.len().max(got.len());
            let differs = (0..longest).find(|&index| expected.get(index) != got.get(index));
            if let Some(index) = differs {
                let text = |list: &[OpKind]| list.get(index).map_or("nothing".into(), |op| format!("{op:?}"));
                return Err(Violation::Diverges {
                    rank: Rank(rank),
                    queue,
                    index,
                    expected: text(&expected),
                    got: text(&got),
                });
            }
        }
    }
    Ok(())
}

fn collectives(schedule: &Schedule, queue: Queue) -> Vec<OpKind> {
    let meets = |kind: &OpKind| {
        kind.is_collective() || matches!(kind, OpKind::ReduceScalars | OpKind::ReduceStatistics { .. })
    };
    schedule.ops.iter().map(|op| op.kind).filter(|kind| kind.queue() == queue && meets(kind)).collect()
}

/// Every trainable unit is reduced, measured and updated once its gradient is written.
fn check_counts(schedule: &Schedule, layout: &Layout) -> Result<(), Violation> {
    let trains = schedule.ops.iter().any(|op| matches!(op.kind, OpKind::Finish { backward: true, .. }));
    for (unit, unit_layout) in layout.units.iter().enumerate() {
        let once = usize::from(trains && unit_layout.is_trainable());
        let count = |is: fn(&OpKind) -> Option<usize>| {
            schedule.ops.iter().filter(|op| is(&op.kind) == Some(unit)).count()
        };
        let reduced = count(|kind| match kind {
            OpKind::Fold { unit, last: true } => Some(*unit),
            _ => None,
        });
        let measured = count(|kind| match kind {
            OpKind::SquareNorm { unit } => Some(*unit),
            _ => None,
        });
        let updated = count(|kind| match kind {
            OpKind::Update { unit } => Some(*unit),
            _ => None,
        });
        for (what, got) in [("final fold", reduced), ("square norm", measured), ("update", updated)] {
            if got != once {
                let unit = unit_layout.name.clone();
                return Err(Violation::Count { unit, what, expected: once, got });
            }
        }
    }
    Ok(())
}

type Clock = [usize; Queue::ALL.len()];

/// Happens-before by vector clocks, and the last accesses of every resource.
struct Walk<'a> {
    schedule: &'a Schedule,
    clocks: Vec<Clock>,
    queues: [Clock; Queue::ALL.len()],
    last: BTreeMap<Resource, (Option<usize>, Vec<usize>)>,
}

impl<'a> Walk<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        Self { schedule, clocks: Vec::new(), queues: Default::default(), last: BTreeMap::new() }
    }

    fn op(&mut self, index: usize, op: &Op, accesses: &[Access]) -> Result<(), Violation> {
        let queue = op.kind.queue() as usize;
        let mut clock = self.queues[queue];
        for &OpId(target) in &op.waits {
            if target >= index || self.schedule.ops[target].kind.queue() == op.kind.queue() {
                return Err(Violation::BadWait { op: self.describe(index), target });
            }
            for (mine, theirs) in clock.iter_mut().zip(&self.clocks[target]) {
                *mine = (*mine).max(*theirs);
            }
        }
        for access in accesses {
            let (writer, readers) = self.last.entry(access.resource).or_default();
            let conflicts = writer.iter().chain(access.write.then_some(&*readers).into_iter().flatten());
            let ordered = |&&earlier: &&usize| {
                earlier != index && clock[self.schedule.ops[earlier].kind.queue() as usize] <= earlier
            };
            if let Some(&earlier) = conflicts.clone().find(ordered) {
                return Err(Violation::Race {
                    earlier: self.describe(earlier),
                    later: self.describe(index),
                    resource: access.resource,
                });
            }
            if access.write {
                (*writer, *readers) = (Some(index), Vec::new());
            } else {
                readers.push(index);
            }
        }
        clock[queue] = index + 1;
        self.queues[queue] = clock;
        self.clocks.push(clock);
        Ok(())
    }

    fn describe(&self, index: usize) -> String {
        format!("{index} ({})", self.schedule.ops[index].kind.name())
    }
}
