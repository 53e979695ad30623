//! The happens-before relation: vector clocks, and the last accesses of every buffer.
//!
//! Everything that earlier steps did to a buffer is ordered before the first operation, `BeginStep`, which therefore
//! counts as the writer of every buffer, including those that it does not name.

use std::collections::BTreeMap;

use super::{Access, Op};
use crate::rank::Queue;

/// For each queue, how many of its operations are known to be complete: one past the index of the last one.
pub(crate) type Clock = [usize; Queue::ALL.len()];

/// The last write of a buffer and the reads since.
#[derive(Clone, Default)]
struct History {
    writer: usize,
    readers: Vec<usize>,
}

/// A growing list of operations and the order between them.
#[derive(Default)]
pub(crate) struct HappensBefore {
    /// For each operation its queue, whether it is a collective, and the clock after it.
    ops: Vec<(Queue, bool, Clock)>,
    queues: Clocks,
    history: Vec<History>,
    /// For each collective, the operations that wait for it or join it.
    successors: BTreeMap<usize, Vec<usize>>,
}

/// For each queue, the clock after its last operation.
type Clocks = [Clock; Queue::ALL.len()];

impl HappensBefore {
    /// The earlier operations that must complete before the next one makes this access.
    pub(crate) fn conflicts(&self, access: Access) -> impl Iterator<Item = usize> + '_ {
        let history = self.history.get(access.buffer.index());
        let readers = history.filter(|_| access.write).map_or(&[][..], |history| history.readers.as_slice());
        let writer = history.map_or(0, |history| history.writer);
        let all = std::iter::once(writer).chain(readers.iter().copied());
        all.filter(|&earlier| earlier < self.ops.len())
    }

    /// The clock before the next operation of a queue, without its waits.
    pub(crate) fn clock(&self, queue: Queue) -> Clock {
        self.queues[queue as usize]
    }

    /// Advances a clock past an operation and everything that is complete before it.
    pub(crate) fn wait(&self, clock: &mut Clock, op: usize) {
        clock.iter_mut().zip(&self.ops[op].2).for_each(|(time, other)| *time = (*time).max(*other));
    }

    /// Whether an operation is certainly complete at `clock`.
    pub(crate) fn is_complete(&self, op: usize, clock: &Clock) -> bool {
        self.ops.get(op).is_some_and(|(queue, ..)| clock[*queue as usize] > op)
    }

    /// Whether an operation is a collective whose buffers no operation complete at `clock` has taken over.
    pub(crate) fn holds_buffers(&self, op: usize, clock: &Clock) -> bool {
        let successors = self.successors.get(&op);
        self.ops[op].1
            && !successors
                .is_some_and(|successors| successors.iter().any(|&other| self.is_complete(other, clock)))
    }

    /// Appends an operation with the clock before it.
    pub(crate) fn push(&mut self, op: &Op, mut clock: Clock) {
        let (id, queue) = (self.ops.len(), op.kind.queue());
        for target in op.waits.iter().chain(&op.joins).filter(|target| self.ops[target.0].1) {
            self.successors.entry(target.0).or_default().push(id);
        }
        for access in op.accesses() {
            let index = access.buffer.index();
            if index >= self.history.len() {
                self.history.resize(index + 1, History::default());
            }
            let history = &mut self.history[index];
            if access.write {
                *history = History { writer: id, readers: Vec::new() };
            } else if history.readers.last() != Some(&id) {
                history.readers.push(id);
            }
        }
        clock[queue as usize] = id + 1;
        self.queues[queue as usize] = clock;
        self.ops.push((queue, op.kind.is_collective(), clock));
    }
}
