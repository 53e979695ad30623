//! Writes the JSON of a trace, event by event.
//!
//! The object is opened with the first event and closed by [`Sink::finish`]; viewers also read an unterminated file, so
//! the trace of a killed run is not lost.

use std::collections::BTreeSet;
use std::io::{self, Write};

use fsdp_core::Queue;
use serde::Serialize;
use serde_json::{Value, json};

/// The text before the events, with which every trace begins.
pub(super) const HEAD: &str = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";

/// One operation of the trace.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Operation {
    pub(super) rank: u64,
    pub(super) queue: Queue,
    /// The label of the bar.
    pub(super) name: String,
    /// The kind, which viewers use for colors and search.
    pub(super) kind: String,
    /// Whether it may partially overlap with other operations of its queue.
    pub(super) overlaps: bool,
    pub(super) start_us: f64,
    pub(super) duration_us: f64,
}

#[derive(Serialize)]
struct Complete<'a> {
    name: &'a str,
    cat: &'a str,
    ph: &'static str,
    pid: u64,
    tid: u64,
    ts: f64,
    dur: f64,
}

/// The begin or end of an event that may overlap with others of its thread.
#[derive(Serialize)]
struct Edge<'a> {
    name: &'a str,
    cat: &'a str,
    ph: &'static str,
    id: u64,
    pid: u64,
    tid: u64,
    ts: f64,
}

/// The stages of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing is written.
    Empty,
    /// The list has events.
    Filled,
    /// The object is closed.
    Finished,
}

/// Writes a trace.
#[derive(Debug)]
pub(super) struct Sink<W: Write> {
    pub(super) out: W,
    ranks: BTreeSet<u64>,
    /// Number of overlapping events so far, which provides their IDs.
    overlapping: u64,
    stage: Stage,
    error: Option<io::Error>,
}

impl<W: Write> Sink<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, ranks: BTreeSet::new(), overlapping: 0, stage: Stage::Empty, error: None }
    }

    /// Writes an operation. The first failure is kept for [`Sink::finish`]; nothing is written after it.
    pub(super) fn write(&mut self, operation: &Operation) {
        if self.stage == Stage::Finished || self.error.is_some() {
            return;
        }
        if let Err(error) = self.try_write(operation) {
            self.error = Some(error);
        }
    }

    /// Ends the JSON and flushes it.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        match self.stage {
            Stage::Empty => self.out.write_all(format!("{HEAD}]}}\n").as_bytes())?,
            Stage::Filled => self.out.write_all(b"\n]}\n")?,
            Stage::Finished => {}
        }
        self.stage = Stage::Finished;
        self.out.flush()
    }

    fn try_write(&mut self, operation: &Operation) -> io::Result<()> {
        if self.ranks.insert(operation.rank) {
            self.name_rank(operation.rank)?;
        }
        if operation.overlaps {
            return self.edges(operation);
        }
        self.event(&Complete {
            name: &operation.name,
            cat: &operation.kind,
            ph: "X",
            pid: operation.rank,
            tid: operation.queue as u64,
            ts: operation.start_us,
            dur: operation.duration_us,
        })
    }

    /// Writes an event that may overlap, as its begin and its end.
    fn edges(&mut self, operation: &Operation) -> io::Result<()> {
        self.overlapping += 1;
        let id = self.overlapping;
        let (start_us, end_us) = (operation.start_us, operation.start_us + operation.duration_us);
        for (ph, ts) in [("b", start_us), ("e", end_us)] {
            self.event(&Edge {
                name: &operation.name,
                cat: &operation.kind,
                ph,
                id,
                pid: operation.rank,
                tid: operation.queue as u64,
                ts,
            })?;
        }
        Ok(())
    }

    /// Names a rank and its queues for the viewer.
    fn name_rank(&mut self, rank: u64) -> io::Result<()> {
        let about = |what: &str, tid: u64, name: &str| -> Value {
            json!({ "name": what, "ph": "M", "pid": rank, "tid": tid, "args": { "name": name } })
        };
        self.event(&about("process_name", 0, &format!("rank {rank}")))?;
        for queue in Queue::ALL {
            self.event(&about("thread_name", queue as u64, queue.name()))?;
        }
        Ok(())
    }

    fn event(&mut self, event: &impl Serialize) -> io::Result<()> {
        let before = if self.stage == Stage::Empty { HEAD } else { "," };
        self.stage = Stage::Filled;
        self.out.write_all(before.as_bytes())?;
        self.out.write_all(b"\n")?;
        Ok(serde_json::to_writer(&mut self.out, event)?)
    }
}
