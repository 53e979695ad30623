//! The metrics file of a run.
//!
//! `metrics.jsonl` contains one JSON object per step, and one per evaluation of a set, after the step that it follows.
//! It is written line by line, so that a run can be watched and an interrupted run keeps its metrics. Each start of a
//! run writes a line with the participating processes before its steps; that line has no `step`. Objects in object
//! stores cannot be appended to, so for these the file is written to a temporary folder, and uploaded whenever the
//! state is saved and when the run ends.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fsdp_ckpt::{is_url, objects};
use serde::Serialize;
use serde_json::json;
use tempfile::TempDir;

use super::line::{EvalMetrics, ProcessTable, StepLoss, StepMetrics};
use crate::atomic_file;
use crate::error::TrainError;

/// Name of the file, in the output folder.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// The key of the line that precedes the steps of a start.
const START: &str = "start";

/// The metrics file of a run.
pub(crate) struct MetricsFile {
    file: File,
    end: End,
    /// The losses of the steps that were kept from earlier starts.
    losses: Vec<StepLoss>,
    copy: Option<LocalCopy>,
}

/// The last step in the file.
#[derive(Default)]
struct End {
    step: u64,
    /// The evaluation sets that have a line for this step.
    evaluated: BTreeSet<String>,
}

/// A local file and the object that it is uploaded to. Its folder is removed on drop.
struct LocalCopy {
    folder: TempDir,
    url: PathBuf,
}

impl MetricsFile {
    /// Continues the file of an output folder. Lines of steps after `step` are cut off, and so is an incomplete or
    /// damaged line with everything after it. A missing file is created. The shortened file replaces the old one
    /// atomically and durably; a link is replaced, not followed.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn resume(out_dir: &Path, step: u64) -> Result<Self, TrainError> {
        let path = out_dir.join(METRICS);
        if !is_url(out_dir) {
            let (file, end, losses) = open(&path, step)?;
            return Ok(Self { file, end, losses, copy: None });
        }
        let folder = TempDir::new().map_err(TrainError::io("create a directory in", std::env::temp_dir()))?;
        let local = folder.path().join(METRICS);
        if let Some(before) = objects::read(&path)? {
            fs::write(&local, before).map_err(TrainError::io("write", &local))?;
        }
        let (file, end, losses) = open(&local, step)?;
        let metrics = Self { file, end, losses, copy: Some(LocalCopy { folder, url: path }) };
        metrics.publish()?;
        Ok(metrics)
    }

    /// The losses of the steps that were kept, which are then no longer held.
    pub(super) fn take_losses(&mut self) -> Vec<StepLoss> {
        std::mem::take(&mut self.losses)
    }

    /// Writes the line of a start after `step` steps.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn start(&mut self, step: u64, process_table: &ProcessTable) -> io::Result<()> {
        let ProcessTable { transport, processes } = process_table;
        let ranks: usize = processes.iter().map(|process| process.ranks).sum();
        let start = json!({
            "version": crate::VERSION,
            "after_step": step,
            "ranks": ranks,
            "transport": transport,
            "processes": processes,
        });
        self.line(&json!({ START: start }))
    }

    /// Writes the line of a step. Numbers that are not finite become `null`, because JSON cannot represent them.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn write(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        self.end = End { step: metrics.step, ..End::default() };
        self.line(metrics)
    }

    /// Writes the line of an evaluation after its step, unless the line exists: an interrupted evaluation is repeated
    /// on all sets. Returns whether the line was written.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn evaluation(&mut self, metrics: &EvalMetrics) -> io::Result<bool> {
        let is_new = self.end.step != metrics.step || self.end.evaluated.insert(metrics.set.clone());
        if is_new { self.line(metrics).map(|()| true) } else { Ok(false) }
    }

    /// Whether this is the last step in the file, and an evaluation of one of these sets is missing.
    pub(crate) fn lacks_evaluation<'s>(&self, step: u64, mut sets: impl Iterator<Item = &'s str>) -> bool {
        self.end.step == step && sets.any(|set| !self.end.evaluated.contains(set))
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(line)?;
        line.push(b'\n');
        self.file.write_all(&line)
    }

    /// Uploads all lines so far. In a folder they are visible already.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn publish(&self) -> Result<(), TrainError> {
        let Some(LocalCopy { folder, url }) = &self.copy else { return Ok(()) };
        let local = folder.path().join(METRICS);
        let lines = fs::read(&local).map_err(TrainError::io("read", &local))?;
        Ok(objects::write(url, &lines)?)
    }
}

/// Opens a file for appending after the lines of the first `step` steps; also returns their losses.
fn open(path: &Path, step: u64) -> Result<(File, End, Vec<StepLoss>), TrainError> {
    let cut = || {
        let bytes = read(path)?.unwrap_or_default();
        // A line of a start after the last kept step is cut off too, because it describes the steps that are cut off.
        let (mut kept, mut end, mut losses) = (0, End::default(), Vec::new());
        for (line, line_end) in complete_lines(&bytes) {
            match line {
                Line::Start => continue,
                Line::Step(StepLoss { step: done, .. }) | Line::Evaluation(done, _) if done > step => break,
                Line::Step(loss) => {
                    end = End { step: loss.step, ..End::default() };
                    losses.push(loss);
                }
                Line::Evaluation(_, set) => drop(end.evaluated.insert(set)),
            }
            kept = line_end;
        }
        Ok((atomic_file::replace(path, &bytes[..kept])?, end, losses))
    };
    cut().map_err(TrainError::io("write", path))
}

/// Returns the step of the last readable line, 0 if there is none; `None` if the file does not exist.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn last_step(path: &Path) -> io::Result<Option<u64>> {
    Ok(read(path)?.map(|bytes| last_step_in(&bytes)))
}

/// Returns the step of the last readable line, 0 if there is none.
pub(crate) fn last_step_in(bytes: &[u8]) -> u64 {
    lines(bytes).last().map_or(0, |(step, _)| step)
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
        }
        Ok(_) => fs::read(path).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the step of each step's line and the end of that line, up to the first incomplete or damaged line.
pub(super) fn lines(bytes: &[u8]) -> impl Iterator<Item = (u64, usize)> {
    complete_lines(bytes).filter_map(|(line, end)| match line {
        Line::Step(loss) => Some((loss.step, end)),
        Line::Start | Line::Evaluation(..) => None,
    })
}

/// Returns lines and their ends, up to the first incomplete or damaged line.
fn complete_lines(bytes: &[u8]) -> impl Iterator<Item = (Line, usize)> {
    let mut end = 0;
    bytes.split_inclusive(|&byte| byte == b'\n').map_while(move |line| {
        end += line.len();
        read_line(line.strip_suffix(b"\n")?).map(|line| (line, end))
    })
}

/// The contents of a line.
enum Line {
    /// The processes that take part from here on.
    Start,
    /// The metrics of this step.
    Step(StepLoss),
    /// An evaluation after this step, of this set.
    Evaluation(u64, String),
}

fn read_line(line: &[u8]) -> Option<Line> {
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    if value.get(START).is_some() {
        return Some(Line::Start);
    }
    let step = value.get("step")?.as_u64()?;
    match value.get("set") {
        Some(set) => Some(Line::Evaluation(step, set.as_str()?.to_owned())),
        None => {
            let number = |key| value.get(key).and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
            Some(Line::Step(StepLoss { step, loss: number("loss"), grad_norm: number("grad_norm") }))
        }
    }
}
