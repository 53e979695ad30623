//! Reports a table to other processes.

use std::time::{Duration, Instant};

use fsdp_core::Rank;

use super::{Rows, Table};
use crate::rendezvous::call_sequence::{CallSequence, Position};
use crate::rendezvous::report::{CallReport, LineReport, Report, RowReport, WaitReport};

impl<E> Table<E> {
    /// Reports the calls of all ranks of this process: their progress, the calls for which ranks have waited at least
    /// `patience`, and all kept calls of the line `requested`. A line of the whole world, of `world` ranks, does not
    /// list its members.
    pub fn report(
        &self,
        now: Instant,
        patience: Duration,
        world: usize,
        requested: Option<&[u64]>,
    ) -> Report {
        let lines = self.lines.iter().enumerate();
        let lines: Vec<LineReport> =
            lines.map(|(line, calls)| self.line(line, calls, now, patience, world, requested)).collect();
        let is_waiting = lines.iter().flat_map(|line| &line.rows).any(|row| row.wait.is_some());
        let status = if is_waiting { self.status() } else { [].into() };
        Report {
            returned: self.ended.iter().map(|rank| rank.0).collect(),
            lines,
            status: status.iter().map(|line| (line.rank.0, line.doing.clone())).collect(),
            is_full: requested.is_some(),
        }
    }

    fn line(
        &self,
        number: usize,
        line: &CallSequence,
        now: Instant,
        patience: Duration,
        world: usize,
        requested: Option<&[u64]>,
    ) -> LineReport {
        let groups: Vec<&Rows<E>> = self.groups.iter().filter(|group| group.line == number).collect();
        // The first group of a line is the one for which it was created.
        let path = &groups[0].group.path;
        let row = |&index: &usize| {
            let (entered, digest) = line.entered(index);
            let wait =
                wait(&groups, index, now).filter(|wait| u128::from(wait.waited_ms) >= patience.as_millis());
            RowReport { rank: line.members()[index].0, entered, digest: digest.words(), wait }
        };
        let rows: Vec<RowReport> = line.local().iter().map(row).collect();
        let waits_from = rows.iter().filter_map(|row| row.wait.as_ref()).map(|wait| wait.position).min();
        let from = if requested == Some(&path[..]) { Some(0) } else { waits_from };
        let calls = from.into_iter().flat_map(|from| line.calls(from));
        let calls = calls.map(|(position, call)| {
            let group = &self.groups[call.group].group;
            let (path, group) = (group.path.clone(), group.name.clone());
            CallReport { position, rank: call.first.0, path, group, call: call.call }
        });
        let members = line.members().iter().map(|&Rank(rank)| rank);
        let is_listed = waits_from.is_some() && members.len() < world;
        LineReport {
            path: path.clone(),
            members: members.filter(|_| is_listed).collect(),
            rows,
            calls: calls.collect(),
        }
    }
}

/// The first unfinished call of a rank on a line.
fn wait<E>(groups: &[&Rows<E>], index: usize, now: Instant) -> Option<WaitReport> {
    let rows = groups.iter().map(|group| &group.rows[index]);
    let fronts = rows.filter_map(|row| Some((row.outstanding.front()?, row.since)));
    let (front, since) = fronts.min_by_key(|(front, _)| -> Position { front.position })?;
    let waited_ms = u64::try_from(now.saturating_duration_since(since).as_millis()).unwrap_or(u64::MAX);
    Some(WaitReport { position: front.position, call: front.call, waited_ms })
}
