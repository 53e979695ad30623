//! Turns operations of the engine into `tracing` spans.

use std::collections::BTreeMap;
use std::sync::Arc;

use fsdp_core::Rank;
use fsdp_core::engine::Observer;
use fsdp_core::plan::Plan;
use fsdp_core::schedule::{OpId, OpKind};
use tracing::{Span, trace_span};

use super::TARGET;

/// Creates a span for every operation of a rank, from issue to completion. Spans of collectives overlap with others of
/// their queue.
#[derive(Debug)]
pub(crate) struct SpanObserver {
    rank: u64,
    plan: Arc<Plan>,
    open: BTreeMap<OpId, Span>,
}

impl SpanObserver {
    /// Creates the observer of a rank.
    pub(crate) fn new(rank: Rank, plan: Arc<Plan>) -> Self {
        Self { rank: rank.0 as u64, plan, open: BTreeMap::new() }
    }
}

impl Observer for SpanObserver {
    fn begin(&mut self, id: OpId, kind: &OpKind) {
        let collective = kind.is_collective();
        let (rank, queue, op) = (self.rank, kind.queue().name(), kind.name());
        let unit = kind.unit().map(|unit| self.plan.layout.unit(unit).name.as_str());
        let block = kind.block().map(|block| self.plan.spec.block(block).name.as_str());
        let span = trace_span!(target: TARGET, "op", rank, queue, op, unit, block, collective);
        self.open.insert(id, span);
    }

    fn end(&mut self, id: OpId, _kind: &OpKind) {
        self.open.remove(&id);
    }
}
