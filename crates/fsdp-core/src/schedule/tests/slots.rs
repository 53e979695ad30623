//! Tests that slots are as few as lifetimes allow, and the same in every round.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::schedule::{Accumulation, BufferId, OpKind, Role, Round, Schedule, Section, SectionKind};
use crate::testing::{Built, setups};
use crate::wrap::UnitId;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn slot_count_equals_peak_overlap_per_size(setup in setups()) {
        let built = setup.build();
        let step = built.step();
        prop_assert_eq!(ROLES.map(|role| declared(&step, role)), overlaps(&built, &step));
    }

    #[test]
    fn evaluation_uses_buffers_of_step(setup in setups()) {
        let built = setup.build();
        let (step, evaluation) = (built.step(), built.evaluation());
        prop_assert_eq!(&step.buffers, &evaluation.buffers);
        let [slots, gradients, staging, reduced] = overlaps(&built, &evaluation);
        for (role, needed) in [(ROLES[0], slots), (ROLES[2], staging)] {
            let there = declared(&step, role);
            prop_assert!(needed.iter().all(|(lens, count)| there[lens] >= *count));
        }
        prop_assert!(gradients.is_empty() && reduced.is_empty());
    }

    #[test]
    fn gradient_slots_are_same_in_every_round(setup in setups()) {
        let built = setup.build();
        let step = built.step();
        let opens = |round: usize| -> Vec<&Vec<BufferId>> {
            let is_round = |section: &&Section| section.kind == SectionKind::MicroBatch(Round(round));
            let section = step.sections.iter().find(is_round).unwrap();
            let ops = step.ops[section.start..section.end].iter();
            ops.filter(|op| matches!(op.kind, OpKind::OpenGradient(_))).map(|op| &op.writes).collect()
        };
        if built.policy.accumulation == Accumulation::Reduce {
            prop_assert!((0..step.rounds).all(|round| opens(round) == opens(0)));
        }
    }
}

/// The number of slots for each list of lengths.
type Tally = BTreeMap<Vec<usize>, usize>;

const ROLES: [fn(usize) -> Role; 4] = [Role::Slot, Role::GradientSlot, Role::StagingSlot, Role::ReducedSlot];

/// The slots of a role that a schedule declares.
fn declared(schedule: &Schedule, role: fn(usize) -> Role) -> Tally {
    let mut tally = Tally::new();
    for number in 0.. {
        let of_slot = schedule.buffers.iter().filter(|decl| decl.role == role(number));
        let lens: Vec<usize> = of_slot.filter_map(|decl| decl.len).collect();
        if lens.is_empty() {
            break;
        }
        *tally.entry(lens).or_default() += 1;
    }
    tally
}

/// For every size of slot, the most in use at one time: unsharded, gradient, staging and reduced slots.
fn overlaps(built: &Built, schedule: &Schedule) -> [Tally; 4] {
    let side_of = |id: BufferId| {
        ROLES.iter().position(|role| {
            (0..).take(schedule.buffers.len()).any(|number| schedule.buffer(id).role == role(number))
        })
    };
    let lens_of = |ids: &[BufferId]| ids.iter().filter_map(|&id| schedule.buffer(id).len).collect::<Vec<_>>();
    // The slots of each kind in use by a unit, with their lengths.
    let mut live = [(); 4].map(|()| BTreeMap::<UnitId, Vec<usize>>::new());
    let mut most = [(); 4].map(|()| Tally::new());
    // The gradient slot of a unit is free again after the next reduction, or at the end of the micro-batch.
    let mut reducing: Option<UnitId> = None;
    let ends: Vec<usize> = schedule.sections.iter().map(|section| section.end).collect();
    for (index, op) in schedule.ops.iter().enumerate() {
        let unit = op.kind.unit();
        match op.kind {
            OpKind::Reshard(unit) => drop(live[0].remove(&unit)),
            // An added gradient is given up.
            OpKind::Add { unit, queue: crate::Queue::Compute } if side_of(op.reads[0]) == Some(1) => {
                live[1].remove(&unit);
            }
            OpKind::Download(unit) => drop(live[3].remove(&unit)),
            // Directions use a gradient slot of their unit, but only the segments that have some.
            OpKind::Direct(unit) => {
                let layout = built.layout.unit(unit);
                let lens: Vec<usize> =
                    layout.trainable_segments().map(|segment| segment.unsharded_len()).collect();
                live[1].insert(unit, lens.clone());
                let now = live[1].values().filter(|other| **other == lens).count();
                let peak = most[1].entry(lens).or_default();
                *peak = now.max(*peak);
            }
            OpKind::Update(unit) => drop(live[1].remove(&unit)),
            OpKind::AllGather { .. }
            | OpKind::OpenGradient(_)
            | OpKind::Upload(_)
            | OpKind::ReduceScatter { .. } => {
                if let (Some(side), Some(unit)) = (op.writes.first().and_then(|&id| side_of(id)), unit) {
                    let lens = lens_of(&op.writes);
                    live[side].insert(unit, lens.clone());
                    let now = live[side].values().filter(|other| **other == lens).count();
                    let peak = most[side].entry(lens).or_default();
                    *peak = now.max(*peak);
                }
                if matches!(op.kind, OpKind::ReduceScatter { .. }) {
                    reducing.take().map(|unit| live[1].remove(&unit));
                    reducing = unit;
                }
            }
            _ => {}
        }
        // A staging slot is free again once the unit was used.
        if let Some(block) = op.kind.block() {
            let used = built.units_of(block.0);
            live[2].retain(|unit, _| !used.contains(unit));
        }
        if ends.contains(&(index + 1)) {
            reducing.take().map(|unit| live[1].remove(&unit));
        }
    }
    most
}
