//! Renders a schedule as text: one line per operation, with equal micro-batches shown once.

use std::fmt::Write;

use super::{BufferId, Op, OpId, OpKind, Role, Schedule, Section, SectionKind, Source};
use crate::collective::Purpose;
use crate::layout::Layout;
use crate::mesh::Group;
use crate::model::ModelSpec;
use crate::program::{BlockCall, ForwardMode, Round};
use crate::wrap::UnitId;

impl Schedule {
    /// Renders the schedule as lines of `index queue operation (waits)`. Consecutive micro-batches that differ only in
    /// their number, or in which sums of gradients they add, are printed once. Collectives of units run over the shard
    /// axis if nothing else is said.
    pub fn render(&self, spec: &ModelSpec, layout: &Layout) -> String {
        let mut text = String::new();
        let mut at = 0;
        while at < self.sections.len() {
            let section = &self.sections[at];
            let repeats = |ignore_sums| {
                let first = self.normalized(section, ignore_sums);
                let rest = self.sections[at + 1..].iter();
                rest.take_while(|other| self.normalized(other, ignore_sums) == first).count()
            };
            let (identical, repeats) = (repeats(false), repeats(true));
            let _ = match section.kind {
                SectionKind::Prologue => writeln!(text, "prologue"),
                SectionKind::MicroBatch(Round(round)) if repeats > 0 => {
                    let exception = if identical == repeats { "" } else { " except for the sums they add" };
                    writeln!(text, "micro-batches {round} to {} (alike{exception})", round + repeats)
                }
                SectionKind::MicroBatch(Round(round)) => writeln!(text, "micro-batch {round}"),
                SectionKind::Epilogue => writeln!(text, "epilogue"),
            };
            for index in section.start..section.end {
                let line = self.line(index, spec, layout);
                let _ = writeln!(text, "{line}");
            }
            if identical < repeats {
                self.sections[at..=at + repeats]
                    .iter()
                    .for_each(|section| self.write_sums(&mut text, section));
            }
            at += 1 + repeats;
        }
        text
    }

    /// Writes the sums that a micro-batch adds, in one line: they are the same for all units.
    fn write_sums(&self, text: &mut String, section: &Section) {
        let SectionKind::MicroBatch(Round(round)) = section.kind else { return };
        let is_add = |op: &&Op| matches!(op.kind, OpKind::Add { .. });
        let ops = &self.ops[section.start..section.end];
        let unit = ops.iter().find(is_add).and_then(|op| op.kind.unit());
        let adds = ops.iter().filter(is_add).filter(|op| op.kind.unit() == unit);
        let name = |id: BufferId| self.buffer(id).name();
        let adds: Vec<String> =
            adds.map(|op| format!("{} into {}", name(op.reads[0]), name(op.writes[0]))).collect();
        if !adds.is_empty() {
            let _ = writeln!(text, "       micro-batch {round} adds, for each unit, {}", adds.join(", "));
        }
    }

    fn line(&self, index: usize, spec: &ModelSpec, layout: &Layout) -> String {
        let op = &self.ops[index];
        let queue_width = self.ops.iter().map(|op| op.kind.queue().name().len()).fold(8, usize::max);
        let description = match op.kind.block() {
            Some(block) => {
                format!("{} {}{}", op.kind.name(), spec.block(block).name, checkpoint_suffix(&op.kind))
            }
            None => describe(op, self, layout),
        };
        let mut line = format!("{index:>5}  {:<queue_width$} {description}", op.kind.queue().name());
        if !op.waits.is_empty() {
            let waits: Vec<String> = op.waits.iter().map(|wait| wait.0.to_string()).collect();
            let _ = write!(line, "  (after {})", waits.join(", "));
        }
        line
    }

    /// The operations of a section without what differs between equal micro-batches: the round, and the absolute
    /// positions of waits. With `ignore_sums`, also without additions, the buffers of sums and gradients, and all
    /// waits.
    fn normalized(&self, section: &Section, ignore_sums: bool) -> Vec<Op> {
        let relative = |ids: &[OpId]| {
            let ids = ids.iter().filter(|_| !ignore_sums);
            ids.map(|id| OpId(id.0.wrapping_sub(section.start))).collect()
        };
        let is_sum = |id: BufferId| {
            matches!(
                self.buffer(id).role,
                Role::ShardedSum(_) | Role::WholeSum(_) | Role::ShardedGradient | Role::GradientSlot(_)
            )
        };
        let operands =
            |ids: &[BufferId]| ids.iter().copied().filter(|&id| !(ignore_sums && is_sum(id))).collect();
        let ops = self.ops[section.start..section.end].iter();
        ops.filter(|op| !(ignore_sums && matches!(op.kind, OpKind::Add { .. })))
            .map(|op| Op {
                kind: match op.kind {
                    OpKind::BeginMicroBatch(_) => OpKind::BeginMicroBatch(Round(0)),
                    kind => kind,
                },
                reads: operands(&op.reads),
                writes: operands(&op.writes),
                waits: relative(&op.waits),
                joins: relative(&op.joins),
            })
            .collect()
    }
}

/// A remark on how a block is run.
fn checkpoint_suffix(kind: &OpKind) -> &'static str {
    match kind {
        OpKind::Call(BlockCall::Forward(_, ForwardMode::Checkpoint)) => " (checkpointed)",
        OpKind::Call(BlockCall::Forward(_, ForwardMode::CheckpointProducts)) => {
            " (checkpointed, products kept)"
        }
        _ => "",
    }
}

/// Describes an operation by its name, its unit and its most informative buffers.
pub(crate) fn describe(op: &Op, schedule: &Schedule, layout: &Layout) -> String {
    let name = op.kind.name();
    let of = |unit: UnitId| format!("{name} {}", layout.unit(unit).name);
    let first = |ids: &[BufferId]| ids.first().map_or_else(String::new, |&id| schedule.buffer(id).name());
    let (from, to) = (first(&op.reads), first(&op.writes));
    match op.kind {
        OpKind::BeginMicroBatch(round) => format!("{name} {}", round.0),
        OpKind::AllGather { unit, source, group, purpose } => {
            let from = if source == Source::Shard { String::new() } else { format!(" from {from}") };
            let pass = if purpose == Purpose::Backward { "backward" } else { "forward" };
            format!("{} -> {to}{from}{}, for {pass}", of(unit), over(group))
        }
        OpKind::AllReduce { unit, group, .. } => format!("{}{}", of(unit), over(group)),
        OpKind::Upload(unit) => format!("{} -> {to}", of(unit)),
        OpKind::ReduceScatter { unit, group, .. } | OpKind::GatherDirections { unit, group } => {
            format!("{} -> {to}{}", of(unit), over(group))
        }
        OpKind::Download(unit) => format!("{} from {from}", of(unit)),
        OpKind::OpenGradient(unit) => {
            let mut names: Vec<String> = op.writes.iter().map(|&id| schedule.buffer(id).name()).collect();
            names.dedup();
            format!("{} in {}", of(unit), names.join(", "))
        }
        OpKind::Add { unit, .. } => format!("{}: {from} into {to}", of(unit)),
        OpKind::Statistics { unit, phase } => format!("{name} {} of {}", phase.0, layout.unit(unit).name),
        OpKind::ReduceStatistics(phase) => format!("{name} {}", phase.0),
        _ => op.kind.unit().map_or_else(|| name.into(), of),
    }
}

/// A remark on the ranks of a collective, if they are not the usual ones.
fn over(group: Group) -> String {
    if group == Group::SHARDS { String::new() } else { format!(" over {group}") }
}

#[cfg(test)]
mod tests;
