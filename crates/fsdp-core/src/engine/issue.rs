//! The order in which the host issues operations.
//!
//! Program order is right for asynchronous devices. On the host, where an operation runs as it is issued, other orders
//! test the declared waits: any queue head whose waits are met may run, and only those.

use std::collections::BTreeSet;

use super::Engine;
use crate::error::Error;
use crate::memory::Memory;
use crate::program::Program;
use crate::rank::Queue;
use crate::schedule::{OpId, OpKind, Schedule};

/// Chooses which of the ready operations (at most one per queue, in program order) is issued next.
pub trait IssueOrder: Send {
    /// Returns an index into `ready`, which is not empty.
    fn choose(&mut self, ready: &[OpId]) -> usize;
}

/// Issues operations in the order of the schedule.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProgramOrder;

impl IssueOrder for ProgramOrder {
    fn choose(&mut self, _ready: &[OpId]) -> usize {
        0
    }
}

/// Observes the begin and end of every operation, for traces and progress.
pub trait Observer: Send {
    /// The waits of the operation are met, and it is issued next.
    fn begin(&mut self, _op: OpId, _kind: &OpKind) {}

    /// The operation was submitted to its queue.
    fn issued(&mut self, _op: OpId, _kind: &OpKind) {}

    /// The operation is done. A collective is done when its buffers are handed to the operation that needs them.
    fn end(&mut self, _op: OpId, _kind: &OpKind) {}
}

impl Observer for () {}

/// The operations that have not been issued.
struct Frontier<'a> {
    schedule: &'a Schedule,
    queues: [std::collections::VecDeque<OpId>; Queue::ALL.len()],
    done: Vec<bool>,
    /// Operations that communicate and have not been issued.
    communicating: BTreeSet<OpId>,
}

impl<'a> Frontier<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        let mut queues: [std::collections::VecDeque<OpId>; Queue::ALL.len()] = Default::default();
        let mut communicating = BTreeSet::new();
        for (index, op) in schedule.ops.iter().enumerate() {
            queues[op.kind.queue() as usize].push_back(OpId(index));
            if op.kind.is_collective() || schedule.meets(op) {
                communicating.insert(OpId(index));
            }
        }
        Self { schedule, queues, done: vec![false; schedule.ops.len()], communicating }
    }

    /// The queue heads that may be issued, in program order. A head that waits for a collective in flight is ready only
    /// when all operations before that one that communicate have been issued on this rank; otherwise two ranks could wait
    /// for each other. So is a call of a block that meets those of other ranks. (Proof: of all blocked ranks, take the one
    /// that is blocked on the operation that comes first. A rank that has not issued that operation is blocked on a later
    /// one, so it has issued all earlier ones: a contradiction.)
    fn ready(&self, in_flight: impl Fn(OpId) -> bool) -> Vec<OpId> {
        let mut ready: Vec<OpId> = self
            .queues
            .iter()
            .filter_map(|queue| queue.front().copied())
            .filter(|&head| {
                let op = self.schedule.op(head);
                let first_missing = self.communicating.first();
                let comes_first = first_missing.is_none_or(|&missing| missing >= head);
                (comes_first || !self.schedule.meets(op))
                    && op.waits.iter().all(|wait| self.done[wait.0])
                    && op
                        .waits
                        .iter()
                        .chain(&op.joins)
                        .filter(|&&earlier| in_flight(earlier))
                        .all(|earlier| first_missing.is_none_or(|missing| missing > earlier))
            })
            .collect();
        ready.sort_unstable();
        ready
    }

    fn issued(&mut self, op: OpId) {
        self.queues[self.schedule.op(op).kind.queue() as usize].pop_front();
        self.done[op.0] = true;
        self.communicating.remove(&op);
    }
}

impl<M: Memory, P: Program<M>> Engine<M, P> {
    /// Issues all operations of a schedule.
    pub(super) fn run(
        &mut self,
        schedule: &Schedule,
        order: &mut dyn IssueOrder,
        observer: &mut dyn Observer,
    ) -> Result<(), Error> {
        let awaited: BTreeSet<OpId> = schedule.ops.iter().flat_map(|op| op.waits.iter().copied()).collect();
        let mut frontier = Frontier::new(schedule);
        self.events.clear();
        for _ in 0..schedule.ops.len() {
            let ready = frontier.ready(|op| self.in_flight.contains_key(&op));
            assert!(!ready.is_empty(), "the first operation that is not issued has nothing to wait for");
            let id = ready[order.choose(&ready)];
            let op = schedule.op(id);
            let queue = op.kind.queue();
            for &earlier in op.waits.iter().chain(&op.joins) {
                if self.settle(schedule, earlier, queue)? {
                    observer.end(earlier, &schedule.op(earlier).kind);
                }
            }
            for wait in &op.waits {
                if let Some(event) = self.events.get(wait) {
                    self.memory.wait(queue, event);
                }
            }
            observer.begin(id, &op.kind);
            self.execute(schedule, id)?;
            observer.issued(id, &op.kind);
            if awaited.contains(&id) && !op.kind.is_collective() {
                self.events.insert(id, self.memory.record(queue));
            }
            frontier.issued(id);
            if !op.kind.is_collective() {
                observer.end(id, &op.kind);
            }
        }
        assert!(self.in_flight.is_empty(), "every collective is joined by a later operation");
        Ok(())
    }
}

#[cfg(test)]
mod tests;
