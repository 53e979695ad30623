use proptest::prelude::*;

use super::*;
use crate::comm::tests::{NoMemory, Shape};
use crate::dtype::DType;
use crate::error::Error;
use crate::layout::Extent;
use crate::rank::Rank;
use crate::schedule::{Accumulation, AccumulationOrder, Offload, Op, Reshard, Source};
use crate::testing::{Built, Setup, setups};
use crate::update::{Piece, RuleState, SegmentShard, Stage, StateTensor, StepScalars, Updates};

/// Counts allocations one by one, as a memory does, without knowledge of schedules.
#[derive(Default)]
struct Counter {
    live: [usize; Category::COUNT],
    peak: [usize; Category::COUNT],
    total_peak: usize,
    /// Bytes in host memory; they are never freed.
    host: [usize; Category::COUNT],
}

impl Counter {
    fn allocate(&mut self, category: Category, bytes: usize) {
        self.live[category as usize] += bytes;
        self.peak[category as usize] = self.peak[category as usize].max(self.live[category as usize]);
        self.total_peak = self.total_peak.max(self.live.iter().sum());
    }

    fn own(&mut self, on_host: bool, category: Category, bytes: usize) {
        match on_host {
            true => self.host[category as usize] += bytes,
            false => self.allocate(category, bytes),
        }
    }

    fn free(&mut self, category: Category, bytes: usize) {
        self.live[category as usize] -= bytes;
    }

    /// Simulates a block that allocates up to each of its peaks in turn and leaves `net` allocated.
    fn call(&mut self, footprint: &CallFootprint) {
        let activation = footprint.activation_peak.min(footprint.total_peak);
        let workspace = footprint.total_peak - activation;
        self.allocate(Category::Activation, footprint.activation_peak);
        self.free(Category::Activation, footprint.activation_peak);
        self.allocate(Category::Workspace, footprint.workspace_peak);
        self.free(Category::Workspace, footprint.workspace_peak);
        self.allocate(Category::Activation, activation);
        self.allocate(Category::Workspace, workspace);
        self.free(Category::Workspace, workspace);
        self.free(Category::Activation, activation);
        match usize::try_from(footprint.activation_net) {
            Ok(kept) => self.allocate(Category::Activation, kept),
            Err(_) => self.free(Category::Activation, footprint.activation_net.unsigned_abs()),
        }
    }
}

/// Raises peaks to at least the net change, so that no call leaves more than it ever held.
fn footprint(net: isize, [a, w, t]: [usize; 3]) -> CallFootprint {
    let activation_peak = usize::try_from(net).unwrap_or(0) + a;
    let least = activation_peak.max(w);
    CallFootprint {
        activation_net: net,
        activation_peak,
        workspace_peak: w,
        total_peak: least + t % (activation_peak + w - least + 1),
    }
}

/// Random footprints of the calls of a micro-batch, none of which frees more than is live.
fn footprints() -> impl Strategy<Value = Vec<CallFootprint>> {
    prop::collection::vec((any::<i8>(), any::<[u8; 3]>()), 0..16).prop_map(|calls| {
        let mut live = 0isize;
        let call = |(net, peaks): (i8, [u8; 3])| {
            let net = isize::from(net).max(-live);
            live += net;
            footprint(net, peaks.map(usize::from))
        };
        calls.into_iter().map(call).collect()
    })
}

/// Bytes of state that the rule of a unit keeps on the tested rank, by tensor and segment.
type State = [usize; 2];

/// A rule that keeps two tensors per segment, of lengths that only the test knows.
struct Rule(State);

impl RuleState for Rule {
    fn state(&self, _: &[Piece], _: usize, dtype: DType) -> Vec<StateTensor> {
        self.0.map(|len| StateTensor { name: "state", len, dtype, pieces: Vec::new() }).into()
    }
}

impl Updates<NoMemory> for Rule {
    fn run(
        &self,
        _: &NoMemory,
        _: Stage<'_, Shape>,
        _: &mut SegmentShard<'_, Shape>,
        _: &StepScalars<'_, Shape>,
    ) -> Result<(), Error> {
        unreachable!("nothing is updated here")
    }
}

