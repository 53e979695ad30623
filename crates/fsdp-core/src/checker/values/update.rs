//! Symbolic contents of scalars and statistics, and the operands of updates.

use std::collections::BTreeSet;

use super::{Owner, Part, Value, Values, Violation, owners, params};
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
        self.count(at, op, [1, op.writes.len()])?;
        self.keep(at, op.reads[0], Value::NotFinite)?;
        for &id in &op.writes {
            let (before, behind) = match self.names.schedule.buffer(id).role {
                Role::Scalars => {
                    let norms = BTreeSet::new();
                    (Value::Nothing, Value::Scalars { losses: 0, norms, reduced: false })
                }
                Role::Statistics(phase) => {
                    (Value::Nothing, Value::Statistics { phase, parts: BTreeSet::new(), reduced: false })
                }
                _ => (Value::GradientOfLastStep, Value::Nothing),
            };
            self.turn(at, id, before, behind)?;
        }
        Ok(())
    }

    /// Adds losses (`losses[0]` micro-batches before, `losses[1]` after) or norms that are not yet included to the
    /// scalars.
    pub(super) fn note(
        &mut self,
        at: usize,
        buffer: BufferId,
        losses: [usize; 2],
        more: impl IntoIterator<Item = Owner>,
    ) -> Result<(), Violation> {
        let held = match &self.held[buffer.index()] {
            Value::Scalars { norms, .. } => norms.clone(),
            _ => BTreeSet::new(),
        };
        let more: BTreeSet<Owner> = more.into_iter().collect();
        let scalars = |losses, norms| Value::Scalars { losses, norms, reduced: false };
        self.turn(at, buffer, scalars(losses[0], &held - &more), scalars(losses[1], &held | &more))
    }

    pub(super) fn part_of_statistics(
        &mut self,
        at: usize,
        op: &Op,
        unit: UnitId,
        Phase(phase): Phase,
    ) -> Result<(), Violation> {
        self.update(at, op, unit, phase, 2, false)?;
        let buffer = op.writes[op.writes.len() - 1];
        let held = match &self.held[buffer.index()] {
            Value::Statistics { parts, .. } => parts.clone(),
            _ => BTreeSet::new(),
        };
        let own: BTreeSet<Owner> = owners(unit).take(self.trained_segments(unit)).collect();
        let [before, behind] =
            [&held - &own, &held | &own].map(|parts| Value::Statistics { phase, parts, reduced: false });
        self.turn(at, buffer, before, behind)
    }

    /// The segments of a unit that have directions.
    fn directed(&self, unit: UnitId) -> Vec<Owner> {
        let own = &self.names.schedule.lasting.units[unit.0];
        own.whole.iter().map(|&segment| (unit, segment)).collect()
    }

    pub(super) fn direct(&mut self, at: usize, op: &Op, unit: UnitId) -> Result<(), Violation> {
        let directed = self.directed(unit);
        self.update(at, op, unit, 0, 1 + directed.len(), false)?;
        let rows = &op.writes[op.writes.len() - directed.len()..];
        rows.iter().zip(directed).try_for_each(|(&id, owner)| {
            self.turn(at, id, Value::Nothing, Value::Direction { owner, part: Part::Shard })
        })
    }

    pub(super) fn gather_directions(&mut self, at: usize, op: &Op, unit: UnitId) -> Result<(), Violation> {
        let directed = self.directed(unit);
        self.count(at, op, [directed.len(); 2])?;
        for ((&read, &write), owner) in op.reads.iter().zip(&op.writes).zip(directed) {
            self.turn(at, read, Value::Direction { owner, part: Part::Shard }, Value::Nothing)?;
            self.turn(at, write, Value::Nothing, Value::Direction { owner, part: Part::Whole })?;
        }
        Ok(())
    }

    /// Checks an update, which gives up the directions of its unit and leaves the scratch empty.
    pub(super) fn check_update(&mut self, at: usize, op: &Op, unit: UnitId) -> Result<(), Violation> {
        let (directed, lasting) = (self.directed(unit), &self.names.schedule.lasting);
        let scratch = lasting.scratch.filter(|_| !directed.is_empty());
        let more = directed.len() + usize::from(scratch.is_some());
        self.update(at, op, unit, lasting.statistics.len(), 1 + more, true)?;
        let (gathered, rest) = op.writes[op.writes.len() - more..].split_at(directed.len());
        gathered.iter().zip(directed).try_for_each(|(&id, owner)| {
            self.turn(at, id, Value::Direction { owner, part: Part::Whole }, Value::Nothing)
        })?;
        rest.iter().try_for_each(|&id| self.keep(at, id, Value::Nothing))
    }

    /// Checks the operands that statistics, directions and updates have in common: `phases` phases of statistics are
    /// read; the shards of the unit and its state, `updated` or not, are written, followed by `more` buffers.
    pub(super) fn update(
        &mut self,
        at: usize,
        op: &Op,
        unit: UnitId,
        phases: usize,
        more: usize,
        updated: bool,
    ) -> Result<(), Violation> {
        let own = &self.names.schedule.lasting.units[unit.0];
        let (segments, stride) = (own.gradient.len(), own.stride());
        let tensors = own.state.first().map_or(0, Vec::len);
        self.count(at, op, [segments + 1 + phases, segments * stride + more])?;
        for (owner, (&gradient, shard)) in
            owners(unit).zip(op.reads.iter().zip(op.writes.chunks(stride))).take(segments)
        {
            self.keep(at, gradient, self.total(owner))?;
            let (shard, state) = shard.split_at(stride - tensors);
            for &id in shard {
                let behind = Value::Params { owner, part: Part::Shard, updated };
                self.turn(at, id, params(owner, Part::Shard), behind)?;
            }
            for (tensor, &id) in state.iter().enumerate() {
                self.keep(at, id, Value::State { owner, tensor })?;
            }
        }
        self.keep(at, op.reads[segments], Value::Factors { of_this_step: true })?;
        for (phase, &id) in op.reads[segments + 1..].iter().enumerate() {
            self.keep(at, id, self.statistics(phase, true))?;
        }
        self.keep(at, op.writes[segments * stride], Value::NotFinite)
    }
}
