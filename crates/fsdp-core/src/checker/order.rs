//! Happens-before checks: conflicting accesses are ordered, and collectives hand their buffers over before use.

use super::{Names, Violation};
use crate::schedule::{HappensBefore, Op, OpId};

/// Checks the next operation, and adds it to the order.
pub(super) fn check(
    names: Names<'_>,
    before: &mut HappensBefore,
    index: usize,
    op: &Op,
) -> Result<(), Violation> {
    let ops = &names.schedule.ops;
    let mut clock = before.clock(op.kind.queue());
    for &OpId(target) in &op.waits {
        if target >= index || ops[target].kind.queue() == op.kind.queue() {
            return Err(Violation::BadWait { op: names.op(index), target });
        }
        before.wait(&mut clock, target);
    }
    for &OpId(target) in &op.joins {
        let is_collective = ops.get(target).is_some_and(|op| op.kind.is_collective());
        if !is_collective || !before.is_complete(target, &clock) {
            return Err(Violation::BadJoin { op: names.op(index), target });
        }
    }
    for access in op.accesses() {
        for earlier in before.conflicts(access) {
            if !before.is_complete(earlier, &clock) {
                let (earlier, later) = (names.op(earlier), names.op(index));
                return Err(Violation::Race { earlier, later, buffer: names.buffer(access.buffer) });
            }
            let is_successor = op.waits.iter().chain(&op.joins).any(|target| target.0 == earlier);
            if !is_successor && before.holds_buffers(earlier, &clock) {
                let (collective, later) = (names.op(earlier), names.op(index));
                return Err(Violation::NotHandedOver { collective, later });
            }
        }
    }
    before.push(op, clock);
    Ok(())
}
