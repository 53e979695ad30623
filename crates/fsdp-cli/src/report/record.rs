//! Reads the parts of a run's output folder that a report shows.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use crate::error::CliError;

/// Maximum length of a line: the start record has some hundred bytes per process, for thousands of processes.
const LINE_MAX: u64 = 64 << 20;

/// A run.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// The output folder, as given by the user.
    pub(super) name: String,
    /// The text of `resolved.toml`, if it exists.
    pub(super) resolved: Option<String>,
    /// For each figure of any step: pairs of step and value; NaN for a non-finite value.
    pub(super) columns: BTreeMap<String, Vec<(f64, f64)>>,
    /// Losses and perplexities of evaluations, by set.
    pub(super) evaluations: BTreeMap<String, Evaluations>,
    /// For each rank, the number of steps in which the others waited for it, among steps that record it.
    pub(super) slowest: BTreeMap<u64, u64>,
    /// The number of the last step.
    pub(super) steps: u64,
    /// The participants of the last start.
    pub(super) start: Option<Start>,
    /// Number of lines that are not a JSON object of a known kind, such as one still being written.
    pub(super) unread: usize,
}

/// The evaluations on a set: pairs of step and value.
#[derive(Debug, Default)]
pub(super) struct Evaluations {
    pub(super) loss: Vec<(f64, f64)>,
    pub(super) perplexity: Vec<(f64, f64)>,
}

/// The participants of a run.
#[derive(Debug, Deserialize)]
pub(super) struct Start {
    pub(super) version: String,
    pub(super) ranks: u64,
    pub(super) transport: String,
}

/// A line of `metrics.jsonl`. A value of `null` is not finite.
#[derive(Deserialize)]
struct Line {
    start: Option<Start>,
    step: Option<u64>,
    set: Option<String>,
    slowest_rank: Option<u64>,
    #[serde(flatten)]
    figures: BTreeMap<String, serde_json::Value>,
}

impl Record {
    /// Reads an output folder, which a run may still be writing to.
    ///
    /// # Errors
    /// [`CliError::Read`]: there is no `metrics.jsonl`, or it cannot be read.
    pub(super) fn read(folder: &Path) -> Result<Self, CliError> {
        let file = folder.join("metrics.jsonl");
        let advice = ": give the output folder of a run (run.out_dir)";
        let failed = |source| CliError::Read { file: file.clone(), advice, source };
        let mut record = Self { name: folder.display().to_string(), ..Self::default() };
        let mut lines = BufReader::new(File::open(&file).map_err(failed)?);
        let mut line = Vec::new();
        loop {
            line.clear();
            if (&mut lines).take(LINE_MAX).read_until(b'\n', &mut line).map_err(failed)? == 0 {
                break;
            }
            match serde_json::from_slice::<Line>(&line) {
                Ok(line) => record.note(line),
                Err(_) => record.unread += 1,
            }
        }
        record.resolved = std::fs::read_to_string(folder.join("resolved.toml")).ok();
        Ok(record)
    }

    #[expect(clippy::cast_precision_loss, reason = "a step is a place on an axis")]
    fn note(&mut self, line: Line) {
        if let Some(start) = line.start {
            self.start = Some(start);
            return;
        }
        let Some(step) = line.step else {
            self.unread += 1;
            return;
        };
        let figures = line.figures.into_iter();
        let points = figures.filter(|(_, value)| value.is_number() || value.is_null()).map(|(key, value)| {
            let value = value.as_f64().unwrap_or(f64::NAN);
            (key, (step as f64, value))
        });
        if let Some(set) = line.set {
            let set = self.evaluations.entry(set).or_default();
            return points.for_each(|(key, point)| match key.as_str() {
                "eval_loss" => set.loss.push(point),
                "eval_perplexity" => set.perplexity.push(point),
                _ => {}
            });
        }
        self.steps = self.steps.max(step);
        points.for_each(|(key, point)| self.columns.entry(key).or_default().push(point));
        if let Some(rank) = line.slowest_rank {
            *self.slowest.entry(rank).or_default() += 1;
        }
    }

    /// The points of a column; empty if no step has it.
    pub(super) fn column(&self, name: &str) -> &[(f64, f64)] {
        self.columns.get(name).map_or(&[], Vec::as_slice)
    }

    /// The configured number of steps; `None` if unknown.
    pub(super) fn planned(&self) -> Option<u64> {
        let table: toml::Table = self.resolved.as_ref()?.parse().ok()?;
        u64::try_from(table.get("train")?.get("steps")?.as_integer()?).ok()
    }
}
