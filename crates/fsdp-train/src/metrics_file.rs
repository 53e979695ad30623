//! Where metrics of a run go: a file in the output folder. In an object store nothing can be appended, so there the file
//! is written among the temporary ones of the machine, and copied whole when the state is saved and when the run ends.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use fsdp_ckpt::{is_url, objects};
use tempfile::TempDir;

use crate::error::TrainError;
use crate::metrics::{Census, METRICS, MetricsWriter, StepMetrics};

/// The metrics of a run.
pub(crate) struct MetricsFile {
    writer: MetricsWriter<BufWriter<File>>,
    copy: Option<Copy>,
}

/// A file and the object that it is copied to. The folder goes with it.
struct Copy {
    folder: TempDir,
    url: PathBuf,
}

impl MetricsFile {
    /// Goes on with the metrics in an output folder: see [`MetricsWriter::resume`].
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn resume(out_dir: &Path, step: u64) -> Result<Self, TrainError> {
        let path = out_dir.join(METRICS);
        if !is_url(out_dir) {
            let writer = MetricsWriter::resume(&path, step).map_err(TrainError::io("write", &path))?;
            return Ok(Self { writer, copy: None });
        }
        let folder = TempDir::new().map_err(TrainError::io("create a directory in", std::env::temp_dir()))?;
        let local = folder.path().join(METRICS);
        if let Some(before) = objects::read(&path)? {
            fs::write(&local, before).map_err(TrainError::io("write", &local))?;
        }
        let writer = MetricsWriter::resume(&local, step).map_err(TrainError::io("write", &local))?;
        let file = Self { writer, copy: Some(Copy { folder, url: path }) };
        file.publish()?;
        Ok(file)
    }

    /// Writes a line.
    ///
    /// # Errors
    /// If the file can not be written.
    pub(crate) fn write(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        self.writer.write(metrics)
    }

    /// Writes the line in front of the steps of a start: see [`MetricsWriter::start`].
    ///
    /// # Errors
    /// If the file can not be written.
    pub(crate) fn start(&mut self, step: u64, census: &Census) -> io::Result<()> {
        self.writer.start(step, census)
    }

    /// Makes all lines so far visible. In a folder they are.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn publish(&self) -> Result<(), TrainError> {
        let Some(Copy { folder, url }) = &self.copy else { return Ok(()) };
        let local = folder.path().join(METRICS);
        let lines = fs::read(&local).map_err(TrainError::io("read", &local))?;
        Ok(objects::write(url, &lines)?)
    }
}
