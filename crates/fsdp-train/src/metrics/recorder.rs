//! Everything that a run reports its steps and evaluations to.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::exposition::Exposition;
use super::{Census, EvalMetrics, METRICS, MetricsFile, StepMetrics, csv, mlflow, tensorboard};
use crate::config::{MetricsSink, Resolved};
use crate::error::TrainError;

/// A number of a step or an evaluation, under the name that it has in `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) name: String,
    /// What is not finite is no number here.
    pub(super) value: f64,
}

/// All numbers of a line of `metrics.jsonl` but its step, in its order.
pub(super) fn figures(line: &impl Serialize) -> Vec<Figure> {
    let Ok(Value::Object(line)) = serde_json::to_value(line) else { unreachable!("lines are objects") };
    let figure = |(name, value): (String, Value)| {
        let value = if value.is_null() { Some(f64::NAN) } else { value.as_f64() };
        value.filter(|_| name != "step").map(|value| Figure { name, value })
    };
    line.into_iter().filter_map(figure).collect()
}

/// What a run file says, by key.
fn parameters(config: &Resolved) -> Vec<(String, String)> {
    fn add(key: String, value: &toml::Value, found: &mut Vec<(String, String)>) {
        match value {
            toml::Value::Table(table) => {
                for (inner, value) in table {
                    let key = if key.is_empty() { inner.clone() } else { format!("{key}.{inner}") };
                    add(key, value, found);
                }
            }
            toml::Value::String(text) => found.push((key, text.clone())),
            other => found.push((key, other.to_string())),
        }
    }
    let mut found = Vec::new();
    let table: toml::Table = config.to_toml().parse().expect("a configuration is written as TOML");
    add(String::new(), &toml::Value::Table(table), &mut found);
    found
}

/// Files beside `metrics.jsonl` that have the same figures in another form.
pub(super) trait Sink: Send {
    /// What is named when it can not be written.
    fn path(&self) -> &Path;

    /// A step is done.
    ///
    /// # Errors
    /// If it can not be written.
    fn step(&mut self, step: u64, figures: &[Figure]) -> io::Result<()>;

    /// A set was evaluated on after `step` steps.
    ///
    /// # Errors
    /// If it can not be written.
    fn evaluation(&mut self, step: u64, set: &str, figures: &[Figure]) -> io::Result<()>;
}

/// What the first rank of a run writes its metrics to.
pub(crate) struct Recorder {
    out_dir: PathBuf,
    file: MetricsFile,
    sinks: Vec<Box<dyn Sink>>,
    exposition: Option<Exposition>,
}

impl Recorder {
    /// Goes on in an output folder after `step` steps, or begins: what is there of later steps is cut off.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn resume(config: &Resolved, step: u64) -> Result<Self, TrainError> {
        let out_dir = Path::new(&config.run.out_dir);
        let file = MetricsFile::resume(out_dir, step)?;
        let failed = |name| TrainError::io("write", out_dir.join(name));
        // Also what this run does not write: later steps of a former one would be taken for its own.
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

    /// Also answers questions with the figures of the last step.
    pub(crate) fn expose(&mut self, exposition: Exposition) {
        self.exposition = Some(exposition);
    }

    /// Writes the line of a start after `step` steps.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn start(&mut self, step: u64, census: &Census) -> Result<(), TrainError> {
        self.file.start(step, census).map_err(TrainError::io("write", self.out_dir.join(METRICS)))
    }

    /// Records a step.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn step(&mut self, metrics: &StepMetrics) -> Result<(), TrainError> {
        self.file.write(metrics).map_err(TrainError::io("write", self.out_dir.join(METRICS)))?;
        self.tell(metrics, |sink, figures| sink.step(metrics.step, figures))?;
        if let Some(exposition) = &self.exposition {
            exposition.step(metrics.step, &figures(metrics));
        }
        Ok(())
    }

    /// Records an evaluation on a set, unless it is recorded already.
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
        self.tell(metrics, |sink, figures| sink.evaluation(metrics.step, &metrics.set, figures))
    }

    fn tell(
        &mut self,
        line: &impl Serialize,
        tell: impl Fn(&mut dyn Sink, &[Figure]) -> io::Result<()>,
    ) -> Result<(), TrainError> {
        if self.sinks.is_empty() {
            return Ok(());
        }
        let figures = figures(line);
        self.sinks.iter_mut().try_for_each(|sink| {
            let told = tell(&mut **sink, &figures);
            told.map_err(|error| TrainError::io("write", sink.path())(error))
        })
    }

    /// Whether the run ends with this step so far, without an evaluation on one of these sets.
    pub(crate) fn lacks_evaluation<'s>(&self, step: u64, sets: impl Iterator<Item = &'s str>) -> bool {
        self.file.lacks_evaluation(step, sets)
    }

    /// Makes everything so far visible. In a folder it is.
    ///
    /// # Errors
    /// [`TrainError::Io`], [`TrainError::Checkpoint`].
    pub(crate) fn publish(&self) -> Result<(), TrainError> {
        self.file.publish()
    }
}
