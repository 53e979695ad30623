//! Appends operations and derives the waits that each one needs, and no more.
//!
//! An operation must come after every earlier one that accesses one of its buffers, if either of the two writes. Order
//! within a queue is implicit; across queues it takes a wait, unless another wait implies it.
//!
//! In addition, a collective's buffers must be handed over before they are used: by a wait for it or, where queue order
//! or other waits already order the collective first, by a join.

use std::collections::BTreeSet;

use super::before::HappensBefore;
use super::{BufferId, Op, OpId, OpKind, Section, SectionKind};

/// Builds the list of operations.
#[derive(Default)]
pub(super) struct Emitter {
    pub(super) ops: Vec<Op>,
    pub(super) sections: Vec<Section>,
    before: HappensBefore,
}

impl Emitter {
    /// Starts a section; it ends where the next one starts.
    pub(super) fn section(&mut self, kind: SectionKind) {
        let at = self.ops.len();
        self.sections.push(Section { kind, start: at, end: at });
    }

    /// Appends an operation with the waits it needs.
    pub(super) fn push(&mut self, kind: OpKind, reads: Vec<BufferId>, writes: Vec<BufferId>) {
        let mut op = Op { kind, reads, writes, waits: Vec::new(), joins: Vec::new() };
        let earlier: BTreeSet<usize> =
            op.accesses().flat_map(|access| self.before.conflicts(access)).collect();
        let mut clock = self.before.clock(kind.queue());
        // Latest first, so that operations implied by a wait are not waited for again.
        for &earlier in earlier.iter().rev() {
            if !self.before.is_complete(earlier, &clock) {
                op.waits.push(OpId(earlier));
                self.before.wait(&mut clock, earlier);
            }
        }
        op.waits.reverse();
        let joins =
            earlier.into_iter().filter(|&earlier| self.before.holds_buffers(earlier, &clock)).map(OpId);
        op.joins = joins.filter(|join| !op.waits.contains(join)).collect();
        self.before.push(&op, clock);
        self.ops.push(op);
        if let Some(open) = self.sections.last_mut() {
            open.end = self.ops.len();
        }
    }
}
