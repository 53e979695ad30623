mod dealing;
mod policies;
mod slots;
mod sums;

use proptest::prelude::*;

use super::*;
use crate::mesh::{Axis, Group, Mesh};
use crate::model::{BlockId, ParamId};
use crate::program::{BlockCall, ForwardMode, calls};
use crate::testing::{Built, Setup, Sketch, grid, setups};
use crate::wrap::{UnitId, WrapPolicy};

fn is_compute(kind: &OpKind) -> bool {
    kind.block().is_some()
}

fn block_of(kind: &OpKind) -> Option<usize> {
    kind.block().map(|block| block.0)
}

/// Whether a unit keeps a sub-shard.
fn keeps_sub_shard(schedule: &Schedule, unit: UnitId) -> bool {
    schedule.buffers.iter().any(|decl| decl.role == Role::SubShard && decl.unit == Some(unit))
}

/// The operations of each micro-batch.
fn micro_batches(schedule: &Schedule) -> Vec<Vec<OpKind>> {
    let of = |section: &Section| schedule.ops[section.start..section.end].iter().map(|op| op.kind).collect();
    let is_micro_batch = |section: &&Section| matches!(section.kind, SectionKind::MicroBatch(_));
    schedule.sections.iter().filter(is_micro_batch).map(of).collect()
}

fn count(schedule: &Schedule, is: impl Fn(&OpKind) -> bool) -> usize {
    schedule.ops.iter().filter(|op| is(&op.kind)).count()
}

/// The first block that runs backward, according to the definition.
fn first_backward_block(built: &Built) -> usize {
    let blocks = &built.spec.blocks;
    let trains = |block: &usize| blocks[*block].params.iter().any(|&id| built.spec.param(id).trainable);
    (0..blocks.len()).find(trains).unwrap_or(blocks.len() - 1)
}

/// The first block whose parameters are read after the last block: recomputation starts at the layer's input.
fn first_reread_block(built: &Built) -> usize {
    let blocks = &built.spec.blocks;
    let mut first = first_backward_block(built);
    if built.policy.checkpointing != Checkpointing::None {
        while first > 0 && blocks[first].layer.is_some() && blocks[first - 1].layer == blocks[first].layer {
            first -= 1;
        }
    }
    first
}

/// Number of times that a unit is gathered in one micro-batch.
fn gathers_of(built: &Built, unit: UnitId) -> usize {
    let last = built.spec.blocks.len() - 1;
    let uses: Vec<usize> = (0..=last).filter(|&block| built.units_of(block).contains(&unit)).collect();
    let Some(&latest) = uses.last() else { return 0 };
    let kept = match built.policy.reshard_after_forward {
        Reshard::Never => true,
        Reshard::Auto => built.layout.unit(unit).is_root,
        Reshard::Always | Reshard::ToGroup(_) => false,
    };
    if latest < first_reread_block(built) || latest == last || kept { 1 } else { 2 }
}

/// Whether fewer ranks than hold a unit keep it together after forward, according to the definition of the policy.
fn keeps_group(built: &Built, unit: UnitId) -> bool {
    let holders = built.mesh.shards() / built.layout.unit(unit).blocks;
    let Reshard::ToGroup(n) = built.policy.reshard_after_forward else { return false };
    n < holders && holders.is_multiple_of(n)
}

/// The compute operations of one micro-batch, according to the definition of checkpointing.
fn compute_of(built: &Built) -> Vec<OpKind> {
    let blocks = &built.spec.blocks;
    let (last, first) = (blocks.len() - 1, first_backward_block(built));
    let mode_of = match built.policy.checkpointing {
        Checkpointing::None => ForwardMode::Record,
        Checkpointing::Full => ForwardMode::Checkpoint,
        Checkpointing::Selective => ForwardMode::CheckpointProducts,
    };
    let full = built.policy.checkpointing != Checkpointing::None;
    let mut kinds: Vec<OpKind> = Vec::new();
    for (block, spec) in blocks.iter().enumerate().take(last) {
        let reaches_back = blocks[first..].iter().any(|other| other.layer == spec.layer);
        let recomputed = full && spec.layer.is_some() && reaches_back;
        let mode = if recomputed { mode_of } else { ForwardMode::Record };
        kinds.push(OpKind::Call(BlockCall::Forward(BlockId(block), mode)));
    }
    kinds.push(OpKind::Call(BlockCall::ForwardBackward(BlockId(last))));
    for block in (first..last).rev() {
        let layer = blocks[block].layer;
        let ends_layer = block + 1 == last || blocks[block + 1].layer != layer;
        if full && layer.is_some() && ends_layer {
            let inside = (0..=block).filter(|&other| blocks[other].layer == layer);
            let mode = ForwardMode::Recompute;
            kinds.extend(inside.map(|other| OpKind::Call(BlockCall::Forward(BlockId(other), mode))));
        }
        kinds.push(OpKind::Call(BlockCall::Backward(BlockId(block))));
    }
    kinds
}

