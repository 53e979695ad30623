//! What the checker objects to in the copies between device and host.

use super::edit::{moved, with, without};
use super::{assert_rejected, find};
use crate::Mesh;
use crate::checker::Violation;
use crate::schedule::{Offload, OpId, OpKind, Policy, Resource, Schedule, Source};
use crate::testing::{Built, Setup, Sketch};

/// Three layers and a root, all of the same policy but for the number of micro-batches.
fn sample(rounds: usize, replicas: usize) -> (Built, Schedule) {
    let policy = Policy { offload: Offload::Cpu, ..Policy::default() };
    let mesh = Mesh::new(replicas, 2).unwrap();
    let setup = Setup {
        rounds,
        phases: 1,
        mesh,
        policy,
        ..Setup::plain(Sketch { halves: true, ..Sketch::plain(3) })
    };
    let built = setup.build();
    let schedule = built.step();
    assert_eq!(built.check(&schedule), Ok(()));
    (built, schedule)
}

fn indices(schedule: &Schedule, is: impl Fn(&OpKind) -> bool) -> Vec<usize> {
    (0..schedule.ops.len()).filter(|&index| is(&schedule.ops[index].kind)).collect()
}

#[test]
fn rejects_a_missing_upload() {
    let (built, schedule) = sample(2, 1);
    let uploads = indices(&schedule, |kind| matches!(kind, OpKind::Upload { .. }));
    let gathers = indices(&schedule, |kind| matches!(kind, OpKind::AllGather { .. }));
    assert_eq!(uploads.len(), gathers.len());
    for index in uploads {
        let OpKind::Upload { unit, .. } = schedule.ops[index].kind else { unreachable!("found by its kind") };
        let name = &built.layout.units[unit].name;
        assert_rejected(
            &built,
            &without(&schedule, index),
            |violation| matches!(violation, Violation::NotStaged { unit, .. } if unit == name),
        );
    }
}

#[test]
fn rejects_an_upload_that_nobody_gathers() {
    let (built, schedule) = sample(1, 1);
    let index = find(&schedule, |kind| matches!(kind, OpKind::AllGather { .. }));
    let OpKind::AllGather { unit, slot, purpose, .. } = schedule.ops[index].kind else {
        unreachable!("found by its kind")
    };
    let mut from_shard = schedule;
    from_shard.ops[index].kind = OpKind::AllGather { unit, slot, source: Source::Shard, purpose };
    assert_rejected(&built, &from_shard, |violation| {
        matches!(violation, Violation::LeftOver { what: "in a staging slot", .. })
    });
}

#[test]
fn rejects_an_upload_into_a_taken_slot() {
    let (built, schedule) = sample(1, 1);
    let index = find(&schedule, |kind| matches!(kind, OpKind::Upload { .. }));
    let OpKind::Upload { unit, staging } = schedule.ops[index].kind else {
        unreachable!("found by its kind")
    };
    let slots = schedule.staging_slots.len();
    // Another unit into the same slot, and the same unit into another one.
    for kind in [OpKind::Upload { unit: unit + 1, staging }, OpKind::Upload { unit, staging: slots }] {
        assert_rejected(
            &built,
            &with(&schedule, index + 1, kind),
            |violation| matches!(violation, Violation::SlotTaken { tenant, .. } if *tenant == built.layout.units[unit].name),
        );
    }
}

/// An upload into the slot of a unit whose all-gather may still read it.
#[test]
fn rejects_an_upload_into_a_slot_that_is_being_gathered() {
    let (built, schedule) = sample(1, 1);
    let uploads = indices(&schedule, |kind| matches!(kind, OpKind::Upload { .. }));
    let staging_of = |index: usize| match schedule.ops[index].kind {
        OpKind::Upload { staging, .. } => staging,
        _ => unreachable!("found by its kind"),
    };
    let mut found = 0;
    for pair in uploads.windows(2) {
        let [first, second] = [staging_of(pair[0]), staging_of(pair[1])];
        if first == second || schedule.staging_slots[first] != schedule.staging_slots[second] {
            continue;
        }
        let mut changed = schedule.clone();
        let OpKind::Upload { unit, .. } = changed.ops[pair[1]].kind else {
            unreachable!("found by its kind")
        };
        changed.ops[pair[1]].kind = OpKind::Upload { unit, staging: first };
        let gather = pair[1] + 1;
        let OpKind::AllGather { slot, purpose, .. } = changed.ops[gather].kind else {
            unreachable!("a gather follows its upload")
        };
        changed.ops[gather].kind = OpKind::AllGather { unit, slot, source: Source::Staged(first), purpose };
        assert_rejected(
            &built,
            &changed,
            |violation| matches!(violation, Violation::Race { resource: Resource::StagingSlot(slot), .. } if *slot == first),
        );
        found += 1;
    }
    assert!(found > 0, "two uploads follow each other with prefetch");
}

