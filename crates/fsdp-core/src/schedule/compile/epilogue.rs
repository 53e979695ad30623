//! The operations after the last micro-batch: scalars of the step, cross-rank inputs of the update rule, and updates.
//!
//! The directions of a unit are prepared while the unit before it is updated: its rows are computed, and their
//! all-gather is issued, one unit ahead. They are gathered into gradient slots, which are free by then.

use super::super::{BufferId, OpKind, Phase};
use super::Build;
use crate::layout::Segment;
use crate::wrap::UnitId;

/// The next unit to be updated, with its directions in flight.
struct PendingUpdate {
    unit: UnitId,
    /// Gradient slot, direction slot, and the gathered directions per segment that has some; `None` without directions.
    directions: Option<(usize, usize, Vec<BufferId>)>,
}

impl Build<'_> {
    pub(super) fn epilogue(&mut self) {
        let lasting = &self.declared.lasting;
        let units = self.compiler.layout.unit_ids();
        let units: Vec<UnitId> = units.filter(|unit| !lasting.units[unit.0].gradient.is_empty()).collect();
        self.emit.push(OpKind::ReduceScalars, Vec::new(), vec![lasting.scalars, lasting.factors]);
        for (phase, &statistics) in lasting.statistics.iter().enumerate() {
            for &unit in &units {
                let (reads, mut writes) = self.declared.update(unit, &lasting.statistics[..phase]);
                writes.push(statistics);
                self.emit.push(OpKind::Statistics { unit, phase: Phase(phase) }, reads, writes);
            }
            let phase = Phase(phase);
            self.emit.push(OpKind::ReduceStatistics(phase), Vec::new(), vec![statistics]);
        }
        let mut pending: Option<PendingUpdate> = None;
        for &unit in &units {
            let directions = self.directions(unit);
            if let Some(previous) = pending.replace(PendingUpdate { unit, directions }) {
                self.update(previous);
            }
        }
        if let Some(last) = pending {
            self.update(last);
        }
    }

    /// Emits the operations that compute and gather the directions of a unit, if it has some.
    fn directions(&mut self, unit: UnitId) -> Option<(usize, usize, Vec<BufferId>)> {
        let segment_ids = self.declared.lasting.units[unit.0].whole.clone();
        if segment_ids.is_empty() {
            return None;
        }
        // Trainable segments come first, so a segment's number is also its index among these.
        let of_shard = self.gradient_sizes(unit, Segment::shard_len);
        let of_shard = segment_ids.iter().map(|segment| of_shard[segment.0]).collect();
        let unsharded = self.gradient_sizes(unit, Segment::unsharded_len);
        let (rows_slot, rows) = self.direction_slots.take(&mut self.declared, of_shard);
        let (slot, buffers) = self.gradient_slots.take(&mut self.declared, unsharded);
        let gathered: Vec<BufferId> = segment_ids.iter().map(|segment| buffers[segment.0]).collect();
        let (reads, mut writes) = self.declared.update(unit, &[]);
        writes.extend(&rows);
        self.emit.push(OpKind::Direct(unit), reads, writes);
        self.emit.push(OpKind::GatherDirections { unit, group: self.group(unit) }, rows, gathered.clone());
        Some((slot, rows_slot, gathered))
    }

    fn update(&mut self, PendingUpdate { unit, directions }: PendingUpdate) {
        let (reads, mut writes) = self.declared.update(unit, &self.declared.lasting.statistics);
        let Some((slot, rows_slot, gathered)) = directions else {
            self.emit.push(OpKind::Update(unit), reads, writes);
            return;
        };
        writes.extend(gathered);
        writes.extend(self.declared.lasting.scratch);
        self.emit.push(OpKind::Update(unit), reads, writes);
        self.gradient_slots.give_back(slot);
        self.direction_slots.give_back(rows_slot);
    }
}