/// The number of compute operations before each operation of a micro-batch.
fn steps_before(kinds: &[OpKind]) -> Vec<usize> {
    let mut seen = 0;
    let mut before = Vec::new();
    for kind in kinds {
        before.push(seen);
        seen += usize::from(is_compute(kind));
    }
    before
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn collective_counts_match_closed_forms(setup in setups()) {
        let built = setup.build();
        let (step, evaluation) = (built.step(), built.evaluation());
        for (unit, layout) in built.layout.unit_ids().zip(&built.layout.units) {
            let trains = usize::from(layout.is_trainable());
            let gathers = |kind: &OpKind| matches!(kind, OpKind::AllGather { unit: u, .. } if *u == unit);
            let reduces = |kind: &OpKind| matches!(kind, OpKind::ReduceScatter { unit: u, .. } if *u == unit);
            let sums = |kind: &OpKind| matches!(kind, OpKind::AllReduce { unit: u, .. } if *u == unit);
            let per_step = match built.policy.accumulation {
                Accumulation::Reduce => setup.rounds,
                Accumulation::Unsharded => 1,
            };
            prop_assert_eq!(count(&step, gathers), setup.rounds * gathers_of(&built, unit));
            prop_assert_eq!(count(&step, reduces), trains * per_step);
            let offloads = usize::from(built.policy.offload == Offload::Cpu);
            let uploads = |kind: &OpKind| matches!(kind, OpKind::Upload(u, ..) if *u == unit);
            let downloads = |kind: &OpKind| matches!(kind, OpKind::Download(u, ..) if *u == unit);
            let of_shard = |kind: &OpKind| matches!(kind, OpKind::AllGather { unit: u, source, .. }
                if *u == unit && *source != Source::SubShard);
            for schedule in [&step, &evaluation] {
                prop_assert_eq!(count(schedule, uploads), offloads * count(schedule, of_shard));
            }
            prop_assert_eq!(count(&step, downloads), offloads * trains);
            prop_assert_eq!(count(&evaluation, downloads), 0);
            prop_assert_eq!(count(&step, sums), trains * usize::from(setup.mesh.size(Axis::Replicate) > 1));
            let of_chunks = setup.rounds * (step.chunks * layout.blocks - 1);
            let [compute, reduce] = match built.policy.accumulation {
                Accumulation::Reduce => [of_chunks, setup.rounds - 1],
                Accumulation::Unsharded => [of_chunks + setup.rounds - 1, 0],
            };
            for (queue, adds) in [(crate::Queue::Compute, compute), (crate::Queue::Reduce, reduce)] {
                prop_assert_eq!(count(&step, |kind| *kind == OpKind::Add { unit, queue }), trains * adds);
            }
            let used = (0..built.spec.blocks.len()).any(|block| built.units_of(block).contains(&unit));
            prop_assert_eq!(count(&evaluation, gathers), setup.rounds * usize::from(used));
            prop_assert_eq!(count(&evaluation, reduces) + count(&evaluation, sums), 0);
            let statistics = |kind: &OpKind| matches!(kind, OpKind::Statistics { unit: u, .. } if *u == unit);
            prop_assert_eq!(count(&step, statistics), trains * setup.phases);
            let holds_whole = layout.segments.iter().flat_map(|segment| &segment.params);
            let directs = usize::from(holds_whole.into_iter().any(|place| built.rule.whole.contains(&place.param)));
            for kind in [OpKind::Direct(unit), OpKind::GatherDirections { unit, group: layout.group() }] {
                prop_assert_eq!(count(&step, |other| *other == kind), directs);
                prop_assert_eq!(count(&evaluation, |other| *other == kind), 0);
            }
        }
        let phases = |kind: &OpKind| matches!(kind, OpKind::ReduceStatistics(_));
        prop_assert_eq!(count(&step, phases), setup.phases);
        prop_assert_eq!(count(&evaluation, phases), 0);
        for schedule in [&step, &evaluation] {
            prop_assert_eq!(count(schedule, |kind| *kind == OpKind::ReduceScalars), 1);
            prop_assert_eq!(schedule.rounds, setup.rounds);
        }
    }

    #[test]
    fn blocks_run_forward_then_backward_and_layers_are_recomputed(setup in setups()) {
        let built = setup.build();
        for (round, kinds) in micro_batches(&built.step()).into_iter().enumerate() {
            prop_assert_eq!(kinds[0], OpKind::BeginMicroBatch(Round(round)));
            let compute: Vec<OpKind> = kinds.into_iter().filter(is_compute).collect();
            prop_assert_eq!(compute, compute_of(&built));
        }
        let last = BlockId(built.spec.blocks.len() - 1);
        for kinds in micro_batches(&built.evaluation()) {
            let mode = ForwardMode::Evaluate;
            let mut expected: Vec<OpKind> =
                (0..last.0).map(|block| OpKind::Call(BlockCall::Forward(BlockId(block), mode))).collect();
            expected.push(OpKind::Call(BlockCall::Evaluate(last)));
            let compute: Vec<OpKind> = kinds.into_iter().filter(is_compute).collect();
            prop_assert_eq!(compute, expected);
        }
    }

    #[test]
    fn gathers_run_ahead_by_exactly_prefetch_depth(setup in setups()) {
        let built = setup.build();
        for schedule in [built.step(), built.evaluation()] {
            for kinds in micro_batches(&schedule) {
                assert_prefetch(&built, &kinds)?;
            }
        }
    }

    #[test]
    fn units_are_resharded_and_gradients_closed_after_last_use(setup in setups()) {
        let built = setup.build();
        let step = built.step();
        for kinds in micro_batches(&step) {
            for (index, kind) in kinds.iter().enumerate() {
                let before = kinds[..index].iter().rev().find_map(block_of);
                match *kind {
                    OpKind::Reshard(unit) => {
                        prop_assert!(built.units_of(before.unwrap()).contains(&unit));
                        let keeps = matches!(kinds[index - 1], OpKind::KeepSubShard { unit: u, .. } if u == unit);
                        let rest = &kinds[index..];
                        let small = rest.iter().any(|later| matches!(*later,
                            OpKind::AllGather { unit: u, source: Source::SubShard, .. } if u == unit));
                        let group = keeps_group(&built, unit);
                        prop_assert_eq!(keeps, small);
                        let again = rest.iter().any(|later| matches!(*later,
                            OpKind::AllGather { unit: u, .. } if u == unit));
                        prop_assert_eq!(keeps, again && group);
                        prop_assert!(!keeps || keeps_sub_shard(&step, unit));
                    }
                    OpKind::OpenGradient(unit) => {
                        let next = kinds[index..].iter().find_map(block_of).unwrap();
                        prop_assert!(writes(&built, next, unit));
                    }
                    OpKind::CloseGradient(unit) => {
                        prop_assert!(writes(&built, before.unwrap(), unit));
                        let later = kinds[index..].iter().filter_map(block_of);
                        prop_assert!(later.into_iter().all(|block| !writes(&built, block, unit)));
                    }
                    _ => {}
                }
            }
        }
        for unit in built.layout.unit_ids() {
            let group = keeps_group(&built, unit);
            prop_assert_eq!(keeps_sub_shard(&step, unit), group && gathers_of(&built, unit) == 2);
        }
    }

    #[test]
    fn sections_cover_schedule_without_gaps(setup in setups()) {
        let built = setup.build();
        for schedule in [built.step(), built.evaluation()] {
            let kinds: Vec<SectionKind> = schedule.sections.iter().map(|section| section.kind).collect();
            let mut expected = vec![SectionKind::Prologue];
            expected.extend((0..setup.rounds).map(|round| SectionKind::MicroBatch(Round(round))));
            expected.push(SectionKind::Epilogue);
            prop_assert_eq!(kinds, expected);
            let mut at = 0;
            for section in &schedule.sections {
                prop_assert_eq!(section.start, at);
                at = section.end;
            }
            prop_assert_eq!(at, schedule.ops.len());
        }
    }

    #[test]
    fn reduction_results_are_used_one_unit_later(setup in setups()) {
        let built = setup.build();
        let step = built.step();
        let is_reduction = |op: &&Op| matches!(op.kind, OpKind::ReduceScatter { .. });
        for index in 0..step.ops.len() {
            let op = &step.ops[index];
            let reads_result = match op.kind {
                OpKind::Add { queue, .. } => queue == crate::Queue::Reduce,
                OpKind::AllReduce { .. } => true,
                OpKind::SquareNorm(_) => built.mesh.size(Axis::Replicate) == 1,
                _ => false,
            };
            if !reads_result {
                continue;
            }
            let result = if op.reads.is_empty() { &op.writes } else { &op.reads };
            let made = step.ops[..index].iter().rposition(|op| is_reduction(&op) && op.writes == *result);
            let Some(made) = made else { continue };
            let section = step.sections.iter().find(|section| section.end > made).unwrap();
            let between = &step.ops[made + 1..index];
            let last = !step.ops[made + 1..section.end].iter().any(|op| is_reduction(&op));
            prop_assert!(last || index >= section.end || between.iter().any(|op| is_reduction(&op)));
        }
    }
}

