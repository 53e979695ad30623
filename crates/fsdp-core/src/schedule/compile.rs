//! The compiler: (blocks, layout, mesh, policy, rounds) to a schedule.
//!
//! This is the only place that knows policies. Per micro-batch it walks the compute steps and puts around
//! them: all-gathers at their issue points, resharding after last uses, gradient slots from the first write
//! to the last, and reductions. The sharded result of a reduction is folded one unit later, so that the host
//! does not wait for a reduce-scatter that it just issued.
//!
//! Under CPU offload a shard is uploaded into a staging slot where its all-gather is issued, and the slot is free
//! again where the unit is first used: there the all-gather is complete anyway. The total of a step is measured
//! where it is complete, and downloaded behind that. Sums over micro-batches stay on the device until then; if there
//! is nothing to sum, reduced gradients only pass through slots.

mod gradients;

use std::collections::{BTreeMap, BTreeSet};

use super::emit::Emitter;
use super::policy::{Offload, Policy};
use super::residency::{Residency, Step, evaluation_steps, issue_points, residencies, training_steps};
use super::{OpKind, Schedule, SectionKind, Slot, Source, Tenancy};
use crate::checker::Violation;
use crate::error::Error;
use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::rank::Mesh;

use gradients::Reduction;

/// What schedules are compiled from.
#[derive(Clone, Copy, Debug)]
pub struct Compiler<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Its layout; made for the mesh's shard axis.
    pub layout: &'a Layout,
    /// The mesh.
    pub mesh: Mesh,
    /// The (resolved) policy.
    pub policy: &'a Policy,
    /// Phases of cross-rank statistics of the update rule.
    pub statistics_phases: usize,
}

/// The schedule of one training step with `rounds` micro-batches per rank.
///
/// # Errors
/// [`Error::Schedule`] when the compiler itself broke a rule: a bug, reported like any unsafe schedule.
///
/// # Panics
/// When `rounds` is zero, or the layout is not made for the mesh.
pub fn compile_step(compiler: &Compiler<'_>, rounds: usize) -> Result<Schedule, Error> {
    assert!(rounds > 0, "a step has at least one micro-batch");
    assert_eq!(compiler.layout.shards, compiler.mesh.shards(), "the layout is made for the mesh");
    let steps = training_steps(compiler.spec, compiler.layout, compiler.policy.checkpointing);
    let mut build = Build::new(compiler, &steps, rounds, true);
    build.step(rounds).map_err(Error::Schedule)?;
    Ok(build.into_schedule(rounds))
}

/// The schedule of evaluating `rounds` batches per rank: forward only.
///
/// # Errors
/// As [`compile_step`].
///
/// # Panics
/// As [`compile_step`].
pub fn compile_evaluation(compiler: &Compiler<'_>, rounds: usize) -> Result<Schedule, Error> {
    assert!(rounds > 0, "an evaluation has at least one batch");
    assert_eq!(compiler.layout.shards, compiler.mesh.shards(), "the layout is made for the mesh");
    let steps = evaluation_steps(compiler.spec, compiler.layout);
    let mut build = Build::new(compiler, &steps, rounds, false);
    build.evaluation(rounds).map_err(Error::Schedule)?;
    Ok(build.into_schedule(rounds))
}

/// Slots of equal lengths, handed out by lifetime.
#[derive(Default)]
struct SlotTable {
    slots: Vec<Slot>,
    free: BTreeSet<usize>,
}

impl SlotTable {
    fn take(&mut self, lens: &[usize]) -> usize {
        if let Some(&slot) = self.free.iter().find(|&&slot| self.slots[slot].lens == lens) {
            self.free.remove(&slot);
            return slot;
        }
        self.slots.push(Slot { lens: lens.to_vec() });
        self.slots.len() - 1
    }

    fn give_back(&mut self, slot: usize) {
        self.free.insert(slot);
    }
}

struct Build<'a> {
    compiler: &'a Compiler<'a>,
    steps: &'a [Step],
    stays: Vec<Residency>,
    issue_at: Vec<usize>,
    /// First and last step that writes a unit's gradient.
    writes: BTreeMap<usize, (usize, usize)>,
    rounds: usize,
    emit: Emitter<'a>,
    slots: SlotTable,
    gradients: SlotTable,
    staging: SlotTable,
    reduced: SlotTable,
    resident: BTreeMap<usize, usize>,
    /// Staging slots of units that are not used yet.
    staged: BTreeMap<usize, usize>,
    /// A reduced unit whose result is not folded yet, and the slots that it may still use.
    unfolded: Option<Reduction>,
    /// A unit whose sum over replicas was issued last, and which is measured behind it.
    unmeasured: Option<Reduction>,
}