#[test]
fn rejects_slots_of_the_wrong_size() {
    let (built, schedule) = sample(1, 1);
    let mut staging = schedule.clone();
    staging.staging_slots[0].lens[0] += 1;
    let mut reduced = schedule.clone();
    reduced.reduced_slots[0].lens.clear();
    let mut missing = schedule;
    missing.reduced_slots.clear();
    for changed in [staging, reduced, missing] {
        assert_rejected(&built, &changed, |violation| matches!(violation, Violation::SlotMismatch { .. }));
    }
}

#[test]
fn rejects_a_gather_of_another_staging_slot() {
    let (built, schedule) = sample(1, 1);
    for index in indices(&schedule, |kind| matches!(kind, OpKind::AllGather { .. })) {
        let mut changed = schedule.clone();
        if let OpKind::AllGather { source: Source::Staged(staging), .. } = &mut changed.ops[index].kind {
            *staging += 1;
        }
        assert_rejected(&built, &changed, |violation| matches!(violation, Violation::NotStaged { .. }));
    }
}

#[test]
fn rejects_missing_and_repeated_downloads() {
    for (rounds, replicas) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let (built, schedule) = sample(rounds, replicas);
        let downloads = indices(&schedule, |kind| matches!(kind, OpKind::Download { .. }));
        assert_eq!(downloads.len(), built.layout.units.len());
        for index in downloads {
            let verdict = built.check(&without(&schedule, index));
            // A slot that nothing gives back is the next one's trouble first.
            let right = matches!(
                verdict,
                Err(Violation::SlotTaken { .. }
                    | Violation::LeftOver { what: "holding a reduced slot", .. }
                    | Violation::Count { what: "download", expected: 1, got: 0, .. })
            );
            assert!(right, "{verdict:?}");
            let again = with(&schedule, index + 1, schedule.ops[index].kind);
            assert_rejected(&built, &again, |violation| matches!(violation, Violation::NoTotal { .. }));
        }
    }
}

#[test]
fn rejects_a_download_before_the_total_is_there_or_after_it_was_applied() {
    for (rounds, replicas) in [(1, 1), (2, 2)] {
        let (built, schedule) = sample(rounds, replicas);
        for index in indices(&schedule, |kind| matches!(kind, OpKind::Download { .. })) {
            let OpKind::Download { unit, .. } = schedule.ops[index].kind else {
                unreachable!("found by its kind")
            };
            let fold = find(&schedule, |kind| *kind == OpKind::Fold { unit, last: true });
            let verdict = built.check(&moved(&schedule, index, fold));
            assert!(matches!(verdict, Err(Violation::NoTotal { .. })), "{verdict:?}");
            let update = find(&schedule, |kind| *kind == OpKind::Update { unit });
            let mut late = moved(&schedule, index, update);
            // Whoever waited for the download comes first now.
            late.ops.iter_mut().enumerate().for_each(|(at, op)| op.waits.retain(|wait| wait.0 < at));
            let verdict = built.check(&late);
            assert!(verdict.is_err(), "an update on the device");
        }
    }
}

#[test]
fn rejects_a_sum_over_replicas_and_a_norm_of_what_left_the_device() {
    let (built, schedule) = sample(1, 2);
    let index = find(&schedule, |kind| matches!(kind, OpKind::Download { .. }));
    let OpKind::Download { unit, .. } = schedule.ops[index].kind else { unreachable!("found by its kind") };
    for late in [OpKind::AllReduceReplicas { unit }, OpKind::SquareNorm { unit }] {
        let late = with(&schedule, index + 1, late);
        assert_rejected(&built, &late, |violation| matches!(violation, Violation::NoTotal { .. }));
    }
}

#[test]
fn rejects_a_download_from_another_slot() {
    let (built, schedule) = sample(1, 1);
    let index = find(&schedule, |kind| matches!(kind, OpKind::Download { .. }));
    for other in [None, Some(7)] {
        let mut changed = schedule.clone();
        if let OpKind::Download { slot, .. } = &mut changed.ops[index].kind {
            *slot = other;
        }
        assert_rejected(&built, &changed, |violation| matches!(violation, Violation::SlotMismatch { .. }));
    }
}

/// A reduce-scatter into the slot of a gradient that may still be on its way to the host.
#[test]
fn rejects_a_reduction_into_a_slot_that_is_being_downloaded() {
    let (built, schedule) = sample(1, 1);
    let mut races = 0;
    for index in indices(&schedule, |kind| matches!(kind, OpKind::ReduceScatter { slot: Some(_), .. })) {
        let downloads = |wait: &OpId| matches!(schedule.op(*wait).kind, OpKind::Download { .. });
        if !schedule.ops[index].waits.iter().any(downloads) {
            continue;
        }
        let mut changed = schedule.clone();
        changed.ops[index].waits.retain(|wait| !downloads(wait));
        assert_rejected(&built, &changed, |violation| {
            matches!(violation, Violation::Race { resource: Resource::ReducedSlot(_), .. })
        });
        races += 1;
    }
    assert!(races > 0, "three layers take two slots in turn");
}
