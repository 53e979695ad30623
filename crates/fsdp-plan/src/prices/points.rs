//! Prices by [measured points](crate::measured): of operations, of what calls list, of collectives.

use std::collections::BTreeMap;

use fsdp_core::plan::Plan;
use fsdp_core::schedule::Op;

use super::{Collective, Prices};
use crate::measured::{self, Estimate, Measured, Point, Points, Question};
use crate::software::Software;
use crate::work::{Listed, OpWork, StepWork};

/// A point that is further away says little: as far as one size that is four times another.
const FAR: f64 = 1.39;

impl<'a> Prices<'a> {
    /// What was measured, where this engine is priced: it is of no other software.
    pub(super) fn measured(&self) -> Option<&'a Measured> {
        self.cluster.measured.as_ref().filter(|_| self.software == Software::OURS)
    }

    /// What points say of work that ranks do at the same time, each with its part of the threads. Where there are more ranks
    /// than threads, they take turns.
    fn in_turns(&self, measured: &Measured, points: &Points, asked: Question<'_>) -> Option<Estimate> {
        let ranks = self.sharing.min(measured.threads);
        let turns = self.sharing as f64 / ranks as f64;
        let said = measured::estimate(points, Question { ranks, ..asked })?;
        Some(Estimate { seconds: said.seconds * turns, ..said })
    }

    /// What an operation takes that is neither a collective nor calls a block, if it was measured: updates with products were
    /// not.
    pub(super) fn operation(&self, op: &Op, work: &OpWork) -> Option<Estimate> {
        let measured = self.measured().filter(|_| !op.kind.is_collective() && work.products.is_empty())?;
        let Point { size, work, .. } = &work.point();
        let question = Question { what: op.kind.name(), ranks: 1, size, work: *work };
        self.in_turns(measured, &measured.operations, question)
    }

    /// What an operation takes that a call lists; where none of its kind was measured, by its sizes, from infinitely far away.
    pub(super) fn listed(&self, measured: &Measured, listed: &Listed) -> Estimate {
        let Listed { op, size, work } = listed;
        let what = format!("{op} {}", self.setting.dtype);
        let question = Question { what: &what, ranks: 1, size, work: *work };
        let said = self.in_turns(measured, &measured.calls, question);
        let said =
            said.unwrap_or_else(|| Estimate { seconds: self.by_size(listed), distance: f64::INFINITY });
        Estimate { seconds: said.seconds + measured.between_calls, ..said }
    }

    /// What points say of a collective in a machine.
    pub(super) fn timed(&self, collective: Collective, bytes: f64, group: usize) -> Option<f64> {
        let measured = self.measured().filter(|_| group <= self.cluster.devices_per_node())?;
        let what = format!("{} {}", collective.name(), self.setting.transport);
        let size = [bytes.max(1.0)];
        let question = Question { what: &what, ranks: group, size: &size, work: size[0] };
        measured::estimate(&measured.collectives, question).map(|said| said.seconds)
    }

    /// Seconds of a step that calls take of which there is no point near, by operation; none where nothing was measured.
    pub fn far_from_points(&self, plan: &Plan, work: &StepWork) -> BTreeMap<&'static str, f64> {
        let Some(measured) = self.measured() else { return BTreeMap::new() };
        let mut far = BTreeMap::new();
        for call in plan.step.ops.iter().filter_map(|op| work.call(op)) {
            for listed in &call.listed {
                let said = self.listed(measured, listed);
                if said.distance > FAR {
                    *far.entry(listed.op).or_default() += said.seconds;
                }
            }
        }
        far
    }
}
