//! Prices from [measured points](crate::measured): of operations, of operations within calls, and of collectives.

use std::collections::BTreeMap;
use std::fmt;

use fsdp_core::plan::Plan;
use fsdp_core::schedule::Op;
use fsdp_core::{Group, Mesh};
use serde::Serialize;

use super::{Collective, Prices, Ring};
use crate::measured::{self, Estimate, Measured, Point, Points, Question};
use crate::software::Software;
use crate::work::{Listed, OpWork, StepWork};

/// Distance beyond which a point says little: one size that differs by a factor of four.
const FAR: f64 = 1.39;

/// The part of a step in an operation that has no point near.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Far {
    /// Its fraction of the work of all calls, each operation priced by its sizes alone: prices from points could be
    /// long, and would make operations without points look small.
    pub part: f64,
    /// Whether there is no point of the operation at all.
    pub is_unknown: bool,
}

/// The basis of a price without measured points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instead {
    /// Points with another number of ranks.
    Ranks(usize),
    /// Prices of a machine that was not measured.
    Price(&'static str),
    /// The specification of the network, which a calibration of one machine does not measure.
    Network,
}

impl fmt::Display for Instead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Instead::Ranks(ranks) => write!(f, "as measured with {ranks}"),
            Instead::Price(price) => f.write_str(price),
            Instead::Network => f.write_str("by the network's specification"),
        }
    }
}

impl<'a> Prices<'a> {
    /// The measurements, if this engine is priced: they do not apply to other software.
    pub(super) fn measured(&self) -> Option<&'a Measured> {
        self.cluster.measured.as_ref().filter(|_| self.software == Software::OURS)
    }

    /// Estimates work that ranks do at the same time, each with its part of the threads. If there are more ranks than
    /// threads, they take turns.
    fn estimate_in_turns(
        &self,
        measured: &Measured,
        points: &Points,
        question: Question<'_>,
    ) -> Option<Estimate> {
        let ranks = self.sharing.min(measured.threads);
        let turns = self.sharing as f64 / ranks as f64;
        let estimate = measured::estimate(points, Question { ranks, ..question })?;
        Some(Estimate { seconds: estimate.seconds * turns, ..estimate })
    }

    /// Estimates an operation that is not a collective and calls no block; `None` if it was not measured, as updates
    /// with products never are.
    pub(super) fn estimate_operation(&self, op: &Op, work: &OpWork) -> Option<Estimate> {
        let measured = self.measured().filter(|_| !op.kind.is_collective() && work.products.is_empty())?;
        let Point { size, work, .. } = &work.point();
        let question = Question { what: op.kind.name(), ranks: 1, size, work: *work };
        self.estimate_in_turns(measured, &measured.operations, question)
    }

    /// Estimates an operation within a call: by its sizes, at infinite distance, if none of its name was measured.
    pub(super) fn estimate_listed(&self, measured: &Measured, listed: &Listed) -> Estimate {
        let Listed { op, size, work } = listed;
        let what = format!("{op} {}", self.setting.dtype);
        let question = Question { what: &what, ranks: 1, size, work: *work };
        let estimate = self.estimate_in_turns(measured, &measured.calls, question);
        let estimate =
            estimate.unwrap_or_else(|| Estimate { seconds: self.by_size(listed), distance: f64::INFINITY });
        Estimate { seconds: estimate.seconds + measured.between_calls, ..estimate }
    }

    /// Estimates the seconds of a collective within a machine.
    pub(super) fn estimate_collective(&self, collective: Collective, bytes: f64, ring: Ring) -> Option<f64> {
        let measured = self.measured().filter(|_| ring.nodes(self.cluster.devices_per_node()) == 1)?;
        let what = format!("{} {}", collective.name(), self.setting.transport);
        let size = [bytes.max(1.0)];
        let question = Question { what: &what, ranks: ring.ranks, size: &size, work: size[0] };
        measured::estimate(&measured.collectives, question).map(|estimate| estimate.seconds)
    }

    /// The parts of a plan that were not measured, or not with this number of ranks, and the basis of their prices;
    /// empty on a cluster without measurements.
    pub fn unmeasured(&self, plan: &Plan, work: &StepWork) -> BTreeMap<String, Instead> {
        let Some(measured) = self.measured() else { return BTreeMap::new() };
        let (transport, world) = (self.setting.transport, plan.mesh.world());
        let mut all = BTreeMap::new();
        for (collective, ring) in collectives(plan.mesh) {
            let group = ring.ranks;
            let points = measured.collectives.get(&format!("{} {transport}", collective.name()));
            let basis = match ring.nodes(self.cluster.devices_per_node()) > 1 {
                true => Some(Instead::Network),
                false => substitute(points, group, "by the links' specification"),
            };
            let name = format!("{} over {transport} between {group} ranks", collective.name());
            all.extend(basis.map(|basis| (name, basis)));
        }
        for (op, bytes) in plan.step.ops.iter().zip(&work.ops) {
            let is_priced = self.op(plan, op, bytes).seconds > 0.0;
            if op.kind.call().is_none()
                && !op.kind.is_collective()
                && is_priced
                && self.estimate_operation(op, bytes).is_none()
            {
                all.insert(op.kind.name().to_owned(), Instead::Price("by its bytes"));
            }
        }
        let steps = measured.steps.get(transport);
        let basis = substitute(steps, world, "nothing is added to the sum of operations");
        let name = format!("whole steps over {transport} on {world} ranks");
        all.extend(basis.map(|basis| (name, basis)));
        all
    }

    /// The parts of the work of calls without a point near, by operation; empty on a cluster without measurements.
    pub fn far_from_points(&self, plan: &Plan, work: &StepWork) -> BTreeMap<&'static str, Far> {
        let Some(measured) = self.measured() else { return BTreeMap::new() };
        let (mut far, mut total) = (BTreeMap::<_, Far>::new(), 0.0);
        for call in plan.step.ops.iter().filter_map(|op| work.call(op)) {
            for listed in &call.listed {
                let (seconds, distance) =
                    (self.by_size(listed), self.estimate_listed(measured, listed).distance);
                total += seconds;
                if distance > FAR {
                    let far = far.entry(listed.op).or_default();
                    far.part += seconds;
                    far.is_unknown |= distance.is_infinite();
                }
            }
        }
        far.values_mut().for_each(|far| far.part /= total);
        far
    }
}

