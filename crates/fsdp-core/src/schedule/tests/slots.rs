//! Slots are as few as lifetimes allow, and the same in every round.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::micro_batches;
use crate::schedule::{Accumulation, OpKind, Schedule, Slot};
use crate::testing::{Built, setups};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn slots_are_as_many_as_units_of_one_size_ever_overlap(setup in setups()) {
        let built = setup.build();
        for schedule in [built.step(), built.evaluation()] {
            let [slots, gradients, staging, reduced] = overlaps(&built, &schedule);
            prop_assert_eq!(by_lens(&schedule.slots), slots);
            prop_assert_eq!(by_lens(&schedule.gradient_slots), gradients);
            prop_assert_eq!(by_lens(&schedule.staging_slots), staging);
            prop_assert_eq!(by_lens(&schedule.reduced_slots), reduced);
        }
    }

    #[test]
    fn an_evaluation_needs_no_slot_that_training_lacks(setup in setups()) {
        let built = setup.build();
        let (step, evaluation) = (built.step(), built.evaluation());
        for (step, evaluation) in
            [(&step.slots, &evaluation.slots), (&step.staging_slots, &evaluation.staging_slots)]
        {
            let step = by_lens(step);
            for (lens, needed) in by_lens(evaluation) {
                prop_assert!(step.get(&lens).is_some_and(|&there| there >= needed));
            }
        }
        prop_assert!(evaluation.gradient_slots.is_empty() && evaluation.reduced_slots.is_empty());
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

/// For every size of slot, how many are in use at the busiest moment: unsharded, gradient, staging and reduced slots.
fn overlaps(built: &Built, schedule: &Schedule) -> [Tally; 4] {
    let mut live = [(); 4].map(|()| BTreeMap::<usize, &Vec<usize>>::new());
    let mut most = [(); 4].map(|()| Tally::new());
    // A gradient slot is free again when the reduced gradient was folded.
    let mut reducing = BTreeMap::new();
    for op in &schedule.ops {
        let (side, unit, slot) = match op.kind {
            OpKind::AllGather { unit, slot, .. } => (0, unit, &schedule.slots[slot]),
            OpKind::OpenGradient { unit, slot, .. } => (1, unit, &schedule.gradient_slots[slot]),
            OpKind::Upload { unit, staging } => (2, unit, &schedule.staging_slots[staging]),
            OpKind::ReduceScatter { unit, slot } => {
                reducing.insert(unit, live[1][&unit]);
                let Some(slot) = slot else { continue };
                (3, unit, &schedule.reduced_slots[slot])
            }
            OpKind::Reshard { unit } => {
                live[0].remove(&unit);
                continue;
            }
            OpKind::FoldUnsharded { unit, last: false } => {
                live[1].remove(&unit);
                continue;
            }
            OpKind::Fold { unit, .. } => {
                live[1].remove(&unit);
                reducing.remove(&unit);
                continue;
            }
            // A staging slot is free again when the unit was used.
            OpKind::Forward { block, .. } | OpKind::Finish { block, .. } | OpKind::Backward { block } => {
                let used = built.units_of(block.0);
                live[2].retain(|unit, _| !used.contains(unit));
                continue;
            }
            OpKind::Download { unit, .. } => {
                live[3].remove(&unit);
                continue;
            }
            _ => continue,
        };
        live[side].insert(unit, &slot.lens);
        let now = live[side].values().filter(|other| ***other == slot.lens).count();
        let peak = most[side].entry(slot.lens.clone()).or_default();
        *peak = now.max(*peak);
    }
    assert!(reducing.is_empty(), "every reduced gradient is folded");
    most
}
