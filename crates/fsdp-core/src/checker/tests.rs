mod edit;
mod operands;
mod waits;

use proptest::prelude::*;

use super::*;
use crate::mesh::{Axis, Group};
use crate::program::BlockCall;
use crate::rank::{Queue, Rank};
use crate::schedule::{
    Accumulation, AccumulationOrder, BufferDecl, Offload, Op, Place, Policy, Reshard, Role,
};
use crate::schedule::{OpId, OpKind};
use edit::{doubled, moved, without};

use crate::testing::{Built, Frozen, Setup, Sketch, grid, setups};
use crate::wrap::WrapPolicy;

/// Asserts that every wait and every join is needed: without it, the checker reports a violation of the right kind.
fn assert_waits_minimal(built: &Built, schedule: &Schedule) -> Result<(), TestCaseError> {
    let mut changed = schedule.clone();
    for index in 0..schedule.ops.len() {
        for at in 0..schedule.ops[index].waits.len() {
            changed.ops[index].waits.remove(at);
            let verdict = built.check(&changed);
            // A join relies on a wait to order the collective first, and an operation that waits for one that took a
            // collective's buffers back relies on the latter.
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

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
    fn random_schedules_have_no_redundant_waits_or_joins(setup in setups()) {
        let built = setup.build();
        assert_waits_minimal(&built, &built.step())?;
        assert_waits_minimal(&built, &built.evaluation())?;
    }
}

#[test]
fn small_schedules_have_no_redundant_waits_or_joins() {
    let nested = Sketch { halves: true, cross: true, ..Sketch::plain(2) };
    for setup in grid(&nested) {
        let built = setup.build();
        assert_eq!(built.check(&built.step()), Ok(()), "{setup:?}");
        assert_waits_minimal(&built, &built.step()).unwrap_or_else(|error| panic!("{error} in {setup:?}"));
    }
}

/// A schedule with three layers, two micro-batches and replicas, to cover every feature.
fn sample() -> (Built, Schedule) {
    let setup = Setup {
        rounds: 2,
        phases: 1,
        whole: true,
        mesh: crate::Mesh::new([(Axis::Replicate, 2), (Axis::Shard, 2)]).unwrap(),
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
fn rejects_reshard_before_last_use() {
    let (built, schedule) = sample();
    for index in 0..schedule.ops.len() {
        let OpKind::Reshard(unit) = schedule.ops[index].kind else { continue };
        let uses = |op: &Op| op.kind.block().is_some_and(|block| built.units_of(block.0).contains(&unit));
        let last_use = (0..index).rev().find(|&at| uses(&schedule.ops[at]));
        let early = moved(&schedule, index, last_use.expect("a unit is used before it is given up"));
        assert_rejected(
            &built,
            &early,
            |violation| matches!(violation, Violation::Contents { got, .. } if got == "Nothing"),
        );
    }
}

/// The runs in whose schedules faults are planted, to cover every feature.
fn samples() -> Vec<Built> {
    let sketch = Sketch { halves: true, tied: true, shared: true, ..Sketch::plain(2) };
    let plain = Setup { phases: 2, whole: true, rounds: 3, ..Setup::plain(sketch) };
    let policy = Policy::default();
    let with = |policy, mesh: (usize, usize)| Setup {
        policy,
        mesh: crate::Mesh::new([(Axis::Replicate, mesh.0), (Axis::Shard, mesh.1)]).unwrap(),
        ..plain.clone()
    };
    let (cpu, unsharded) = (Offload::Cpu, Accumulation::Unsharded);
    let group = Reshard::ToGroup(2);
    let setups = [
        with(policy, (1, 2)),
        with(Policy { param_dtype: crate::DType::Bf16, reshard_after_forward: group, ..policy }, (1, 4)),
        with(Policy { accumulation: unsharded, ..policy }, (2, 2)),
        with(Policy { offload: cpu, accumulation_order: AccumulationOrder::Running, ..policy }, (2, 1)),
        with(Policy { offload: cpu, accumulation: unsharded, forward_prefetch: 2, ..policy }, (1, 2)),
        Setup {
            sketch: Sketch { frozen: Frozen::Every(3), ..plain.sketch.clone() },
            rounds: 1,
            ..plain.clone()
        },
    ];
    setups.iter().map(Setup::build).collect()
}

/// Whether an operation has no contents in buffers: it acts only on the program and its data.
fn is_of_the_program(kind: &OpKind) -> bool {
    matches!(kind, OpKind::Call(BlockCall::Forward(..)) | OpKind::BeginMicroBatch(_))
}

#[test]
fn missing_or_duplicate_operation_is_rejected() {
    for built in samples() {
        for schedule in [built.step(), built.evaluation()] {
            for index in 0..schedule.ops.len() {
                let kind = schedule.ops[index].kind;
                if is_of_the_program(&kind) {
                    continue;
                }
                for changed in [without(&schedule, index), doubled(&schedule, index)] {
                    let verdict = built.check(&changed);
                    assert!(verdict.is_err(), "{index}: {kind:?} in {:?}", built.policy);
                    assert!(!matches!(verdict, Err(Violation::Misfit { .. })), "{verdict:?}");
                }
            }
        }
    }
}

#[test]
fn missing_or_duplicate_addition_is_rejected() {
    let built = Setup { rounds: 4, ..Setup::plain(Sketch::plain(1)) }.build();
    let schedule = built.step();
    let adds: Vec<usize> = (0..schedule.ops.len())
        .filter(|&index| matches!(schedule.ops[index].kind, OpKind::Add { .. }))
        .collect();
    assert_eq!(adds.len(), 2 * 3, "four micro-batches of two units");
    for index in adds {
        // A sum that was not added is in the way of the next one, or missing at the end.
        assert_rejected(&built, &without(&schedule, index), |violation| {
            matches!(violation, Violation::Contents { .. })
        });
        let op = &schedule.ops[index];
        assert_rejected(
            &built,
            &doubled(&schedule, index),
            |violation| matches!(violation, Violation::Contents { got, .. } if got == "Nothing"),
        );
        // Added to itself, it would be in the sum twice.
        let mut twice = schedule.clone();
        twice.ops[index].reads.clone_from(&op.writes);
        assert!(built.check(&twice).is_err());
    }
}

#[test]
fn collective_over_another_group_is_rejected() {
    let groups = [
        Group::WORLD,
        Group::SHARDS,
        Group::REPLICATE,
        Group::SHARDS.neighbors(2),
        Group::SHARDS.neighbors(1),
    ];
    for built in samples() {
        let schedule = built.step();
        for (index, other) in (0..schedule.ops.len()).flat_map(|index| groups.map(|group| (index, group))) {
            let mut changed = schedule.clone();
            match &mut changed.ops[index].kind {
                OpKind::AllGather { group, .. }
                | OpKind::KeepSubShard { group, .. }
                | OpKind::ReduceScatter { group, .. }
                | OpKind::AllReduce { group, .. }
                    if *group != other =>
                {
                    *group = other;
                }
                _ => continue,
            }
            assert!(built.check(&changed).is_err(), "{:?}", changed.ops[index].kind);
        }
    }
}

#[test]
fn missing_micro_batch_is_rejected() {
    let (built, mut schedule) = sample();
    schedule.rounds += 1;
    assert_rejected(&built, &schedule, |violation| matches!(violation, Violation::Contents { .. }));
}

#[test]
fn operand_len_dtype_or_place_mismatch_is_rejected() {
    for built in samples() {
        let schedule = built.step();
        let shared =
            |decl: &BufferDecl| decl.len.is_none() || decl.category == crate::memory::Category::CommStaging;
        for index in (0..schedule.buffers.len()).filter(|&index| !shared(&schedule.buffers[index])) {
            type Edit = fn(&mut BufferDecl);
            let edits: [Edit; 3] = [
                |decl| decl.len = decl.len.map(|len| len + 1),
                |decl| {
                    decl.dtype =
                        if decl.dtype == crate::DType::F32 { crate::DType::F64 } else { crate::DType::F32 }
                },
                |decl| decl.place = if decl.place == Place::Host { Place::Device } else { Place::Host },
            ];
            for (number, edit) in edits.into_iter().enumerate() {
                let mut changed = schedule.clone();
                edit(&mut changed.buffers[index]);
                // Updates convert: gradients and parameters may have different dtypes.
                let verdict = built.check(&changed);
                let converted = number == 1
                    && matches!(schedule.buffers[index].role, Role::Master | Role::ShardedGradient)
                    && verdict.is_ok();
                // Only the update rule knows the length of the scratch. In a slot that only directions are gathered
                // into, segments without directions are unused.
                let id = crate::schedule::BufferId(index as u32);
                let is_used = schedule.ops.iter().any(|op| op.accesses().any(|access| access.buffer == id));
                let is_scratch = schedule.buffers[index].role == Role::Scratch;
                let unknown = verdict.is_ok() && (!is_used || number == 0 && is_scratch);
                let fits = matches!(verdict, Err(Violation::Misfit { .. }));
                assert!(fits || converted || unknown, "{:?}: {verdict:?}", schedule.buffers[index]);
            }
        }
    }
}

#[test]
fn frozen_model_has_no_update_norm_or_reduce_scatter() {
    let built = Setup::plain(Sketch { frozen: Frozen::All, ..Sketch::plain(2) }).build();
    let schedule = built.step();
    assert_eq!(built.check(&schedule), Ok(()));
    let trains =
        |op: &Op| matches!(op.kind, OpKind::Update(_) | OpKind::SquareNorm(_) | OpKind::ReduceScatter { .. });
    assert!(!schedule.ops.iter().any(trains));
}

#[test]
fn swapped_or_missing_collective_on_one_rank_diverges() {
    let (_, schedule) = sample();
    assert_eq!(check_ranks(&[]), Ok(()));
    assert_eq!(check_ranks(&[&schedule, &schedule, &schedule]), Ok(()));
    for queue in [Queue::Gather, Queue::Reduce] {
        let met: Vec<usize> = (0..schedule.ops.len())
            .filter(|&index| {
                let kind = &schedule.ops[index].kind;
                kind.queue() == queue && !matches!(kind, OpKind::Add { .. } | OpKind::SquareNorm(_))
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
fn block_first_reading_two_units_joins_one_waits_for_other() {
    // Norm and head are gathered one after the other, and the last block waits only for the second.
    let wrap = WrapPolicy::Classes(vec!["Norm".into(), "Head".into()]);
    let built = Setup { wrap, ..Setup::plain(Sketch::plain(1)) }.build();
    let schedule = built.step();
    let last_block = find(&schedule, |kind| matches!(kind, OpKind::Call(call) if call.is_last()));
    let op = &schedule.ops[last_block];
    assert_eq!((op.waits.len(), op.joins.len()), (1, 1));
    assert!(op.joins[0] < op.waits[0]);
}

#[test]
fn race_violation_names_operations_and_buffer() {
    let built = Setup::plain(Sketch::plain(1)).build();
    let mut schedule = built.step();
    let forward = find(&schedule, |kind| matches!(kind, OpKind::Call(BlockCall::Forward(..))));
    let gather = schedule.ops[forward].waits[0].0;
    schedule.ops[forward].waits.clear();
    let message = built.check(&schedule).unwrap_err().to_string();
    let len = built.layout.units[0].segments[0].unsharded_len();
    let expected = format!(
        "operation {forward} (forward) may overtake operation {gather} (all-gather (root) -> slot 0, for forward): both \
         touch buffer 16 (slot 0, segment 0: {len} x f32), and no wait orders them"
    );
    assert_eq!(message, expected);
}