/// The collectives of a mesh, with the rings that they run over.
fn collectives(mesh: Mesh) -> impl Iterator<Item = (Collective, Ring)> {
    let of = |collective, group| (collective, Ring::of(mesh, group));
    let all = [
        of(Collective::AllGather, Group::SHARDS),
        of(Collective::ReduceScatter, Group::SHARDS),
        of(Collective::AllReduce, Group::REPLICATE),
        of(Collective::AllReduce, Group::WORLD),
        of(Collective::AllGather, Group::CONTEXT),
        of(Collective::AllGather, Group::EXPERT),
    ];
    let of_experts =
        [Collective::AllGather, Collective::ReduceScatter].map(|of_both| of(of_both, Group::EXPERT_SHARDS));
    all.into_iter()
        .chain(of_experts.into_iter().filter(move |_| mesh.expert() > 1))
        .filter(|(_, ring)| ring.ranks > 1)
}

/// The substitute for points with this number of ranks: points with another number, or a price; `None` if there are
/// such points.
fn substitute(points: Option<&Vec<Point>>, ranks: usize, price: &'static str) -> Option<Instead> {
    let points = points.map_or(&[][..], Vec::as_slice);
    if points.iter().any(|point| point.ranks == ranks) {
        return None;
    }
    let nearest = measured::nearest(points.iter(), ranks).next();
    Some(nearest.map_or(Instead::Price(price), |point| Instead::Ranks(point.ranks)))
}
