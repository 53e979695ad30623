//! Emission: appends operations and derives the waits that each one needs, and no more.
//!
//! An operation must come after every earlier one that touches one of its resources, when either of the two
//! writes. Order within a queue is given; across queues it takes a wait, unless another wait implies it.
//!
//! A collective's buffers must besides be handed over before they are used: by the wait for it, or, where
//! queue order or other waits already put the collective first, by a join.

use std::collections::{BTreeMap, BTreeSet};

use super::tenancy::{Access, Resource, Tenancy};
use super::{Op, OpId, OpKind, Section, SectionKind};
use crate::checker::Violation;
use crate::rank::Queue;

/// Per queue, how many of its operations are known to be complete: one past the index of the last one.
pub(crate) type Clock = [usize; Queue::ALL.len()];

/// The last write of a resource and the reads since.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    pub(crate) writer: Option<usize>,
    pub(crate) readers: Vec<usize>,
}

impl History {
    /// The earlier operations that an access must come after.
    pub(crate) fn conflicts(&self, access: Access) -> impl Iterator<Item = usize> + '_ {
        let readers = if access.write { self.readers.as_slice() } else { &[] };
        self.writer.into_iter().chain(readers.iter().copied())
    }

    /// Notes an access.
    pub(crate) fn note(&mut self, op: usize, access: Access) {
        if access.write {
            self.writer = Some(op);
            self.readers.clear();
        } else {
            self.readers.push(op);
        }
    }
}

/// Builds the list of operations.
pub(super) struct Emitter<'a> {
    pub(super) ops: Vec<Op>,
    pub(super) sections: Vec<Section>,
    pub(super) tenancy: Tenancy<'a>,
    phases: usize,
    history: BTreeMap<Resource, History>,
    /// For every collective the operations that wait for it or join it.
    handed_over: BTreeMap<usize, Vec<usize>>,
    clocks: Vec<Clock>,
    queue_clocks: [Clock; Queue::ALL.len()],
}

impl<'a> Emitter<'a> {
    pub(super) fn new(tenancy: Tenancy<'a>, phases: usize) -> Self {
        Self {
            ops: Vec::new(),
            sections: Vec::new(),
            tenancy,
            phases,
            history: BTreeMap::new(),
            handed_over: BTreeMap::new(),
            clocks: Vec::new(),
            queue_clocks: Default::default(),
        }
    }

    /// Starts a section; it ends where the next one starts.
    pub(super) fn section(&mut self, kind: SectionKind) {
        let at = self.ops.len();
        if let Some(open) = self.sections.last_mut() {
            open.end = at;
        }
        self.sections.push(Section { kind, start: at, end: at });
    }

    /// Appends an operation with the waits it needs.
    pub(super) fn push(&mut self, kind: OpKind) -> Result<OpId, Violation> {
        let id = self.ops.len();
        let mut accesses = self.tenancy.apply(&kind)?;
        if matches!(kind, OpKind::Update { .. }) {
            accesses = Tenancy::with_statistics(accesses, self.phases);
        }
        let queue = kind.queue() as usize;
        let before = self.conflicts(&accesses);
        let (mut clock, waits) = self.waits(queue, &before);
        let joins = self.joins(&clock, &waits, &before);
        for target in waits.iter().chain(&joins).filter(|target| self.ops[target.0].kind.is_collective()) {
            self.handed_over.entry(target.0).or_default().push(id);
        }
        clock[queue] = id + 1;
        for access in accesses {
            self.history.entry(access.resource).or_default().note(id, access);
        }
        self.queue_clocks[queue] = clock;
        self.clocks.push(clock);
        self.ops.push(Op { kind, waits, joins });
        if let Some(open) = self.sections.last_mut() {
            open.end = self.ops.len();
        }
        Ok(OpId(id))
    }

    /// The earlier operations that these accesses must come after, in program order.
    fn conflicts(&self, accesses: &[Access]) -> BTreeSet<usize> {
        let of = |access: &Access| self.history.get(&access.resource).map(|past| past.conflicts(*access));
        accesses.iter().filter_map(of).flatten().collect()
    }

    /// The waits of an operation on `queue`, and what is known to be complete behind them.
    fn waits(&self, queue: usize, before: &BTreeSet<usize>) -> (Clock, Vec<OpId>) {
        let mut clock = self.queue_clocks[queue];
        let mut waits = Vec::new();
        // Latest first: what they imply need not be waited for again.
        for &earlier in before.iter().rev() {
            if clock[self.ops[earlier].kind.queue() as usize] <= earlier {
                waits.push(OpId(earlier));
                merge(&mut clock, &self.clocks[earlier]);
            }
        }
        waits.reverse();
        (clock, waits)
    }

    /// The collectives among `before` that nothing behind `clock` hands over yet.
    fn joins(&self, clock: &Clock, waits: &[OpId], before: &BTreeSet<usize>) -> Vec<OpId> {
        let complete = |&op: &usize| clock[self.ops[op].kind.queue() as usize] > op;
        before
            .iter()
            .filter(|&&earlier| self.ops[earlier].kind.is_collective())
            .filter(|&&earlier| !waits.contains(&OpId(earlier)))
            .filter(|earlier| !self.handed_over.get(earlier).is_some_and(|by| by.iter().any(complete)))
            .map(|&earlier| OpId(earlier))
            .collect()
    }
}

/// Raises `clock` to include all that `other` knows.
pub(crate) fn merge(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
