//! Observed steps: marks around every operation show when each queue was busy.

use std::ops::Range;
use std::sync::Arc;

use fsdp_core::engine::{Observer, ProgramOrder};
use fsdp_core::schedule::{OpId, OpKind};
use fsdp_core::{Error, Queue};
use fsdp_nn::Backend;
use fsdp_nn::hf::HfModel;
use fsdp_train::{RankTrainer, TrainError};

use crate::clock::Clock;
use crate::timeline::{Interval, busy, exposed};

/// Medians over the observed steps, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observed {
    /// A step, including the marks.
    pub(crate) step_ms: f64,
    /// Work on each queue.
    pub(crate) busy_ms: [f64; Queue::ALL.len()],
    /// Work on queues other than compute while compute was idle.
    pub(crate) exposed_ms: f64,
}

/// Observes some steps.
pub(crate) fn measure<M: Backend + Clock>(
    trainer: &mut RankTrainer<'_, M, HfModel>,
    memory: &Arc<M>,
    steps: Range<u64>,
) -> Result<Observed, TrainError> {
    let mut observed = Vec::new();
    for step in steps {
        let mut marks = Marks { memory: Arc::clone(memory), spans: Vec::new(), open: None, failure: None };
        let begin = memory.mark(Queue::Compute)?;
        trainer.issue(step, false, &mut ProgramOrder, &mut marks)?;
        trainer.report()?;
        let end = memory.mark(Queue::Compute)?;
        if let Some(failure) = marks.failure {
            return Err(failure.into());
        }
        observed.push(analyze_step(&**memory, &begin, &end, &marks.spans)?);
    }
    let median = |property: &dyn Fn(&Observed) -> f64| {
        let mut values: Vec<f64> = observed.iter().map(property).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Ok(Observed {
        step_ms: median(&|step| step.step_ms),
        busy_ms: Queue::ALL.map(|queue| median(&|step| step.busy_ms[queue as usize])),
        exposed_ms: median(&|step| step.exposed_ms),
    })
}

fn analyze_step<M: Clock>(
    memory: &M,
    begin: &M::Mark,
    end: &M::Mark,
    spans: &[Span<M::Mark>],
) -> Result<Observed, Error> {
    let mut queues: [Vec<Interval>; Queue::ALL.len()] = Default::default();
    for span in spans {
        let at = |mark| memory.milliseconds(begin, mark);
        queues[span.queue as usize].push(Interval { start: at(&span.begin)?, end: at(&span.end)? });
    }
    let compute = &queues[Queue::Compute as usize];
    let communication = [Queue::Gather, Queue::Reduce].map(|queue| queues[queue as usize].clone()).concat();
    Ok(Observed {
        step_ms: memory.milliseconds(begin, end)?,
        busy_ms: Queue::ALL.map(|queue| busy(&queues[queue as usize])),
        exposed_ms: exposed(&communication, compute),
    })
}

/// The time span of one operation.
struct Span<K> {
    queue: Queue,
    begin: K,
    end: K,
}

/// Marks queues around operations.
struct Marks<M: Clock> {
    memory: Arc<M>,
    spans: Vec<Span<M::Mark>>,
    open: Option<M::Mark>,
    /// The first failure; an observer cannot fail, so it is reported at the end of the step.
    failure: Option<Error>,
}

impl<M: Clock> Marks<M> {
    fn mark(&mut self, queue: Queue) -> Option<M::Mark> {
        self.memory.mark(queue).map_err(|error| self.failure.get_or_insert(error)).ok()
    }
}

impl<M: Clock> Observer for Marks<M> {
    fn begin(&mut self, _op: OpId, kind: &OpKind) {
        self.open = self.mark(kind.queue());
    }

    fn issued(&mut self, _op: OpId, kind: &OpKind) {
        let queue = kind.queue();
        if let (Some(begin), Some(end)) = (self.open.take(), self.mark(queue)) {
            self.spans.push(Span { queue, begin, end });
        }
    }
}
