//! Lists of calls over places, and the live range of each place.

use super::{Call, Decl, Operand};
use crate::op::{ExpertAxis, Op, Pointwise};

/// A call, and the places that begin before it and end after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The call; its local operands are places.
    pub call: Call,
    /// The chunk whose tokens and gradients it accesses, among those of the rank.
    pub chunk: usize,
    /// Places that are allocated before the call.
    pub begins: Vec<usize>,
    /// Places that receive the result of a redistribution after the call. It runs beside the calls from its own to this one.
    pub arrivals: Vec<usize>,
    /// Places that are not read after the call.
    pub ends: Vec<usize>,
}

/// A redistribution over ranks, which runs beside other calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Redistribution {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Whether the contents of `from` are lost.
    gives_up: bool,
}

impl Redistribution {
    /// Whether a call cannot run at the same time.
    pub(crate) fn conflicts_with(&self, call: &Call) -> bool {
        let &Self { from, to, gives_up } = self;
        call.locals().any(|id| id == to || (gives_up && id == from)) || call.writes_to(from)
    }
}

impl Call {
    /// Returns the redistribution that the call starts. Rounds are none: the host follows them.
    pub(crate) fn redistribution(&self) -> Option<Redistribution> {
        let gives_up = match self.op {
            Op::Exchange(_)
            | Op::ExpertAxis(ExpertAxis::AllGather { .. } | ExpertAxis::AllGatherRoutes { .. }) => false,
            Op::ExpertAxis(ExpertAxis::ReduceScatter { .. }) => true,
            _ => return None,
        };
        Some(Redistribution { from: self.reads[0].local()?, to: self.writes[0].0.local()?, gives_up })
    }
}

/// Moves each redistribution before the calls that it does not depend on, up to the one before it.
fn start_early(mut calls: Vec<Call>) -> Vec<Call> {
    for index in 0..calls.len() {
        let Some(redistribution) = calls[index].redistribution() else { continue };
        let waits_for = |call: &Call| {
            matches!(call.op, Op::Exchange(_) | Op::ExpertAxis(_)) || redistribution.conflicts_with(call)
        };
        let first = calls[..index].iter().rposition(waits_for).map_or(0, |before| before + 1);
        calls[first..=index].rotate_right(1);
    }
    calls
}

/// Calls in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct List {
    /// Places that were live before the list but are not used by it; they end at once.
    pub unread: Vec<usize>,
    /// The calls.
    pub steps: Vec<Step>,
}

impl List {
    /// Computes the live ranges of places. Those of `before` are live at the start, and those of `after` stay live at
    /// the end.
    pub(super) fn new(calls: Vec<Call>, before: &[usize], after: &[usize]) -> Self {
        let calls = start_early(calls);
        let reads = |id: usize| calls.iter().any(|call| call.locals().any(|local| local == id));
        let unread = before.iter().copied().filter(|&id| !reads(id) && !after.contains(&id)).collect();
        let mut live: Vec<usize> = before.to_vec();
        let mut steps: Vec<Step> = Vec::with_capacity(calls.len());
        for call in calls {
            let mut begins: Vec<usize> = Vec::new();
            for id in call.locals() {
                if !live.contains(&id) {
                    live.push(id);
                    begins.push(id);
                }
            }
            steps.push(Step { call, chunk: 0, begins, arrivals: Vec::new(), ends: Vec::new() });
        }
        let mut held = vec![Vec::new(); steps.len()];
        for index in 0..steps.len() {
            let Some(redistribution) = steps[index].call.redistribution() else { continue };
            let waits = |step: &Step| redistribution.conflicts_with(&step.call);
            let beside = steps[index + 1..].iter().position(waits).unwrap_or(steps.len() - index - 1);
            steps[index + beside].arrivals.push(redistribution.to);
            held[index + beside].extend([redistribution.from, redistribution.to]);
        }
        let mut ended: Vec<usize> = after.to_vec();
        for (step, held) in steps.iter_mut().zip(held).rev() {
            for id in step.call.locals().chain(held).collect::<Vec<_>>() {
                if !ended.contains(&id) {
                    ended.push(id);
                    step.ends.push(id);
                }
            }
        }
        Self { unread, steps }
    }
}

/// A list under construction: its calls, and all places so far.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) places: Vec<Decl>,
    pub(crate) calls: Vec<Call>,
}

impl Draft {
    /// Declares a new place.
    pub(crate) fn place(&mut self, decl: Decl) -> usize {
        self.places.push(decl);
        self.places.len() - 1
    }

    /// Returns a whole place as an operand.
    pub(crate) fn whole(&self, id: usize) -> Operand {
        Operand::Local { id, offset: 0, len: self.places[id].len() }
    }

    /// Adds a call of an operation without dropout.
    pub(crate) fn call(&mut self, op: Op, reads: Vec<Operand>, writes: Vec<(Operand, bool)>) {
        self.calls.push(Call::new(op, reads, writes));
    }

    /// Adds a copy of a place to a new one.
    pub(super) fn copy(&mut self, from: usize, decl: Decl) -> usize {
        let to = self.place(decl);
        let (reads, writes) = (vec![self.whole(from)], vec![(self.whole(to), false)]);
        self.call(Op::Pointwise(Pointwise::Copy { len: decl.len() }), reads, writes);
        to
    }
}