/// Allocates what an engine allocates, unit by unit, following the definition of the policies.
fn allocate_static(counter: &mut Counter, built: &Built, step: &Schedule, state: State) {
    let policy = &built.policy;
    let (param, reduce) = (policy.param_dtype.size_bytes(), policy.reduce_dtype.size_bytes());
    let offloads = policy.offload == Offload::Cpu;
    for decl in &step.buffers {
        let bytes = match decl.role {
            Role::Slot(_) | Role::StagingSlot(_) if decl.dtype == DType::U8 => 1,
            Role::Slot(_) | Role::StagingSlot(_) if decl.dtype == DType::F32 => 4,
            Role::Slot(_) | Role::StagingSlot(_) => param,
            Role::GradientSlot(_) | Role::ReducedSlot(_) | Role::DirectionSlot(_) => reduce,
            Role::Scratch => policy.param_dtype.master().size_bytes(),
            _ => continue,
        };
        let category = match decl.role {
            Role::Slot(_) => Category::Unsharded,
            Role::GradientSlot(_) => Category::GradientSlot,
            Role::DirectionSlot(_) => Category::ShardedGradient,
            Role::Scratch => Category::Workspace,
            _ => Category::HostStaging,
        };
        counter.allocate(category, decl.len.unwrap() * bytes);
    }
    let master = if policy.param_dtype == DType::F64 { 8 } else { 4 };
    for (unit, layout) in built.layout.units.iter().enumerate() {
        for segment in &layout.segments {
            let own = segment.rows_per_rank * segment.row_len;
            let whole = own * built.mesh.shards() / layout.blocks;
            let keeps_f32 = |place: &Extent| built.spec.param(place.param).keep_f32;
            let param = match segment.is_quantized() {
                true => 1,
                false if segment.params.iter().any(keeps_f32) => master,
                false => param,
            };
            if segment.is_quantized() {
                counter.own(offloads, Category::ParameterShard, own);
            } else if segment.trainable || policy.frozen_master {
                counter.own(offloads, Category::ParameterShard, own * master);
                if param == 2 {
                    counter.own(offloads, Category::ParameterShard, own * 2);
                }
            } else {
                counter.own(offloads, Category::ParameterShard, own * param);
            }
            let gathers_again = |op: &Op| {
                let source = Source::SubShard;
                matches!(op.kind, OpKind::AllGather { unit: u, source: s, .. } if u.0 == unit && s == source)
            };
            if let (Reshard::ToGroup(n), true) =
                (policy.reshard_after_forward, step.ops.iter().any(gathers_again))
            {
                counter.allocate(Category::Unsharded, whole / n * param);
            }
            if !segment.trainable {
                continue;
            }
            state.iter().for_each(|len| counter.own(offloads, Category::OptimizerState, len * master));
            counter.own(offloads, Category::ShardedGradient, own * reduce);
            let sums = match (policy.accumulation_order, step.rounds) {
                (AccumulationOrder::Tree, rounds) => (1..=rounds).filter(|n| n.is_power_of_two()).count() - 1,
                (AccumulationOrder::Running, 2..) => 1,
                (AccumulationOrder::Running, _) => 0,
            };
            let is_sharded = policy.accumulation == Accumulation::Reduce;
            let each = if is_sharded { own } else { whole };
            // The gradient of a round needs an extra buffer on the device if it is added to a sum there.
            let sums = if offloads && is_sharded && step.rounds > 1 { sums + 1 } else { sums };
            (0..sums).for_each(|_| counter.allocate(Category::Accumulator, each * reduce));
        }
    }
}

/// Makes the calls of every micro-batch; activations left by one are freed when the next one begins.
fn walk(counter: &mut Counter, rounds: usize, calls: &[CallFootprint], data_bytes: usize) {
    counter.allocate(Category::Activation, data_bytes);
    for _ in 0..rounds {
        counter.free(Category::Activation, counter.live[Category::Activation as usize] - data_bytes);
        calls.iter().for_each(|call| counter.call(call));
    }
}

fn cases() -> impl Strategy<Value = (Setup, Vec<CallFootprint>, [u16; 3])> {
    (setups(), footprints(), any::<[u16; 3]>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn predicted_usage_matches_simulated_allocations((setup, calls, [data, first, second]) in cases()) {
        let built = setup.build();
        let (plan, state) = (built.plan(), [usize::from(first), usize::from(second)]);
        let tables = &plan.tables(&Rule(state), Rank(0));
        for schedule in [&plan.step, plan.evaluation.as_ref().unwrap()] {
            let data_bytes = usize::from(data);
            let input = LedgerInput { tables, calls: &calls, data_bytes };
            let usage = predict(schedule, &input);
            let alone = moving(schedule, &input, 1, 1);
            prop_assert!(alone.world_bytes <= alone.rank_bytes);
            prop_assert!(alone.rank_bytes <= usage.device.total_peak_bytes);
            prop_assert!(moving(schedule, &input, 7, 2).world_bytes <= 7 * alone.rank_bytes);
            let mut counter = Counter::default();
            allocate_static(&mut counter, &built, &plan.step, state);
            for _ in 0..2 {
                counter.allocate(Category::CommStaging, 8 * (2 * 69 + 3));
            }
            [1, 3].into_iter().for_each(|len| counter.allocate(Category::CommStaging, 8 * len));
            built.rule.phases.iter().for_each(|len| counter.allocate(Category::CommStaging, 8 * len));
            walk(&mut counter, schedule.rounds, &calls, data_bytes);
            prop_assert_eq!(usage.device.live_bytes, counter.live);
            prop_assert_eq!(usage.device.peak_bytes, counter.peak);
            prop_assert_eq!(usage.device.total_peak_bytes, counter.total_peak);
            prop_assert_eq!(usage.host.live_bytes, counter.host);
            prop_assert_eq!(usage.host.peak_bytes, counter.host);
            prop_assert_eq!(usage.host.total_peak_bytes, counter.host.iter().sum::<usize>());
        }
    }

    #[test]
    fn shards_of_all_ranks_hold_every_parameter(setup in setups()) {
        let built = setup.build();
        let elements: usize = (0..built.mesh.shards())
            .flat_map(|rank| {
                let shard = built.mesh.shard(Rank(rank));
                built.layout.units.iter().flat_map(move |unit| {
                    unit.segments.iter().flat_map(move |segment| segment.pieces(shard))
                })
            })
            .map(|piece| piece.len)
            .sum();
        let stored: usize = built.spec.params.iter().map(|param| param.stored_len()).sum();
        prop_assert_eq!(elements, stored);
    }
}
