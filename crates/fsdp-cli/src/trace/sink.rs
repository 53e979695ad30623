//! Writes the JSON of a trace, event by event.
//!
//! The object is opened with the first event and closed by [`Sink::finish`]; viewers also read an unterminated file, so
//! the trace of a killed run is not lost.

use std::collections::BTreeSet;
use std::io::{self, Write};

use fsdp_core::Queue;
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
        let Operation { rank, name, kind, start_us, duration_us, .. } = operation;
        let tid = operation.queue as u64;
        if !operation.overlaps {
            return self.event(&json!({
                "name": name, "cat": kind, "ph": "X", "pid": rank, "tid": tid, "ts": start_us, "dur": duration_us,
            }));
        }
        // An event that may overlap has a begin and an end.
        self.overlapping += 1;
        let id = self.overlapping;
        [("b", *start_us), ("e", start_us + duration_us)].into_iter().try_for_each(|(ph, ts)| {
            self.event(&json!({
                "name": name, "cat": kind, "ph": ph, "id": id, "pid": rank, "tid": tid, "ts": ts,
            }))
        })
    }

    /// Names a rank and its queues for the viewer.
    fn name_rank(&mut self, rank: u64) -> io::Result<()> {
        let about = |what: &str, tid: u64, name: &str| json!({ "name": what, "ph": "M", "pid": rank, "tid": tid, "args": { "name": name } });
        self.event(&about("process_name", 0, &format!("rank {rank}")))?;
        for queue in Queue::ALL {
            self.event(&about("thread_name", queue as u64, queue.name()))?;
        }
        Ok(())
    }

    fn event(&mut self, event: &Value) -> io::Result<()> {
        let before = if self.stage == Stage::Empty { HEAD } else { "," };
        self.stage = Stage::Filled;
        self.out.write_all(before.as_bytes())?;
        self.out.write_all(b"\n")?;
        Ok(serde_json::to_writer(&mut self.out, event)?)
    }
}
