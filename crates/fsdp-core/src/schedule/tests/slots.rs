//! Slots are as few as lifetimes allow, and the same in every round.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::micro_batches;
use crate::schedule::{Accumulation, OpKind, Schedule, Slot};
use crate::testing::setups;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn slots_are_as_many_as_units_of_one_size_ever_overlap(setup in setups()) {
        let built = setup.build();
        for schedule in [built.step(), built.evaluation()] {
            let (slots, gradients) = overlaps(&schedule);
            prop_assert_eq!(by_lens(&schedule.slots), slots);
            prop_assert_eq!(by_lens(&schedule.gradient_slots), gradients);
        }
    }

    #[test]
    fn an_evaluation_needs_no_slot_that_training_lacks(setup in setups()) {
        let built = setup.build();
        let (step, evaluation) = (by_lens(&built.step().slots), by_lens(&built.evaluation().slots));
        for (lens, needed) in evaluation {
            prop_assert!(step.get(&lens).is_some_and(|&there| there >= needed));
        }
        prop_assert!(built.evaluation().gradient_slots.is_empty());
    }

    #[test]
    fn every_gradient_slot_is_the_same_in_every_round(setup in setups()) {
        let built = setup.build();
        let rounds = micro_batches(&built.step());
        let opens = |kinds: &[OpKind]| -> Vec<(usize, usize)> {
            let slot_of = |kind: &OpKind| match *kind {
                OpKind::OpenGradient { unit, slot, .. } => Some((unit, slot)),
                _ => None,
            };
            kinds.iter().filter_map(slot_of).collect()
        };
        if built.policy.accumulation == Accumulation::Reduce {
            prop_assert!(rounds.iter().all(|kinds| opens(kinds) == opens(&rounds[0])));
        }
    }
}

type Tally = BTreeMap<Vec<usize>, usize>;

fn by_lens(slots: &[Slot]) -> Tally {
    let mut tally = Tally::new();
    for slot in slots {
        *tally.entry(slot.lens.clone()).or_default() += 1;
    }
    tally
}

/// For every size of slot, how many are in use at the busiest moment: unsharded and gradient slots.
fn overlaps(schedule: &Schedule) -> (Tally, Tally) {
    let mut live = [BTreeMap::new(), BTreeMap::new()];
    let mut most = [Tally::new(), Tally::new()];
    // A gradient slot is free again when the reduced gradient was folded.
    let mut reducing = BTreeMap::new();
    for op in &schedule.ops {
        let (side, lens) = match op.kind {
            OpKind::AllGather { unit, slot, .. } => {
                live[0].insert(unit, &schedule.slots[slot].lens);
                (0, &schedule.slots[slot].lens)
            }
            OpKind::OpenGradient { unit, slot, .. } => {
                live[1].insert(unit, &schedule.gradient_slots[slot].lens);
                (1, &schedule.gradient_slots[slot].lens)
            }
            OpKind::Reshard { unit } => {
                live[0].remove(&unit);
                continue;
            }
            OpKind::FoldUnsharded { unit, last: false } => {
                live[1].remove(&unit);
                continue;
            }
            OpKind::ReduceScatter { unit } => {
                reducing.insert(unit, live[1][&unit]);
                continue;
            }
            OpKind::Fold { unit, .. } => {
                live[1].remove(&unit);
                reducing.remove(&unit);
                continue;
            }
            _ => continue,
        };
        let now = live[side].values().filter(|other| **other == lens).count();
        let peak = most[side].entry(lens.clone()).or_default();
        *peak = now.max(*peak);
    }
    assert!(reducing.is_empty(), "every reduced gradient is folded");
    let [slots, gradients] = most;
    (slots, gradients)
}
