//! A schedule as text, for people: one line per operation, equal micro-batches shown once.

use std::fmt::Write;

use super::{Op, OpId, OpKind, Schedule, Section, SectionKind, Source};
use crate::comm::Purpose;
use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::program::ForwardMode;

impl Schedule {
    /// The schedule as lines of `index queue operation (waits)`. Consecutive micro-batches that differ only
    /// in their number are printed once.
    pub fn render(&self, spec: &ModelSpec, layout: &Layout) -> String {
        let mut text = String::new();
        let mut at = 0;
        while at < self.sections.len() {
            let section = &self.sections[at];
            let alike = self.sections[at + 1..]
                .iter()
                .take_while(|other| self.normalized(other) == self.normalized(section))
                .count();
            let _ = match section.kind {
                SectionKind::Prologue => writeln!(text, "prologue"),
                SectionKind::MicroBatch(round) if alike > 0 => {
                    writeln!(text, "micro-batches {round} to {} (alike)", round + alike)
                }
                SectionKind::MicroBatch(round) => writeln!(text, "micro-batch {round}"),
                SectionKind::Epilogue => writeln!(text, "epilogue"),
            };
            for index in section.start..section.end {
                let line = self.line(index, spec, layout);
                let _ = writeln!(text, "{line}");
            }
            at += 1 + alike;
        }
        text
    }

    fn line(&self, index: usize, spec: &ModelSpec, layout: &Layout) -> String {
        let op = &self.ops[index];
        let queue_width = self.ops.iter().map(|op| op.kind.queue().name().len()).fold(8, usize::max);
        let mut line = format!(
            "{index:>5}  {:<queue_width$} {}",
            op.kind.queue().name(),
            describe(&op.kind, spec, layout)
        );
        if !op.waits.is_empty() {
            let waits: Vec<String> = op.waits.iter().map(|wait| wait.0.to_string()).collect();
            let _ = write!(line, "  (after {})", waits.join(", "));
        }
        line
    }

    /// The operations of a section without what differs between equal micro-batches: the round, and the
    /// absolute position of waits.
    fn normalized(&self, section: &Section) -> Vec<Op> {
        let relative = |ids: &[OpId]| ids.iter().map(|id| OpId(id.0.wrapping_sub(section.start))).collect();
        self.ops[section.start..section.end]
            .iter()
            .map(|op| Op {
                kind: match op.kind {
                    OpKind::BeginMicroBatch { .. } => OpKind::BeginMicroBatch { round: 0 },
                    kind => kind,
                },
                waits: relative(&op.waits),
                joins: relative(&op.joins),
            })
            .collect()
    }
}

/// An operation with the names of its unit or block.
pub(crate) fn describe(kind: &OpKind, spec: &ModelSpec, layout: &Layout) -> String {
    let name = kind.name();
    let unit_name = |unit: usize| &layout.units[unit].name;
    match *kind {
        OpKind::BeginMicroBatch { round } => format!("{name} {round}"),
        OpKind::AllGather { unit, slot, source, purpose } => {
            let from = match source {
                Source::Shard => String::new(),
                Source::SubShard => " from sub-shard".into(),
                Source::Staged(staging) => format!(" from staging slot {staging}"),
            };
            let pass = if purpose == Purpose::Backward { "backward" } else { "forward" };
            format!("{name} {} -> slot {slot}{from}, for {pass}", unit_name(unit))
        }
        OpKind::Upload { unit, staging } => format!("{name} {} -> staging slot {staging}", unit_name(unit)),
        OpKind::ReduceScatter { unit, slot: Some(slot) } => {
            format!("{name} {} -> reduced slot {slot}", unit_name(unit))
        }
        OpKind::Download { unit, slot: Some(slot) } => {
            format!("{name} {} from reduced slot {slot}", unit_name(unit))
        }
        OpKind::Forward { block, mode } => {
            let note = match mode {
                ForwardMode::Checkpoint => " (checkpointed)",
                ForwardMode::CheckpointProducts => " (checkpointed, products kept)",
                _ => "",
            };
            format!("{name} {}{note}", spec.block(block).name)
        }
        OpKind::Finish { block, .. } | OpKind::Backward { block } => {
            format!("{name} {}", spec.block(block).name)
        }
        OpKind::OpenGradient { unit, slot } => {
            format!("{name} {} in gradient slot {slot}", unit_name(unit))
        }
        OpKind::KeepSubShard { unit }
        | OpKind::Reshard { unit }
        | OpKind::CloseGradient { unit }
        | OpKind::ReduceScatter { unit, slot: None }
        | OpKind::Download { unit, slot: None }
        | OpKind::AllReduceReplicas { unit }
        | OpKind::SquareNorm { unit }
        | OpKind::Update { unit } => format!("{name} {}", unit_name(unit)),
        OpKind::FoldUnsharded { unit, last } | OpKind::Fold { unit, last } => {
            format!("{name} {}{}", unit_name(unit), if last { ", the last" } else { "" })
        }
        OpKind::Statistics { unit, phase } => format!("{name} {} of {}", phase, unit_name(unit)),
        OpKind::ReduceStatistics { phase } => format!("{name} {phase}"),
        OpKind::BeginStep | OpKind::ReduceScalars => name.into(),
    }
}

#[cfg(test)]
mod tests;
