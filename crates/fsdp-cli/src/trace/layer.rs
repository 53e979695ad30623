//! The subscriber layer that writes operation spans as events of a trace.

use std::cell::Cell;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fsdp_core::Queue;
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::sink::{Operation, Sink};

/// Writes each span as one event when it closes: a span lasts from its creation until its last handle is dropped, on
/// any thread.
#[derive(Debug)]
pub(crate) struct TraceLayer<W: Write> {
    sink: Arc<Mutex<Sink<W>>>,
    origin: Instant,
}

impl<W: Write> TraceLayer<W> {
    pub(super) fn new(sink: Arc<Mutex<Sink<W>>>) -> Self {
        Self { sink, origin: Instant::now() }
    }
}

thread_local! {
    /// The rank of the last operation that began on this thread.
    static RANK: Cell<u64> = const { Cell::new(0) };
}

/// The fields of an open operation span, and when it began.
struct Open {
    at: Instant,
    fields: Fields,
}

impl<S, W> Layer<S> for TraceLayer<W>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: Write + Send + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        // Block calls do not know their rank; they run within an operation, on its thread.
        fields.is_call = attributes.metadata().name() == "call";
        if fields.is_call {
            fields.rank = RANK.get();
        } else {
            RANK.set(fields.rank);
        }
        let span = context.span(id).expect("a new span is in the registry");
        span.extensions_mut().insert(Open { at: Instant::now(), fields });
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let end = Instant::now();
        let span = context.span(&id).expect("a span that closes is in the registry");
        let Some(Open { at, fields }) = span.extensions_mut().remove::<Open>() else { return };
        let Some(queue) = fields.queue() else { return };
        let operation = Operation {
            rank: fields.rank,
            queue,
            name: fields.name(),
            kind: if fields.is_call { "call".into() } else { fields.op },
            overlaps: fields.collective,
            start_us: microseconds(self.origin, at),
            duration_us: microseconds(at, end),
        };
        self.sink.lock().unwrap_or_else(PoisonError::into_inner).write(&operation);
    }
}

fn microseconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e6
}

#[derive(Default)]
struct Fields {
    rank: u64,
    queue: String,
    op: String,
    /// The unit or block, if any.
    subject: String,
    collective: bool,
    /// Whether it is a call within an operation.
    is_call: bool,
}

impl Fields {
    fn queue(&self) -> Option<Queue> {
        Queue::ALL.into_iter().find(|queue| queue.name() == self.queue)
    }

    fn name(&self) -> String {
        if self.subject.is_empty() { self.op.clone() } else { format!("{} {}", self.op, self.subject) }
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "rank" {
            self.rank = value;
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "collective" {
            self.collective = value;
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let text = match field.name() {
            "queue" => &mut self.queue,
            "op" => &mut self.op,
            "unit" | "block" => &mut self.subject,
            _ => return,
        };
        value.clone_into(text);
    }

    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}
}
