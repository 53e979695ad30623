//! Declares buffers: those that ranks own of each unit, the others that a step needs, and slots that are used in turn.

use std::collections::BTreeSet;

use super::super::live::LiveRange;
use super::super::policy::{Accumulation, AccumulationOrder, Offload, Policy};
use super::super::{BufferDecl, BufferId, Lasting, Place, Role, Schedule, UnitBuffers};
use super::Compiler;
use crate::dtype::DType;
use crate::layout::{Segment, SegmentId};
use crate::memory::Category;
use crate::scalars::GradientFactors;
use crate::tree;
use crate::wrap::UnitId;

/// The buffers of a schedule.
pub(super) struct Declared {
    pub(super) buffers: Vec<BufferDecl>,
    pub(super) lasting: Lasting,
    /// For each unit, the sub-shard per segment; empty if none is kept.
    pub(super) sub_shards: Vec<Vec<BufferId>>,
    /// For each unit, sets of buffers for sums of sharded gradients; the first set receives the total.
    pub(super) sums: Vec<Vec<Vec<BufferId>>>,
    /// For each unit, sets of buffers for sums of unsharded gradients.
    pub(super) whole_sums: Vec<Vec<Vec<BufferId>>>,
}

/// A declaration on the device that belongs to no unit.
fn decl(role: Role, category: Category, dtype: DType, len: usize) -> BufferDecl {
    BufferDecl { role, category, dtype, len: Some(len), place: Place::Device, unit: None, segment: None }
}

fn is_trained(segment: &Segment) -> bool {
    segment.trainable
}

/// Number of buffer sets for partial sums, beyond the one that exists anyway: the sharded gradient, or a gradient slot.
fn extra_sums(policy: &Policy, rounds: usize) -> usize {
    match policy.accumulation_order {
        AccumulationOrder::Tree => tree::accumulators(rounds) - 1,
        AccumulationOrder::Running => usize::from(rounds > 1),
    }
}

impl Declared {
    /// Declares the buffers of a step, except slots.
    pub(super) fn of_step(compiler: &Compiler<'_>, ranges: &[LiveRange], rounds: usize) -> Self {
        let mut buffers = Vec::new();
        let lasting = scalars(&mut buffers, compiler);
        let sub_shards = vec![Vec::new(); compiler.layout.units.len()];
        let mut declared = Self { buffers, lasting, sub_shards, sums: Vec::new(), whole_sums: Vec::new() };
        for unit in compiler.layout.unit_ids() {
            let unit_buffers = declared.declare_shards(compiler, unit);
            let keeps_sub_shard = ranges.iter().any(|range| range.unit == unit && range.keep_sub_shard);
            let sub_group = compiler.policy.reshard_after_forward.sub_group(compiler.layout.unit(unit));
            if let (Some(group), true) = (sub_group, keeps_sub_shard) {
                let n = compiler.mesh.group_size(group);
                let declare = |segment: &Segment| {
                    decl(Role::SubShard, Category::Unsharded, segment.dtype, segment.unsharded_len() / n)
                };
                declared.sub_shards[unit.0] = declared.per_segment(compiler, unit, |_| true, declare);
            }
            declared.declare_sums(compiler, unit, &unit_buffers, rounds);
            declared.lasting.units.push(unit_buffers);
        }
        declared.declare_scratch(compiler);
        declared
    }

    /// The buffers of an evaluation: those of the step that it belongs to.
    pub(super) fn of_evaluation(step: &Schedule) -> Self {
        let (buffers, lasting) = (step.buffers.clone(), step.lasting.clone());
        let none = || vec![Vec::new(); lasting.units.len()];
        Self { sub_shards: none(), sums: Vec::new(), whole_sums: Vec::new(), buffers, lasting }
    }

    pub(super) fn push(&mut self, decl: BufferDecl) -> BufferId {
        self.buffers.push(decl);
        BufferId::of(self.buffers.len() - 1)
    }

