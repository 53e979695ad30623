//! Writes the steps and evaluations of a run to all of its outputs.

use std::io;
use std::path::{Path, PathBuf};

use fsdp_config::{MetricsSink, Resolved};
use serde::Serialize;

use super::exposition::MetricsServer;
use super::file::{METRICS, MetricsFile};
use super::line::{EvalMetrics, ProcessTable, StepLoss, StepMetrics};
use super::sink::{Figure, Sink, figures};
use super::{csv, mlflow, tensorboard};
use crate::error::TrainError;

/// Returns the settings of a run file, by dotted key.
fn parameters(config: &Resolved) -> Vec<(String, String)> {
    fn add(key: String, value: &toml::Value, pairs: &mut Vec<(String, String)>) {
        match value {
            toml::Value::Table(table) => {
                for (inner, value) in table {
                    let key = if key.is_empty() { inner.clone() } else { format!("{key}.{inner}") };
                    add(key, value, pairs);
                }
            }
            toml::Value::String(text) => pairs.push((key, text.clone())),
            other => pairs.push((key, other.to_string())),
        }
    }
    let mut pairs = Vec::new();
    let table: toml::Table = config.to_toml().parse().expect("a configuration is written as TOML");
    add(String::new(), &toml::Value::Table(table), &mut pairs);
    pairs
}

/// All outputs to which the first rank of a run writes its metrics.
pub(crate) struct Recorder {
    out_dir: PathBuf,
    file: MetricsFile,
    sinks: Vec<Box<dyn Sink>>,
    exposition: Option<MetricsServer>,
}

impl Recorder {
    /// Continues in an output folder after `step` steps, or starts there; metrics of later steps are cut off.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn resume(config: &Resolved, step: u64) -> Result<Self, TrainError> {
        let out_dir = Path::new(&config.run.out_dir);
        let file = MetricsFile::resume(out_dir, step)?;
        let failed = |name| TrainError::io("write", out_dir.join(name));
        // This includes formats that the run does not write: later steps of an earlier run would be mistaken for its
        // own.
        tensorboard::cut(out_dir, step).map_err(failed(tensorboard::TENSORBOARD))?;
        csv::cut(out_dir, step).map_err(failed(csv::STEPS))?;
        mlflow::cut(out_dir, step).map_err(failed(mlflow::MLFLOW))?;
        let open = |sink: &MetricsSink| -> Result<Box<dyn Sink>, TrainError> {
            let (path, opened) = match sink {
                MetricsSink::Tensorboard => {
                    let opened = tensorboard::EventFile::begin(out_dir, step);
                    (tensorboard::TENSORBOARD, opened.map(|file| Box::new(file) as Box<dyn Sink>))
                }
                MetricsSink::Csv => {
                    let opened = csv::Tables::resume(out_dir, step);
                    (csv::STEPS, opened.map(|tables| Box::new(tables) as Box<dyn Sink>))
                }
                MetricsSink::Mlflow => {
                    let opened = mlflow::Run::begin(out_dir, &parameters(config));
                    (mlflow::MLFLOW, opened.map(|run| Box::new(run) as Box<dyn Sink>))
                }
            };
            opened.map_err(failed(path))
        };
        let sinks = config.run.metrics.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { out_dir: out_dir.to_owned(), file, sinks, exposition: None })
    }

    /// The losses of the steps that were kept, which are then no longer held.
    pub(crate) fn take_losses(&mut self) -> Vec<StepLoss> {
        self.file.take_losses()
    }

    /// Also serves the figures of the last step over HTTP.
    pub(crate) fn expose(&mut self, exposition: MetricsServer) {
        self.exposition = Some(exposition);
    }

    /// Writes the line of a start after `step` steps.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn start(&mut self, step: u64, process_table: &ProcessTable) -> Result<(), TrainError> {
        self.file.start(step, process_table).map_err(TrainError::io("write", self.out_dir.join(METRICS)))
    }

    /// Records a step.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn step(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        self.file.write(metrics).map_err(TrainError::io("write", self.out_dir.join(METRICS)))?;
        self.write_to_sinks(metrics, |sink, figures| sink.step(metrics.step, figures))?;
        if let Some(exposition) = &self.exposition {
            exposition.step(metrics.step, &figures(metrics));
        }
        Ok(())
    }

    /// Records an evaluation of a set, unless it is recorded already.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn evaluation(&mut self, metrics: &EvalMetrics) -> Result<(), TrainError> {
        if let Some(exposition) = &self.exposition {
            exposition.evaluation(&metrics.set, &figures(metrics));
        }
        let written = self.file.evaluation(metrics);
        if !written.map_err(TrainError::io("write", self.out_dir.join(METRICS)))? {
            return Ok(());
        }
        self.write_to_sinks(metrics, |sink, figures| sink.evaluation(metrics.step, &metrics.set, figures))
    }

    fn write_to_sinks(
        &mut self,
        line: &impl Serialize,
        write: impl Fn(&mut dyn Sink, &[Figure]) -> io::Result<()>,
    ) -> Result<(), TrainError> {
        if self.sinks.is_empty() {
            return Ok(());
        }
        let figures = figures(line);
        self.sinks.iter_mut().try_for_each(|sink| {
            let result = write(&mut **sink, &figures);
            result.map_err(|error| TrainError::io("write", sink.path())(error))
        })
    }

    /// Whether this is the last step recorded so far, and an evaluation of one of these sets is missing.
    pub(crate) fn lacks_evaluation<'s>(&self, step: u64, sets: impl Iterator<Item = &'s str>) -> bool {
        self.file.lacks_evaluation(step, sets)
    }

    /// Uploads everything so far. In a folder it is visible already.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn publish(&self) -> Result<(), TrainError> {
        self.file.publish()
    }
}
