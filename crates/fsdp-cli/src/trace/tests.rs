//! Checks the JSON written for spans.

use serde_json::Value;
use tracing::subscriber::with_default;
use tracing::trace_span;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry;

use super::*;

/// Runs `body` under a layer and returns the events of the finished trace.
fn events(body: impl FnOnce()) -> Vec<Value> {
    let sink = Arc::new(Mutex::new(Sink::new(Vec::new())));
    with_default(registry().with(TraceLayer::new(Arc::clone(&sink))), body);
    sink.lock().unwrap().finish().unwrap();
    let sink = Arc::into_inner(sink).unwrap().into_inner().unwrap();
    let trace: Value = serde_json::from_slice(&sink.out).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn empty_trace_is_valid_json() {
    assert!(events(|| ()).is_empty());
}

#[test]
fn spans_become_complete_events_with_rank_and_queue() {
    let events = events(|| {
        let unit = Some("model.layers.0");
        drop(trace_span!(target: TARGET, "op", rank = 3u64, queue = "gather", op = "all-gather", unit));
        drop(trace_span!(target: TARGET, "op", rank = 3u64, queue = "compute", op = "begin step"));
    });
    let complete: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(complete.len(), 2);
    assert_eq!(complete[0]["name"], "all-gather model.layers.0");
    assert_eq!((&complete[0]["pid"], &complete[0]["tid"]), (&3.into(), &1.into()));
    assert_eq!((&complete[1]["name"], &complete[1]["tid"]), (&"begin step".into(), &0.into()));
    assert!(complete.iter().all(|event| event["dur"].as_f64().unwrap() >= 0.0));
}

#[test]
fn collectives_become_event_pairs_that_may_overlap() {
    let events = events(|| {
        let span = |unit| {
            let (rank, queue, op, unit) = (0u64, "gather", "all-gather", Some(unit));
            trace_span!(target: TARGET, "op", rank, queue, op, unit, collective = true)
        };
        let first = span("a");
        let second = span("b");
        drop(first);
        drop(second);
    });
    let edges: Vec<&Value> = events.iter().filter(|event| event["ph"] != "M").collect();
    let kinds: Vec<&Value> = edges.iter().map(|event| &event["ph"]).collect();
    assert_eq!(kinds, ["b", "e", "b", "e"]);
    assert!(edges[0]["id"] == edges[1]["id"] && edges[1]["id"] != edges[2]["id"]);
    assert!(edges[2]["ts"].as_f64() <= edges[1]["ts"].as_f64(), "the second begins before the first ends");
}

#[test]
fn ranks_and_queues_are_named_once() {
    let events = events(|| {
        for rank in [0u64, 1, 0] {
            drop(trace_span!(target: TARGET, "op", rank, queue = "reduce", op = "fold"));
        }
    });
    let names: Vec<&Value> =
        events.iter().filter(|event| event["ph"] == "M").map(|event| &event["args"]["name"]).collect();
    let queues = ["compute", "gather", "reduce", "upload", "download"];
    let named = |rank| std::iter::once(rank).chain(queues).collect::<Vec<_>>();
    assert_eq!(names, [named("rank 0"), named("rank 1")].concat());
}

#[test]
fn other_spans_are_ignored() {
    let events = events(|| drop(trace_span!("something", size = 3)));
    assert!(events.is_empty());
}

#[test]
fn write_error_is_reported_by_finish() {
    let mut room = [0u8; 4];
    let mut sink = Sink::new(room.as_mut_slice());
    sink.write(&sink::Operation {
        rank: 0,
        queue: fsdp_core::Queue::Compute,
        name: "forward".to_owned(),
        kind: "forward".to_owned(),
        overlaps: false,
        start_us: 0.0,
        duration_us: 1.0,
    });
    assert!(sink.finish().is_err());
}
