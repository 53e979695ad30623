//! The compiler: from (blocks, layout, mesh, policy, rounds) to a schedule.
//!
//! This is the only module that interprets policies. Per micro-batch it walks the compute steps and inserts all-gathers
//! at their issue points, resharding after last uses, gradient slots from the first write to the last, and reductions.
//! The sharded result of a reduction is used one unit later, so that the host does not wait for a reduce-scatter that
//! it just issued. The compiler also decides which sums are added when, and in which buffers: it turns the tree of
//! [`crate::tree`] into a list of additions.
//!
//! With CPU offload, a shard is uploaded into a staging slot where its all-gather is issued. The slot is free again
//! after the unit's first use, which waits for the all-gather anyway. The norm of a step's total gradient is computed
//! as soon as the total is complete, and the total is then downloaded. Until then, sums over micro-batches stay on the
//! device; without sums, reduced gradients only pass through slots.

mod declare;
mod epilogue;
mod gradients;

use std::collections::BTreeMap;

use super::emit::Emitter;
use super::live::{ComputeStep, LiveRange, compute_steps, issue_points, live_ranges};
use super::policy::{Offload, Policy};
use super::{BufferId, OpKind, Role, Schedule, SectionKind, Source};
use crate::collective::ReduceOp;
use crate::layout::Layout;
use crate::memory::Category;
use crate::mesh::{Axis, Group, Mesh};
use crate::model::ModelSpec;
use crate::program::{BlockCall, Pass, Round};
use crate::update::RuleDecl;
use crate::wrap::UnitId;

use declare::{Declared, Slots};
use gradients::{GradientBuffers, Reduction, Sums};

/// The inputs of schedule compilation.
#[derive(Clone, Copy, Debug)]
pub struct Compiler<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// The layout over the mesh's shard axis.
    pub layout: &'a Layout,
    /// The mesh.
    pub mesh: Mesh,
    /// The (resolved) policy.
    pub policy: &'a Policy,
    /// The buffers that the update rule declares.
    pub rule: &'a RuleDecl,
}

/// Compiles the schedule of one training step with `rounds` micro-batches per rank.
///
/// # Panics
/// When `rounds` is zero, or the layout was made for another mesh.
pub fn compile_step(compiler: &Compiler<'_>, rounds: usize) -> Schedule {
    let pass = Pass::Train(compiler.policy.checkpointing);
    let steps = compute_steps(compiler.spec, compiler.layout, pass);
    let ranges = live_ranges(compiler.layout, &steps, compiler.policy);
    let declared = Declared::of_step(compiler, &ranges, rounds);
    let mut build = Build::new(compiler, (pass, &steps), ranges, declared, rounds);
    build.micro_batches();
    build.epilogue();
    build.into_schedule()
}

/// Compiles the schedule that evaluates `rounds` batches per rank: forward only, with the buffers of `step`.
///
/// # Panics
/// As [`compile_step`].
pub fn compile_evaluation(compiler: &Compiler<'_>, step: &Schedule, rounds: usize) -> Schedule {
    let steps = compute_steps(compiler.spec, compiler.layout, Pass::Evaluate);
    let ranges = live_ranges(compiler.layout, &steps, compiler.policy);
    evaluate(Build::new(compiler, (Pass::Evaluate, &steps), ranges, Declared::of_evaluation(step), rounds))
}

fn evaluate(mut build: Build<'_>) -> Schedule {
    build.micro_batches();
    let scalars = vec![build.declared.lasting.scalars];
    build.emit.push(OpKind::ReduceScalars, Vec::new(), scalars);
    build.into_schedule()
}

/// Compiles the schedule that evaluates `rounds` batches per rank with buffers of its own: no parameter is trainable,
/// so there are no gradients and no optimizer state.
///
/// # Panics
/// As [`compile_step`]; also when a parameter is trainable.
pub fn compile_evaluation_alone(compiler: &Compiler<'_>, rounds: usize) -> Schedule {
    let is_trained = compiler.spec.params.iter().any(|param| param.trainable);
    assert!(!is_trained, "an evaluation by itself trains nothing");
    let steps = compute_steps(compiler.spec, compiler.layout, Pass::Evaluate);
    let ranges = live_ranges(compiler.layout, &steps, compiler.policy);
    let declared = Declared::of_step(compiler, &ranges, rounds);
    evaluate(Build::new(compiler, (Pass::Evaluate, &steps), ranges, declared, rounds))
}

