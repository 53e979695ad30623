//! The flight record: the last collectives of a process, written when the world has failed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use std::{env, thread};

use fsdp_ckpt::is_url;
use fsdp_comm::FlightRecorder;
use fsdp_comm::process::Verdict;
use fsdp_comm::process::cluster::Cluster;
use fsdp_train::config::RunConfig;
use serde_json::json;

/// The variable by which `fsdp launch` says where a process logs.
pub(crate) const LOG_DIR: &str = "FSDP_LOG_DIR";

/// How long a process that ends waits for its record.
const WRITTEN_WITHIN: Duration = Duration::from_secs(1);

/// Where the record of this process goes.
#[derive(Clone)]
pub(super) struct Record {
    recorder: Arc<FlightRecorder>,
    file: PathBuf,
    written: Arc<(Mutex<bool>, Condvar)>,
}

impl Record {
    /// In the folder of logs of this process, if it has one, or else in the output folder of the run; among the temporary
    /// files of the machine, where that is in an object store.
    pub(super) fn new(cluster: &Cluster, run: &RunConfig) -> Self {
        let file = match env::var_os(LOG_DIR) {
            Some(dir) => PathBuf::from(dir).join("flight.jsonl"),
            None => folder(run).join(format!("flight-{}.jsonl", cluster.place().process)),
        };
        Self { recorder: cluster.recorder(), file, written: Arc::default() }
    }

    /// Writes it: first a line with the verdict, then one per call. In a thread, since the file may be on a disk that hangs.
    /// Nothing is written before the first call: a run that is refused leaves things as they were.
    pub(super) fn write(self, verdict: &Verdict) {
        if self.recorder.last(None).is_none() {
            return self.is_written();
        }
        let first = json!({ "verdict": verdict.to_string() });
        let write = move || {
            if let Err(error) = self.try_write(&first) {
                tracing::info!("no flight record in {}: {error}", self.file.display());
            }
            self.is_written();
        };
        // Without a thread there is none.
        let _ = thread::Builder::new().name("flight record".to_owned()).spawn(write);
    }

    fn is_written(&self) {
        let (written, changed) = &*self.written;
        *written.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
    }

    /// When the world has failed, waits a moment until it is written.
    pub(super) fn wait(&self) {
        let (written, changed) = &*self.written;
        let written = written.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_timeout_while(written, WRITTEN_WITHIN, |written| !*written));
    }

    fn try_write(&self, first: &serde_json::Value) -> io::Result<()> {
        let mut name = self.file.as_os_str().to_owned();
        name.push(".tmp");
        let mut file = BufWriter::new(File::create(&name)?);
        writeln!(file, "{first}")?;
        self.recorder.write(&mut file)?;
        file.into_inner()?.sync_all()?;
        fs::rename(&name, &self.file)
    }
}

fn folder(run: &RunConfig) -> PathBuf {
    if is_url(&run.out_dir) { env::temp_dir() } else { PathBuf::from(&run.out_dir) }
}