fn writes(built: &Built, block: usize, unit: UnitId) -> bool {
    let of_unit = |id: &&ParamId| built.unit_of(**id) == unit && built.spec.param(**id).trainable;
    built.spec.blocks[block].params.iter().any(|id| of_unit(&id))
}

/// Asserts that gather `i` of a pass is issued when the unit of gather `i - depth` is about to be used (the last block
/// counts as the first of the backward pass), so that no more than `depth` units wait for their first use. A unit counts
/// together with its experts.
fn assert_prefetch(built: &Built, kinds: &[OpKind]) -> Result<(), TestCaseError> {
    let before = steps_before(kinds);
    let last_block =
        kinds.iter().position(|kind| matches!(kind, OpKind::Call(call) if call.is_last())).unwrap();
    for (pass, depth) in [
        (crate::comm::Purpose::Forward, built.policy.forward_prefetch),
        (crate::comm::Purpose::Backward, built.policy.backward_prefetch),
    ] {
        let gathers: Vec<(usize, UnitId)> = (0..kinds.len())
            .filter_map(|index| match kinds[index] {
                OpKind::AllGather { unit, purpose, .. } if purpose == pass => Some((index, unit)),
                _ => None,
            })
            .collect();
        let origin = |unit: UnitId| built.layout.unit(unit).origin;
        let first_use = |&(index, unit): &(usize, UnitId)| {
            let uses = |at: &usize| block_of(&kinds[*at]).is_some_and(|b| built.units_of(b).contains(&unit));
            before[(index..kinds.len()).find(uses).unwrap()]
        };
        // The first use of each unit or its experts, in order.
        let mut firsts: Vec<(usize, usize)> = Vec::new();
        let mut uses: Vec<_> = gathers.iter().map(|gather| (first_use(gather), gather.1)).collect();
        uses.sort();
        for (at, unit) in uses {
            if firsts.iter().all(|(_, other)| *other != origin(unit)) {
                firsts.push((at, origin(unit)));
            }
        }
        let mut points: Vec<usize> = firsts.iter().map(|(at, _)| *at).collect();
        if pass == crate::comm::Purpose::Backward {
            points.insert(0, before[last_block]);
        }
        let shift = points.len() - firsts.len();
        for &(index, unit) in &gathers {
            let number = firsts.iter().position(|(_, other)| *other == origin(unit)).unwrap();
            prop_assert_eq!(before[index], points[(number + shift).saturating_sub(depth)]);
        }
        for (number, &(index, unit)) in gathers.iter().enumerate() {
            if built.layout.unit(unit).blocks == 1 && firsts.len() == gathers.len() {
                let ahead = gathers[..=number].iter().filter(|gather| first_use(gather) > before[index]);
                prop_assert!(ahead.count() <= depth);
            }
        }
    }
    Ok(())
}

