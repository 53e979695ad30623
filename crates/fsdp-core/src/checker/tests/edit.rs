//! Edits that plant errors in schedules.

use crate::schedule::{Op, OpId, Schedule};

/// The schedule with its operations in the given order and waits and joins renumbered; `None` drops an operation.
fn reordered(schedule: &Schedule, order: &[usize]) -> Schedule {
    let mut place = vec![None; schedule.ops.len()];
    for (to, &from) in order.iter().enumerate() {
        place[from] = Some(to);
    }
    let renumber = |ids: &[OpId]| ids.iter().filter_map(|id| place[id.0].map(OpId)).collect();
    let ops = order.iter().map(|&from| {
        let op = &schedule.ops[from];
        Op { waits: renumber(&op.waits), joins: renumber(&op.joins), ..op.clone() }
    });
    Schedule { ops: ops.collect(), ..schedule.clone() }
}

/// The schedule without one operation. Its waits and joins pass to the operations that waited for it and to the next
/// one on its queue, so that nothing but the operation itself is missing.
pub(super) fn without(schedule: &Schedule, dropped: usize) -> Schedule {
    let mut changed = schedule.clone();
    let Op { kind, waits, joins, .. } = schedule.ops[dropped].clone();
    let queue_of = |index: usize| schedule.ops[index].kind.queue();
    let before = (0..dropped).rev().find(|&index| queue_of(index) == kind.queue());
    let after = (dropped + 1..schedule.ops.len()).find(|&index| queue_of(index) == kind.queue());
    for index in dropped + 1..schedule.ops.len() {
        let waited = schedule.ops[index].waits.contains(&OpId(dropped));
        if waited || Some(index) == after {
            let heirs = waits.iter().copied().chain(before.map(OpId));
            let op = &mut changed.ops[index];
            op.waits.extend(heirs.filter(|wait| queue_of(wait.0) != queue_of(index)));
            if waited {
                op.joins.extend(waits.iter().filter(|wait| queue_of(wait.0) == queue_of(index)));
            }
            op.joins.extend(&joins);
            op.joins.retain(|join| schedule.ops[join.0].kind.is_collective());
        }
    }
    let order: Vec<usize> = (0..schedule.ops.len()).filter(|&index| index != dropped).collect();
    reordered(&changed, &order)
}

pub(super) fn moved(schedule: &Schedule, from: usize, to: usize) -> Schedule {
    let mut order: Vec<usize> = (0..schedule.ops.len()).filter(|&index| index != from).collect();
    order.insert(to, from);
    reordered(schedule, &order)
}

/// The schedule with an operation repeated directly after itself; operations that waited for it wait for the second
/// one.
pub(super) fn doubled(schedule: &Schedule, at: usize) -> Schedule {
    let mut changed = schedule.clone();
    let op = &schedule.ops[at];
    let joins = if op.kind.is_collective() { vec![OpId(at)] } else { Vec::new() };
    changed.ops.push(Op { waits: Vec::new(), joins, ..op.clone() });
    let mut changed = moved(&changed, schedule.ops.len(), at + 1);
    for later in &mut changed.ops[at + 2..] {
        let targets = later.waits.iter_mut().chain(&mut later.joins);
        targets.filter(|target| target.0 == at).for_each(|target| target.0 = at + 1);
    }
    changed
}
