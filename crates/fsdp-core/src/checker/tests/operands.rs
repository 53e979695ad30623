//! Operands replaced by others.

use super::samples;
use crate::schedule::{BufferId, Schedule};
use crate::testing::Built;

/// The buffers that could replace one: of the same category, dtype, length and place.
fn alike(schedule: &Schedule, id: BufferId) -> Vec<BufferId> {
    let decl = schedule.buffer(id);
    let key = |id: BufferId| {
        let decl = schedule.buffer(id);
        (decl.category, decl.dtype, decl.len, decl.place)
    };
    assert!(decl.len.is_some() || decl.unit.is_some());
    let ids = (0..schedule.buffers.len()).map(|index| BufferId(index as u32));
    ids.filter(|&other| other != id && key(other) == key(id)).collect()
}

/// Replaces every operand by every similar buffer, asserts that the checker objects, and returns the number of
/// attempts.
fn assert_operands_are_needed(built: &Built, schedule: &Schedule) -> usize {
    let mut changed = schedule.clone();
    let mut tried = 0;
    for index in 0..schedule.ops.len() {
        let op = &schedule.ops[index];
        for (reads, count) in [(true, op.reads.len()), (false, op.writes.len())] {
            for at in 0..count {
                let original = if reads { op.reads[at] } else { op.writes[at] };
                for other in alike(schedule, original) {
                    let list = &mut changed.ops[index];
                    if reads {
                        list.reads[at] = other
                    } else {
                        list.writes[at] = other
                    }
                    let verdict = built.check(&changed);
                    assert!(
                        verdict.is_err(),
                        "{:?} instead of {:?} at {index}: {:?}, policy {:?}",
                        schedule.buffer(other),
                        schedule.buffer(original),
                        op.kind,
                        built.policy
                    );
                    tried += 1;
                }
            }
        }
        changed.ops[index] = op.clone();
    }
    tried
}

#[test]
fn operand_replaced_by_similar_buffer_is_rejected() {
    let mut tried = 0;
    for built in samples() {
        tried += assert_operands_are_needed(&built, &built.step());
        tried += assert_operands_are_needed(&built, &built.evaluation());
    }
    assert!(tried > 1000, "{tried} were tried");
}

#[test]
fn missing_extra_or_reordered_operands_are_rejected() {
    for built in samples() {
        let schedule = built.step();
        for index in 0..schedule.ops.len() {
            let op = &schedule.ops[index];
            for reads in [true, false] {
                let list = if reads { &op.reads } else { &op.writes };
                let mut edits = Vec::new();
                if let [first, rest @ ..] = list.as_slice() {
                    edits.push(rest.to_vec());
                    edits.push(list.iter().copied().chain([*first]).collect());
                    let reversed: Vec<BufferId> = list.iter().rev().copied().collect();
                    edits.extend((reversed != *list && !is_a_set(index)).then_some(reversed));
                }
                for edit in edits {
                    let mut changed = schedule.clone();
                    let op = &mut changed.ops[index];
                    *(if reads { &mut op.reads } else { &mut op.writes }) = edit;
                    assert!(built.check(&changed).is_err(), "{index}: {:?}", schedule.ops[index].kind);
                }
            }
        }
    }
}

/// Whether the order of an operation's operands is irrelevant: a step begins with all of them.
fn is_a_set(index: usize) -> bool {
    index == 0
}