struct Build<'a> {
    compiler: &'a Compiler<'a>,
    pass: Pass,
    steps: &'a [ComputeStep],
    ranges: Vec<LiveRange>,
    issue_at: Vec<usize>,
    /// The first and last step that write a unit's gradient.
    written: BTreeMap<UnitId, (usize, usize)>,
    rounds: usize,
    emit: Emitter,
    declared: Declared,
    slots: Slots,
    gradient_slots: Slots,
    staging_slots: Slots,
    reduced_slots: Slots,
    direction_slots: Slots,
    /// Gathered units: slot and buffers.
    gathered: BTreeMap<UnitId, (usize, Vec<BufferId>)>,
    /// Staging slots of units that were uploaded and not yet used.
    staged: BTreeMap<UnitId, usize>,
    /// Gradients that are open for writing, one per chunk.
    open: BTreeMap<UnitId, Vec<GradientBuffers>>,
    sums: Vec<Sums>,
    whole_sums: Vec<Sums>,
    /// The last reductions, of a unit and its experts, whose results are not used yet.
    pending_reductions: Vec<Reduction>,
    /// The unit whose all-reduce over replicas was issued last; its norm is computed after that.
    pending_norm: Option<(UnitId, GradientBuffers)>,
}

impl<'a> Build<'a> {
    fn new(
        compiler: &'a Compiler<'a>,
        (pass, steps): (Pass, &'a [ComputeStep]),
        ranges: Vec<LiveRange>,
        mut declared: Declared,
        rounds: usize,
    ) -> Self {
        assert!(rounds > 0, "there is at least one micro-batch");
        assert_eq!(compiler.layout.shards, compiler.mesh.shards(), "the layout is made for the mesh");
        let mut written: BTreeMap<UnitId, (usize, usize)> = BTreeMap::new();
        for (at, step) in steps.iter().enumerate() {
            for &unit in &step.gradients {
                written.entry(unit).or_insert((at, at)).1 = at;
            }
        }
        let accumulation_order = compiler.policy.accumulation_order;
        let slots =
            |role: fn(usize) -> Role, category| Slots::new(role, category).declared(&declared.buffers);
        let sums = |sets: Vec<Vec<Vec<BufferId>>>| -> Vec<Sums> {
            sets.into_iter().map(|sets| Sums::new(accumulation_order, sets)).collect()
        };
        Self {
            compiler,
            pass,
            steps,
            issue_at: issue_points(compiler.layout, steps, &ranges, compiler.policy),
            ranges,
            written,
            rounds,
            emit: Emitter::default(),
            slots: slots(Role::Slot, Category::Unsharded),
            gradient_slots: slots(Role::GradientSlot, Category::GradientSlot),
            staging_slots: slots(Role::StagingSlot, Category::HostStaging),
            reduced_slots: slots(Role::ReducedSlot, Category::HostStaging),
            direction_slots: slots(Role::DirectionSlot, Category::ShardedGradient),
            sums: sums(std::mem::take(&mut declared.sums)),
            whole_sums: sums(std::mem::take(&mut declared.whole_sums)),
            declared,
            gathered: BTreeMap::new(),
            staged: BTreeMap::new(),
            open: BTreeMap::new(),
            pending_reductions: Vec::new(),
            pending_norm: None,
        }
    }

    fn into_schedule(self) -> Schedule {
        let (Compiler { policy, mesh, .. }, chunks) = (*self.compiler, self.chunks());
        Schedule {
            buffers: self.declared.buffers,
            lasting: self.declared.lasting,
            ops: self.emit.ops,
            sections: self.emit.sections,
            pass: self.pass,
            rounds: self.rounds,
            chunks,
            mesh,
            averaged_ranks: match policy.reduce_op {
                ReduceOp::Sum => 1,
                ReduceOp::Average => mesh.world(),
            },
        }
    }

    /// Emits everything before the epilogue.
    fn micro_batches(&mut self) {
        self.emit.section(SectionKind::Prologue);
        let lasting = &self.declared.lasting;
        let mut writes = vec![lasting.scalars];
        writes.extend(lasting.statistics.iter().filter(|_| self.pass != Pass::Evaluate));
        writes.extend(lasting.units.iter().flat_map(|unit| &unit.gradient));
        self.emit.push(OpKind::BeginStep, vec![lasting.not_finite], writes);
        for round in 0..self.rounds {
            self.micro_batch(round);
        }
        self.emit.section(SectionKind::Epilogue);
    }

    fn micro_batch(&mut self, round: usize) {
        self.emit.section(SectionKind::MicroBatch(Round(round)));
        self.emit.push(OpKind::BeginMicroBatch(Round(round)), Vec::new(), Vec::new());
        let steps = self.steps;
        for (at, step) in steps.iter().enumerate() {
            for range in 0..self.ranges.len() {
                if self.issue_at[range] == at {
                    self.gather(range);
                }
            }
            for &unit in &step.gradients {
                if self.written[&unit].0 == at {
                    self.open_gradient(unit);
                }
            }
            self.compute(step);
            for unit in &step.units {
                if let Some(staging) = self.staged.remove(unit) {
                    self.staging_slots.give_back(staging);
                }
            }
            for range in 0..self.ranges.len() {
                if self.ranges[range].to == at {
                    self.reshard(range);
                }
            }
            for &unit in &step.gradients {
                if self.written[&unit].1 == at {
                    self.close_gradient(unit, round);
                }
            }
        }
        self.finish_reductions(round, None);
        self.emit_square_norm();
    }

    /// Chunks of each sample on a rank.
    fn chunks(&self) -> usize {
        self.compiler.policy.chunks / self.compiler.mesh.size(Axis::Context)
    }

    /// Gradients of a unit that the calls of a micro-batch compute, to be added: one for each chunk, and for experts one
    /// for each chunk of each rank of the expert axis.
    fn leaves(&self, unit: UnitId) -> usize {
        self.chunks() * self.compiler.layout.unit(unit).blocks
    }

    fn compute(&mut self, step: &ComputeStep) {
        let (reads, mut writes) = self.operands(step.call);
        if step.call.is_last() {
            writes.push(self.declared.lasting.scalars);
        }
        self.emit.push(OpKind::Call(step.call), reads, writes);
    }

    /// The buffers with the parameters of a block, and the buffers for the gradients of its trainable parameters.
    fn operands(&self, call: BlockCall) -> (Vec<BufferId>, Vec<BufferId>) {
        let (mut reads, mut targets) = (Vec::new(), Vec::new());
        for id in self.compiler.layout.called(&self.compiler.spec.block(call.block()).params) {
            let (unit, segment, _) = self.compiler.layout.find(id).expect("every parameter lies in a unit");
            reads.push(self.gathered[&unit].1[segment.0]);
            if call.is_backward() && self.compiler.spec.param(id).trainable {
                targets.push((unit, segment.0));
            }
        }
        let leaves = targets.iter().map(|(unit, _)| self.leaves(*unit)).max().unwrap_or(0);
        let of_leaf = |leaf: usize| {
            let open = targets
                .iter()
                .filter_map(move |(unit, segment)| Some((self.open[unit].get(leaf)?, *segment)));
            open.map(|(gradient, segment)| gradient.buffers[segment])
        };
        (reads, (0..leaves).flat_map(of_leaf).collect())
    }

    fn gather(&mut self, range: usize) {
        let LiveRange { unit, mut source, purpose, .. } = self.ranges[range];
        let segments = &self.compiler.layout.unit(unit).segments;
        let mut reads = match source {
            Source::SubShard => self.declared.sub_shards[unit.0].clone(),
            _ => self.declared.lasting.units[unit.0].shard(),
        };
        if (self.compiler.policy.offload, source) == (Offload::Cpu, Source::Shard) {
            let sizes = segments.iter().map(|segment| (segment.dtype, segment.shard_len())).collect();
            let (staging, staged) = self.staging_slots.take(&mut self.declared, sizes);
            self.staged.insert(unit, staging);
            self.emit.push(OpKind::Upload(unit), reads, staged.clone());
            (source, reads) = (Source::Staged, staged);
        }
        let sizes = segments.iter().map(|segment| (segment.dtype, segment.unsharded_len())).collect();
        let (slot, writes) = self.slots.take(&mut self.declared, sizes);
        let group = if source == Source::SubShard { self.sub_group(unit) } else { self.group(unit) };
        self.emit.push(OpKind::AllGather { unit, source, group, purpose }, reads, writes.clone());
        self.gathered.insert(unit, (slot, writes));
    }

    /// The ranks that hold a unit together.
    fn group(&self, unit: UnitId) -> Group {
        self.compiler.layout.unit(unit).group()
    }

    /// The ranks that keep a unit together after forward.
    fn sub_group(&self, unit: UnitId) -> Group {
        let kept = self.compiler.policy.reshard_after_forward.sub_group(self.compiler.layout.unit(unit));
        kept.expect("a sub-shard of the unit is kept")
    }

    fn reshard(&mut self, range: usize) {
        let LiveRange { unit, keep_sub_shard, .. } = self.ranges[range];
        let (slot, buffers) = self.gathered.remove(&unit).expect("a unit is gathered before it is given up");
        if keep_sub_shard {
            let kept = self.declared.sub_shards[unit.0].clone();
            let group = self.sub_group(unit);
            self.emit.push(OpKind::KeepSubShard { unit, group }, buffers.clone(), kept);
        }
        self.emit.push(OpKind::Reshard(unit), Vec::new(), buffers);
        self.slots.give_back(slot);
    }
}
