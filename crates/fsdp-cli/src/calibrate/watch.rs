//! Times each operation of a step, and each call within it, by marks in the queues of its rank.

use std::cell::RefCell;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fsdp_core::Error;
use fsdp_core::engine::Observer;
use fsdp_core::schedule::{OpId, OpKind};
use tracing::span::{Attributes, Id};
use tracing::{Subscriber, subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

use crate::device::clock::Clock;
use crate::trace::TARGET;

thread_local! {
    /// Called where a call begins or ends on this thread.
    static AT_CALL: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// Runs [`AT_CALL`] where the span of a call begins and ends.
struct Calls;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Calls {
    fn on_new_span(&self, _attributes: &Attributes<'_>, _id: &Id, _context: Context<'_, S>) {
        at_call();
    }

    fn on_close(&self, _id: Id, _context: Context<'_, S>) {
        at_call();
    }
}

fn at_call() {
    AT_CALL.with_borrow_mut(|callback| callback.iter_mut().for_each(|callback| callback()));
}

/// The times of an operation.
#[derive(Clone, Debug)]
pub(super) struct OpTimes {
    pub(super) op: OpId,
    pub(super) seconds: f64,
    /// Seconds of the calls within it, in order.
    pub(super) calls: Vec<f64>,
}

/// An operation between marks.
struct Marked<K> {
    op: OpId,
    begin: K,
    end: K,
    /// The begin and end of each call within it.
    calls: Vec<K>,
}

/// Marks of the calls of the current operation, or the error that prevented them.
type CallMarks<M> = Arc<Mutex<Result<Vec<<M as Clock>::Mark>, Error>>>;

/// Marks the queues of a rank around operations and calls.
pub(super) struct Watch<M: Clock> {
    memory: Arc<M>,
    begin: Option<M::Mark>,
    calls: CallMarks<M>,
    done: Vec<Marked<M::Mark>>,
}

impl<M: Clock> Watch<M> {
    /// Starts watching this thread's calls, until the returned guard is dropped.
    pub(super) fn new(memory: &Arc<M>) -> (Self, subscriber::DefaultGuard)
    where
        M: 'static,
    {
        let calls: CallMarks<M> = Arc::new(Mutex::new(Ok(Vec::new())));
        let (shared_calls, device) = (Arc::clone(&calls), Arc::clone(memory));
        AT_CALL.set(Some(Box::new(move || {
            let mut marks = lock::<M>(&shared_calls);
            if let Ok(all) = &mut *marks {
                match device.mark(fsdp_core::Queue::Compute) {
                    Ok(mark) => all.push(mark),
                    Err(error) => *marks = Err(error),
                }
            }
        })));
        let only_calls = filter_fn(|span| span.target() == TARGET && span.name() == "call");
        let guard = subscriber::set_default(Registry::default().with(Calls.with_filter(only_calls)));
        (Self { memory: Arc::clone(memory), begin: None, calls, done: Vec::new() }, guard)
    }

    fn mark(&self, kind: &OpKind) -> Option<M::Mark> {
        let mark = self.memory.mark(kind.queue());
        mark.map_err(|error| *lock::<M>(&self.calls) = Err(error)).ok()
    }

    /// Returns the operations since the last call; waits until they are done.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn take(&mut self) -> Result<Vec<OpTimes>, Error> {
        mem::replace(&mut *lock::<M>(&self.calls), Ok(Vec::new()))?;
        let memory = &self.memory;
        let seconds = |from: &M::Mark, to: &M::Mark| Ok(memory.milliseconds(from, to)? / 1e3);
        let times = |Marked { op, begin, end, calls }: Marked<M::Mark>| {
            let calls = calls.chunks_exact(2).map(|marks| seconds(&marks[0], &marks[1]));
            Ok(OpTimes { op, seconds: seconds(&begin, &end)?, calls: calls.collect::<Result<_, Error>>()? })
        };
        mem::take(&mut self.done).into_iter().map(times).collect()
    }
}

fn lock<M: Clock>(calls: &Mutex<Result<Vec<M::Mark>, Error>>) -> MutexGuard<'_, Result<Vec<M::Mark>, Error>> {
    calls.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M: Clock> Observer for Watch<M> {
    fn begin(&mut self, _op: OpId, kind: &OpKind) {
        self.begin = self.mark(kind);
    }

    fn issued(&mut self, op: OpId, kind: &OpKind) {
        let end = self.mark(kind);
        let calls = lock::<M>(&self.calls).as_mut().map(mem::take).unwrap_or_default();
        if let (Some(begin), Some(end)) = (self.begin.take(), end) {
            self.done.push(Marked { op, begin, end, calls });
        }
    }
}

impl<M: Clock> Drop for Watch<M> {
    fn drop(&mut self) {
        AT_CALL.set(None);
    }
}

#[cfg(test)]
mod tests;