#[test]
fn calls_of_pass_are_those_of_one_micro_batch() {
    for rounds in 1..4 {
        let built = Setup { rounds, ..Setup::plain(Sketch::plain(2)) }.build();
        let calls: Vec<OpKind> =
            calls(&built.spec, built.step().pass).into_iter().map(OpKind::Call).collect();
        assert_eq!(calls, compute_of(&built));
    }
}

#[test]
fn operations_use_expected_queues() {
    let setup = Setup { rounds: 2, whole: true, ..Setup::plain(Sketch::plain(2)) };
    for op in setup.build().step().ops {
        let queue = match op.kind.name() {
            "all-gather" | "all-gather directions" => crate::Queue::Gather,
            "reduce-scatter" | "add" | "square norm" => crate::Queue::Reduce,
            name if name.starts_with("all-reduce") => crate::Queue::Reduce,
            "upload" => crate::Queue::Upload,
            "download" => crate::Queue::Download,
            _ => crate::Queue::Compute,
        };
        assert_eq!(op.kind.queue(), queue, "{}", op.kind.name());
    }
}

#[test]
fn directions_are_gathered_one_unit_ahead() {
    let built = Setup { whole: true, ..Setup::plain(Sketch::plain(3)) }.build();
    let step = built.step();
    let of_rule = |kind: &OpKind| {
        matches!(kind, OpKind::Direct(_) | OpKind::GatherDirections { .. } | OpKind::Update(_))
    };
    let kinds: Vec<OpKind> = step.ops.iter().map(|op| op.kind).filter(of_rule).collect();
    let [root, first, second, third] = [0, 1, 2, 3].map(UnitId);
    let gathered = |unit| [OpKind::Direct(unit), OpKind::GatherDirections { unit, group: Group::SHARDS }];
    let expected = [
        &gathered(first)[..],
        &[OpKind::Update(root)],
        &gathered(second),
        &[OpKind::Update(first)],
        &gathered(third),
        &[OpKind::Update(second), OpKind::Update(third)],
    ];
    assert_eq!(kinds, expected.concat());
    // They need only this rank's rows of two units, and the scratch.
    let slots = |step: &Schedule| {
        step.buffers.iter().filter(|decl| matches!(decl.role, Role::GradientSlot(_))).count()
    };
    assert_eq!(slots(&step), slots(&Setup::plain(Sketch::plain(3)).build().step()));
    let rows = step.buffers.iter().filter(|decl| matches!(decl.role, Role::DirectionSlot(_)));
    assert_eq!(rows.count(), 2);
}