    /// Declares a buffer for each segment of a unit that `has` one.
    fn per_segment(
        &mut self,
        compiler: &Compiler<'_>,
        unit: UnitId,
        has: impl Fn(&Segment) -> bool,
        declare: impl Fn(&Segment) -> BufferDecl,
    ) -> Vec<BufferId> {
        let segments = compiler.layout.unit(unit).segments.iter().enumerate();
        segments
            .filter(|(_, segment)| has(segment))
            .map(|(index, segment)| {
                let (unit, segment_id) = (Some(unit), Some(SegmentId(index)));
                self.push(BufferDecl { unit, segment: segment_id, ..declare(segment) })
            })
            .collect()
    }

    /// Declares the buffers that a rank owns of a unit: parameters, gradient, optimizer state.
    fn declare_shards(&mut self, compiler: &Compiler<'_>, unit: UnitId) -> UnitBuffers {
        let policy = compiler.policy;
        let place = match policy.offload {
            Offload::None => Place::Device,
            Offload::Cpu => Place::Host,
        };
        let owned = |role, category, dtype| {
            move |segment: &Segment| BufferDecl { place, ..decl(role, category, dtype, segment.shard_len()) }
        };
        let shard = Category::ParameterShard;
        let master =
            |segment: &Segment| owned(Role::Master, shard, policy.kept_segment_dtype(segment))(segment);
        let mut buffers = UnitBuffers {
            master: self.per_segment(compiler, unit, |_| true, master),
            ..UnitBuffers::default()
        };
        let has_low = |segment: &Segment| policy.kept_segment_dtype(segment) != segment.dtype;
        let mut low = self
            .per_segment(compiler, unit, has_low, owned(Role::Low, shard, policy.param_dtype))
            .into_iter();
        let segments = compiler.layout.unit(unit).segments.iter();
        buffers.low = segments.map(|segment| has_low(segment).then(|| low.next()).flatten()).collect();
        let gradient = owned(Role::ShardedGradient, Category::ShardedGradient, policy.reduce_dtype);
        buffers.gradient = self.per_segment(compiler, unit, is_trained, gradient);
        buffers.state = vec![Vec::new(); buffers.gradient.len()];
        for (tensor, &dtype) in compiler.rule.state.iter().enumerate() {
            let declare = owned(Role::State(tensor), Category::OptimizerState, dtype);
            let declare = |segment: &Segment| BufferDecl { len: None, ..declare(segment) };
            let tensors = self.per_segment(compiler, unit, is_trained, declare);
            buffers.state.iter_mut().zip(tensors).for_each(|(state, tensor)| state.push(tensor));
        }
        let is_whole = |segment: &Segment| {
            segment.trainable && segment.params.iter().any(|place| compiler.rule.whole.contains(&place.param))
        };
        let segments = compiler.layout.unit(unit).segments.iter().enumerate();
        buffers.whole =
            segments.filter(|(_, segment)| is_whole(segment)).map(|(index, _)| SegmentId(index)).collect();
        buffers
    }

    /// Declares scratch space for updates, if any unit has directions.
    fn declare_scratch(&mut self, compiler: &Compiler<'_>) {
        if self.lasting.units.iter().any(|unit| !unit.whole.is_empty()) {
            let dtype = compiler.policy.kept_dtype(true);
            self.lasting.scratch =
                Some(self.push(decl(Role::Scratch, Category::Workspace, dtype, compiler.rule.scratch)));
        }
    }

    /// Declares the buffers in which gradients of several micro-batches are added. With offload, sharded sums are still
    /// on the device until the total is complete; gradients that are not added pass through slots.
    fn declare_sums(
        &mut self,
        compiler: &Compiler<'_>,
        unit: UnitId,
        unit_buffers: &UnitBuffers,
        rounds: usize,
    ) {
        let (policy, extra) = (compiler.policy, extra_sums(compiler.policy, rounds));
        let (sharded, whole) = match policy.accumulation {
            Accumulation::Reduce => (extra, 0),
            Accumulation::Unsharded => (0, extra),
        };
        let mut sets = match policy.offload {
            Offload::None => vec![unit_buffers.gradient.clone()],
            Offload::Cpu => Vec::new(),
        };
        let sharded = sharded + usize::from(policy.offload == Offload::Cpu && sharded > 0);
        let mut set = |role, len: fn(&Segment) -> usize| {
            let declare =
                |segment: &Segment| decl(role, Category::Accumulator, policy.reduce_dtype, len(segment));
            self.per_segment(compiler, unit, is_trained, declare)
        };
        sets.extend((0..sharded).map(|number| set(Role::ShardedSum(number), Segment::shard_len)));
        let whole = (0..whole).map(|number| set(Role::WholeSum(number), Segment::unsharded_len)).collect();
        self.sums.push(sets);
        self.whole_sums.push(whole);
    }

