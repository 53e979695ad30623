mod accesses;
mod edit;
mod offload;
mod waits;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::schedule::{Access, OpId};
use edit::{moved, with, without};

use crate::testing::{Built, Frozen, Setup, Sketch, grid, setups};
use crate::wrap::WrapPolicy;

/// Every wait and every join is needed: without it, the checker has an objection of the right kind.
fn assert_waits_minimal(built: &Built, schedule: &Schedule) -> Result<(), TestCaseError> {
    let mut changed = schedule.clone();
    for index in 0..schedule.ops.len() {
        for at in 0..schedule.ops[index].waits.len() {
            changed.ops[index].waits.remove(at);
            let verdict = built.check(&changed);
            // A join relies on a wait to put the collective first; and who waits for an operation that took a
            // collective's buffers back relies on that.
            let raced = matches!(
                verdict,
                Err(Violation::Race { .. } | Violation::BadJoin { .. } | Violation::NotHandedOver { .. })
            );
            prop_assert!(raced, "without wait {at} of operation {index}: {verdict:?}");
            changed.ops[index] = schedule.ops[index].clone();
        }
        for at in 0..schedule.ops[index].joins.len() {
            changed.ops[index].joins.remove(at);
            let verdict = built.check(&changed);
            let lost = matches!(verdict, Err(Violation::NotHandedOver { .. }));
            prop_assert!(lost, "without join {at} of operation {index}: {verdict:?}");
            changed.ops[index] = schedule.ops[index].clone();
        }
    }
    Ok(())
}

