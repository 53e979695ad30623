//! Symbolic contents of scalars and statistics, and the operands of updates.

use std::collections::BTreeSet;

use super::{Owner, Part, Value, Values, Violation, owners, params};
use crate::mesh::Group;
use crate::schedule::{BufferId, Op, Phase, Role};
use crate::wrap::UnitId;

impl Values<'_> {
    /// The scalars of a step with all parts included.
    pub(super) fn scalars(&self, reduced: bool) -> Value {
        let norms = if self.names.schedule.trains() { self.trained.clone() } else { BTreeSet::new() };
        Value::Scalars { losses: self.names.schedule.rounds, norms, reduced }
    }

    /// The statistics of a phase with all parts included.
    pub(super) fn statistics(&self, phase: usize, reduced: bool) -> Value {
        Value::Statistics { phase, parts: self.trained.clone(), reduced }
    }

    pub(super) fn begin_step(&mut self, at: usize, op: &Op) -> Result<(), Violation> {
        self.check_operands(at, op, [1, op.writes.len()])?;
        self.expect_contents(at, op.reads[0], Value::NotFinite)?;
        for &id in &op.writes {
            let (before, after) = match self.names.schedule.buffer(id).role {
                Role::Scalars => {
                    let norms = BTreeSet::new();
                    (Value::Nothing, Value::Scalars { losses: 0, norms, reduced: false })
                }
                Role::Statistics(phase) => {
                    (Value::Nothing, Value::Statistics { phase, parts: BTreeSet::new(), reduced: false })
                }
                _ => (Value::GradientOfLastStep, Value::Nothing),
            };
            self.replace(at, id, before, after)?;
        }
        Ok(())
    }

    /// Reads the total gradients of a unit, and adds their squares to the scalars.
    pub(super) fn add_square_norm(&mut self, at: usize, op: &Op, unit: UnitId) -> Result<(), Violation> {
        let segments = self.trained_segments(unit);
        self.check_operands(at, op, [segments, 1])?;
        let mut gradients = op.reads.iter().zip(owners(unit));
        gradients.try_for_each(|(&id, owner)| self.expect_contents(at, id, self.total(owner)))?;
        let losses = self.names.schedule.rounds;
        self.add_scalars(at, op.writes[0], [losses; 2], owners(unit).take(segments))
    }

    /// Adds losses (`losses[0]` micro-batches before, `losses[1]` after) or norms that are not yet included to the
    /// scalars.
    pub(super) fn add_scalars(
        &mut self,
        at: usize,
        buffer: BufferId,
        losses: [usize; 2],
        added: impl IntoIterator<Item = Owner>,
    ) -> Result<(), Violation> {
        let norms = match &self.contents[buffer.index()] {
            Value::Scalars { norms, .. } => norms.clone(),
            _ => BTreeSet::new(),
        };
        let added: BTreeSet<Owner> = added.into_iter().collect();
        let scalars = |losses, norms| Value::Scalars { losses, norms, reduced: false };
        self.replace(at, buffer, scalars(losses[0], &norms - &added), scalars(losses[1], &norms | &added))
    }

    pub(super) fn add_statistics(
        &mut self,
        at: usize,
        op: &Op,
        unit: UnitId,
        Phase(phase): Phase,
    ) -> Result<(), Violation> {
        self.update(at, op, unit, phase, 2, false)?;
        let buffer = op.writes[op.writes.len() - 1];
        let previous = match &self.contents[buffer.index()] {
            Value::Statistics { parts, .. } => parts.clone(),
            _ => BTreeSet::new(),
        };
        let added: BTreeSet<Owner> = owners(unit).take(self.trained_segments(unit)).collect();
        let [before, after] = [&previous - &added, &previous | &added].map(|parts| Value::Statistics {
            phase,
            parts,
            reduced: false,
        });
        self.replace(at, buffer, before, after)
    }

    /// The segments of a unit that have directions.
    fn direction_owners(&self, unit: UnitId) -> Vec<Owner> {
        let buffers = &self.names.schedule.lasting.units[unit.0];
        buffers.whole.iter().map(|&segment| (unit, segment)).collect()
    }

    pub(super) fn direct(&mut self, at: usize, op: &Op, unit: UnitId) -> Result<(), Violation> {
        let owners = self.direction_owners(unit);
        self.update(at, op, unit, 0, 1 + owners.len(), false)?;
        let rows = &op.writes[op.writes.len() - owners.len()..];
        let part = self.shard(unit);
        rows.iter().zip(owners).try_for_each(|(&id, owner)| {
            self.replace(at, id, Value::Nothing, Value::Direction { owner, part })
        })
    }

    pub(super) fn gather_directions(
        &mut self,
        at: usize,
        op: &Op,
        unit: UnitId,
        group: Group,
    ) -> Result<(), Violation> {
        let owners = self.direction_owners(unit);
        self.check_operands(at, op, [owners.len(); 2])?;
        for ((&read, &write), owner) in op.reads.iter().zip(&op.writes).zip(owners) {
            self.replace(at, read, Value::Direction { owner, part: Part::Of(group) }, Value::Nothing)?;
            self.replace(at, write, Value::Nothing, Value::Direction { owner, part: Part::Whole })?;
        }
        Ok(())
    }

    /// Checks an update, which gives up the directions of its unit and leaves the scratch empty.
    pub(super) fn check_update(&mut self, at: usize, op: &Op, unit: UnitId) -> Result<(), Violation> {
        let (owners, lasting) = (self.direction_owners(unit), &self.names.schedule.lasting);
        let scratch = lasting.scratch.filter(|_| !owners.is_empty());
        let extra_writes = owners.len() + usize::from(scratch.is_some());
        self.update(at, op, unit, lasting.statistics.len(), 1 + extra_writes, true)?;
        let (gathered, rest) = op.writes[op.writes.len() - extra_writes..].split_at(owners.len());
        gathered.iter().zip(owners).try_for_each(|(&id, owner)| {
            self.replace(at, id, Value::Direction { owner, part: Part::Whole }, Value::Nothing)
        })?;
        rest.iter().try_for_each(|&id| self.expect_contents(at, id, Value::Nothing))
    }

    /// Checks the operands that statistics, directions and updates have in common: `phases` phases of statistics are
    /// read; the shards of the unit and its state, `updated` or not, are written, followed by `extra_writes` buffers.
    pub(super) fn update(
        &mut self,
        at: usize,
        op: &Op,
        unit: UnitId,
        phases: usize,
        extra_writes: usize,
        updated: bool,
    ) -> Result<(), Violation> {
        let buffers = &self.names.schedule.lasting.units[unit.0];
        let (segments, written) = (buffers.gradient.len(), buffers.updated_len());
        let part = self.shard(unit);
        self.check_operands(at, op, [segments + 1 + phases, written + extra_writes])?;
        let written_by = buffers.updated(&op.writes);
        for (owner, (&gradient, [shard, state])) in owners(unit).zip(op.reads.iter().zip(written_by)) {
            self.expect_contents(at, gradient, self.total(owner))?;
            for &id in shard {
                let after = Value::Params { owner, part, updated };
                self.replace(at, id, params(owner, part), after)?;
            }
            for (tensor, &id) in state.iter().enumerate() {
                self.expect_contents(at, id, Value::State { owner, tensor })?;
            }
        }
        self.expect_contents(at, op.reads[segments], Value::Factors { of_this_step: true })?;
        for (phase, &id) in op.reads[segments + 1..].iter().enumerate() {
            self.expect_contents(at, id, self.statistics(phase, true))?;
        }
        self.expect_contents(at, op.writes[written], Value::NotFinite)
    }
}
