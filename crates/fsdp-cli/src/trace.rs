//! Traces: every operation of the schedule, per rank and queue, as Chrome/Perfetto JSON.
//!
//! An [observer](SpanObserver) turns operations into `tracing` spans; a [layer](TraceLayer) writes each span
//! that closes as one complete event. Ranks appear as processes and queues as their threads.

mod layer;
mod observer;
mod sink;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use layer::TraceLayer;
pub(crate) use observer::SpanObserver;
use sink::Sink;

use crate::error::CliError;

/// The target of spans of operations.
pub(crate) const TARGET: &str = "fsdp::op";

/// A trace being written.
#[derive(Debug)]
pub(crate) struct TraceFile {
    path: PathBuf,
    sink: Arc<Mutex<Sink<BufWriter<File>>>>,
}

impl TraceFile {
    /// Creates, or empties, the file.
    ///
    /// # Errors
    /// [`CliError::Create`].
    pub(crate) fn create(path: &Path) -> Result<Self, CliError> {
        let file = File::create(path).map_err(|source| CliError::Create {
            option: "--trace",
            file: path.to_owned(),
            source,
        })?;
        Ok(Self { path: path.to_owned(), sink: Arc::new(Mutex::new(Sink::new(BufWriter::new(file)))) })
    }

    /// The layer that writes to the file.
    pub(crate) fn layer(&self) -> TraceLayer<BufWriter<File>> {
        TraceLayer::new(Arc::clone(&self.sink))
    }

    /// Completes the JSON. Spans that close later are not written.
    ///
    /// # Errors
    /// [`CliError::Write`] of the first write that failed.
    pub(crate) fn finish(&self) -> Result<(), CliError> {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        sink.finish().map_err(CliError::write(&self.path))
    }
}

#[cfg(test)]
mod tests;
