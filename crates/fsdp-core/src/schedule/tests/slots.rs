//! Tests that slots are as few as lifetimes allow, and the same in every round.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::DType;
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
            prop_assert!(needed.iter().all(|(sizes, count)| there[sizes] >= *count));
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

/// The dtype and length of each buffer of a slot.
type Sizes = Vec<(DType, usize)>;
/// The number of slots for each size.
type Tally = BTreeMap<Sizes, usize>;

const ROLES: [fn(usize) -> Role; 4] = [Role::Slot, Role::GradientSlot, Role::StagingSlot, Role::ReducedSlot];

/// The slots of a role that a schedule declares.
fn declared(schedule: &Schedule, role: fn(usize) -> Role) -> Tally {
    let mut tally = Tally::new();
    for number in 0.. {
        let of_slot = schedule.buffers.iter().filter(|decl| decl.role == role(number));
        let sizes: Sizes = of_slot.filter_map(|decl| Some((decl.dtype, decl.len?))).collect();
        if sizes.is_empty() {
            break;
        }
        *tally.entry(sizes).or_default() += 1;
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
    let size = |id: &BufferId| {
        let decl = schedule.buffer(*id);
        decl.len.map(|len| (decl.dtype, len))
    };
    let sizes_of = |ids: &[BufferId]| ids.iter().filter_map(size).collect::<Vec<_>>();
    // The slots of each kind in use: their unit, their first buffer, and their lengths.
    let mut live = [(); 4].map(|()| Vec::<(UnitId, BufferId, Sizes)>::new());
    let mut most = [(); 4].map(|()| Tally::new());
    let free = |live: &mut Vec<(UnitId, BufferId, Sizes)>, unit: UnitId| live.retain(|slot| slot.0 != unit);
    // The gradient slots of a unit and its experts are free again after the next reduction of another one, or at the end of the
    // micro-batch.
    let origin = |unit: UnitId| built.layout.unit(unit).origin;
    let mut reducing: Vec<UnitId> = Vec::new();
    let ends: Vec<usize> = schedule.sections.iter().map(|section| section.end).collect();
    for (index, op) in schedule.ops.iter().enumerate() {
        let unit = op.kind.unit();
        match op.kind {
            OpKind::Reshard(unit) => free(&mut live[0], unit),
            // An added gradient is given up.
            OpKind::Add { queue: crate::Queue::Compute, .. } => live[1].retain(|slot| slot.1 != op.reads[0]),
            OpKind::Download(unit) => free(&mut live[3], unit),
            // Directions use a gradient slot of their unit, but only the segments that have some.
            OpKind::Direct(unit) => {
                let layout = built.layout.unit(unit);
                let dtype = built.policy.reduce_dtype;
                let sizes = layout.trainable_segments().map(|segment| (dtype, segment.unsharded_len()));
                let sizes: Vec<_> = sizes.collect();
                take(&mut live[1], &mut most[1], (unit, op.writes[0], sizes));
            }
            OpKind::Update(unit) => free(&mut live[1], unit),
            OpKind::AllGather { .. }
            | OpKind::OpenGradient(_)
            | OpKind::Upload(_)
            | OpKind::ReduceScatter { .. } => {
                let sets = match op.kind {
                    OpKind::OpenGradient(unit) => schedule.chunks * built.layout.unit(unit).blocks,
                    _ => 1,
                };
                for ids in op.writes.chunks((op.writes.len() / sets).max(1)) {
                    if let (Some(side), Some(unit)) = (side_of(ids[0]), unit) {
                        take(&mut live[side], &mut most[side], (unit, ids[0], sizes_of(ids)));
                    }
                }
                if let OpKind::ReduceScatter { unit, .. } = op.kind {
                    let (same, others) =
                        reducing.into_iter().partition(|&other| origin(other) == origin(unit));
                    reducing = same;
                    let others: Vec<UnitId> = others;
                    others.into_iter().for_each(|unit| free(&mut live[1], unit));
                    reducing.push(unit);
                }
            }
            _ => {}
        }
        // A staging slot is free again once the unit was used.
        if let Some(block) = op.kind.block() {
            let used = built.units_of(block.0);
            live[2].retain(|slot| !used.contains(&slot.0));
        }
        if ends.contains(&(index + 1)) {
            reducing.drain(..).for_each(|unit| free(&mut live[1], unit));
        }
    }
    most
}

/// Adds a slot in use, and updates the most of its lengths in use.
fn take(live: &mut Vec<(UnitId, BufferId, Sizes)>, most: &mut Tally, slot: (UnitId, BufferId, Sizes)) {
    let sizes = slot.2.clone();
    live.push(slot);
    let now = live.iter().filter(|other| other.2 == sizes).count();
    let peak = most.entry(sizes).or_default();
    *peak = now.max(*peak);
}