/// The accesses that waits are derived from, and proven against, are those of an independent table.
fn assert_accesses(built: &Built, schedule: &Schedule) -> Result<(), TestCaseError> {
    let mut tenancy = Tenancy::new(&built.spec, &built.layout);
    for (index, op) in schedule.ops.iter().enumerate() {
        let mut got = tenancy.apply(&op.kind).unwrap();
        if matches!(op.kind, OpKind::Update { .. }) {
            got = Tenancy::with_statistics(got, built.phases);
        }
        let got: BTreeSet<Access> = got.into_iter().collect();
        prop_assert_eq!(got, accesses::of_last(built, &schedule.ops[..=index]), "{:?}", op.kind);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn accesses_of_random_schedules_are_those_of_the_table(setup in setups()) {
        let built = setup.build();
        assert_accesses(&built, &built.step())?;
        assert_accesses(&built, &built.evaluation())?;
    }

    #[test]
    fn every_compiled_schedule_is_accepted(setup in setups()) {
        let built = setup.build();
        prop_assert_eq!(built.check(&built.step()), Ok(()));
        prop_assert_eq!(built.check(&built.evaluation()), Ok(()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_wait_and_join_of_a_random_schedule_is_needed(setup in setups()) {
        let built = setup.build();
        assert_waits_minimal(&built, &built.step())?;
        assert_waits_minimal(&built, &built.evaluation())?;
    }
}

#[test]
fn accesses_of_every_small_schedule_are_those_of_the_table() {
    for setup in grid(&Sketch { halves: true, cross: true, ..Sketch::plain(2) }) {
        let built = setup.build();
        assert_accesses(&built, &built.step()).unwrap();
        assert_accesses(&built, &built.evaluation()).unwrap();
    }
}

#[test]
fn every_wait_and_join_of_every_small_schedule_is_needed() {
    let nested = Sketch { halves: true, cross: true, ..Sketch::plain(2) };
    for setup in grid(&nested) {
        let built = setup.build();
        assert_eq!(built.check(&built.step()), Ok(()), "{setup:?}");
        assert_waits_minimal(&built, &built.step()).unwrap_or_else(|error| panic!("{error} in {setup:?}"));
    }
}

/// Three layers, two micro-batches, replicas: something of everything.
fn sample() -> (Built, Schedule) {
    let setup = Setup {
        rounds: 2,
        phases: 1,
        mesh: crate::Mesh::new(2, 2).unwrap(),
        ..Setup::plain(Sketch { halves: true, ..Sketch::plain(3) })
    };
    let built = setup.build();
    let schedule = built.step();
    assert_eq!(built.check(&schedule), Ok(()));
    (built, schedule)
}

fn find(schedule: &Schedule, is: impl Fn(&OpKind) -> bool) -> usize {
    schedule.ops.iter().position(|op| is(&op.kind)).expect("the schedule has such an operation")
}

#[track_caller]
fn assert_rejected(built: &Built, schedule: &Schedule, is: impl Fn(&Violation) -> bool) {
    let violation = built.check(schedule).expect_err("the schedule is unsafe");
    assert!(is(&violation), "rejected for another reason: {violation}");
}

#[test]
fn rejects_a_reshard_before_the_last_use() {
    let (built, schedule) = sample();
    for index in 0..schedule.ops.len() {
        let OpKind::Reshard { unit } = schedule.ops[index].kind else { continue };
        let last_use = (0..index).rev().find(|&at| match schedule.ops[at].kind {
            OpKind::Forward { block, .. } | OpKind::Finish { block, .. } | OpKind::Backward { block } => {
                built.units_of(block.0).contains(&unit)
            }
            _ => false,
        });
        let early = moved(&schedule, index, last_use.expect("a unit is used before it is given up"));
        let name = &built.layout.units[unit].name;
        assert_rejected(
            &built,
            &early,
            |violation| matches!(violation, Violation::ComputesOnSharded { unit, .. } if unit == name),
        );
    }
}

#[test]
fn rejects_a_missing_all_gather() {
    let (built, schedule) = sample();
    for index in 0..schedule.ops.len() {
        if let OpKind::AllGather { unit, .. } = schedule.ops[index].kind {
            let name = &built.layout.units[unit].name;
            assert_rejected(
                &built,
                &without(&schedule, index),
                |violation| matches!(violation, Violation::ComputesOnSharded { unit, .. } if unit == name),
            );
        }
    }
}

#[test]
fn rejects_a_second_reshard_and_a_sub_shard_of_nothing() {
    let (built, schedule) = sample();
    let at = find(&schedule, |kind| matches!(kind, OpKind::Reshard { .. }));
    let OpKind::Reshard { unit } = schedule.ops[at].kind else { unreachable!("found by its kind") };
    for kind in [OpKind::Reshard { unit }, OpKind::KeepSubShard { unit }] {
        assert_rejected(&built, &with(&schedule, at + 1, kind), |violation| {
            matches!(violation, Violation::NotUnsharded { .. })
        });
    }
}

#[test]
fn rejects_a_missing_reshard() {
    let (built, schedule) = sample();
    let last = schedule.ops.iter().rposition(|op| matches!(op.kind, OpKind::Reshard { .. })).unwrap();
    assert_rejected(&built, &without(&schedule, last), |violation| {
        matches!(violation, Violation::LeftOver { what: "unsharded", .. })
    });
}

#[test]
fn rejects_opening_a_taken_slot() {
    let (built, schedule) = sample();
    let tenants = [(true, "gather"), (false, "gradient")];
    for (gathers, what) in tenants {
        let opens: Vec<usize> = (0..schedule.ops.len())
            .filter(|&index| match schedule.ops[index].kind {
                OpKind::AllGather { .. } => gathers,
                OpKind::OpenGradient { .. } => !gathers,
                _ => false,
            })
            .collect();
        let mut changed = schedule.clone();
        let slot_of = |kind: &OpKind| match *kind {
            OpKind::AllGather { slot, .. } | OpKind::OpenGradient { slot, .. } => slot,
            _ => unreachable!("only operations that open slots are listed"),
        };
        // The second of two layers that are in slots at the same time is put into the first one's.
        let pair = opens.windows(2).find(|pair| {
            let [first, second] = [pair[0], pair[1]].map(|index| slot_of(&schedule.ops[index].kind));
            let lens = if gathers { &schedule.slots } else { &schedule.gradient_slots };
            first != second && lens[first] == lens[second]
        });
        let &[first, second] = pair.unwrap_or_else(|| panic!("two {what} slots overlap")) else {
            unreachable!()
        };
        let taken = slot_of(&schedule.ops[first].kind);
        match &mut changed.ops[second].kind {
            OpKind::AllGather { slot, .. } | OpKind::OpenGradient { slot, .. } => *slot = taken,
            _ => unreachable!("only operations that open slots are listed"),
        }
        if gathers {
            assert_rejected(
                &built,
                &changed,
                |violation| matches!(violation, Violation::SlotTaken { slot, .. } if *slot == taken),
            );
        } else {
            // The first one's gradient is still being reduced: nothing orders the new tenant behind that.
            assert_rejected(
                &built,
                &changed,
                |violation| matches!(violation, Violation::Race { resource: Resource::GradientSlot(slot), .. } if *slot == taken),
            );
        }
    }
}

#[test]
fn rejects_a_gradient_slot_that_is_taken() {
    let (built, schedule) = sample();
    let close = find(&schedule, |kind| matches!(kind, OpKind::CloseGradient { unit } if *unit == 2));
    let slot = schedule.ops.iter().find_map(|op| match op.kind {
        OpKind::OpenGradient { unit: 2, slot, .. } => Some(slot),
        _ => None,
    });
    let slot = slot.expect("the unit has a gradient");
    for unit in [1, 2] {
        let kind = OpKind::OpenGradient { unit, slot };
        assert_rejected(
            &built,
            &with(&schedule, close + 1, kind),
            |violation| matches!(violation, Violation::SlotTaken { tenant, .. } if *tenant == built.layout.units[2].name),
        );
    }
}

#[test]
fn rejects_a_gather_of_a_gathered_unit() {
    let (built, schedule) = sample();
    let at = find(&schedule, |kind| matches!(kind, OpKind::AllGather { unit: 1, .. }));
    let OpKind::AllGather { unit, slot, source, purpose } = schedule.ops[at].kind else { unreachable!() };
    let again = OpKind::AllGather { unit, slot: slot + 1, source, purpose };
    assert_rejected(
        &built,
        &with(&schedule, at + 1, again),
        |violation| matches!(violation, Violation::SlotTaken { unit, tenant, .. } if unit == tenant),
    );
}

#[test]
fn rejects_slots_that_do_not_fit() {
    let (built, mut schedule) = sample();
    let at = find(&schedule, |kind| matches!(kind, OpKind::AllGather { .. }));
    let OpKind::AllGather { slot, .. } = schedule.ops[at].kind else { unreachable!() };
    schedule.slots[slot].lens[0] += 1;
    assert_rejected(&built, &schedule, |violation| matches!(violation, Violation::SlotMismatch { .. }));
    let (_, mut schedule) = sample();
    schedule.gradient_slots.clear();
    assert_rejected(&built, &schedule, |violation| matches!(violation, Violation::SlotMismatch { .. }));
}

#[test]
fn rejects_gradients_out_of_turn() {
    let (built, schedule) = sample();
    type Drops = fn(&OpKind) -> bool;
    type Is = fn(&Violation) -> bool;
    let cases: [(Drops, Is); 4] = [
        (
            |kind| matches!(kind, OpKind::OpenGradient { .. }),
            |violation| matches!(violation, Violation::GradientNotOpen { .. }),
        ),
        (
            |kind| matches!(kind, OpKind::CloseGradient { .. }),
            |violation| matches!(violation, Violation::GradientNotClosed { .. }),
        ),
        (
            |kind| matches!(kind, OpKind::ReduceScatter { .. }),
            |violation| matches!(violation, Violation::NothingToFold { .. }),
        ),
        (
            |kind| matches!(kind, OpKind::Fold { last: false, .. }),
            |violation| matches!(violation, Violation::NotFolded { .. }),
        ),
    ];
    for (dropped, is) in cases {
        for index in (0..schedule.ops.len()).filter(|&index| dropped(&schedule.ops[index].kind)) {
            assert_rejected(&built, &without(&schedule, index), is);
        }
    }
    let last = schedule.ops.iter().rposition(|op| matches!(op.kind, OpKind::Fold { .. })).unwrap();
    assert_rejected(&built, &without(&schedule, last), |violation| {
        matches!(violation, Violation::NoTotal { .. })
    });
    let built = Setup::plain(Sketch::plain(1)).build();
    let schedule = built.step();
    let last = schedule.ops.iter().rposition(|op| matches!(op.kind, OpKind::Fold { .. })).unwrap();
    let not_folded = without(&schedule, last);
    assert_rejected(&built, &not_folded, |violation| matches!(violation, Violation::NoTotal { .. }));
    assert!(matches!(not_folded.ops[last].kind, OpKind::SquareNorm { .. }), "a total is measured at once");
    assert_rejected(&built, &without(&not_folded, last), |violation| {
        matches!(violation, Violation::LeftOver { what: "holding a reduced gradient", .. })
    });
}

#[test]
fn rejects_a_gradient_that_keeps_its_slot() {
    let setup = Setup::plain(Sketch::plain(1));
    let built = setup.build();
    let schedule = built.step();
    let at = schedule.ops.iter().rposition(|op| matches!(op.kind, OpKind::Fold { .. })).unwrap();
    let slot = schedule.gradient_slots.iter().position(|slot| {
        slot.lens == built.layout.units[1].segments.iter().map(Segment::unsharded_len).collect::<Vec<_>>()
    });
    let open = OpKind::OpenGradient { unit: 1, slot: slot.unwrap() };
    let mut open = with(&schedule, at + 1, open);
    let reduce =
        open.ops.iter().position(|op| matches!(op.kind, OpKind::ReduceScatter { unit: 1, .. })).unwrap();
    open.ops[at + 1].waits.push(OpId(reduce));
    assert_rejected(&built, &open, |violation| {
        matches!(violation, Violation::LeftOver { what: "holding a gradient slot", .. })
    });
}

#[test]
fn rejects_missing_and_repeated_operations_of_the_epilogue() {
    let (built, schedule) = sample();
    for index in 0..schedule.ops.len() {
        let kind = schedule.ops[index].kind;
        let what = match kind {
            OpKind::Update { .. } => "update",
            OpKind::SquareNorm { .. } => "square norm",
            OpKind::AllReduceReplicas { .. } => "all-reduce",
            _ => continue,
        };
        assert_rejected(
            &built,
            &without(&schedule, index),
            |violation| matches!(violation, Violation::Count { what: w, expected: 1, got: 0, .. } if *w == what),
        );
        let mut twice = with(&schedule, index, kind);
        twice.ops[index].waits = schedule.ops[index].waits.clone();
        twice.ops[index].joins = schedule.ops[index].joins.clone();
        twice.ops[index + 1].joins.extend(kind.is_collective().then_some(OpId(index)));
        assert_rejected(
            &built,
            &twice,
            |violation| matches!(violation, Violation::Count { what: w, expected: 1, got: 2, .. } if *w == what),
        );
    }
}

#[test]
fn rejects_a_micro_batch_without_a_gradient() {
    let (built, mut schedule) = sample();
    schedule.rounds += 1;
    assert_rejected(&built, &schedule, |violation| {
        matches!(violation, Violation::Count { what: "close gradient", expected: 3, got: 2, .. })
    });
}

#[test]
fn a_frozen_model_and_an_evaluation_have_nothing_to_count() {
    let built = Setup::plain(Sketch { frozen: Frozen::All, ..Sketch::plain(2) }).build();
    let schedule = built.step();
    assert_eq!(built.check(&schedule), Ok(()));
    assert!(!schedule.ops.iter().any(|op| counted(&op.kind).is_some()));
    let (built, _) = sample();
    let update = with(&built.evaluation(), built.evaluation().ops.len(), OpKind::Update { unit: 0 });
    let mut update = update;
    let scalars = find(&update, |kind| matches!(kind, OpKind::ReduceScalars));
    update.ops.last_mut().unwrap().waits.push(OpId(scalars));
    assert_rejected(&built, &update, |violation| {
        matches!(violation, Violation::Count { what: "update", expected: 0, got: 1, .. })
    });
}

#[test]
fn a_sub_shard_is_kept_before_it_is_gathered() {
    let policy = crate::schedule::Policy {
        reshard_after_forward: crate::schedule::Reshard::ToGroup(2),
        ..Default::default()
    };
    let setup = Setup { policy, mesh: crate::Mesh::new(1, 4).unwrap(), ..Setup::plain(Sketch::plain(2)) };
    let built = setup.build();
    let schedule = built.step();
    let kept: Vec<usize> = (0..schedule.ops.len())
        .filter(|&index| matches!(schedule.ops[index].kind, OpKind::KeepSubShard { .. }))
        .collect();
    assert_eq!(kept.len(), 2, "both layers keep a part");
    for index in kept {
        assert_rejected(&built, &without(&schedule, index), |violation| {
            matches!(violation, Violation::NoSubShard { .. })
        });
    }
}

#[test]
fn swapping_two_collectives_on_one_rank_diverges() {
    let (_, schedule) = sample();
    assert_eq!(check_ranks(&[]), Ok(()));
    assert_eq!(check_ranks(&[&schedule, &schedule, &schedule]), Ok(()));
    for queue in [Queue::Gather, Queue::Reduce] {
        let met: Vec<usize> = (0..schedule.ops.len())
            .filter(|&index| {
                let kind = &schedule.ops[index].kind;
                kind.queue() == queue && !matches!(kind, OpKind::Fold { .. } | OpKind::SquareNorm { .. })
            })
            .collect();
        for (position, pair) in met.windows(2).enumerate() {
            let mut swapped = schedule.clone();
            (swapped.ops[pair[0]], swapped.ops[pair[1]]) =
                (schedule.ops[pair[1]].clone(), schedule.ops[pair[0]].clone());
            let verdict = check_ranks(&[&schedule, &schedule, &swapped]);
            let right = matches!(&verdict, Err(Violation::Diverges { rank: Rank(2), queue: q, index, .. })
                if *q == queue && *index == position);
            assert!(right, "{verdict:?}");
            let missing = without(&schedule, pair[0]);
            assert!(matches!(
                check_ranks(&[&schedule, &missing]),
                Err(Violation::Diverges { rank: Rank(1), .. })
            ));
            assert!(check_ranks(&[&missing, &schedule]).is_err());
        }
    }
    let last = schedule.ops.iter().rposition(|op| op.kind.queue() == Queue::Reduce).unwrap();
    let Err(Violation::Diverges { got, .. }) = check_ranks(&[&schedule, &without(&schedule, last)]) else {
        panic!("a missing collective diverges")
    };
    assert_eq!(got, "nothing");
}

#[test]
fn two_units_first_read_by_one_block_are_both_handed_over() {
    // Norm and head are gathered one behind the other, and the last block waits for the second only.
    let wrap = WrapPolicy::Classes(vec!["Norm".into(), "Head".into()]);
    let built = Setup { wrap, ..Setup::plain(Sketch::plain(1)) }.build();
    let schedule = built.step();
    let finish = find(&schedule, |kind| matches!(kind, OpKind::Finish { .. }));
    let op = &schedule.ops[finish];
    assert_eq!((op.waits.len(), op.joins.len()), (1, 1));
    assert!(op.joins[0] < op.waits[0]);
}

#[test]
fn violations_say_which_operations_and_what() {
    let built = Setup::plain(Sketch::plain(1)).build();
    let mut schedule = built.step();
    let forward = find(&schedule, |kind| matches!(kind, OpKind::Forward { .. }));
    let gather = schedule.ops[forward].waits[0].0;
    schedule.ops[forward].waits.clear();
    let message = built.check(&schedule).unwrap_err().to_string();
    let expected = format!(
        "operation {forward} (forward) may overtake operation {gather} (all-gather): both touch Slot(0), and no \
         wait orders them"
    );
    assert_eq!(message, expected);
}
