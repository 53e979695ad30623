//! Writes the flight record, the last collectives of a process, when the world has failed.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use std::{env, thread};

use fsdp_ckpt::is_url;
use fsdp_comm::FlightRecorder;
use fsdp_comm::process::cluster::Cluster;
use fsdp_config::RunConfig;
use serde_json::json;

use crate::atomic_file;

/// The variable through which `fsdp launch` passes the log folder of a process.
pub(crate) const LOG_DIR: &str = "FSDP_LOG_DIR";

/// How long an ending process waits for its record: a busy disk takes seconds, and processes have 5 seconds to end.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);

/// The destination of this process's record.
#[derive(Clone)]
pub(super) struct Record {
    recorder: Arc<FlightRecorder>,
    file: PathBuf,
    progress: Arc<(Mutex<Progress>, Condvar)>,
}

/// The progress of writing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Progress {
    #[default]
    None,
    Started,
    Done,
}

impl Record {
    /// Places the record in this process's log folder, if it has one, else in the output folder of the run, or in the
    /// machine's temporary folder if that is in an object store.
    pub(super) fn new(cluster: &Cluster, run: &RunConfig) -> Self {
        let file = match env::var_os(LOG_DIR) {
            Some(dir) => PathBuf::from(dir).join("flight.jsonl"),
            None => folder(run).join(format!("flight-{}.jsonl", cluster.place().process)),
        };
        Self { recorder: cluster.recorder(), file, progress: Arc::default() }
    }

    /// Writes the record once: first a line with the failure, then one per call. Uses a thread, since the disk may
    /// hang. Writes nothing before the first call, so that a rejected run leaves no files.
    pub(super) fn write(&self, verdict: &str) {
        if self.set(Progress::Started) != Progress::None {
            return;
        }
        if self.recorder.last(None).is_none() {
            self.set(Progress::Done);
            return;
        }
        let (record, first) = (self.clone(), json!({ "verdict": verdict }));
        let write = move || {
            if let Err(error) = record.try_write(&first) {
                tracing::info!("cannot write the flight record {}: {error}", record.file.display());
            }
            record.set(Progress::Done);
        };
        // Without a thread there is no record.
        let _ = thread::Builder::new().name("flight record".to_owned()).spawn(write);
    }

    /// Advances the progress unless it is done; returns the previous one.
    fn set(&self, next: Progress) -> Progress {
        let (progress, changed) = &*self.progress;
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        let previous = *progress;
        if previous != Progress::Done {
            *progress = next;
        }
        changed.notify_all();
        previous
    }

    /// After a failure of the world, waits briefly until the record is written.
    pub(super) fn wait(&self) {
        let (progress, changed) = &*self.progress;
        let progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_timeout_while(progress, WRITE_TIMEOUT, |progress| *progress != Progress::Done));
    }

    fn try_write(&self, first: &serde_json::Value) -> io::Result<()> {
        let mut text = Vec::new();
        writeln!(text, "{first}")?;
        self.recorder.write(&mut text)?;
        atomic_file::replace(&self.file, &String::from_utf8_lossy(&text))
    }
}

fn folder(run: &RunConfig) -> PathBuf {
    if is_url(&run.out_dir) { env::temp_dir() } else { PathBuf::from(&run.out_dir) }
}