    /// The buffers of a unit that an update reads and writes, given the statistics that it reads.
    pub(super) fn update(&self, unit: UnitId, statistics: &[BufferId]) -> (Vec<BufferId>, Vec<BufferId>) {
        let unit_buffers = &self.lasting.units[unit.0];
        let mut reads = unit_buffers.gradient.clone();
        reads.push(self.lasting.factors);
        reads.extend(statistics);
        let mut writes = Vec::new();
        for (segment, state) in unit_buffers.state.iter().enumerate() {
            writes.push(unit_buffers.master[segment]);
            writes.extend(unit_buffers.low[segment]);
            writes.extend(state);
        }
        writes.push(self.lasting.not_finite);
        (reads, writes)
    }
}

/// Declares the scalars of a step and the statistics.
fn scalars(buffers: &mut Vec<BufferDecl>, compiler: &Compiler<'_>) -> Lasting {
    let mut small = |role, dtype, len| {
        buffers.push(decl(role, Category::CommStaging, dtype, len));
        BufferId::of(buffers.len() - 1)
    };
    let phases = compiler.rule.phases.iter().enumerate();
    Lasting {
        units: Vec::new(),
        scalars: small(Role::Scalars, DType::I64, compiler.spec.tallies.scalar_words()),
        spare_scalars: small(Role::SpareScalars, DType::I64, compiler.spec.tallies.scalar_words()),
        factors: small(Role::Factors, DType::F64, GradientFactors::LEN),
        not_finite: small(Role::NotFinite, DType::I64, 1),
        statistics: phases.map(|(phase, &len)| small(Role::Statistics(phase), DType::F64, len)).collect(),
        scratch: None,
    }
}

/// The dtype and length of each segment of a unit.
type Shape = Vec<(DType, usize)>;

/// Buffers that units with segments of equal dtypes and lengths use in turn.
pub(super) struct Slots {
    role: fn(usize) -> Role,
    category: Category,
    sets: Vec<(Shape, Vec<BufferId>)>,
    free: BTreeSet<usize>,
}

impl Slots {
    pub(super) fn new(role: fn(usize) -> Role, category: Category) -> Self {
        Self { role, category, sets: Vec::new(), free: BTreeSet::new() }
    }

    /// Adds the slots that were already declared, all of them free.
    pub(super) fn declared(mut self, buffers: &[BufferDecl]) -> Self {
        for (index, decl) in buffers.iter().enumerate() {
            let last = self.sets.len();
            if decl.role == (self.role)(last) {
                self.sets.push((Vec::new(), Vec::new()));
            } else if last == 0 || decl.role != (self.role)(last - 1) {
                continue;
            }
            let (sizes, ids) = self.sets.last_mut().expect("a slot was just found");
            sizes.extend(decl.len.map(|len| (decl.dtype, len)));
            ids.push(BufferId::of(index));
        }
        self.free = (0..self.sets.len()).collect();
        self
    }

    /// Takes a free slot for segments of these dtypes and lengths, or declares a new one; returns its number and its
    /// buffers.
    pub(super) fn take(
        &mut self,
        declared: &mut Declared,
        sizes: Vec<(DType, usize)>,
    ) -> (usize, Vec<BufferId>) {
        let found = self.free.iter().copied().find(|&slot| self.sets[slot].0 == sizes);
        let slot = found.unwrap_or_else(|| {
            let role = (self.role)(self.sets.len());
            let ids = sizes.iter().enumerate().map(|(segment, &(dtype, len))| {
                let segment = Some(SegmentId(segment));
                declared.push(BufferDecl { segment, ..decl(role, self.category, dtype, len) })
            });
            self.sets.push((sizes.clone(), ids.collect()));
            self.sets.len() - 1
        });
        self.free.remove(&slot);
        (slot, self.sets[slot].1.clone())
    }

    pub(super) fn give_back(&mut self, slot: usize) {
        self.free.insert(slot);
    }
}
