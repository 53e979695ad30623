//! Waits and joins that order nothing: on later operations, on missing ones, or on those that the queue orders anyway.

use super::*;

#[test]
fn rejects_invalid_wait_targets() {
    let (built, schedule) = sample();
    let (gather, reshard) = (
        find(&schedule, |kind| matches!(kind, OpKind::AllGather { .. })),
        find(&schedule, |kind| matches!(kind, OpKind::Reshard(_))),
    );
    let count = schedule.ops.len();
    // A later operation, itself, one that does not exist, an earlier one of the same queue.
    for (op, target) in [(gather, reshard), (gather, gather), (reshard, count), (reshard, reshard - 1)] {
        let mut changed = schedule.clone();
        changed.ops[op].waits.push(OpId(target));
        assert_rejected(
            &built,
            &changed,
            |violation| matches!(violation, Violation::BadWait { target: found, .. } if *found == target),
        );
    }
}

#[test]
fn rejects_invalid_join_targets() {
    let (built, schedule) = sample();
    let gather = find(&schedule, |kind| matches!(kind, OpKind::AllGather { .. }));
    let begin = find(&schedule, |kind| matches!(kind, OpKind::BeginMicroBatch(_)));
    let reshard = find(&schedule, |kind| matches!(kind, OpKind::Reshard(_)));
    let last = schedule.ops.iter().rposition(|op| op.kind.is_collective()).unwrap();
    let count = schedule.ops.len();
    // Not a collective, a later one, one that does not exist, an earlier one that nothing orders before.
    for (op, target) in [(reshard, begin), (reshard, last), (reshard, count), (begin, gather)] {
        let mut changed = schedule.clone();
        changed.ops[op].joins.push(OpId(target));
        assert_rejected(
            &built,
            &changed,
            |violation| matches!(violation, Violation::BadJoin { target: found, .. } if *found == target),
        );
    }
}