#[test]
fn offload_with_whole_param_directions_is_rejected() {
    let mut built = Setup { whole: true, ..Setup::plain(Sketch::plain(1)) }.build();
    built.policy.offload = Offload::Cpu;
    let Built { spec, layout, policy, mesh, rule, rounds } = built;
    let refused = crate::plan::Plan::new(spec, layout, mesh, policy, &rule, rounds, 0).unwrap_err();
    assert!(matches!(refused, crate::Error::Policy { key: "offload", .. }), "{refused}");
}

#[test]
fn schedule_is_deterministic() {
    for setup in grid(&Sketch { halves: true, ..Sketch::plain(2) }).into_iter().step_by(7) {
        assert_eq!(setup.build().step(), setup.build().step());
    }
}

#[test]
fn zero_rounds_or_layout_of_other_mesh_panics() {
    type Change = fn(&mut Built);
    let changes: [Change; 2] =
        [|built| built.rounds = 0, |built| built.mesh = Mesh::new([(Axis::Shard, 3)]).unwrap()];
    for change in changes {
        let mut built = Setup::plain(Sketch::plain(1)).build();
        change(&mut built);
        assert!(std::panic::catch_unwind(|| built.step()).is_err());
        assert!(std::panic::catch_unwind(|| built.evaluation()).is_err());
    }
}

#[test]
fn root_is_gathered_twice_only_when_always_resharded() {
    let wrap = WrapPolicy::Classes(vec!["Layer".into(), "Head".into(), "Norm".into()]);
    for (reshard, expected) in [(Reshard::Auto, 1), (Reshard::Always, 2), (Reshard::Never, 1)] {
        let policy = Policy { reshard_after_forward: reshard, ..Policy::default() };
        let built = Setup { wrap: wrap.clone(), policy, ..Setup::plain(Sketch::plain(2)) }.build();
        assert!(built.layout.units[0].is_root);
        assert_eq!(
            count(&built.step(), |kind| matches!(kind, OpKind::AllGather { unit: UnitId(0), .. })),
            expected
        );
    }
}
