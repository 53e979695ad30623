//! Happens-before by vector clocks, and the last accesses of every resource.

use std::collections::BTreeMap;

use super::Violation;
use crate::rank::Queue;
use crate::schedule::{Access, Op, OpId, Resource, Schedule};

/// Per queue, one past the index of the last operation that is certainly complete.
type Clock = [usize; Queue::ALL.len()];

/// The walk along a schedule.
pub(super) struct Walk<'a> {
    schedule: &'a Schedule,
    clocks: Vec<Clock>,
    queues: [Clock; Queue::ALL.len()],
    last: BTreeMap<Resource, (Option<usize>, Vec<usize>)>,
    /// For every collective the operations that wait for it or join it.
    handed_over: BTreeMap<usize, Vec<usize>>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(schedule: &'a Schedule) -> Self {
        Self {
            schedule,
            clocks: Vec::new(),
            queues: Default::default(),
            last: BTreeMap::new(),
            handed_over: BTreeMap::new(),
        }
    }

    /// Takes the next operation with what it touches.
    pub(super) fn op(&mut self, index: usize, op: &Op, accesses: &[Access]) -> Result<(), Violation> {
        let queue = op.kind.queue() as usize;
        let mut clock = self.queues[queue];
        for &OpId(target) in &op.waits {
            if target >= index || self.schedule.ops[target].kind.queue() == op.kind.queue() {
                return Err(Violation::BadWait { op: self.describe(index), target });
            }
            for (mine, theirs) in clock.iter_mut().zip(&self.clocks[target]) {
                *mine = (*mine).max(*theirs);
            }
        }
        for &OpId(target) in &op.joins {
            let collective = self.schedule.ops.get(target).is_some_and(|op| op.kind.is_collective());
            if !collective || !self.is_before(target, &clock) {
                return Err(Violation::BadJoin { op: self.describe(index), target });
            }
        }
        clock[queue] = index + 1;
        for &OpId(target) in op.waits.iter().chain(&op.joins) {
            self.handed_over.entry(target).or_default().push(index);
        }
        for access in accesses {
            self.access(index, &clock, *access)?;
        }
        self.queues[queue] = clock;
        self.clocks.push(clock);
        Ok(())
    }

    fn access(&mut self, index: usize, clock: &Clock, access: Access) -> Result<(), Violation> {
        let past = self.last.entry(access.resource).or_default().clone();
        let readers = if access.write { past.1.as_slice() } else { &[] };
        for &earlier in past.0.iter().chain(readers) {
            if !self.is_before(earlier, clock) {
                return Err(Violation::Race {
                    earlier: self.describe(earlier),
                    later: self.describe(index),
                    resource: access.resource,
                });
            }
            if self.schedule.ops[earlier].kind.is_collective() && !self.is_handed_over(earlier, clock) {
                return Err(Violation::NotHandedOver {
                    collective: self.describe(earlier),
                    later: self.describe(index),
                });
            }
        }
        let (writer, readers) = self.last.entry(access.resource).or_default();
        if access.write {
            (*writer, *readers) = (Some(index), Vec::new());
        } else {
            readers.push(index);
        }
        Ok(())
    }

    /// Whether an operation is certainly complete at `clock` (or is the one whose clock that is).
    fn is_before(&self, op: usize, clock: &Clock) -> bool {
        clock[self.schedule.ops[op].kind.queue() as usize] > op
    }

    fn is_handed_over(&self, collective: usize, clock: &Clock) -> bool {
        self.handed_over.get(&collective).is_some_and(|by| by.iter().any(|&op| self.is_before(op, clock)))
    }

    fn describe(&self, index: usize) -> String {
        format!("{index} ({})", self.schedule.ops[index].kind.name())
    }
}
