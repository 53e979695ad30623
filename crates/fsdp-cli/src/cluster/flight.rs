//! The flight record: the last collectives of a process, written when the world has failed.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use std::{env, thread};

use fsdp_ckpt::is_url;
use fsdp_comm::FlightRecorder;
use fsdp_comm::process::cluster::Cluster;
use fsdp_train::config::RunConfig;
use serde_json::json;

/// The variable by which `fsdp launch` says where a process logs.
pub(crate) const LOG_DIR: &str = "FSDP_LOG_DIR";

/// How long a process that ends waits for its record: a disk that others write to takes seconds, and all have 5 to end.
const WRITTEN_WITHIN: Duration = Duration::from_secs(3);

/// Where the record of this process goes.
#[derive(Clone)]
pub(super) struct Record {
    recorder: Arc<FlightRecorder>,
    file: PathBuf,
    progress: Arc<(Mutex<Progress>, Condvar)>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Progress {
    #[default]
    None,
    Begun,
    Done,
}

impl Record {
    /// In the folder of logs of this process, if it has one, or else in the output folder of the run; among the temporary
    /// files of the machine, where that is in an object store.
    pub(super) fn new(cluster: &Cluster, run: &RunConfig) -> Self {
        let file = match env::var_os(LOG_DIR) {
            Some(dir) => PathBuf::from(dir).join("flight.jsonl"),
            None => folder(run).join(format!("flight-{}.jsonl", cluster.place().process)),
        };
        Self { recorder: cluster.recorder(), file, progress: Arc::default() }
    }

    /// Writes it, once: first a line with what has ended the world, then one per call. In a thread, since the file may be on
    /// a disk that hangs. Nothing is written before the first call: a run that is refused leaves things as they were.
    pub(super) fn write(&self, verdict: &str) {
        if self.set(Progress::Begun) != Progress::None {
            return;
        }
        if self.recorder.last(None).is_none() {
            self.set(Progress::Done);
            return;
        }
        let (record, first) = (self.clone(), json!({ "verdict": verdict }));
        let write = move || {
            if let Err(error) = record.try_write(&first) {
                tracing::info!("no flight record in {}: {error}", record.file.display());
            }
            record.set(Progress::Done);
        };
        // Without a thread there is none.
        let _ = thread::Builder::new().name("flight record".to_owned()).spawn(write);
    }

    /// Goes on, never back; where it was.
    fn set(&self, to: Progress) -> Progress {
        let (progress, changed) = &*self.progress;
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        let was = *progress;
        if was != Progress::Done {
            *progress = to;
        }
        changed.notify_all();
        was
    }

    /// When the world has failed, waits a moment until it is written.
    pub(super) fn wait(&self) {
        let (progress, changed) = &*self.progress;
        let progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_timeout_while(progress, WRITTEN_WITHIN, |progress| *progress != Progress::Done));
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
