//! Traces: every operation of the schedule, per rank and queue, as Chrome/Perfetto JSON.
//!
//! An [observer](SpanObserver) turns operations into `tracing` spans; a [layer](TraceLayer) writes each span that
//! closes as one complete event. Ranks appear as processes, and queues as their threads.

mod layer;
mod observer;
mod sink;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_config::Resolved;
use fsdp_core::Queue;
use fsdp_data::is_data;
use fsdp_train::train::is_output;

pub(crate) use layer::TraceLayer;
pub(crate) use observer::SpanObserver;
use sink::{HEAD, Operation, Sink};

use crate::atomic_file::is_replaceable;
use crate::error::CliError;

/// The target of operation spans.
pub(crate) const TARGET: &str = "fsdp::op";

/// A trace being written.
#[derive(Debug)]
pub(crate) struct TraceFile {
    path: PathBuf,
    sink: Arc<Mutex<Sink<BufWriter<File>>>>,
}

/// Checks that a trace may be written to a file: it would replace at most an earlier trace, and is not an output file
/// of the run.
///
/// # Errors
/// [`CliError::Option`], [`CliError::Create`].
pub(crate) fn check(path: &Path, config: &Resolved) -> Result<(), CliError> {
    let refused = |what: &str| {
        let what = format!("{} {what}; choose another file", path.display());
        Err(CliError::Option { option: "--trace", what })
    };
    let out_dir = Path::new(&config.run.out_dir);
    if is_output(out_dir, path) {
        return refused("is a file that the run writes (run.out_dir)");
    }
    if is_data(&config.data, out_dir, path) {
        return refused("is or would become data of the run ([data])");
    }
    match is_replaceable(path, HEAD) {
        Ok(true) => Ok(()),
        Ok(false) => refused("exists already and is not a trace: it would be lost"),
        Err(source) => Err(CliError::create("--trace", path)(source)),
    }
}

impl TraceFile {
    /// Creates the file, or empties it.
    ///
    /// # Errors
    /// [`CliError::Create`].
    pub(crate) fn create(path: &Path) -> Result<Self, CliError> {
        let file = File::create(path).map_err(CliError::create("--trace", path))?;
        Ok(Self { path: path.to_owned(), sink: Arc::new(Mutex::new(Sink::new(BufWriter::new(file)))) })
    }

    /// The layer that writes to the file.
    pub(crate) fn layer(&self) -> TraceLayer<BufWriter<File>> {
        TraceLayer::new(Arc::clone(&self.sink))
    }

    /// Writes a predicted operation of the first rank, with its times in seconds.
    pub(crate) fn write(&self, queue: Queue, name: String, kind: &str, start: f64, end: f64) {
        let operation = Operation {
            rank: 0,
            queue,
            name,
            kind: kind.to_owned(),
            overlaps: false,
            start_us: start * 1e6,
            duration_us: (end - start) * 1e6,
        };
        self.sink.lock().unwrap_or_else(PoisonError::into_inner).write(&operation);
    }

    /// Completes the JSON. Spans that close later are not written.
    ///
    /// # Errors
    /// [`CliError::Write`] with the first write that failed.
    pub(crate) fn finish(&self) -> Result<(), CliError> {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        sink.finish().map_err(CliError::write(&self.path))
    }
}

#[cfg(test)]
mod tests;
