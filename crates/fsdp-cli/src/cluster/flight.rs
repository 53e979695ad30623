//! The flight record: the last collectives of a process, written when the world has failed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::{env, thread};

use fsdp_comm::FlightRecorder;
use fsdp_comm::process::Verdict;
use fsdp_comm::process::cluster::Cluster;
use fsdp_train::config::RunConfig;
use serde_json::json;

/// The variable by which `fsdp launch` says where a process logs.
pub(crate) const LOG_DIR: &str = "FSDP_LOG_DIR";

/// Where the record of this process goes.
pub(super) struct Record {
    recorder: Arc<FlightRecorder>,
    file: PathBuf,
}

impl Record {
    /// In the folder of logs of this process, if it has one, or else in the output folder of the run.
    pub(super) fn new(cluster: &Cluster, run: &RunConfig) -> Self {
        let file = match env::var_os(LOG_DIR) {
            Some(dir) => PathBuf::from(dir).join("flight.jsonl"),
            None => PathBuf::from(&run.out_dir).join(format!("flight-{}.jsonl", cluster.place().process)),
        };
        Self { recorder: cluster.recorder(), file }
    }

    /// Writes it: first a line with the verdict, then one per call. In a thread, since the file may be on a disk that hangs.
    /// Nothing is written before the first call: a run that is refused leaves things as they were.
    pub(super) fn write(self, verdict: &Verdict) {
        if self.recorder.last(None).is_none() {
            return;
        }
        let first = json!({ "verdict": verdict.to_string() });
        let write = move || {
            if let Err(error) = self.try_write(&first) {
                tracing::info!("no flight record in {}: {error}", self.file.display());
            }
        };
        // Without a thread there is none.
        let _ = thread::Builder::new().name("flight record".to_owned()).spawn(write);
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