impl<'a> Build<'a> {
    fn new(compiler: &'a Compiler<'a>, steps: &'a [Step], rounds: usize, training: bool) -> Self {
        let stays = residencies(compiler.layout, steps, compiler.policy);
        let issue_at = issue_points(steps, &stays, compiler.policy);
        let mut writes: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        for (at, step) in steps.iter().enumerate() {
            for &unit in &step.gradients {
                writes.entry(unit).or_insert((at, at)).1 = at;
            }
        }
        let phases = if training { compiler.statistics_phases } else { 0 };
        let emit = Emitter::new(Tenancy::new(compiler.spec, compiler.layout), phases);
        Self {
            compiler,
            steps,
            stays,
            issue_at,
            writes,
            rounds,
            emit,
            slots: SlotTable::default(),
            gradients: SlotTable::default(),
            staging: SlotTable::default(),
            reduced: SlotTable::default(),
            resident: BTreeMap::new(),
            staged: BTreeMap::new(),
            unfolded: None,
            unmeasured: None,
        }
    }

    fn into_schedule(self, rounds: usize) -> Schedule {
        let mut keeps_sub_shard = vec![false; self.compiler.layout.units.len()];
        for stay in self.stays.iter().filter(|stay| stay.keep_sub_shard) {
            keeps_sub_shard[stay.unit] = true;
        }
        Schedule {
            ops: self.emit.ops,
            sections: self.emit.sections,
            slots: self.slots.slots,
            gradient_slots: self.gradients.slots,
            staging_slots: self.staging.slots,
            reduced_slots: self.reduced.slots,
            rounds,
            keeps_sub_shard,
        }
    }

    fn step(&mut self, rounds: usize) -> Result<(), Violation> {
        self.emit.section(SectionKind::Prologue);
        self.push(OpKind::BeginStep)?;
        for round in 0..rounds {
            self.micro_batch(round)?;
        }
        self.emit.section(SectionKind::Epilogue);
        self.epilogue()
    }

    fn evaluation(&mut self, rounds: usize) -> Result<(), Violation> {
        self.emit.section(SectionKind::Prologue);
        self.push(OpKind::BeginStep)?;
        for round in 0..rounds {
            self.micro_batch(round)?;
        }
        self.emit.section(SectionKind::Epilogue);
        self.push(OpKind::ReduceScalars)
    }

    fn push(&mut self, kind: OpKind) -> Result<(), Violation> {
        self.emit.push(kind).map(|_| ())
    }

    fn micro_batch(&mut self, round: usize) -> Result<(), Violation> {
        self.emit.section(SectionKind::MicroBatch(round));
        self.push(OpKind::BeginMicroBatch { round })?;
        for at in 0..self.steps.len() {
            for stay in 0..self.stays.len() {
                if self.issue_at[stay] == at {
                    self.gather(stay)?;
                }
            }
            for unit in self.steps[at].gradients.clone() {
                if self.writes[&unit].0 == at {
                    self.open_gradient(unit)?;
                }
            }
            self.push(self.steps[at].kind)?;
            let steps = self.steps;
            for &unit in &steps[at].units {
                if let Some(staging) = self.staged.remove(&unit) {
                    self.staging.give_back(staging);
                }
            }
            for stay in 0..self.stays.len() {
                if self.stays[stay].to == at {
                    self.reshard(stay)?;
                }
            }
            for unit in self.steps[at].gradients.clone() {
                if self.writes[&unit].1 == at {
                    self.close_gradient(unit, round)?;
                }
            }
        }
        self.fold(round)?;
        self.measure()
    }

    fn gather(&mut self, stay: usize) -> Result<(), Violation> {
        let Residency { unit, mut source, purpose, .. } = self.stays[stay];
        let segments = &self.compiler.layout.units[unit].segments;
        let lens: Vec<usize> = segments.iter().map(|segment| segment.unsharded_len()).collect();
        if (self.offload(), source) == (Offload::Cpu, Source::Shard) {
            let lens: Vec<usize> = segments.iter().map(|segment| segment.shard_len()).collect();
            let staging = self.staging.take(&lens);
            self.staged.insert(unit, staging);
            self.push(OpKind::Upload { unit, staging })?;
            source = Source::Staged(staging);
        }
        let slot = self.slots.take(&lens);
        self.resident.insert(unit, slot);
        self.push(OpKind::AllGather { unit, slot, source, purpose })
    }

    fn offload(&self) -> Offload {
        self.compiler.policy.offload
    }

    fn reshard(&mut self, stay: usize) -> Result<(), Violation> {
        let unit = self.stays[stay].unit;
        if self.stays[stay].keep_sub_shard {
            self.push(OpKind::KeepSubShard { unit })?;
        }
        self.push(OpKind::Reshard { unit })?;
        if let Some(slot) = self.resident.remove(&unit) {
            self.slots.give_back(slot);
        }
        Ok(())
    }

    fn epilogue(&mut self) -> Result<(), Violation> {
        let units: Vec<usize> = (0..self.compiler.layout.units.len())
            .filter(|&unit| self.compiler.layout.units[unit].is_trainable())
            .collect();
        self.push(OpKind::ReduceScalars)?;
        for phase in 0..self.compiler.statistics_phases {
            for &unit in &units {
                self.push(OpKind::Statistics { unit, phase })?;
            }
            self.push(OpKind::ReduceStatistics { phase })?;
        }
        units.iter().try_for_each(|&unit| self.push(OpKind::Update { unit }))
    }
}
