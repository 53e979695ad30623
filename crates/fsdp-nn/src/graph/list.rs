//! Lists of calls over places, and the live range of each place.

use super::{Call, Decl, Operand};
use crate::op::{Op, Pointwise};

/// A call, and the places that begin before it and end after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The call; its local operands are places.
    pub call: Call,
    /// The chunk whose tokens and gradients it accesses, among those of the rank.
    pub chunk: usize,
    /// Places that are allocated before the call.
    pub begins: Vec<usize>,
    /// Places that are not read after the call.
    pub ends: Vec<usize>,
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
            steps.push(Step { call, chunk: 0, begins, ends: Vec::new() });
        }
        let mut ended: Vec<usize> = after.to_vec();
        for step in steps.iter_mut().rev() {
            for id in step.call.locals() {
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
